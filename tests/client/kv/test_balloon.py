"""The balloon alone: which groups come and go first. `test_cache.py` drives it through random traffic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from tests.support.sizes import MIB

from membroker.kv.balloon import Balloon
from membroker.kv.groups import ASKED, DOOMED, DRAINING, HELD, LEAVING, LIFECYCLE, MAPPED, RETIRING
from membroker.kv.layout import Layout, Strided

BASE = 1 << 40
PAGE = 2 * MIB


def block_major(block: int, blocks: int) -> Layout:
    return Layout(BASE, PAGE, blocks, [Strided(BASE, block, block)])


def with_memory(balloon: Balloon, groups: int, first: int = 0) -> list[int]:
    """Map the lowest groups from `first` on, and return the blocks that this makes usable."""
    for group in range(first, groups):
        balloon.groups.move(group, "asked")
        balloon.groups.move(group, "mapped")
    return balloon.groups.take()


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


def all_unused(blocks: Sequence[int]) -> Collection[int]:
    return blocks


def cold(blocks: Sequence[int]) -> float:
    return 0.0


def asking(used: Collection[int] = (), unused: Any = None, warmth: Any = cold, cost: Any = len) -> Any:
    """An engine that answers what the balloon asks; requests use these blocks."""

    def not_used(blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block not in used]

    return SimpleNamespace(unused=unused or not_used, warmth=warmth, cost=cost)


def test_free_groups_go_first_and_the_highest_of_them() -> None:
    """Five groups: 1 is busy, 2 and 4 have cached prefixes, 0 always has memory. 3 goes, then the colder of 2 and 4."""
    balloon = Balloon(block_major(MIB, 10), keep=PAGE)
    with_memory(balloon, 5)
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
    balloon = Balloon(block_major(MIB, 10))
    with_memory(balloon, 5)
    used = {2: 9.0, 4: 2.0, 5: 2.0, 6: 5.0, 7: 5.0, 8: 2.0}

    def cost(blocks: Sequence[int]) -> float:
        return max((used[block] for block in blocks if block in used), default=0.0)

    assert balloon.choose(10, 3 * PAGE, asking(used, cost=cost)) == [4, 2, 3]


def test_what_has_become_free_goes_instead_of_what_drains() -> None:
    """While busy groups drain, each call looks at a few others. When enough goes, none has to drain any more."""
    balloon = Balloon(block_major(MIB, 10))
    with_memory(balloon, 5)
    used = {2, 4, 6, 8}

    def choose() -> list[int]:
        return balloon.choose(10, PAGE, asking(used), most=2)

    assert choose() == [4], "all are busy"
    used.discard(4)
    assert [choose(), choose()] == [[], [2]], "one group a call, the highest first"
    balloon.groups.held([4, 5])
    assert balloon.groups.retire([2, 4]) == [2]
    assert (choose(), balloon.groups.retiring_bytes, balloon.groups.going_bytes) == ([], PAGE, 2 * PAGE)
    balloon.reconsider()
    assert (balloon.groups.state(4), balloon.groups.going_bytes) == (MAPPED, PAGE)
    check(balloon)


def test_a_sweep_looks_at_few_groups_at_a_time() -> None:
    """A scheduler has no time for thousands of blocks in a step: each call goes on where the last one ended."""
    balloon = Balloon(block_major(MIB, 20))
    with_memory(balloon, 10)
    asked: list[int] = []

    def unused(blocks: Sequence[int]) -> list[int]:
        asked.extend(blocks)
        return []

    looks = []
    for _ in range(3):
        balloon.choose(14, 0, asking(unused=unused), most=6)
        looks.append((asked[:], balloon.is_sweeping))
        asked.clear()
    assert looks == [([18, 19, 16, 17, 14, 15], True), ([12, 13, 10, 11, 8, 9], True), ([6, 7, 4, 5, 2, 3], True)]
    balloon.choose(14, 0, asking(unused=unused), most=6)
    assert (asked, balloon.is_sweeping) == ([], False), "block 0 is always there"


def test_what_is_wanted_again_comes_back_without_a_request() -> None:
    balloon = Balloon(block_major(MIB, 10))
    with_memory(balloon, 5)
    assert balloon.choose(2, 0, asking()) == [4, 3, 2, 1]
    balloon.groups.held([2, 3, 4, 5, 6, 7])
    assert balloon.groups.retire(balloon.groups.groups_in(DRAINING)) == [1, 2, 3]
    balloon.groups.move(1, "fence passed")
    assert balloon.revive(6) == [2]
    assert balloon.groups.take() == [4, 5]
    assert balloon.revive(7) == [3], "group 4 was draining, and the engine has its blocks still"
    assert [balloon.groups.state(group) for group in range(5)] == [MAPPED, LEAVING, MAPPED, MAPPED, DRAINING]
    balloon.groups.move(1, "failed")
    assert balloon.groups.state(1) == DOOMED
    check(balloon)
