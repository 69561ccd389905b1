"""Clients that mean harm: forged log lines, connections without end, and reused pids."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack, suppress

from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, running, until
from tests.support.raw import Connection, Session, reason
from tests.support.scene import CONFIG, PAGE, TAKES_DESCRIPTORS, Scene
from tests.support.workers import workers

import membroker
from membrokerd.edge.rpc.proxy import CONNECTIONS_BESIDE


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
    """A second process gets a pidfd with the number that a dead one's had: its own death must still be noticed."""
    borrows = "kept = client.model('m').allocate(PAGE)"
    with running({"settle_seconds": 600.0}) as daemon, workers(2) as (first, second):
        first.connect(daemon).do(borrows)
        child = first.ask("fork_unseen()")
        try:
            first.kill()
            until(lambda: daemon.books().releasing_bytes == PAGE)
            second.connect(daemon).do(borrows)
        finally:
            os.kill(child, signal.SIGKILL)
        until(lambda: not daemon.books().releasing_bytes)
        assert daemon.books().lent_bytes == PAGE
        second.kill()
        until(lambda: not daemon.sessions())
        assert daemon.books().lent_bytes == 0


def test_many_that_say_nothing_make_room() -> None:
    """Silent connections are bounded: the oldest is closed, and a client that says Hello gets in."""
    with running(CONFIG, module=f"{TAKES_DESCRIPTORS},wait_for_hellos") as daemon, ExitStack() as stack:
        worker = stack.enter_context(membroker.connect(daemon.endpoint("blue")))
        scene = Scene(daemon, worker, worker.model("honest"))
        silent = [stack.enter_context(Connection(daemon.endpoint("blue"))) for _ in range(200)]
        assert silent[0].last_words() is None
        assert not raw.is_readable(silent[-1].sock)
        with Session(daemon.endpoint("blue")) as session:
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
