"""Clients that mean harm: forged log lines, connections and models without end, and reused pids."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.raw import Connection, Session, reason
from tests.support.scene import PAGE, Scene

from membrokerd.edge.rpc.proxy import CONNECTIONS_BESIDE

ROOT = Path(__file__).parents[2]


def test_a_client_name_forges_no_line(scene: Scene) -> None:
    """Newlines, escapes and a mile of text in the name: one line of the log, and nothing a terminal would obey."""
    forged = "x\n2026-01-01T00:00:00Z INFO ready pid=1\x1b[2J\r\u202e\u2028" + "y" * 10_000
    with Session(scene.daemon.endpoint(), client=forged) as session:
        shown = next(one.client for one in scene.daemon.sessions() if one.name == session.welcome.session)
    assert shown.endswith("y")
    assert len(shown) <= 128
    assert shown.isprintable()
    lines = scene.daemon.log().splitlines()
    assert not [line for line in lines if line.startswith("2026-01-01T00:00:00Z")]
    assert "\x1b" not in scene.daemon.log()


def test_a_dead_process_takes_no_others_watch_with_it() -> None:
    """A process dies and its child keeps its memory; a second one connects; then the first's memory goes.

    The second's pidfd has the number that the first's had. Its own death must still be noticed.
    """
    with running({"settle_seconds": 600.0}) as daemon, ExitStack() as stack:
        first = stack.enter_context(_process(daemon, fork=True))
        first.kill()
        first.wait()
        until(lambda: daemon.books().releasing_bytes == PAGE)
        second = stack.enter_context(_process(daemon))
        first.stdin.close()  # the child ends
        until(lambda: not daemon.books().releasing_bytes)
        assert daemon.books().lent_bytes == PAGE
        second.kill()
        until(lambda: not daemon.sessions())
        assert daemon.books().lent_bytes == 0


_BORROWER = """
import ctypes, os, pathlib, signal, sys
from tests.support.raw import *
session = Session(pathlib.Path(sys.argv[1]))
session.send(pb.Frame(request_id=1, allocate=allocation(session.register("m"), 2 << 20)))
memory = handoff.receive(session.sock)
if sys.argv[2] == "True":
    reader, writer = os.pipe()
    if not ctypes.PyDLL(None).fork():
        os.write(writer, b".")
        os.read(0, 1)
        os._exit(0)
    os.read(reader, 1)
print("ready", flush=True)
signal.pause()
"""


def _process(daemon: Daemon, fork: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BORROWER, str(daemon.endpoint()), str(fork)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_many_that_say_nothing_make_room(scene: Scene) -> None:
    """Silent connections are bounded: the oldest is closed, and a client that says Hello gets in."""
    with ExitStack() as stack:
        silent = [stack.enter_context(Connection(scene.daemon.endpoint("blue"))) for _ in range(200)]
        assert silent[0].last_words() is None
        assert not raw.is_readable(silent[-1].sock)
        with Session(scene.daemon.endpoint("blue")) as session:
            assert session.token
    scene.unharmed()


def test_idle_grpc_connections_of_one_tenant_leave_the_others_room() -> None:
    """They cost their tenant nothing and the daemon three descriptors each: above a bound they are closed at once."""
    with running({"max_sessions": 8}) as daemon, ExitStack() as stack:
        before = daemon.descriptors()
        for _ in range(200):
            idle = stack.enter_context(socket.socket(socket.AF_UNIX))
            idle.settimeout(DEADLINE_SECONDS)
            idle.connect(str(daemon.endpoint("red") / "grpc.sock"))
        with suppress(ConnectionResetError):
            assert idle.recv(1) == b"", "greeted, though far above the bound"
        # The peer's, the one to gRPC's own socket, and gRPC's end of it. gRPC itself would end them after a minute.
        until(lambda: daemon.descriptors() <= before + 3 * (8 + CONNECTIONS_BESIDE) + 8)
        with Session(daemon.endpoint("blue")) as session:
            session.register("m")


def test_nobody_fills_the_log_by_being_refused() -> None:
    """A client that connects and sends garbage in a loop is counted each time, and written down once a second."""
    with running() as daemon:
        began = time.monotonic()
        for _ in range(200):
            with Connection(daemon.endpoint()) as one:
                one.sock.send(b"garbage")
                assert reason(one.receive().frame.reply.error) == "PROTOCOL_VIOLATION"
        assert daemon.figure("membroker_connections_refused_total", reason="PROTOCOL_VIOLATION") == 200
        until(lambda: "connection refused" in daemon.log())
        assert daemon.log().count("connection refused") <= 2 + time.monotonic() - began
