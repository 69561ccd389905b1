"""No turn of the daemon's event loop makes 50,000 calls, whatever is sent; and what is refused so that this holds.

Real processes send frames and calls at their limits, endlessly or all at once. An honest worker of another tenant
goes on beside each; its times and the longest turn are in the report.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, hold_still, running, until
from tests.support.honest_worker import COUNTED, Honest, State, check_turns, honest
from tests.support.workers import PAGE, Worker, descriptors_at_rest, worker, workers

from membroker.wire.sessions import sessions_for
from membrokerd.edge.handoff.listener import HELLO_SECONDS

pytestmark = pytest.mark.deep

SESSIONS = 16
"""Of one process, and no more."""
MAX_SESSIONS = min(512, sessions_for(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""As many as a daemon of this user may have by its descriptors."""

BEGIN = """
import select, time
from pathlib import Path
from tests.support.raw import *
endpoint = Path({endpoint!r})
def resume(token):
    line = Connection(endpoint)
    line.send(pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, resume_token=token)))
    assert line.receive().frame.welcome.resumed
    return line
def drain(sock):
    with suppress(BlockingIOError):
        while sock.recv(65_536):
            pass
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all: its longest turn is that of all these tests."""
    config = {"capacity": "320GiB", "settle_seconds": 1.0, "max_sessions": MAX_SESSIONS, "log": {"level": "info"}}
    with running(config, module=COUNTED) as one:
        yield one


@pytest.fixture
def beside(daemon: Daemon, state: State, request: pytest.FixtureRequest) -> Iterator[Honest]:
    """An honest worker; afterwards nobody else is there, and no turn was too long."""
    with honest(daemon) as one:
        yield one
        until(lambda: len(daemon.sessions()) == 1)
        until(lambda: daemon.books().free_bytes == daemon.books().capacity_bytes)
        check_turns(daemon, state, f"up to {request.node.name}")


@pytest.fixture
def flood(daemon: Daemon) -> Iterator[Worker]:
    """A process of the tenant red that knows the wire; it is killed in the end."""
    with worker() as process:
        process.do(BEGIN.format(endpoint=str(daemon.endpoint("red"))))
        yield process


_ENDLESS = """
sessions = [Session(endpoint) for _ in range(16)]
tokens = [session.token for session in sessions]
for session in sessions:
    session.sock.close()
kinds = [
    pb.Holds(segments=[pb.HeldSegment()] * 32_700),
    pb.Holds(declarations=[pb.HeldDeclaration(model='tenants/red/models/m')] * 2_500),
    pb.Holds(extent_ids=range(1, 4_097)),
    pb.Holds(),
]
frames = [pb.Frame(request_id=2, holds=holds).SerializeToString() for holds in kinds]
def attack(rounds):
    sent = 0
    for _ in range(rounds):
        lines = {resume(token): frames[number % 4] for number, token in enumerate(tokens)}
        while lines:
            for line, frame in list(lines.items()):
                try:
                    line.sock.send(frame)
                    sent += 1
                except OSError:  # a line that takes frames on and on ends in the timeout of the test
                    del lines[line]
                    line.close()
    return sent
"""


def test_endless_holds(beside: Honest, flood: Worker, state: State) -> None:
    """Sixteen sessions are resumed, again and again, and each sends Holds at the limit of a frame, with no last."""
    flood.do(_ENDLESS)
    sent = beside.beside_flood(state, "endless Holds", flood, "answer = attack(20)")
    state("frames of endless Holds sent before 320 connections were ended", str(sent))
    flood.kill()


# --- Frames and calls ---

_FRAMES = {
    "releases of 65,000 ids": "release=bpb.ReleaseExtentsRequest(extent_ids=[1] * 65_000, no_reply=True)",
    "releases of 4,096 ids": "release=bpb.ReleaseExtentsRequest(extent_ids=range(1, 4_097), no_reply=True)",
    "names of 60 KB": "allocate=allocation('tenants/red/models/x' * 3_000, PAGE)",
    "allocations that are refused": "allocate=allocation(model, 1 << 60)",
}


@pytest.mark.parametrize("what", _FRAMES)
def test_frames_at_their_limits(beside: Honest, flood: Worker, state: State, what: str) -> None:
    """Sixteen sessions send what costs the most to refuse, as fast as they can."""
    flood.do(f"sessions = [Session(endpoint) for _ in range({SESSIONS})]")
    flood.do("model = [session.register('m') for session in sessions][0]")
    flood.do(f"frame = pb.Frame(request_id=1, {_FRAMES[what]}).SerializeToString()")
    sent = beside.beside_flood(
        state,
        what,
        flood,
        """
for session in sessions:
    session.sock.setblocking(False)
    session.notices.setblocking(False)
end, answer = time.monotonic() + 2, 0
while time.monotonic() < end or answer <= len(sessions):  # on a machine that is so busy they take longer
    for session in sessions:
        drain(session.sock)
        drain(session.notices)
        with suppress(BlockingIOError):
            session.sock.send(frame)
            answer += 1
""",
    )
    state(f"{what}, in 2 seconds", str(sent))
    flood.kill()


_CALLS = {
    "ListModels": "ListModels.future(bpb.ListModelsRequest(page_size=1000), metadata=token)",
    "GetDevice": "GetDevice.future(bpb.GetDeviceRequest(), metadata=token)",
}


@pytest.mark.parametrize("what", _CALLS)
def test_calls_all_at_once(daemon: Daemon, beside: Honest, flood: Worker, state: State, what: str) -> None:
    """Three hundred calls over twenty connections are there in one moment, while the tenant has 240 models."""
    flood.do(
        """
session = Session(endpoint)
models = [session.register(f'm{number}') for number in range(240)]
token = (('membroker-token', session.token),)
channels = [grpc.insecure_channel(f'unix:{endpoint}/grpc.sock', (('number', number),)) for number in range(20)]
stubs = [broker_pb2_grpc.BrokerServiceStub(channel) for channel in channels]
for stub in stubs:
    stub.GetDevice(bpb.GetDeviceRequest(), metadata=token)
"""
    )
    with hold_still(daemon):
        flood.do(f"futures = [stub.{_CALLS[what]} for stub in stubs for _ in range(15)]")
    served = beside.beside_flood(state, f"300 × {what}", flood, "answer = sum(f.exception() is None for f in futures)")
    assert served == 300
    flood.kill()


# --- Large steps ---

EXTENTS = 65_536
"""Of one Allocate, and more than a GPU of 128 GiB has granules."""


def test_a_session_with_65536_extents(daemon: Daemon, beside: Honest, flood: Worker, state: State) -> None:
    """It borrows them in one call, resumes with them and gives all back by its Goodbye; another one dies with them."""
    flood.do("session = Session(endpoint)\nmodel = session.register('m')")
    borrow = f"session.send(pb.Frame(request_id=7, allocate=allocation(model, PAGE, {EXTENTS})))\n"
    borrow += "_, ids = session.answer(7)\nanswer = len(ids)"
    assert beside.beside_flood(state, "an Allocate of 65,536 extents", flood, borrow) == EXTENTS
    beside.beside_flood(
        state,
        "its resume",
        flood,
        """
session.sock.close()
line = resume(session.token)
for first in range(0, len(ids), 4_096):
    line.send(pb.Frame(request_id=2, holds=pb.Holds(extent_ids=ids[first:first + 4_096])))
line.send(pb.Frame(request_id=2, holds=pb.Holds(last=True)))
assert line.receive().frame.reply.HasField('resume')
answer = None
""",
    )
    assert daemon.books().lent_bytes >= EXTENTS * PAGE
    goodbye = "line.send(pb.Frame(request_id=9, goodbye=pb.Goodbye()))\nline.receive()\nanswer = None"
    beside.beside_flood(state, "its Goodbye", flood, goodbye)
    flood.do("session = Session(endpoint)\nmodel = session.register('m')")
    flood.begin(borrow)
    assert flood.result() == EXTENTS
    flood.kill()
    beside.beside(state, "its death", lambda: daemon.books().releasing_bytes == 0 and len(daemon.sessions()) == 1)


def test_a_journal_of_large_books_is_compacted(daemon: Daemon, beside: Honest, flood: Worker, state: State) -> None:
    """Every other one of 32,768 extents is left, so the shortest story has a fact for each: 0.15 s of work in all."""
    flood.do("session = Session(endpoint)\nmodel = session.register('m')")
    flood.do(f"ids = session.borrow(model, PAGE, {EXTENTS // 2})")
    flood.do(
        "for first in range(0, len(ids), 8_192): session.call(release=bpb.ReleaseExtentsRequest("
        "extent_ids=ids[first:first + 8_192:2]))"
    )
    (journal,) = daemon.directory.rglob("journal")
    churn = """
import os
inode = os.stat(journal).st_ino
while os.stat(journal).st_ino == inode:
    ids = session.borrow(model, PAGE, 4_096)
    for one in range(2):
        session.call(release=bpb.ReleaseExtentsRequest(extent_ids=ids[one::2]))
answer = None
"""
    flood.do(f"journal = {str(journal)!r}")
    for _ in range(2):  # the second one compacts what the first one wrote
        beside.beside_flood(state, "a journal that is compacted", flood, churn)
    flood.kill()


PROCESSES = min(16, MAX_SESSIONS // 2 // SESSIONS)
"""A tenant of two has half of the sessions."""


def test_256_sessions_die_at_once(daemon: Daemon, beside: Honest, state: State) -> None:
    """A container is killed with sixteen processes, or as many as may be, of sixteen sessions that hold memory."""
    with workers(PROCESSES) as dying:
        for each in dying:
            each.do(BEGIN.format(endpoint=str(daemon.endpoint("red"))))
            each.do(f"sessions = [Session(endpoint) for _ in range({SESSIONS})]")
            each.do("models = [session.register('m') for session in sessions]")
            each.do("[session.borrow(model, PAGE) for session, model in zip(sessions, models, strict=True)]")
        with hold_still(daemon):
            for each in dying:
                each.kill()
        beside.beside(state, f"{PROCESSES * SESSIONS} sessions that die at once", lambda: len(daemon.sessions()) == 1)


def test_hellos_that_came_while_the_broker_was_stopped(daemon: Daemon, beside: Honest, flood: Worker) -> None:
    """The daemon is stopped for longer than a connection may be silent. Who said Hello meanwhile is greeted."""
    at_rest = descriptors_at_rest(daemon)
    flood.do("early = [Connection(endpoint) for _ in range(8)]")
    until(lambda: daemon.descriptors() == at_rest + 2 * 8)
    with hold_still(daemon):
        flood.do("late = [Connection(endpoint) for _ in range(8)]")
        flood.do("for one in [*early, *late]: one.send(hello())")
        time.sleep(HELLO_SECONDS + 0.5)  # no state says it: the time itself is what must not count
    assert flood.ask("[one.receive().frame.HasField('welcome') for one in [*early, *late]]") == [True] * 16
    flood.kill()
