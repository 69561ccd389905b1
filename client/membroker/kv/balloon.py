"""`Balloon`: which groups of a KV cache get memory next, and which ones go.

Owns the choice, and how far its sweeps have come. It decides, and does nothing: it asks an engine what its blocks are
used for, and must never call another verb of it, a broker or a driver, nor take a lock or look at a clock.

An engine is told the number of all blocks once. Those without memory are held out of its free list, so its own count of
free blocks is right at any time. To grow is to map a group and hand its blocks out; to shrink is to hold blocks again,
wait for a fence, and unmap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import NamedTuple

from ..errors import InvalidRequest
from .engine import Engine
from .groups import ASKED, DRAINING, HELD, MAPPED, RETIRING, Groups
from .layout import MAX_BLOCKS, Layout


class Balloon(Groups):
    """The groups and blocks of `layout`. All sizes are in bytes.

    `floor` is never released. `ahead` is mapped beyond what the engine wants, so that growth finds it ready. `keep`
    is the most that cached prefixes may occupy in groups that no request uses. `ceiling` is the most that has memory at
    a time (None: the whole cache). The engine has the blocks of `always` from the beginning, such as a null block, and
    their groups never go. The caller maps `first` before the engine begins.

    Raises `InvalidRequest` for an unknown block, and for a ceiling below the floor or below the groups of `always`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        floor: int = 0,
        ahead: int = 0,
        keep: int = 0,
        ceiling: int | None = None,
        always: Collection[int] = (0,),
    ) -> None:
        super().__init__(layout, always)
        self.floor = floor
        self.keep = keep
        self.ahead = -(-ahead // layout.block_bytes)
        """Blocks."""
        self.ceiling = ceiling
        self._cached: dict[int, float] = {}
        """The warmth of groups that had nothing but cached contents when they were last looked at."""
        self._next = layout.groups
        """A sweep goes on below this group."""
        self._last_drained = -1
        if ceiling is not None and ceiling < max(floor, sum(self._bytes[group] for group in self.first)):
            raise InvalidRequest(f"a ceiling of {ceiling} bytes is below the floor, or below what always has memory")

    # Growing

    def next_to_map(self, want: int) -> tuple[int, bool] | None:
        """Return the group to borrow next, and whether it is needed now; None if nothing is to be borrowed.

        `want` is how many blocks the engine wants in all. What it lacks is needed, and the floor is; what is ahead is
        not. The lowest group comes first, so that what is mapped stays packed, and only its last block straddles into a
        page without memory.
        """
        group = self._states.find(HELD)
        if group < 0 or (self.ceiling is not None and self.charged_bytes + self._bytes[group] > self.ceiling):
            return None
        if self.available < want or self.staying_bytes + self._charged[ASKED] < self.floor:
            return group, True
        return (group, False) if self.available < want + self.ahead else None

    def wanted_bytes(self, want: int) -> int:
        """Return about how much is needed until the engine has `want` blocks, a group that is being asked for included.

        It is no more than the ceiling leaves.
        """
        size = max(0, want - self.available) * self.layout.block_bytes
        return size if self.ceiling is None else min(size, self.ceiling - self.charged_bytes + self._charged[ASKED])

    # Shrinking

    def choose(self, want: int, size: int, engine: Engine, *, most: int = MAX_BLOCKS) -> list[int]:
        """Choose groups to release, begin to drain them, and return them. Nothing goes below the floor.

        `size` is what others want back in bytes, what is going already included. Until so many bytes go, all groups are
        looked at: free ones go first, the highest first; then the coldest cached ones; then busy ones, those with the
        least cost first, and of these the ones with the fewest used blocks, whatever the engine wants. While busy ones
        drain, those go instead that have become free.

        With a `size` of 0 groups go that the engine does not want: free ones, sparse ones, and the coldest cached ones
        beyond `keep`. A call looks at about `most` blocks for that, or for what has become free, and the next one goes
        on from there: see `is_sweeping`.
        """
        if size > self.going_bytes:
            return self._choose_asked(size, engine)
        return self._choose_free(size, engine, most) if size else self._choose_spare(want, engine, most)

    @property
    def is_sweeping(self) -> bool:
        """Whether the last `choose` has not looked at all groups, and the next one goes on."""
        return self._next < self.layout.groups

    def _choose_asked(self, size: int, engine: Engine) -> list[int]:
        chosen = list[int]()

        def drain(looks: Iterable[_Look]) -> None:
            for look in looks:
                if self.going_bytes >= size:
                    return
                self._drain(look.group, chosen)

        looks = [self._look(group, engine) for group in self.groups_in(MAPPED) if group not in self.first]
        drain(sorted((one for one in looks if not one.used), key=lambda one: (one.warmth, -one.group)))
        if self.going_bytes < size:  # costs take the engine's time
            costs = {one: self._cost(one.group, engine) for one in looks if one.used}
            drain(sorted(costs, key=lambda one: (costs[one], one.used, -one.group)))
        return chosen

    def _choose_free(self, size: int, engine: Engine, most: int) -> list[int]:
        chosen = list[int]()
        for group in self._next_groups(most) if size > self.retiring_bytes else ():
            if not self._look(group, engine).used:
                self._drain(group, chosen)
        return chosen

    def _drain(self, group: int, chosen: list[int]) -> None:
        if self.staying_bytes - self._bytes[group] >= self.floor:
            self.move(group, "chosen")
            self._cached.pop(group, None)
            chosen.append(group)

    def _cost(self, group: int, engine: Engine) -> float:
        return engine.cost([block for block in self.layout.members(group) if self._out[block]])

    def _choose_spare(self, want: int, engine: Engine, most: int) -> list[int]:
        left, chosen = self.available - want - self.ahead, list[int]()
        if left < 0:
            self._next = self.layout.groups
            return chosen

        def spare(look: _Look) -> None:
            nonlocal left
            if look.loss <= left:
                left -= look.loss
                self._drain(look.group, chosen)

        for group in self._next_groups(most):
            look = self._look(group, engine)
            if not look.warmth and 2 * look.used <= len(self.layout.members(group)):
                spare(look)
        cached = sum(self._bytes[group] for group in self._cached)
        for group in sorted(self._cached, key=self._cached.__getitem__):
            if cached <= self.keep:
                break
            look = self._look(group, engine)  # it may be busy by now
            cached -= self._bytes[group]
            if not look.used:
                spare(look)
        return chosen

    def _next_groups(self, most: int) -> list[int]:
        """Return the next mapped groups of a sweep from the highest to the lowest, with about `most` blocks."""
        found, blocks = [], 0
        while self._next and blocks < most:
            self._next -= 1
            if self._states[self._next] == MAPPED and self._next not in self.first:
                found.append(self._next)
                blocks += len(self.layout.members(self._next))
        if not self._next:
            self._next = self.layout.groups
        return found

    def _look(self, group: int, engine: Engine) -> _Look:
        """Look at a group, and note whether it has nothing but cached contents."""
        members = self.layout.members(group)
        with_engine = [block for block in members if self._out[block]]
        free = engine.unused(with_engine)
        used, warmth = len(with_engine) - len(free), engine.warmth(list(free)) if free else 0.0
        if warmth and not used:
            self._cached[group] = warmth
        else:
            self._cached.pop(group, None)
        ready = 0 if len(with_engine) == len(members) else sum(block in self._ready for block in members)
        return _Look(group, used, warmth, ready + sum(not self._missing[block] for block in free))

    def next_draining(self, most: int) -> list[int]:
        """Return draining groups with about `most` blocks, the next ones each time: many can wait for long requests."""
        groups = self.groups_in(DRAINING)
        after = bisect_right(groups, self._last_drained)
        found, blocks = [], 0
        for group in groups[after:] + groups[:after]:
            if blocks >= most:
                break
            found.append(group)
            blocks += len(self.layout.members(group))
        if found:
            self._last_drained = found[-1]
        return found

    def revive(self, want: int) -> list[int]:
        """Stop releasing what the engine wants again, the lowest groups first; return them. Nothing is borrowed."""
        revived = []
        for group in sorted([*self.groups_in(DRAINING), *self.groups_in(RETIRING)]):
            if self.available >= want:
                break
            self.move(group, "wanted")
            revived.append(group)
        return revived

    def reconsider(self) -> None:
        """Stop draining: none of these groups is to go any more, unless it is chosen again."""
        for group in self.groups_in(DRAINING):
            self.move(group, "wanted")

    def check(self) -> None:
        """Assert what always holds. For tests: it looks at every block."""
        super().check()
        assert self.ceiling is None or self.charged_bytes <= self.ceiling


class _Look(NamedTuple):
    """What is in a group.

    `used` blocks are used by requests, `warmth` is that of the others, and `loss` is how many blocks the engine would
    miss at once without the group.
    """

    group: int
    used: int
    warmth: float
    loss: int
