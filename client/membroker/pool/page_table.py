"""`PageTable`: the present state of each page of a pool, and whether a call has claimed it.

A call claims the pages that it works on until it ends, and other calls refuse these pages meanwhile. The library itself
claims free and spare pages too, to borrow ahead and to release. The user cannot know of such a claim: a call that needs
one of these pages waits until it is over.

Owns one byte for each page, and the pool's lock. It finds, checks and counts pages. It must never call a source or a
driver, and nobody may hold the lock during such a call: two borrowers that wait for each other would deadlock.

To add a state, add a constant: every state other than `FREE` and `SPARE` is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..errors import AlreadyMapped, InvalidOffset, NotMapped, Offloaded, OutOfVirtualMemory
from ..interrupts import Condition, Step
from ..memory.lifetime import MappedMemory
from ..vmm.driver import AccessFlags

FREE, USED, SPARE, OFFLOADED = range(4)
"""Without memory / allocated / mapped and charged, but not allocated / allocated, with its bytes on the host."""

FIXED = 0x7F
"""Only in a layout: a page that must not move."""

_PENDING = 0x80
"""A bit that is added to a state: a running call has claimed the page, and no other call may touch it."""

_OWN = 0xC0
"""The bits for a claim of the library's own: only of free and spare pages, and a user's call waits for its end."""

_AVAILABLE = bytes((FREE, SPARE))
_NOT_TAKEN = bytes((FREE, SPARE, FREE | _OWN, SPARE | _OWN))
_CLAIM = bytes(byte | _PENDING for byte in range(256))
_CLAIM_OWN = bytes(byte | _OWN for byte in range(256))
_RELEASE = bytes(byte & ~_OWN for byte in range(256))
_SPARE_AS_FREE = bytes.maketrans(bytes((SPARE,)), bytes((FREE,)))
_FREE_RUN = re.compile(b"%c+" % FREE)
_ALLOCATED_RUN = re.compile(b"[%c%c%c%c]*" % (USED, OFFLOADED, USED | _PENDING, OFFLOADED | _PENDING))
_TAKEN_RUN = re.compile(rb"(?s)([^%c%c%c])\1*" % (FREE, FREE | _PENDING, FREE | _OWN))


class Search(NamedTuple):
    """Which unused pages to take for `length` bytes: the lowest ones, or with `above` those after all taken ones.

    The lowest ones begin at page `first`, or a multiple of `step` pages after it.
    """

    length: int
    step: int = 1
    first: int = 0
    above: bool = False


class PageTable:
    """`count` pages of `page_size` bytes, all free at the beginning. Pages are numbers, and ranges of numbers.

    `holding` is their memory. The caller holds `lock` around every method that does not say otherwise.

    `spare` counts the spare pages. `restricted` has the access of each page that does not allow reads and writes.
    `begins` has the first page of each allocation, with the offset in bytes at which the allocation begins in it.
    A spare page that is in `fresh` was never allocated since it was mapped; other pages in it mean nothing. `prepared`
    has spare pages that the user wants to keep: `prepared_left` forgets those that are not spare any more.
    """

    def __init__(self, count: int, page_size: int, holding: MappedMemory) -> None:
        self.count = count
        self.page_size = page_size
        self.holding = holding
        self._own_ended = Condition()
        self.lock = self._own_ended.lock
        self.spare: int = 0
        self.restricted: dict[int, AccessFlags] = {}
        self.begins: dict[int, int] = {}
        self.fresh: set[int] = set()
        self.prepared: set[int] = set()
        # It ends at the highest page that was ever claimed, because a pool may reserve terabytes of addresses.
        self._states = bytearray()

    # Asking

    def is_used(self, pages: range) -> bool:
        """Return whether all of them are allocated, and none of them is claimed."""
        return self._states.count(USED, pages.start, pages.stop) == len(pages)

    def access(self, page: int) -> AccessFlags:
        """Return the access of a page."""
        return self.restricted.get(page, AccessFlags.READ_WRITE)

    def least_access(self, pages: range) -> AccessFlags:
        """Return the most restrictive access among `pages`."""
        if not self.restricted:
            return AccessFlags.READ_WRITE
        noted = {self.restricted.get(page, AccessFlags.READ_WRITE) for page in pages}
        return min(noted, key=lambda access: access.value)

    def allocation(self, first: int) -> range:
        """Return the pages of the allocation that begins at page `first`: up to the next allocation or free page."""
        run = _ALLOCATED_RUN.match(self._states, first)
        end = run.end() if run else first
        return range(first, next((page for page in range(first + 1, end) if page in self.begins), end))

    def top(self) -> int:
        """Return the page after the highest one that is taken, or claimed by a user's call."""
        return len(self._states.rstrip(_NOT_TAKEN))

    def above(self, length: int) -> range:
        """Return the pages of the `length` bytes after the highest taken page. Raises `OutOfVirtualMemory`."""
        top, capacity = self.top(), self.count * self.page_size
        left = capacity - top * self.page_size
        if length > left:
            why = f"{left} of the pool's virtual capacity of {capacity} bytes lie behind its highest allocated page"
            raise OutOfVirtualMemory(length, left, f"cannot grow by {length}: {why}; reserve more (virtual_capacity)")
        return range(top, top - -length // self.page_size)

    def below(self, length: int) -> range:
        """Return the pages of the last `length` bytes up to the highest taken page. Raises `InvalidOffset`."""
        top, count = self.top(), -(-length // self.page_size)
        if count > top:
            raise InvalidOffset(f"the highest allocated page ends at {top * self.page_size}, before {length} bytes")
        return range(top - count, top)

    def spare_runs(self, pages: range) -> list[range]:
        """Return those of `pages` that are spare and not claimed, as runs."""
        return [run for run, state, busy in self.runs(pages) if state == SPARE and not busy]

    def _is_own(self, pages: range) -> bool:
        """Return whether the library itself has claimed one of them."""
        first, stop = pages.start, pages.stop
        return self._states.find(FREE | _OWN, first, stop) >= 0 or self._states.find(SPARE | _OWN, first, stop) >= 0

    def prepared_left(self) -> int:
        """Return the number of prepared pages that are still spare, and forget the others."""
        self.prepared = {page for page in self.prepared if self._states[page] & ~_OWN == SPARE}
        return len(self.prepared)

    def offloaded(self) -> int:
        """Return the number of offloaded pages."""
        return self._states.translate(_RELEASE).count(OFFLOADED)

    def largest_free_run(self) -> tuple[int, int]:
        """Return the length of the largest run of free or spare pages, and the number of all free or spare pages."""
        states = self._states.translate(_SPARE_AS_FREE)
        behind = self.count - len(states.rstrip(bytes((FREE,))))
        runs = [len(run) for run in _FREE_RUN.findall(states)]
        return max([behind, *runs]), self.count - len(states) + sum(runs)

    def first_fit(self, count: int, step: int = 1, first: int = 0) -> range:
        """Return the lowest `count` contiguous pages that are free or spare.

        They begin at `first`, or a multiple of `step` pages after it. Raises `OutOfVirtualMemory`.
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

    def next_free(self, most: int) -> range:
        """Return the lowest pages that are free, in one run of at most `most`; an empty range if no page is free."""
        states = self._states
        first = states.find(FREE)
        if first < 0:
            first = len(states)
        stop = min(first + most, self.count)
        taken = states[first:stop].lstrip(bytes((FREE,)))
        return range(first, max(first, min(stop, len(states)) - len(taken)) if taken else max(first, stop))

    def find(self, search: Search) -> range:
        """Return the pages that a search finds. Raises `OutOfVirtualMemory`."""
        if search.above:
            return self.above(search.length)
        return self.first_fit(-(-search.length // self.page_size), search.step, search.first)

    def find_spare(self, search: Search) -> range | None:
        """Return the lowest contiguous pages that are spare and would do, or None. Only for the simplest search."""
        if search.above or search.step > 1:
            return None
        count = -(-search.length // self.page_size)
        found = self._states.find(bytes((SPARE,)) * count)
        return range(found, found + count) if found >= 0 else None

    def unbacked(self, pages: range) -> list[range]:
        """Return those of unused pages that are free, as runs: the others are spare.

        Raises `AlreadyMapped` unless all of them are free or spare, and `Offloaded` for an offloaded page.
        """
        first, states = pages.start, self._states[pages.start : pages.stop]
        if taken := states.lstrip(_AVAILABLE):
            page = first + len(states) - len(taken)
            self._check_not_offloaded(page)
            by = "is being changed by another call" if taken[0] & _PENDING else "is mapped already"
            raise AlreadyMapped(f"the page at offset {page * self.page_size} {by}")
        found = []
        for run in _FREE_RUN.finditer(states.ljust(len(pages), bytes((FREE,)))):
            found.append(range(first + run.start(), first + run.end()))
        return found

    def _check_not_spare(self, pages: range) -> None:
        """Raise `AlreadyMapped` if one of them is spare."""
        for spare in self.spare_runs(pages):
            raise AlreadyMapped(f"the page at offset {spare.start * self.page_size} is spare: trim() releases it")

    def check_used(self, pages: range) -> None:
        """Raise `NotMapped` unless all of them are allocated and not claimed, and `Offloaded` for an offloaded page."""
        if self.is_used(pages):
            return
        states = self._states[pages.start : pages.stop]
        used = len(states) - len(states.lstrip(bytes((USED,))))
        self._check_not_offloaded(pages.start + used)
        changing = used < len(states) and _PENDING <= states[used] < _OWN
        why = "is being changed by another call" if changing else "is not mapped"
        raise NotMapped(f"the page at offset {(pages.start + used) * self.page_size} {why}")

    def check_allocated(self, pages: range) -> None:
        """Check as `check_used` does, but accept offloaded pages too."""
        for run in self.runs_of(OFFLOADED, pages):
            self.check_used(range(pages.start, run.start))
            pages = range(run.stop, pages.stop)
        self.check_used(pages)

    def check_idle(self, pages: range, *, despite_views: bool = False) -> None:
        """Raise `NotMapped` unless the pages are used, and `BufferError` if a view or a pin of them is alive."""
        self.check_used(pages)
        if not despite_views:
            self._check_unpinned(pages)

    def _check_unpinned(self, pages: range) -> None:
        if not self.holding.views.any():
            return
        start, length = pages.start * self.page_size, len(pages) * self.page_size
        if held := self.holding.views.held_in(self.holding.region.address + start, length):
            raise BufferError(f"[{start}, {start + length}) is still used by {held}: release it first")

    def pinned(self, *, pages_only: bool = False) -> list[range]:
        """Return the pages of each living view and span, or only of those that keep the memory of the pages.

        No new one can be made while the caller holds the lock.
        """
        start, size = self.holding.region.address, self.page_size
        ranges = self.holding.views.ranges(pages_only=pages_only)
        return [range((first - start) // size, (max(first, last - 1) - start) // size + 1) for first, last in ranges]

    def runs_of(self, state: int, pages: range) -> list[range]:
        """Return those of `pages` that are in `state`, as runs. Raises `NotMapped` if one of them is claimed."""
        found = []
        for run, other, busy in self.runs(pages):
            if other == state:
                if busy:
                    offset = run.start * self.page_size
                    raise NotMapped(f"the page at offset {offset} is being changed by another call")
                found.append(run)
        return found

    def claimed_runs(self, state: int, pages: range) -> list[range]:
        """Return those of claimed pages that are in `state`, as runs."""
        return [run for run, other, _ in self.runs(pages) if other == state]

    def _check_not_offloaded(self, page: int) -> None:
        if page < len(self._states) and self._states[page] == OFFLOADED:
            raise Offloaded(f"the page at offset {page * self.page_size} is offloaded: restore() it first")

    def runs(self, pages: range | None = None) -> Iterator[tuple[range, int, bool]]:
        """Yield those of `pages`, or of all, that are not free, as runs: (pages, state, whether they are claimed)."""
        first, states = (0, self._states) if pages is None else (pages.start, self._states[pages.start : pages.stop])
        for run in _TAKEN_RUN.finditer(states):
            state = run[1][0]
            yield range(first + run.start(), first + run.end()), state & ~_OWN, bool(state & _PENDING)

    def layout(self, pinned: Iterable[range], spare: int) -> bytearray:
        """Return a layout for `next_move`: `FREE`, `USED` or `FIXED` for each page.

        It is `spare` for spare pages, and for those that the library itself has claimed. Fixed are those in `pinned`,
        those that other calls have claimed, and those in any other state.
        """
        moving = {FREE: FREE, USED: USED} | dict.fromkeys((SPARE, FREE | _OWN, SPARE | _OWN), spare)
        layout = self._states.translate(bytes(moving.get(state, FIXED) for state in range(256)))
        for pages in pinned:
            layout[pages.start : pages.stop] = bytes((FIXED,)) * len(pages)
        return layout

    # Claiming

    def claim(self, ends: list[Step], runs: Sequence[range], *, own: bool = False) -> None:
        """Claim runs of pages that the caller has checked: other calls then refuse them. `ends` gets the end of it.

        A claim of the library's `own` is of free or spare pages.
        """
        claimed: list[range] = []
        ends.append(partial(self.release, claimed))
        for pages in runs:
            first, end = pages.start, pages.stop
            if end > len(self._states):
                self._states.extend(bytes(end - len(self._states)))
            after = self._states[first:end].translate(_CLAIM_OWN if own else _CLAIM)
            # As in `set`, no interrupt can come between these two lines.
            self._states[first:end] = after
            claimed += (pages,)

    def release(self, claimed: list[range]) -> None:
        """End each claim once, and remove it from the list. Takes the lock."""
        with self.lock:
            while claimed:
                pages = claimed[-1]
                first, end = pages.start, pages.stop
                after = self._states[first:end].translate(_RELEASE)
                self._states[first:end] = after
                del claimed[-1]
            if self._own_ended.waiting:
                self._own_ended.tell_all()

    def claim_unused(self, ends: list[Step], runs: Sequence[range], *, free: bool = False) -> list[range]:
        """Claim pages that are free or spare, or only `free` ones, all or nothing; return the free ones, as runs.

        It waits without the lock while the library itself changes any of them. Raises `AlreadyMapped`.
        """
        with self.lock:
            while True:
                missing: list[range] = []
                try:
                    for pages in runs:
                        missing += self.unbacked(pages)
                        if free:
                            self._check_not_spare(pages)
                    break
                except AlreadyMapped:
                    if not any(map(self._is_own, runs)):
                        raise
                self._own_ended.wait()
            self.claim(ends, runs)
        return missing

    def claim_found(self, ends: list[Step], search: Search) -> tuple[range, list[range]]:
        """Claim the unused pages that a search finds; return them, and then the free ones, as runs.

        It waits without the lock while the library itself changes pages that would do.
        """
        with self.lock:
            while True:
                try:
                    if not self._is_own(pages := self.find(search)):
                        break
                except OutOfVirtualMemory:
                    if not self._is_own(range(self.count)):
                        raise
                self._own_ended.wait()
            missing = self.unbacked(pages)
            self.claim(ends, [pages])
        return pages, missing

    def claim_droppable(self, ends: list[Step], runs: Sequence[range]) -> list[range]:
        """Claim used or offloaded pages, and return the used ones, as runs.

        Raises `NotMapped`, and `BufferError` if a view or a pin of them is alive.
        """
        used: list[range] = []
        for pages in runs:
            if self.is_used(pages):
                used.append(pages)
            else:
                self.check_allocated(pages)
                used += self.runs_of(USED, pages)
        for run in used:
            self._check_unpinned(run)
        self.claim(ends, runs)
        return used

    def wait_for_own(self, pages: range) -> None:
        """Wait without the lock until the library itself changes none of `pages`. Ctrl-C ends the wait."""
        with self.lock:
            while self._is_own(pages):
                self._own_ended.wait()

    # Changing

    def take_spare(self, pages: range, within: int = 0) -> bool:
        """Allocate pages if all are spare and not claimed; return whether they were. `within` goes into `begins`."""
        states = self._states
        if len(pages) == 1:  # the common case, which takes a microsecond
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
        """Make pages spare. They are used, not claimed, and readable and writable."""
        if self.fresh:
            self.fresh.difference_update(pages)
        if self.prepared:
            self.prepared.difference_update(pages)
        if len(pages) == 1:  # as above
            self._states[pages.start] = SPARE
            self.spare += 1
            self._end(pages)
            return
        self.set(pages, SPARE)

    def set(self, pages: range, state: int) -> None:
        """Set the state of pages. Either all of them are claimed, and stay claimed, or all are used and not claimed."""
        first, end = pages.start, pages.stop
        before = self._states[first:end]
        pending = before[0] & _OWN
        after = bytes((state | pending,)) * len(pages)
        more = len(pages) * (state == SPARE) - before.count(SPARE | pending)
        # There is no call between these two lines, because Ctrl-C is raised after a call.
        self._states[first:end] = after
        self.spare += more
        if state not in (USED, OFFLOADED):
            self._end(pages)
            if self.restricted:
                for page in pages:
                    self.restricted.pop(page, None)

    def _end(self, pages: range) -> None:
        """Forget the allocations that begin in these freed pages. The rest of one begins after them from now on."""
        if not self.begins:
            return
        for page in pages:
            self.begins.pop(page, None)
        behind = self._states[pages.stop : pages.stop + 1]
        if pages.stop not in self.begins and behind and _ALLOCATED_RUN.fullmatch(behind):
            self.begins[pages.stop] = 0

    def restrict(self, pages: range, access: AccessFlags) -> None:
        """Record the access of used pages."""
        for page in pages:
            self.restricted.pop(page, None)
        if access is not AccessFlags.READ_WRITE:
            self.restricted.update(dict.fromkeys(pages, access))

    def move(self, pages: range, to: range) -> None:
        """Record that used pages were moved: `to` is used now, and `pages` are free. Both are claimed."""
        restricted = {new: self.restricted[old] for old, new in zip(pages, to, strict=True) if old in self.restricted}
        begins = {new: self.begins[old] for old, new in zip(pages, to, strict=True) if old in self.begins}
        self.set(pages, FREE)
        self.set(to, USED)
        self.restricted.update(restricted)
        self.begins.update(begins)


def as_runs(pages: Iterable[int]) -> list[range]:
    """Return ascending pages as runs."""
    runs: list[range] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs
