"""`Groups`: which groups of a KV cache have memory, and which blocks the engine has.

Owns the state of each group and of each block, and the sums of bytes in each state. It notes what has happened, and
decides nothing: `Balloon` does. It must never call a broker, a driver or an engine, nor take a lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from .layout import Layout

HELD, ASKED, MAPPED, DRAINING, RETIRING, DOOMED, LEAVING = range(7)
"""Without memory / being borrowed and mapped / with memory / to go, and blocks of it are still in use / to go, and the
work that may use it has not passed the fence / the same, and it cannot stay, because others wait for it, or a part may
have no memory any more / being unmapped."""

LIFECYCLE: Final[Mapping[int, Mapping[str, int]]] = {
    HELD: {"asked": ASKED},
    ASKED: {"mapped": MAPPED, "refused": HELD},
    MAPPED: {"chosen": DRAINING},
    DRAINING: {"all held": RETIRING, "wanted": MAPPED},
    RETIRING: {"fence passed": LEAVING, "wanted": MAPPED, "others wait": DOOMED},
    DOOMED: {"fence passed": LEAVING},
    LEAVING: {"unmapped": HELD, "failed": DOOMED},
}
"""`LIFECYCLE[state][cause]` is the next state of a group."""


class Groups:
    """The groups and blocks of `layout`. All sizes are in bytes.

    The engine has block 0 from the beginning, and its groups never go.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sizes: list[int] = [layout.bytes_of(group) for group in range(layout.groups)]
        """The bytes of each group."""
        self._states = bytearray([HELD]) * layout.groups
        self._charged = [0] * len(LIFECYCLE)
        self._charged[HELD] = sum(self.sizes)
        # For each block: how many of its groups are not mapped, and whether the engine has it.
        self._missing = [len(layout.touched(block)) for block in range(layout.blocks)]
        self._out = bytearray(layout.blocks)
        self._ready: set[int] = set()
        self.first: Sequence[int] = layout.touched(0)
        """The groups of block 0."""
        self._out[0] = self._count = 1

    # Figures

    @property
    def available(self) -> int:
        """How many blocks the engine has, or gets with the next `take`."""
        return self._count + len(self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether `take` would return any blocks."""
        return bool(self._ready)

    @property
    def asked_bytes(self) -> int:
        """Bytes that are being borrowed."""
        return self._charged[ASKED]

    @property
    def staying_bytes(self) -> int:
        """Bytes with memory, less those that are going."""
        return self._charged[MAPPED]

    @property
    def going_bytes(self) -> int:
        """Bytes with memory that are draining, retiring or being unmapped."""
        return self._charged[DRAINING] + self.retiring_bytes

    @property
    def retiring_bytes(self) -> int:
        """Bytes with memory that no request uses, and that are being released."""
        return self._charged[RETIRING] + self._charged[DOOMED] + self._charged[LEAVING]

    @property
    def charged_bytes(self) -> int:
        """Bytes with memory, those included that are being borrowed."""
        return self.asked_bytes + self.staying_bytes + self.going_bytes

    def state(self, group: int) -> int:
        """Return the state of a group."""
        return self._states[group]

    def groups_in(self, state: int) -> list[int]:
        """Return the groups in a state, in ascending order."""
        found, group = list[int](), self._states.find(state) if self._charged[state] else -1
        while group >= 0:  # there are thousands of groups, and each step asks for states that few of them are in
            found.append(group)
            group = self._states.find(state, group + 1)
        return found

    def lowest_in(self, state: int) -> int | None:
        """Return the lowest group in a state, or None."""
        group = self._states.find(state)
        return None if group < 0 else group

    def blocks_out(self, groups: Iterable[int]) -> list[int]:
        """Return the blocks in these groups that the engine has, in ascending order."""
        out, members = self._out, self.layout.members
        return sorted({block for group in groups for block in members(group) if out[block]})

    def loss_of(self, group: int, unused: Collection[int]) -> int:
        """Return how many blocks the engine would miss at once without a group, of whose blocks it has these unused."""
        ready = sum(block in self._ready for block in self.layout.members(group)) if self._ready else 0
        return ready + sum(not self._missing[block] for block in unused)

    def is_out(self, block: int) -> bool:
        """Return whether the engine has a block."""
        return bool(self._out[block])

    def move(self, group: int, cause: str) -> None:
        """Note what has happened to a group, as in `LIFECYCLE`. Blocks that have all of their groups are ready."""
        before = self._states[group]
        after = LIFECYCLE[before].get(cause)
        assert after is not None, f"group {group} in state {before} cannot be {cause!r}"
        self._states[group] = after
        self._charged[before] -= self.sizes[group]
        self._charged[after] += self.sizes[group]
        change = (before == MAPPED) - (after == MAPPED)
        if change:
            for block in self.layout.members(group):
                self._missing[block] += change
                if not self._missing[block] and not self._out[block]:
                    self._ready.add(block)
                else:
                    self._ready.discard(block)

    # What comes

    def take(self) -> list[int]:
        """Return the blocks that have become usable, in ascending order. The engine has them from now on."""
        blocks = sorted(self._ready)
        for block in blocks:
            self._out[block] = 1
        self._count += len(blocks)
        self._ready.clear()
        return blocks

    # What goes

    def held(self, blocks: Iterable[int]) -> None:
        """Note that the engine has given blocks up: they are out of its free list, and no request uses them.

        If the memory of one stays, the next `take` returns it.
        """
        for block in blocks:
            assert self._out[block], f"the engine does not have block {block}"
            assert block, "the engine keeps block 0"
            self._out[block] = 0
            self._count -= 1
            if not self._missing[block]:
                self._ready.add(block)

    def staying_blocks(self) -> list[int]:
        """Return the engine's blocks whose memory stays, without block 0."""
        blocks = self.blocks_out(self.groups_in(MAPPED))
        return [block for block in blocks if block and not self._missing[block]]

    def retire(self, groups: Iterable[int], *, final: bool = False) -> list[int]:
        """Return those draining groups of which the engine has no block any more. They wait for a fence from now on.

        `final`: others wait for them, and for all that retire already, so these are not revived.
        """
        ended = [group for group in groups if not any(map(self._out.__getitem__, self.layout.members(group)))]
        for group in ended:
            self.move(group, "all held")
        for group in self.groups_in(RETIRING) if final else ():
            self.move(group, "others wait")
        return ended
