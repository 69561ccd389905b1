"""Many at once, and never: floods of connections, clients that read nothing, and a hundred that are stopped.

Beside each goes an honest worker of another tenant, in a process of its own. It must be lent what it asks for all the
while. How long it took is in the report. Afterwards the daemon is as it was: not a byte charged, not a descriptor more,
no memory kept for those that are gone. No turn of its event loop may have taken more than 50 ms of CPU time. What
frames and calls can do to that is in `test_turns.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.honest_worker import COUNTED, Honest, State, check_turns, honest, unprivileged
from tests.support.raw import Connection, hello, reason
from tests.support.sizes import MIB
from tests.support.workers import (
    ANCHOR_BYTES,
    OF_A_CHANNEL,
    OF_A_SESSION,
    PAGE,
    Worker,
    descriptors_at_start,
    device_used,
    until_clean,
    worker,
    workers,
)
from tests.system.test_turns import BEGIN, SESSIONS

from membroker.wire.sessions import descriptors_for

pytestmark = pytest.mark.deep

CONNECTIONS = 10_000
ROUNDS = 3
RSS_GROWTH_BYTES = 4 * MIB
"""What the daemon may grow by. Half a kilobyte kept of each of 10,000 connections would be 4.8 MiB."""

CONNECTED = """
import socket
def connected(path):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if path == 'handoff.sock' else socket.SOCK_STREAM)
    sock.connect(str(endpoint / path))  # before the timeout, which would make a full backlog an error
    sock.settimeout(DEADLINE_SECONDS)
    return sock
"""


class Scene(NamedTuple):
    """A daemon, with an honest worker by each transport that is connected from first to last."""

    daemon: Daemon
    honest: dict[str, Honest]
    descriptors: int


@pytest.fixture
def scene(state: State) -> Iterator[Scene]:
    """Afterwards only the honest workers are there, nothing of the flood is left, and no turn was too long."""
    config = {"capacity": "40GiB", "settle_seconds": 1.0, "max_sessions": 64, "log": {"level": "info"}}
    with running(config, module=COUNTED) as daemon, ExitStack() as stack:
        at_start = descriptors_at_start(daemon)
        beside = {transport: stack.enter_context(honest(daemon, transport)) for transport in ("handoff", "grpc")}
        scene = Scene(daemon, beside, at_start + 2 * OF_A_SESSION + OF_A_CHANNEL)
        yield scene
        check_turns(daemon, state, "a flood")
        until(lambda: len(daemon.sessions()) == len(scene.honest))
        until(lambda: daemon.books().free_bytes == daemon.books().capacity_bytes)
        until(lambda: device_used(daemon) == 0)
        until(lambda: daemon.descriptors() == scene.descriptors)
        for honest_one in scene.honest.values():
            honest_one.turns(10)


@pytest.fixture
def flood(scene: Scene) -> Iterator[Worker]:
    """A process of the tenant red that knows the wire and how to misuse it; it is killed in the end."""
    with worker() as process:
        process.do(BEGIN.format(endpoint=str(scene.daemon.endpoint("red"))))
        process.do(CONNECTED)
        yield process


LOOPS = {
    "connect, and hang up": ("handoff", "connected('handoff.sock').close()"),
    "connect, say Hello, and hang up": ("handoff", "s = connected('handoff.sock'); s.send(greeting); s.close()"),
    "connect to the gRPC socket, and hang up": ("grpc", "connected('grpc.sock').close()"),
}


@pytest.mark.parametrize("what", LOOPS)
def test_10000_connections_in_a_loop(scene: Scene, flood: Worker, what: str, state: State) -> None:
    """One after the other, as fast as it can. All that a connection took comes back, the daemon's own memory too.

    On a busy machine more of them are open at once in one round than in those before. That memory stays with the
    daemon, and the next round uses it again; what is kept of each connection adds up in every round.
    """
    transport, code = LOOPS[what]
    flood.do("greeting = hello().SerializeToString()")
    loop = f"for _ in range(COUNT): {code}"
    flood.do(loop.replace("COUNT", str(CONNECTIONS // 10)))
    grown: list[int] = []
    while len(grown) < ROUNDS and (not grown or grown[-1] >= RSS_GROWTH_BYTES):
        until(lambda: scene.daemon.descriptors() <= scene.descriptors + 3 * SESSIONS)
        warm = scene.daemon.resident_bytes()
        all_of_them = loop.replace("COUNT", str(CONNECTIONS))
        scene.honest[transport].beside_flood(state, f"10,000 times: {what}", flood, all_of_them)
        until(lambda: scene.daemon.descriptors() <= scene.descriptors + 3 * SESSIONS)
        assert len(scene.daemon.sessions()) <= SESSIONS + len(scene.honest)
        grown.append(scene.daemon.resident_bytes() - warm)
    state(f"RssAnon after 10,000 times: {what}", ", ".join(f"{size // 1024:+} KiB" for size in grown))
    assert grown[-1] < RSS_GROWTH_BYTES, grown


STOPPED = 100
IN_FLIGHT = 128
"""Descriptors of a session that may be under way: its window."""
ASKED = IN_FLIGHT + 64
"""Extents that each asks for. A packet waits behind the window, in the books and nowhere else."""


def test_a_hundred_stopped_sessions_stop_nobody(state: State) -> None:
    """A hundred engines are stopped with their windows full of descriptors that they never read.

    The kernel counts descriptors in flight for the user of their sender, so for all of them at once, and refuses the
    next one at the sender's limit. The daemon has exactly the limit that it asks for so many sessions, and the kernel
    holds it to that. A window of one more packet would take the descriptors from the honest worker.
    """
    descriptors = descriptors_for(STOPPED + 1)
    config = {"capacity": "40GiB", "max_sessions": STOPPED + 1, "settle_seconds": 1.0, "audit_seconds": 0.1}
    with unprivileged(config, descriptors, COUNTED) as daemon:
        at_start = descriptors_at_start(daemon)
        processes = -(-STOPPED // SESSIONS)
        with honest(daemon) as one, workers(processes) as stopped:
            for number, each in enumerate(stopped):
                each.do(BEGIN.format(endpoint=str(daemon.endpoint(["red", "blue"][number % 2]))))
                each.do(f"sessions = [Session(endpoint) for _ in range({len(range(number, STOPPED, processes))})]")
                each.do("models = [session.register('m') for session in sessions]")
            for each in stopped:
                each.do(f"""
for session, model in zip(sessions, models, strict=True):
    session.send(pb.Frame(request_id=1, allocate=allocation(model, PAGE, {ASKED})))
""")
                each.send(signal.SIGSTOP)
            lent, in_flight = STOPPED * ASKED * PAGE, STOPPED * IN_FLIGHT * PAGE
            until(lambda: daemon.books().device_used_bytes == ANCHOR_BYTES + in_flight)
            assert daemon.books().lent_bytes == lent
            with Connection(daemon.endpoint("red")) as one_more:
                one_more.send(hello())
                assert reason(one_more.last_words()) == "TOO_MANY_SESSIONS"
            one.beside(state, "100 stopped sessions")
            one.do("pools = [model.pool(page_size=PAGE, virtual_capacity=300 * PAGE) for _ in range(2)]")
            one.do("[pool.grow(300 * PAGE) for pool in pools]")
            assert daemon.books().lent_bytes == lent + 2 * 300 * PAGE
            until(lambda: daemon.books().device_used_bytes == ANCHOR_BYTES + in_flight + 2 * 300 * PAGE)
            assert len(daemon.sessions()) == STOPPED + 1
            for each in stopped:
                each.kill()
            until(lambda: daemon.books().lent_bytes == 2 * 300 * PAGE)
            one.do("client.close()")
        check_turns(daemon, state, "100 stopped sessions")
        until_clean(daemon, at_start)


def test_clients_that_never_read(scene: Scene, flood: Worker, transport: str, state: State) -> None:
    """Each asks on and on and reads no answer. It stands still when the socket is full; nothing piles up for it."""
    before = scene.daemon.resident_bytes()
    flood.do(f"sessions = [Session(endpoint) for _ in range({SESSIONS})]")
    flood.do("for session in sessions: session.sock.setblocking(False)")
    sent = scene.honest[transport].beside_flood(
        state,
        "16 clients that never read",
        flood,
        """
frame = pb.Frame(request_id=1, release=bpb.ReleaseExtentsRequest(extent_ids=[1])).SerializeToString()
answer = 0
while answer < 100_000:
    # A socket takes some 300; after fewer, what is slow is the machine.
    patience = 0.2 if answer > 200 * len(sessions) else DEADLINE_SECONDS
    writable = select.select([], [session.sock for session in sessions], [], patience)[1]
    if not writable:
        break
    for sock in writable:
        with suppress(BlockingIOError):
            for _ in range(100):
                sock.send(frame)
                answer += 1
""",
    )
    assert sent < 100_000, "the daemon reads on, though nobody reads what it answers"
    assert sent > 200 * SESSIONS, "they were no flood"
    assert len(scene.daemon.sessions()) == SESSIONS + len(scene.honest)
    assert scene.daemon.resident_bytes() - before < RSS_GROWTH_BYTES


_NEVER_ACKNOWLEDGES = """
from collections import Counter
kept = []
Session.fileno = lambda self: self.sock.fileno()
def send(request_id):
    for session, model in zip(sessions, models, strict=True):
        session.send(pb.Frame(request_id=request_id, allocate=allocation(model, PAGE, 64)))
def ask():
    refused = Counter()
    for request_id in (1, 2):  # they are answered, so sixteen more can wait
        send(request_id)
    for session in sessions:
        kept.extend(handoff.receive(session.sock) for _ in range(2))
    for request_id in range(3, 119):
        send(request_id)
    while refused.total() < 100 * len(sessions):
        ready = select.select(sessions, [], [], DEADLINE_SECONDS)[0]
        assert ready, f'nothing more comes: {refused}'
        for session in ready:
            packet = handoff.receive(session.sock)
            kept.append(packet)
            if packet.frame.reply.error.code:
                refused[reason(packet.frame.reply.error)] += 1
    return refused
"""


def test_clients_that_never_acknowledge(scene: Scene, flood: Worker, state: State) -> None:
    """Each reads all that comes, and acknowledges none of it: two packets fill its window, and no third comes.

    Its calls that wait are bounded too: the rest is refused, one by one.
    """
    flood.do(f"sessions = [Session(endpoint) for _ in range({SESSIONS})]")
    flood.do("models = [session.register('m') for session in sessions]")
    flood.do(_NEVER_ACKNOWLEDGES)
    refused = scene.honest["handoff"].beside_flood(state, "16 clients that never acknowledge", flood, "answer = ask()")
    assert refused == {"TOO_MANY_REQUESTS": SESSIONS * 100}
    # Two went out, sixteen wait for the window.
    assert scene.daemon.books().lent_bytes == SESSIONS * 18 * 64 * PAGE
    until(lambda: device_used(scene.daemon) == SESSIONS * 2 * 64 * PAGE)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def test_an_http2_preface_in_drips(scene: Scene, flood: Worker, state: State) -> None:
    """Fifty connections at the gRPC socket of the honest worker's endpoint say their preface a byte at a time.

    Those that end it are greeted, as any client; those that end in nonsense are cut. All of it costs three descriptors
    each, until they go: the connection, and both ends of the one to the gRPC server.
    """
    flood.do(BEGIN.format(endpoint=str(scene.daemon.endpoint("blue"))))
    flood.do("drips = [connected('grpc.sock') for _ in range(50)]")
    scene.honest["grpc"].beside_flood(
        state,
        "50 connections that drip a preface at its own endpoint",
        flood,
        f"""
for byte in {PREFACE[:-1]!r}:
    for sock in drips:
        sock.send(bytes([byte]))
    time.sleep(0.03)
""",
    )
    until(lambda: scene.daemon.descriptors() == scene.descriptors + 3 * 50)
    flood.do(f"for sock in drips[:25]: sock.send({PREFACE[-1:]!r})")
    assert flood.ask("[sock.recv(9)[3] for sock in drips[:25]]") == [4] * 25, "no SETTINGS"
    flood.do("for sock in drips[25:]: sock.send(b'\\xff' * 100)")
    flood.do("""
def ended(sock):
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True
""")
    assert flood.ask("[ended(sock) for sock in drips[25:]]") == [True] * 25
    until(lambda: scene.daemon.descriptors() == scene.descriptors + 3 * 25)
