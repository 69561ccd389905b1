"""`PageTable`: what each page of a pool is at this moment, and whether a call is at it.

Owns one byte for each page. Finding, checking and counting pages is its work; what is done with them is the pool's,
which holds its lock around every method. It must never call a source or a driver.

A further state is a further constant: all that is neither `FREE` nor `SPARE` is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..errors import AlreadyMapped, NotMapped, Offloaded, OutOfVirtualMemory
from ..vmm.driver import AccessFlags

FREE, USED, SPARE, OFFLOADED = range(4)
"""Nothing behind it / allocated / mapped and charged, and allocated by nobody / allocated, and its bytes elsewhere."""

FIXED = 0x7F
"""In a layout only: what has to stay where it is."""

_PENDING = 0x80
"""Beside a state: a running call is changing the page, and no other call may touch it."""

_AVAILABLE = bytes((FREE, SPARE))
_CLAIM = bytes(byte | _PENDING for byte in range(256))
_RELEASE = bytes(byte & ~_PENDING for byte in range(256))
_SPARE_AS_FREE = bytes.maketrans(bytes((SPARE,)), bytes((FREE,)))
_FREE_RUN = re.compile(b"%c+" % FREE)
_ALLOCATED_RUN = re.compile(b"[%c%c%c%c]*" % (USED, OFFLOADED, USED | _PENDING, OFFLOADED | _PENDING))
_TAKEN_RUN = re.compile(rb"(?s)([^%c%c])\1*" % (FREE, FREE | _PENDING))


class PageTable:
    """`count` pages of `page_size` bytes, all free at the beginning. Pages are numbers, and ranges of numbers.

    `spare` counts the spare pages. `restricted` has what a page allows, where that is not everything. `begins` has the
    first page of each allocation, and at which byte of that page the allocation begins.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self.page_size = page_size
        self.spare = 0
        self.restricted: dict[int, AccessFlags] = {}
        self.begins: dict[int, int] = {}
        # As long as the highest page that was ever claimed: addresses are reserved by the terabyte.
        self._states = bytearray()

    # Asking

    def is_used(self, pages: range) -> bool:
        """Say whether all of them are allocated, and no call is at one."""
        return self._states.count(USED, pages.start, pages.stop) == len(pages)

    def access(self, page: int) -> AccessFlags:
        """Return what a page allows."""
        return self.restricted.get(page, AccessFlags.READ_WRITE)

    def least_access(self, pages: range) -> AccessFlags:
        """Return what every one of some pages allows."""
        if not self.restricted:
            return AccessFlags.READ_WRITE
        noted = {self.restricted.get(page, AccessFlags.READ_WRITE) for page in pages}
        return min(noted, key=lambda access: access.value)

    def allocation(self, first: int) -> range:
        """Return the pages of the allocation that begins at a page: up to the next one, or to one that is not taken."""
        run = _ALLOCATED_RUN.match(self._states, first)
        end = run.end() if run else first
        return range(first, next((page for page in range(first + 1, end) if page in self.begins), end))

    def top(self) -> int:
        """Return the page behind the highest one that is taken or that a call is at."""
        return len(self._states.rstrip(_AVAILABLE))

    def unbacked(self, pages: range) -> list[range]:
        """Return the free ones of unused pages that are claimed, as runs."""
        states = self._states[pages.start : pages.stop].translate(_RELEASE)
        return [range(pages.start + run.start(), pages.start + run.end()) for run in _FREE_RUN.finditer(states)]

    def spare_runs(self, pages: range) -> list[range]:
        """Return those of `pages` that are spare and that no call is at, as runs."""
        return [run for run, state, busy in self.runs(pages) if state == SPARE and not busy]

    def largest_free_run(self) -> tuple[int, int]:
        """Return the largest run of pages that could be allocated, spare ones included, and how many there are."""
        states = self._states.translate(_SPARE_AS_FREE)
        behind = self.count - len(states.rstrip(bytes((FREE,))))
        runs = [len(run) for run in _FREE_RUN.findall(states)]
        return max([behind, *runs]), self.count - len(states) + sum(runs)

    def first_fit(self, count: int, step: int = 1, first: int = 0) -> range:
        """Return the lowest `count` pages side by side that could be allocated, spare ones included.

        They begin at `first`, or a multiple of `step` pages behind it. Raises `OutOfVirtualMemory`.
        """
        states = self._states.translate(_SPARE_AS_FREE).rstrip(bytes((FREE,)))
        at = first
        while True:
            found = states.find(bytes(count), at) if count < len(states) else -1
            if found < 0:
                found = max(at, len(states))
            aligned = found + (first - found) % step
            if aligned + count > self.count:
                raise OutOfVirtualMemory(count * self.page_size, self.largest_free_run()[0] * self.page_size)
            if aligned == found:
                return range(found, found + count)
            at = aligned

    def check_unused(self, pages: range) -> None:
        """Raise `AlreadyMapped` unless all of them could be allocated."""
        taken = self._states[pages.start : pages.stop].lstrip(_AVAILABLE)
        if taken:
            page = min(pages.stop, len(self._states)) - len(taken)
            self._check_not_offloaded(page)
            by = "is being changed by another call" if taken[0] & _PENDING else "is mapped already"
            raise AlreadyMapped(f"the page at offset {page * self.page_size} {by}")

    def check_used(self, pages: range) -> None:
        """Raise `NotMapped` unless all of them are allocated, and no call is at one."""
        if self.is_used(pages):
            return
        states = self._states[pages.start : pages.stop]
        used = len(states) - len(states.lstrip(bytes((USED,))))
        self._check_not_offloaded(pages.start + used)
        changing = used < len(states) and states[used] & _PENDING
        why = "is being changed by another call" if changing else "is not mapped"
        raise NotMapped(f"the page at offset {(pages.start + used) * self.page_size} {why}")

    def check_allocated(self, pages: range) -> None:
        """As `check_used`, of pages that may be offloaded as well."""
        for run in self.runs_of(OFFLOADED, pages):
            self.check_used(range(pages.start, run.start))
            pages = range(run.stop, pages.stop)
        self.check_used(pages)

    def runs_of(self, state: int, pages: range) -> list[range]:
        """Return which of `pages` are in a state, as runs. Raises `NotMapped` where a call is at one of them."""
        found = []
        for run, other, busy in self.runs(pages):
            if other == state:
                if busy:
                    offset = run.start * self.page_size
                    raise NotMapped(f"the page at offset {offset} is being changed by another call")
                found.append(run)
        return found

    def claimed_runs(self, state: int, pages: range) -> list[range]:
        """Return which of `pages`, that are claimed, are in a state, as runs."""
        return [run for run, other, _ in self.runs(pages) if other == state]

    def _check_not_offloaded(self, page: int) -> None:
        if page < len(self._states) and self._states[page] == OFFLOADED:
            raise Offloaded(f"the page at offset {page * self.page_size} is offloaded: restore() it first")

    def runs(self, pages: range | None = None) -> Iterator[tuple[range, int, bool]]:
        """Yield those of `pages`, or of all, that are not free, as runs: (pages, state, whether a call is at them)."""
        first, states = (0, self._states) if pages is None else (pages.start, self._states[pages.start : pages.stop])
        for run in _TAKEN_RUN.finditer(states):
            state = run[1][0]
            yield range(first + run.start(), first + run.end()), state & ~_PENDING, bool(state & _PENDING)

    def layout(self, pinned: Iterable[range], spare: int) -> bytearray:
        """Return a picture for `next_move`: `FREE`, `USED` or `FIXED` for each page, and `spare` for spare ones.

        Fixed are the pages of `pinned`, those that a call is at, and whatever is neither free nor used nor spare.
        """
        moving = {FREE: FREE, USED: USED, SPARE: spare}
        layout = self._states.translate(bytes(moving.get(state, FIXED) for state in range(256)))
        for pages in pinned:
            layout[pages.start : pages.stop] = bytes((FIXED,)) * len(pages)
        return layout

    # Changing

    def take_spare(self, pages: range, within: int = 0) -> bool:
        """Allocate pages that are all spare, and that no call is at; say whether they were. `within` as in `begins`."""
        states = self._states
        if len(pages) == 1:  # the case that counts: a microsecond
            page = pages.start
            if page >= len(states) or states[page] != SPARE:
                return False
            states[page] = USED
            self.spare -= 1
            self.begins[page] = within
            return True
        if states[pages.start : pages.stop] != bytes((SPARE,)) * len(pages):
            return False
        self.set(pages, USED)
        self.begins[pages.start] = within
        return True

    def keep_spare(self, pages: range) -> None:
        """Make pages spare that are used, that no call is at, and that allow everything."""
        if len(pages) == 1:  # as above
            self._states[pages.start] = SPARE
            self.spare += 1
            self._end(pages)
            return
        self.set(pages, SPARE)

    def set(self, pages: range, state: int) -> None:
        """Give pages another state: pages that are all claimed, and stay so, or that are used, and no call is at."""
        first, end = pages.start, pages.stop
        before = self._states[first:end]
        pending = before[0] & _PENDING
        after = bytes((state | pending,)) * len(pages)
        more = len(pages) * (state == SPARE) - before.count(SPARE | pending)
        # No call stands between the two: Ctrl-C is raised after a call.
        self._states[first:end] = after
        self.spare += more
        if state not in (USED, OFFLOADED):
            self._end(pages)
            if self.restricted:
                for page in pages:
                    self.restricted.pop(page, None)

    def _end(self, pages: range) -> None:
        """Forget what began in pages that are free now. What is left of an allocation behind them begins there."""
        if not self.begins:
            return
        for page in pages:
            self.begins.pop(page, None)
        behind = self._states[pages.stop : pages.stop + 1]
        if pages.stop not in self.begins and behind and _ALLOCATED_RUN.fullmatch(behind):
            self.begins[pages.stop] = 0

    def restrict(self, pages: range, access: AccessFlags) -> None:
        """Note what used pages allow."""
        for page in pages:
            self.restricted.pop(page, None)
        if access is not AccessFlags.READ_WRITE:
            self.restricted.update(dict.fromkeys(pages, access))

    def move(self, pages: range, to: range) -> None:
        """Note that used pages are elsewhere, both claimed, and that nothing is where they were."""
        restricted = {new: self.restricted[old] for old, new in zip(pages, to, strict=True) if old in self.restricted}
        begins = {new: self.begins[old] for old, new in zip(pages, to, strict=True) if old in self.begins}
        self.set(pages, FREE)
        self.set(to, USED)
        self.restricted.update(restricted)
        self.begins.update(begins)

    def claim(self, pages: range, claimed: list[range]) -> None:
        """Keep all other calls off pages that none is at, and note them in `claimed`."""
        self._reach(pages)
        first, end = pages.start, pages.stop
        after = self._states[first:end].translate(_CLAIM)
        # As in `set`: no interrupt comes between the claim and its note.
        self._states[first:end] = after
        claimed += (pages,)

    def release(self, claimed: list[range]) -> None:
        """End claims, each of them once, and remove them from the list."""
        while claimed:
            pages = claimed[-1]
            first, end = pages.start, pages.stop
            after = self._states[first:end].translate(_RELEASE)
            self._states[first:end] = after
            del claimed[-1]

    def picture(self, pages: range) -> bytes:
        """Return the states of pages, for `restore`."""
        return bytes(self._states[pages.start : pages.stop])

    def restore(self, pages: range, picture: bytes) -> None:
        """Give claimed pages the states that they had. Safe to run again."""
        first, end = pages.start, pages.stop
        more = picture.count(SPARE | _PENDING) - self._states.count(SPARE | _PENDING, first, end)
        self._states[first:end] = picture
        self.spare += more
        self.begins.pop(first, None)

    def _reach(self, pages: range) -> None:
        missing = pages.stop - len(self._states)
        if missing > 0:
            self._states.extend(bytes(missing))


_RUN = re.compile(b"[^%c]+" % FREE)


def next_move(layout: bytearray, cursor: int) -> tuple[range, range] | None:
    """Return the first run from `cursor` on that can go lower, and where to; None when there is none.

    `layout` has `FREE`, `USED` or `FIXED` for each page; a run with a fixed page in it stays. A run goes to the lowest
    hole that holds all of it, else down the hole below it, over itself.
    """
    if cursor and layout[cursor - 1 : cursor] != bytes((FREE,)):  # no new run: its beginning was looked at before
        cursor = len(layout) - len(layout[cursor:].lstrip(bytes((USED, FIXED))))
    for run in _RUN.finditer(layout, cursor):
        start, length = run.start(), len(run[0])
        if FIXED in run[0]:
            continue
        target = layout.find(bytes(length), 0, start)
        if target < 0:
            target = len(layout[:start].rstrip(bytes((FREE,))))
        if target < start:
            return range(start, start + length), range(target, target + length)
    return None
