"""`Balloon`: which groups of a KV cache get memory next, and which ones go.

Owns the choice, and how far its sweeps have come. It decides, and does nothing: it asks an engine what its blocks are
used for, and must never call another verb of it, a broker or a driver, nor take a lock or look at a clock.

An engine is told the number of all blocks once. Those without memory are held out of its free list, so its own count of
free blocks is right at any time. To grow is to map a group and hand its blocks out; to shrink is to hold blocks again,
wait for a fence, and unmap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from .engine import Engine
from .groups import DRAINING, HELD, MAPPED, RETIRING, Groups
from .layout import MAX_BLOCKS, Layout


class Balloon:
    """The choice over the groups and blocks of `layout`, whose states are in `groups`.

    The bounds are those of `ElasticCache`, in bytes. The groups of block 0 never go: the caller maps them, which are
    `groups.first`, before the engine begins.
    """

    def __init__(self, layout: Layout, *, floor: int = 0, ahead: int = 0, keep: int = 0) -> None:
        self.groups: Groups = Groups(layout)
        self._layout = layout
        self.floor = floor
        self.keep = keep
        self.ahead: int = -(-ahead // layout.block_bytes)
        """Blocks."""
        self._cached: dict[int, float] = {}
        """The warmth of groups that had nothing but cached contents when they were last looked at."""
        self._next = layout.groups
        """A sweep goes on below this group."""
        self._last_drained = -1

    # Growing

    def next_to_map(self, want: int) -> tuple[int, bool] | None:
        """Return the group to borrow next, and whether it is needed now; None if nothing is to be borrowed.

        `want` is how many blocks the engine wants in all. What it lacks is needed, and the floor is; what is ahead is
        not. The lowest group comes first, so that what is mapped stays packed, and only its last block straddles into a
        page without memory.
        """
        groups = self.groups
        group = groups.lowest_in(HELD)
        if group is None:
            return None
        if groups.available < want or groups.staying_bytes + groups.asked_bytes < self.floor:
            return group, True
        return (group, False) if groups.available < want + self.ahead else None

    def wanted_bytes(self, want: int) -> int:
        """Return about how much is needed until the engine has `want` blocks, what is being asked for included."""
        return max(0, want - self.groups.available) * self._layout.block_bytes

    # Shrinking

    def choose(self, want: int, size: int, engine: Engine, *, most: int = MAX_BLOCKS) -> list[int]:
        """Choose groups to release, begin to drain them, and return them. Nothing goes below the floor.

        `size` is what others want back in bytes, what is going already included. Until so many bytes go, all groups are
        looked at: free ones go first, the highest first; then the coldest cached ones; then busy ones, those with the
        least cost first, and of these the ones with the fewest used blocks, whatever the engine wants. While busy ones
        drain, those go instead that have become free.

        With a `size` of 0 groups go that the engine does not want: free ones, sparse ones, and the coldest cached ones
        beyond `keep`. A call looks at about `most` blocks for that, or for what has become free, and at up to four
        times as many if so many are not wanted. The next one goes on from there: see `is_sweeping`.
        """
        if size > self.groups.going_bytes:
            return self._choose_asked(size, engine)
        return self._choose_free(size, engine, most) if size else self._choose_spare(want, engine, most)

    @property
    def is_sweeping(self) -> bool:
        """Whether the last `choose` has not looked at all groups, and the next one goes on."""
        return self._next < self._layout.groups

    def _choose_asked(self, size: int, engine: Engine) -> list[int]:
        chosen = list[int]()

        def drain(looks: Iterable[_Look]) -> None:
            for look in looks:
                if self.groups.going_bytes >= size:
                    return
                self._drain(look.group, chosen)

        looks = [self._look(group, engine) for group in self.groups.groups_in(MAPPED) if group not in self.groups.first]
        drain(sorted((look for look in looks if not look.used), key=lambda look: (look.warmth, -look.group)))
        if self.groups.going_bytes < size:  # costs take the engine's time
            costs = {look: engine.cost(self.groups.blocks_out([look.group])) for look in looks if look.used}
            drain(sorted(costs, key=lambda look: (costs[look], look.used, -look.group)))
        return chosen

    def _choose_free(self, size: int, engine: Engine, most: int) -> list[int]:
        chosen = list[int]()
        for group in self._next_groups(most) if size > self.groups.retiring_bytes else ():
            if not self._look(group, engine).used:
                self._drain(group, chosen)
        return chosen

    def _drain(self, group: int, chosen: list[int]) -> None:
        if self.groups.staying_bytes - self.groups.sizes[group] >= self.floor:
            self.groups.move(group, "chosen")
            self._cached.pop(group, None)
            chosen.append(group)

    def _choose_spare(self, want: int, engine: Engine, most: int) -> list[int]:
        left, chosen = self.groups.available - want - self.ahead, list[int]()
        if left < 0 or self.groups.staying_bytes <= self.floor:
            self._next = self._layout.groups
            return chosen

        def spare(look: _Look) -> None:
            nonlocal left
            if look.loss <= left:
                left -= look.loss
                self._drain(look.group, chosen)

        for group in self._next_groups(max(most, min(left, 4 * most))):
            look = self._look(group, engine)
            if not look.warmth and 2 * look.used <= len(self._layout.members(group)):
                spare(look)
        cached = sum(self.groups.sizes[group] for group in self._cached)
        for group in sorted(self._cached, key=self._cached.__getitem__):
            if cached <= self.keep:
                break
            look = self._look(group, engine)  # it may be busy by now
            cached -= self.groups.sizes[group]
            if not look.used:
                spare(look)
        return chosen

    def _next_groups(self, most: int) -> list[int]:
        """Return the next mapped groups of a sweep from the highest to the lowest, with about `most` blocks."""
        found, blocks = [], 0
        while self._next and blocks < most:
            self._next -= 1
            if self.groups.state(self._next) == MAPPED and self._next not in self.groups.first:
                found.append(self._next)
                blocks += len(self._layout.members(self._next))
        if not self._next:
            self._next = self._layout.groups
        return found

    def _look(self, group: int, engine: Engine) -> _Look:
        """Look at a group, and note whether it has nothing but cached contents."""
        with_engine = self.groups.blocks_out([group])
        free = engine.unused(with_engine)
        used, warmth = len(with_engine) - len(free), engine.warmth(list(free)) if free else 0.0
        if warmth and not used:
            self._cached[group] = warmth
        else:
            self._cached.pop(group, None)
        return _Look(group, used, warmth, self.groups.loss_of(group, free))

    def next_draining(self, most: int) -> list[int]:
        """Return draining groups with about `most` blocks, the next ones each time: many can wait for long requests."""
        groups = self.groups.groups_in(DRAINING)
        after = bisect_right(groups, self._last_drained)
        found, blocks = [], 0
        for group in groups[after:] + groups[:after]:
            if blocks >= most:
                break
            found.append(group)
            blocks += len(self._layout.members(group))
        if found:
            self._last_drained = found[-1]
        return found

    def revive(self, want: int) -> list[int]:
        """Stop releasing what the engine wants again, the lowest groups first; return them. Nothing is borrowed."""
        revived = []
        for group in sorted([*self.groups.groups_in(DRAINING), *self.groups.groups_in(RETIRING)]):
            if self.groups.available >= want:
                break
            self.groups.move(group, "wanted")
            revived.append(group)
        return revived

    def reconsider(self) -> None:
        """Stop draining: none of these groups is to go any more, unless it is chosen again."""
        for group in self.groups.groups_in(DRAINING):
            self.groups.move(group, "wanted")


class _Look(NamedTuple):
    """What is in a group.

    `used` blocks are used by requests, `warmth` is that of the others, and `loss` is how many blocks the engine would
    miss at once without the group.
    """

    group: int
    used: int
    warmth: float
    loss: int
