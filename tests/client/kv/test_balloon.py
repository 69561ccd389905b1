"""The balloon alone: a simulated engine, broker and GPU drive it through random traces, and every rule is checked."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB
from tests.support.toy_engine import Request, ToyEngine

from membroker.kv.balloon import Balloon
from membroker.kv.groups import ASKED, DOOMED, DRAINING, HELD, LEAVING, LIFECYCLE, MAPPED, RETIRING
from membroker.kv.layout import Layout, Strided

BASE = 1 << 40
PAGE = 2 * MIB


def block_major(block: int, blocks: int) -> Layout:
    return Layout(BASE, PAGE, blocks, [Strided(BASE, block, block)])


def layer_major(layers: int, block: int, blocks: int) -> Layout:
    step = -(-block * blocks // PAGE) * PAGE
    return Layout(BASE, PAGE, blocks, [Strided(BASE + n * step, block, block) for n in range(layers)])


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


def test_a_straddling_block_comes_with_its_second_page() -> None:
    """Blocks of 768 KiB: block 2 has bytes in the pages 0 and 1, and is usable once both are mapped."""
    balloon = Balloon(block_major(768 << 10, 20))
    assert with_memory(balloon, 1) == [1]
    assert balloon.next_to_map(3) == (1, True)
    balloon.groups.move(1, "asked")
    assert balloon.groups.state(1) == ASKED
    balloon.groups.move(1, "mapped")
    assert balloon.groups.take() == [2, 3, 4]
    assert balloon.groups.take() == []


def test_what_is_mapped_next() -> None:
    """What the engine lacks is needed, and so is the floor. What is ahead is not."""
    balloon = Balloon(block_major(MIB, 20), floor=2 * PAGE, ahead=PAGE)
    assert with_memory(balloon, 1) == [1]
    assert balloon.next_to_map(3) == (1, True)
    assert balloon.next_to_map(1) == (1, True), "below the floor"
    with_memory(balloon, 2, 1)
    assert balloon.next_to_map(2) is None
    assert balloon.next_to_map(3) == (2, False), "2 blocks ahead"
    with_memory(balloon, 4, 2)
    check(balloon)


def test_a_refusal_changes_nothing() -> None:
    balloon = Balloon(block_major(MIB, 20))
    balloon.groups.move(0, "asked")
    assert balloon.groups.charged_bytes == PAGE
    balloon.groups.move(0, "refused")
    assert (balloon.groups.charged_bytes, balloon.groups.state(0), balloon.next_to_map(2)) == (0, HELD, (0, True))
    check(balloon)


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


def test_what_the_engine_wants_stays_but_for_a_recall() -> None:
    balloon = Balloon(block_major(MIB, 10), ahead=PAGE, floor=2 * PAGE)
    with_memory(balloon, 5)
    assert balloon.choose(8, 0, asking()) == []
    assert balloon.choose(5, 0, asking()) == [4], "7 of 10 blocks are wanted, or ahead"
    assert balloon.choose(8, 9 * PAGE, asking()) == [3, 2], "and the floor stays"


def test_nothing_is_looked_at_while_all_memory_is_the_floors() -> None:
    """A look takes the engine's time in every step, and could find nothing that may go."""
    balloon, looked = Balloon(block_major(MIB, 10), floor=3 * PAGE), list[Sequence[int]]()
    with_memory(balloon, 3)

    def unused(blocks: Sequence[int]) -> Sequence[int]:
        looked.append(blocks)
        return blocks

    engine = asking(unused=unused)
    assert (balloon.choose(0, 0, engine), looked, balloon.is_sweeping) == ([], [], False)
    with_memory(balloon, 4, 3)
    assert balloon.choose(0, 0, engine) == [3]
    assert looked


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
    """A scheduler has no time for thousands of blocks in a step: each call goes on where the last one ended.

    It has some more for many blocks that are not wanted.
    """
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
    balloon.choose(19, 0, asking(unused=unused), most=1)
    assert asked == [18, 19]
    asked.clear()
    balloon.choose(10, 0, asking(unused=unused), most=1)
    assert asked == [16, 17, 14, 15]
    balloon.choose(20, 0, asking(unused=unused))
    assert not balloon.is_sweeping, "there is nothing to spare now"


def test_a_busy_group_goes_when_its_last_request_ends() -> None:
    """The free blocks of a sparse group are held, so no new request goes there. It retires with its last block."""
    balloon = Balloon(block_major(512 << 10, 16))
    with_memory(balloon, 4)
    used = {8}

    assert balloon.choose(10, 0, asking(used)) == [3], "a request of 10 blocks more would miss those of the group 2"
    balloon.groups.held([12, 13, 14, 15])
    assert balloon.groups.retire(balloon.groups.groups_in(DRAINING)) == [3]
    assert balloon.choose(9, 0, asking(used)) == [2]
    assert balloon.groups.blocks_out(balloon.groups.groups_in(DRAINING)) == [8, 9, 10, 11]
    balloon.groups.held([9, 10, 11])
    draining = balloon.groups.groups_in(DRAINING)
    assert (balloon.groups.retire(draining), balloon.groups.blocks_out(draining)) == ([], [8])
    assert balloon.groups.take() == []
    check(balloon)
    balloon.groups.held([8])
    assert balloon.groups.retire(balloon.groups.groups_in(DRAINING)) == [2]
    for group in (2, 3):
        balloon.groups.move(group, "fence passed")
        assert balloon.groups.state(group) == LEAVING
        balloon.groups.move(group, "unmapped")
    assert (balloon.groups.charged_bytes, balloon.groups.available) == (2 * PAGE, 8)


def test_draining_groups_are_looked_at_in_turn() -> None:
    """Long requests hold up many groups. A turn looks at some of them, and each comes up again."""
    balloon = Balloon(block_major(512 << 10, 40))
    with_memory(balloon, 10)
    used = set(range(4, 40, 4))
    chosen = balloon.choose(15, 0, asking(used))
    assert chosen == [9, 8, 7, 6, 5, 4, 3, 2]
    assert [balloon.next_draining(12) for _ in range(4)] == [[2, 3, 4], [5, 6, 7], [8, 9, 2], [3, 4, 5]]
    assert balloon.next_draining(1000) == [6, 7, 8, 9, 2, 3, 4, 5]


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


class Machine:
    """A balloon with an engine, a broker that lends up to `room` groups, and work on a GPU that takes some steps."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        blocks = rng.randrange(20, 120)
        if rng.random() < 0.5:
            layout = block_major(rng.choice([384, 512, 768, 1792, 3000, 5120]) << 10, blocks)
        else:
            layout = layer_major(rng.randrange(1, 5), rng.choice([64, 72, 128]) << 10, blocks)
        largest = max(layout.bytes_of(group) for group in range(layout.groups))
        total = sum(layout.bytes_of(group) for group in range(layout.groups))
        self.balloon = Balloon(
            layout,
            floor=rng.choice([0, 0, largest, 3 * largest]),
            ahead=rng.choice([0, largest, 2 * largest]),
            keep=rng.choice([0, largest, total]),
        )
        self.room = total
        self.engine = ToyEngine(blocks, rng, caches=rng.random() < 0.5, preempts=rng.random() < 0.7)
        self.engine.look = self.look
        self.engine.hold(list(range(1, blocks)))
        self.fences: dict[int, int] = {}
        """The step in which the work that may use a retiring group ends."""
        self.step_number = 0
        self.last_use = [0] * blocks
        self.recalled = 0
        self.quiet_steps = 0
        for group in self.balloon.groups.first:
            self.balloon.groups.move(group, "asked")
            self.balloon.groups.move(group, "mapped")

    def look(self, block: int) -> None:
        """A kernel uses a block."""
        states = [self.balloon.groups.state(group) for group in self.balloon.groups.layout.touched(block)]
        assert set(states) <= {MAPPED, DRAINING}, f"block {block} is used, and its groups are in the states {states}"
        self.last_use[block] = self.step_number

    def step(self) -> None:
        self.step_number += 1
        rng, balloon, engine = self.rng, self.balloon, self.engine
        if rng.random() < 0.4:
            engine.add(Request(rng.randrange(1, 8), rng.randrange(0, 3), decode_left=rng.randrange(1, 20)))
        want = min(engine.need(), balloon.groups.layout.blocks)
        if not self.recalled:
            balloon.revive(want)
        if rng.random() < 0.8:
            engine.release(balloon.groups.take())
        engine.step()
        self.give_back(engine.need())
        self.unmap()
        self.borrow(want)
        if rng.random() < 0.05:
            self.recalled = rng.randrange(1, balloon.groups.charged_bytes + 2)
        elif self.recalled and rng.random() < 0.2:
            self.recalled = 0
        check(balloon)

    def is_sweeping(self) -> bool:
        """Some groups were not looked at since all was quiet."""
        self.quiet_steps += 1
        return self.quiet_steps < 2 * self.balloon.groups.layout.groups

    def give_back(self, want: int) -> None:
        balloon, engine = self.balloon, self.engine
        before = balloon.groups.staying_bytes
        most = self.rng.choice([1, 20, 1000])
        chosen = balloon.choose(want, self.recalled, engine, most=most)
        assert set(chosen).isdisjoint(balloon.groups.first)
        assert not chosen or balloon.groups.staying_bytes >= balloon.floor, f"{before} bytes are below the floor now"
        draining = balloon.groups.groups_in(DRAINING) if self.recalled else [*balloon.next_draining(most), *chosen]
        self.hold(draining)
        if self.recalled and engine.preempt(balloon.groups.blocks_out(draining)):
            self.hold(draining)
            assert not balloon.groups.blocks_out(draining)
        for group in balloon.groups.retire(dict.fromkeys(draining)):
            self.fences[group] = self.step_number + self.rng.randrange(1, 4)

    def hold(self, groups: Sequence[int]) -> None:
        blocks = self.engine.unused(self.balloon.groups.blocks_out(groups))
        self.engine.hold(blocks)
        self.balloon.groups.held(blocks)

    def unmap(self) -> None:
        for group in self.balloon.groups.groups_in(RETIRING) + self.balloon.groups.groups_in(DOOMED):
            if self.step_number >= self.fences[group]:
                members = self.balloon.groups.layout.members(group)
                assert not any(self.balloon.groups.is_out(block) or block in self.engine.used for block in members)
                assert all(self.last_use[block] < self.step_number for block in members), "used in this very step"
                self.balloon.groups.move(group, "fence passed")
                if self.rng.random() < 0.05:
                    self.balloon.groups.move(group, "failed")
                else:
                    self.balloon.groups.move(group, "unmapped")

    def borrow(self, want: int) -> None:
        while not self.recalled and (found := self.balloon.next_to_map(want)):
            group, _ = found
            self.balloon.groups.move(group, "asked")
            if self.balloon.groups.charged_bytes > self.room or self.rng.random() < 0.1:
                self.balloon.groups.move(group, "refused")
                return
            self.balloon.groups.move(group, "mapped")

    def drain(self) -> None:
        """No more requests come, all memory is there: everything ends, and only what must stay stays."""
        self.recalled, self.room = 0, 1 << 60
        for _ in range(3000):
            self.step_number += 1
            want = min(self.engine.need(), self.balloon.groups.layout.blocks)
            self.balloon.revive(want)
            self.engine.release(self.balloon.groups.take())
            self.engine.step()
            self.give_back(self.engine.need())
            self.unmap()
            self.borrow(want)
            check(self.balloon)
            if not (
                self.engine.waiting or self.engine.running or self.balloon.groups.going_bytes or self.is_sweeping()
            ):
                return
        raise AssertionError(f"{len(self.engine.waiting)} requests never end, of {self.engine.need()} blocks")


@pytest.mark.deep
@pytest.mark.parametrize("number", range(40))
def test_random_traces(number: int) -> None:
    """Requests come and go, the broker refuses and recalls, fences are late: no block is lost or used without memory.

    At the end all requests finish, and no group stays that nobody wants.
    """
    seed = chosen_seed()
    machine = Machine(seed + number)
    for _ in range(250):
        machine.step()
    machine.drain()
    balloon = machine.balloon
    assert machine.engine.finished
    largest = max(map(balloon.groups.layout.bytes_of, range(balloon.groups.layout.groups)))
    stays = sum(map(balloon.groups.layout.bytes_of, balloon.groups.first)) + balloon.floor + 2 * largest
    ahead = balloon.ahead * balloon.groups.layout.block_bytes
    assert balloon.groups.charged_bytes <= stays + ahead + (balloon.keep if machine.engine.caches else 0) + largest
