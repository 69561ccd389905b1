"""A process is killed at each step of each operation that changes the books: the daemon, the worker, or the keeper.

Whatever was under way has one of its two legal outcomes, the books are what the device and the workers really have, and
what a worker had before is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support import faulty_daemon
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.workers import ANCHOR_BYTES, PAGE, Worker, worker

from membrokerd.system.failpoints import POINTS

pytestmark = pytest.mark.deep

CONFIG: Mapping[str, Any] = {"capacity": "256MiB", "settle_seconds": 10.0}

ALLOCATE = "more = model.allocate(2 * PAGE)"
GIVE_BACK = "spare.close()"
SEGMENT = "segment = model.create_segment('weights', 2 * PAGE)"
SEAL = f"{SEGMENT}; segment.write(0, b'weights'); segment.seal()"
CHURN = "for _ in range(40): model.allocate(PAGE).close()"
CALLS: Mapping[str, str] = {
    **dict.fromkeys(("debit", "debited", "create", "created", "deliver", "delivered", "acknowledge"), ALLOCATE),
    **dict.fromkeys(("credit", "credited"), GIVE_BACK),
    **dict.fromkeys(("store", "stored"), SEGMENT),
    **dict.fromkeys(("seal", "sealed"), SEAL),
    **dict.fromkeys(("compact", "compacted"), CHURN),
    **dict.fromkeys(("resume", "reconcile", "reconciled"), ALLOCATE),
}
"""What a worker does that leads to a point."""
IN_RESUME = ("resume", "reconcile", "reconciled")
BY_GRPC = ("debit", "delivered", "stored", "credited", "sealed", "resume")
"""Points that a client by gRPC can tell apart: nothing came of its call, descriptors without an answer, or all but the
answer. What the daemon does at a point does not depend on the way in."""
OF_THE_KEEPER = ("debit", "store", "stored", "seal", "resume")
"""What the two have with each other: nothing, a put, a segment that is just kept, one that was kept before, and what
the daemon took over."""


@pytest.fixture
def crashed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that can be told to kill somebody at a point."""
    monkeypatch.setenv(faulty_daemon.ARMED, str(tmp_path_factory.mktemp("crash") / "armed"))
    with running(CONFIG, module="tests.support.faulty_daemon crash") as daemon:
        yield daemon


@contextmanager
def engine(daemon: Daemon, transport: str) -> Iterator[Worker]:
    """A worker that holds 4 MiB with something written in it, and 2 MiB that it can spare."""
    with worker() as one:
        one.connect(daemon, transport=transport)
        one.do("model = client.model('m'); kept = model.allocate(2 * PAGE); spare = model.allocate(PAGE)")
        one.do("kept.view()[:4] = b'kept'; kept.view()[-4:] = b'last'")
        yield one


HELD = """
def held():
    buffers = [name for name in ('kept', 'spare', 'more') if name in globals() and not globals()[name].closed]
    there = sum(globals()[name].size for name in buffers)
    return there + (segment.size if 'segment' in globals() and not segment.closed else 0)
"""


def check(daemon: Daemon, one: Worker) -> None:
    """The worker has what it had, and the books and the device say what it has; it can give all of it back."""
    assert one.ask("(bytes(kept.view()[:4]) + bytes(kept.view()[-4:])).decode()") == "keptlast"
    one.do(HELD)
    held = one.ask("held()")
    until(lambda: daemon.books().lent_bytes == held)
    until(lambda: daemon.books().device_used_bytes == held + ANCHOR_BYTES)
    assert daemon.books().releasing_bytes == 0
    if one.ask("'segment' in globals()"):
        one.do("if segment.writable:\n    segment.write(0, b'weights')\n    segment.seal()")
        with worker() as reader:
            reader.connect(daemon)
            assert reader.ask("client.attach('m/weights').read(0, 7).decode()") == "weights"
        one.do("segment.delete()")
    one.do("client.close()")
    until(lambda: daemon.books().lent_bytes + daemon.books().releasing_bytes == 0)
    until(lambda: daemon.books().device_used_bytes == ANCHOR_BYTES)


@pytest.mark.parametrize(
    ("transport", "point"), [*(("handoff", point) for point in POINTS), *(("grpc", point) for point in BY_GRPC)]
)
def test_the_daemon_is_killed(crashed: Daemon, transport: str, point: str) -> None:
    """The call in flight ends as if it had been made once, at the daemon that is started next."""
    with engine(crashed, transport) as one:
        if point in IN_RESUME:
            crashed.kill()
            faulty_daemon.arm(point, 0)
            crashed.start_again(may_end=True)  # a worker may resume before the start is told of
        else:
            faulty_daemon.arm(point, 0)
        one.begin(CALLS[point])
        crashed.process.wait(DEADLINE_SECONDS)
        crashed.start_again()
        one.result()
        check(crashed, one)


@pytest.mark.parametrize("point", POINTS)
def test_the_worker_is_killed(crashed: Daemon, point: str) -> None:
    """All that it had comes back, and its neighbour notices nothing. A segment is sealed, once that was asked for."""
    with engine(crashed, "handoff") as neighbour, engine(crashed, "handoff") as one:
        if point in IN_RESUME:
            crashed.kill()
            faulty_daemon.arm(point, one.pid)
            neighbour.kill()
            crashed.start_again()
        else:
            faulty_daemon.arm(point, one.pid)
        one.begin(CALLS[point])
        one.process.wait(DEADLINE_SECONDS)
        if point in ("seal", "sealed"):
            neighbour.do("client.attach('m/weights').close(); client.delete_segment('m/weights')")
        left = 0 if point in IN_RESUME else 3 * PAGE
        until(lambda: crashed.books().lent_bytes == left)
        until(lambda: crashed.books().releasing_bytes == 0)
        until(lambda: crashed.books().device_used_bytes == left + ANCHOR_BYTES)
        if left:
            check(crashed, neighbour)


@pytest.mark.parametrize("point", OF_THE_KEEPER)
def test_the_keeper_is_killed(crashed: Daemon, point: str) -> None:
    """Another is started and filled: the call succeeds, and the daemon's own death after it loses nothing."""
    with engine(crashed, "handoff") as one:
        before = crashed.keeper()
        if point in IN_RESUME:
            crashed.kill()
            faulty_daemon.arm(point, before)
            crashed.start_again()
        else:
            faulty_daemon.arm(point, before)
        one.begin(CALLS[point])
        one.result()
        until(lambda: not faulty_daemon.armed_path().exists())
        until(lambda: crashed.keeper() not in (0, before))
        until(lambda: "the keeper of descriptors has all descriptors again" in crashed.log())
        crashed.kill()
        crashed.start_again()
        check(crashed, one)
