"""Which groups of blocks come and go first, and when a recall preempts. `test_cache.py` has random traffic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fake_lender import PAGE
from tests.support.sizes import MIB

from membroker.kv.balloon import Balloon
from membroker.kv.groups import ASKED, DOOMED, DRAINING, HELD, LEAVING, LIFECYCLE, MAPPED, RETIRING
from membroker.kv.layout import Layout, Strided
from membroker.kv.state import PATIENCE_SECONDS, CacheState

BASE = 1 << 40


def with_memory(keep: int = 0) -> Balloon:
    """Return a balloon of ten blocks in five groups, which all have memory."""
    balloon = Balloon(Layout(BASE, PAGE, 10, [Strided(BASE, MIB, MIB)]), keep=keep)
    for group in range(5):
        balloon.groups.move(group, "asked")
        balloon.groups.move(group, "mapped")
    balloon.groups.take()
    return balloon


def check(balloon: Balloon) -> None:
    """Assert what always holds. It looks at every block."""
    groups, layout = balloon.groups, balloon.groups.layout
    states = [groups.state(group) for group in range(layout.groups)]
    usable = 0
    for block in range(layout.blocks):
        touched = layout.touched(block)
        is_always = set(touched) <= set(groups.first)
        has_memory = all(states[group] == MAPPED for group in touched)
        assert not groups.is_out(block) or is_always or all(states[group] in (MAPPED, DRAINING) for group in touched)
        usable += groups.is_out(block) or has_memory
    assert groups.available == usable
    sums = [
        sum(size for size, found in zip(groups.sizes, states, strict=True) if found == state) for state in LIFECYCLE
    ]
    assert (groups.asked_bytes, groups.staying_bytes) == (sums[ASKED], sums[MAPPED])
    assert groups.retiring_bytes == sums[RETIRING] + sums[DOOMED] + sums[LEAVING]
    assert groups.going_bytes == groups.retiring_bytes + sums[DRAINING]
    assert groups.charged_bytes == sum(sums) - sums[HELD]
    for state in LIFECYCLE:
        assert groups.groups_in(state) == [group for group, found in enumerate(states) if found == state]


def cold(blocks: Sequence[int]) -> float:
    return 0.0


def asking(used: Collection[int], warmth: Any = cold, cost: Any = len) -> Any:
    """An engine that answers what the balloon asks; requests use these blocks."""

    def unused(blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block not in used]

    return SimpleNamespace(unused=unused, warmth=warmth, cost=cost)


def test_free_groups_go_first_and_the_highest_of_them() -> None:
    """Five groups: 1 is busy, 2 and 4 have cached prefixes, 0 always has memory. 3 goes, then the colder of 2 and 4."""
    balloon = with_memory(keep=PAGE)
    used, warm = {2, 3}, {4: 7.0, 9: 3.0}

    def warmth(blocks: Sequence[int]) -> float:
        return max((warm.get(block, 0.0) for block in blocks), default=0.0)

    assert balloon.choose(3, 0, asking(used, warmth=warmth)) == [3, 4], "one cached page is kept"
    assert balloon.choose(3, 4 * PAGE, asking(used, warmth=warmth)) == [2, 1], (
        "a recall takes that too, and what is busy last"
    )
    assert balloon.choose(3, 9 * PAGE, asking(used, warmth=warmth)) == [], "never the group of block 0"


def test_a_recall_takes_the_busy_groups_that_cost_least() -> None:
    """Not those with the fewest used blocks, if these are of a request that the engine would preempt last."""
    balloon = with_memory()
    used = {2: 9.0, 4: 2.0, 5: 2.0, 6: 5.0, 7: 5.0, 8: 2.0}

    def cost(blocks: Sequence[int]) -> float:
        return max((used[block] for block in blocks if block in used), default=0.0)

    assert balloon.choose(10, 3 * PAGE, asking(used, cost=cost)) == [4, 2, 3]


class Cache:
    """Five groups with memory, of which the engine wants eight blocks. `asked` are the preemptions, and time stands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *used: int) -> None:
        self.clock = SimpleNamespace(now=1000.0, monotonic=lambda: self.clock.now)
        monkeypatch.setattr("membroker.kv.state.time", self.clock)
        self.balloon, self.asked = with_memory(), list[Any]()
        self.state, self.engine = CacheState(self.balloon), asking(set(used))
        self.engine.hold, self.engine.preempt = list, self.asked.append
        self.state.want(8)

    def recalled(self, seconds: float, *, is_guaranteed: bool = False) -> Any:
        """Recall a page, and let the engine hear of it."""
        deadline = self.clock.now + seconds
        recall: Any = SimpleNamespace(
            model="m", remaining=PAGE, deadline=deadline, is_guaranteed=is_guaranteed, done=lambda: None
        )
        self.state.hold(self.engine)
        assert self.state.recalled(recall)
        self.state.hold(self.engine)
        return recall


def test_a_recall_waits_for_requests_that_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are preempted when it has waited long enough for them, and at once for the next recall of the same need."""
    cache = Cache(monkeypatch, *range(10))
    for seconds, waits in ((10.0, PATIENCE_SECONDS), (0.2, 0.1)):
        cache.clock.now += 1.0  # the one before has been answered for long
        recall = cache.recalled(seconds)
        assert cache.asked == []
        cache.clock.now += 0.51 * waits
        cache.state.hold(cache.engine)  # the next turn will come too late
        assert len(cache.asked) == 1
        recall.remaining = 0
        assert cache.state.settled(has_engine=True) is recall
        cache.clock.now += 0.01
        cache.recalled(seconds)
        assert len(cache.asked) == 2
        cache.state._recalls.clear()
        cache.asked.clear()


def test_a_recall_for_a_guarantee_waits_for_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guarantee was promised at any time. A recall that becomes one does not wait either."""
    cache = Cache(monkeypatch, *range(10))
    recall = cache.recalled(10.0)
    assert cache.asked == []
    recall.is_guaranteed = True
    cache.state.recalled(recall)
    cache.state.hold(cache.engine)
    assert len(cache.asked) == 1
    cache = Cache(monkeypatch, *range(10))
    cache.recalled(10.0, is_guaranteed=True)
    assert len(cache.asked) == 1


def test_what_waits_for_its_fence_goes_after_the_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recall is answered in time, and the step that may use the pages is not over: they are as good as released."""
    cache = Cache(monkeypatch)
    cache.recalled(0.0)
    cache.state.settled(has_engine=True)
    cache.state.want(10)
    assert cache.balloon.groups.state(4) == DOOMED
