"""Recalls with a real daemon: what a program that promised to answer is asked, and what others get by its answers.

Red is guaranteed 128 of 256 MiB and has borrowed nothing. Blue has borrowed all of it, which it can only because it
answers recalls.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.fake_broker import Caller
from tests.support.sizes import MIB
from tests.support.workers import Worker, workers

import membroker
from membroker.v1 import resources_pb2

CAPACITY = 256 * MIB
CONFIG = {
    "tenants": {"red": {"guarantee": "128MiB"}, "blue": {}},
    # However busy this machine is, no answer is late, and no request is refused meanwhile.
    "recall_seconds": 600.0,
    "guarantee_wait_seconds": 3_600.0,
}
PREPARE = """
import threading, time
model = client.model('m', virtual_capacity='1GiB')
pool = model.pool(page_size=PAGE)
told, answered = [], threading.Event()

def release(recall):
    'Release what is asked for, from the end of the pool.'
    pool.shrink(recall.remaining)

def give(recall):
    told.append((recall.location, recall.size, recall.deadline - time.monotonic()))
    release(recall)
    answered.set()

def waited_for(what):
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)
    return True
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(CONFIG) as one:
        yield one


@pytest.fixture
def pair(daemon: Daemon) -> Iterator[tuple[Worker, Worker]]:
    """Red's worker and blue's. Both have a model, and nothing borrowed."""
    with workers(2) as (red, blue):
        for name, one in (("red", red), ("blue", blue)):
            one.connect(daemon, name).do(PREPARE)
        yield red, blue


def filled(blue: Worker, callback: str = "give") -> None:
    """Let blue borrow all there is, with this callback."""
    blue.do(f"model.on_recall({callback})")
    blue.do(f"pool.grow({CAPACITY})")


def recalled(daemon: Daemon) -> tuple[int, int]:
    """Return the bytes that are asked for, and the late ones, of all models."""
    books = [one for model in daemon.models() for one in model.books]
    return sum(one.recalled_bytes for one in books), sum(one.late_bytes for one in books)


def test_what_a_callback_does_not_release_is_kept(daemon: Daemon, pair: tuple[Worker, Worker]) -> None:
    """It raises: red is refused, the recall ends as kept, and blue is asked only a few times.

    What is kept shows as late for two seconds only, which on a busy machine may be over before a test looks.
    """
    red, blue = pair
    blue.do("def fail(recall):\n    told.append(recall.size)\n    raise ValueError('a mistake in the callback')")
    filled(blue, "fail")
    assert red.refused("model.allocate(64 * MIB, timeout=0.5)").reason == "CAPACITY"
    # The answer may come after the refusal.
    until(lambda: daemon.figure("membroker_recall_seconds_count", result="kept") >= 1)
    assert 1 <= blue.ask("len(told)") <= 4


def test_a_forked_child_answers_nothing(daemon: Daemon, pair: tuple[Worker, Worker]) -> None:
    """The child has the callback and the open recall of its parent, and neither does anything there."""
    red, blue = pair
    filled(blue, "lambda recall: membroker.DEFERRED")
    red.begin("held = model.allocate(64 * MIB, timeout=600)")
    blue.do("waited_for(lambda: model.pending_recall); recall = model.pending_recall")
    blue.do("""
pid = os.fork()
if not pid:
    try:
        assert model.pending_recall is None
        recall.done()
        try:
            model.on_recall(None)
        except membroker.ClosedError:
            os._exit(7)
    finally:
        os._exit(1)
""")
    assert blue.ask("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == 7
    assert recalled(daemon)[0] >= 64 * MIB
    assert blue.ask("model.pending_recall is recall")
    blue.do("release(recall); recall.done()")
    red.result()


def test_a_recall_goes_on_after_the_daemons_death(daemon: Daemon, pair: tuple[Worker, Worker]) -> None:
    """The daemon dies amid a recall. Both sessions resume, red's request is made again, and blue is asked again."""
    red, blue = pair
    filled(blue, "lambda recall: membroker.DEFERRED")
    red.begin("held = model.allocate(64 * MIB, timeout=600)")
    blue.do("waited_for(lambda: model.pending_recall); old = model.pending_recall")
    daemon.kill()
    blue.do("waited_for(lambda: model.pending_recall is None)")
    blue.do("old.done()")
    daemon.start_again()
    blue.do("waited_for(lambda: model.pending_recall); recall = model.pending_recall")
    assert blue.ask("recall is not old")
    blue.do("release(recall); recall.done()")
    red.result()
    assert blue.ask("model.pending_recall is None")


def test_a_guest_has_its_slice_although_the_daemon_is_restarted() -> None:
    """The slice that the next daemons are configured with is for guests that begin with them."""
    config = {"capacity": CAPACITY, "tenants": {"red": {}}, "slice_seconds": 3_600.0, "recall_seconds": 600.0}
    with (
        running(config) as daemon,
        membroker.connect(daemon.endpoint()) as client,
        membroker.connect(daemon.endpoint()) as other,
    ):
        one, two = client.model("one"), other.model("two")
        for model in (one, two):
            model.on_recall(lambda recall: membroker.DEFERRED)
        one.declare("200MiB", recallable=True)
        daemon.config["slice_seconds"] = 0.0
        for kill in (True, False):
            if kill:
                daemon.kill()
            else:
                assert daemon.stop() == 0
            daemon.start_again()
            until(lambda: [row.state for row in daemon.sessions()] == [resources_pb2.Session.OPEN] * 2)
            with pytest.raises(membroker.OutOfMemory):
                two.declare("200MiB", recallable=True, timeout=0.1)
            assert recalled(daemon) == (0, 0)
        one.declare(0)
        two.declare("200MiB", recallable=True)
        waiting = Caller(lambda: one.declare("200MiB", recallable=True, timeout=600))
        until(lambda: recalled(daemon) == (200 * MIB, 0))
        two.declare(0)
        waiting.value()
