"""What the threads of a cache share: which groups go first when others want memory back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tests.client.kv.test_balloon import all_unused, block_major, cold, with_memory
from tests.support.fake_lender import PAGE
from tests.support.sizes import MIB

from membroker.kv.balloon import Balloon
from membroker.kv.groups import DOOMED, DRAINING, MAPPED
from membroker.kv.state import ASK_GROUPS, PATIENCE_SECONDS, CacheState


@dataclass
class Recall:
    """An open recall."""

    model: object
    remaining: int
    deadline: float
    is_guaranteed: bool = False

    def done(self) -> None:
        """Say nothing."""


def an_engine(used: set[int]) -> Any:
    """An engine whose requests use these blocks, and that preempts none: it notes that it was asked to."""
    asked = list[Any]()
    return SimpleNamespace(
        unused=lambda blocks: [one for one in blocks if one not in used],
        warmth=cold,
        cost=len,
        hold=all_unused,
        preempt=asked.append,
        asked=asked,
    )


def five_groups(*used: int) -> tuple[Balloon, CacheState, Any]:
    """Groups with memory, of which the engine wants eight blocks, and which of its blocks requests use."""
    balloon = Balloon(block_major(MIB, 10))
    with_memory(balloon, 5)
    state = CacheState(balloon)
    state.want(8)
    return balloon, state, an_engine(set(used))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time of the state, which stands still."""
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr("membroker.kv.state.time", found)
    return found


def test_a_recall_waits_for_requests_that_end_soon(clock: Any) -> None:
    """They are preempted when it has waited long enough for them, and at once for the next recall of the same need."""
    _, state, engine = five_groups(*range(10))
    state.hold(engine)
    for seconds, waits in ((10.0, PATIENCE_SECONDS), (0.2, 0.1)):
        clock.now += 1.0  # the one before has been answered for long
        recall = Recall("m", PAGE, clock.now + seconds)
        state.hold(engine)
        assert state.recalled(recall)
        state.hold(engine)
        assert engine.asked == []
        clock.now += 0.51 * waits
        state.hold(engine)  # the next turn will come too late
        assert len(engine.asked) == 1
        recall.remaining = 0
        assert state.settled(has_engine=True) is recall
        clock.now += 0.01
        assert state.recalled(Recall("m", PAGE, clock.now + seconds))
        state.hold(engine)
        assert len(engine.asked) == 2
        state._recalls.clear()
        engine.asked.clear()


@pytest.mark.parametrize("is_raised", [False, True], ids=["", "by a raise"])
def test_a_recall_for_a_guarantee_waits_for_no_request(is_raised: bool, clock: Any) -> None:
    """The guarantee was promised at any time. Another recall that comes before its answer does not wait either."""
    _, state, engine = five_groups(*range(10))
    state.hold(engine)
    recall = Recall("m", PAGE, clock.now + 10.0, is_guaranteed=not is_raised)
    state.recalled(recall)
    state.hold(engine)
    assert len(engine.asked) == (not is_raised)
    recall.is_guaranteed = True
    state.recalled(recall)
    state.hold(engine)
    assert len(engine.asked) == 1 + (not is_raised)
    state.recalled(Recall("another rank", PAGE, clock.now + 10.0))
    state.hold(engine)
    assert len(engine.asked) == 2 + (not is_raised)


def test_an_engine_is_short_while_it_waits_or_others_do(clock: Any) -> None:
    balloon = Balloon(block_major(MIB, 200))
    with_memory(balloon, 5)
    state = CacheState(balloon)
    assert not state.is_short
    state.want(200)
    for is_granted, most in ((True, ASK_GROUPS), (False, 1), (True, 1)):
        groups, _ = state.question() or pytest.fail("it asks for nothing")
        assert len(groups) == most, "while others have what there is, one page at a time"
        assert not state.is_short
        clock.now += 1.0
        assert state.is_short, "the broker has not answered: others have what there is"
        state.answered(groups, is_granted=is_granted)
        assert state.is_short is not is_granted
        state._was_refused = False
    state.recalled(Recall("m", PAGE, clock.now + 1.0))
    assert state.is_short


def test_what_waits_for_its_fence_goes_after_the_answer_too() -> None:
    """A recall is answered in time, and the step that may use the pages is not over: they are as good as released."""
    balloon, state, engine = five_groups()
    state.recalled(Recall("m", PAGE, time.monotonic()))
    assert state.hold(engine) == [4]
    state.settled(has_engine=True)
    state.want(10)
    assert balloon.groups.state(4) == DOOMED


def test_a_recall_takes_free_groups_and_not_those_that_drain_already() -> None:
    """A sparse group waits for its last request. A recall of as many bytes needs neither that nor a preemption."""
    balloon, state, engine = five_groups(8)
    assert state.hold(engine) == []
    assert balloon.groups.groups_in(DRAINING) == [4], "half of it is used, and 8 blocks are wanted"
    state.recalled(Recall("m", PAGE, time.monotonic() + 1.0))
    assert state.hold(engine) == [3]
    assert (balloon.groups.state(3), balloon.groups.state(4)) == (DOOMED, MAPPED)
    assert not engine.asked
