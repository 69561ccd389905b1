"""`PageTable`: what each page of a pool is at this moment, and whether a call is at it.

Owns one byte for each page. Finding, checking and counting pages is its work; what is done with them is the pool's,
which holds its lock around every method. It must never call a source or a driver.

A further state is a further constant: all that is neither `FREE` nor `SPARE` is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from membroker.errors import AlreadyMapped, NotMapped, Offloaded, OutOfVirtualMemory
from membroker.vmm.driver import AccessFlags

FREE, USED, SPARE, OFFLOADED = range(4)
"""Nothing behind it / allocated / mapped and charged, and allocated by nobody / allocated, and its bytes elsewhere."""

_PENDING = 0x80
"""Beside a state: a running call is changing the page, and no other call may touch it."""

_AVAILABLE = bytes((FREE, SPARE))
_CLAIM = bytes(byte | _PENDING for byte in range(256))
_RELEASE = bytes(byte & ~_PENDING for byte in range(256))
_SPARE_AS_FREE = bytes.maketrans(bytes((SPARE,)), bytes((FREE,)))
_FREE_RUN = re.compile(b"%c+" % FREE)
_TAKEN_RUN = re.compile(rb"(?s)([^%c%c])\1*" % (FREE, FREE | _PENDING))


class PageTable:
    """`count` pages of `page_size` bytes, all free at the beginning. Pages are numbers, and ranges of numbers.

    `spare` counts the spare pages. `restricted` has what a page allows, where that is not everything.
    """

    def __init__(self, count: int, page_size: int) -> None:
        self.count = count
        self.page_size = page_size
        self.spare = 0
        self.restricted: dict[int, AccessFlags] = {}
        # As long as the highest page that was ever claimed: addresses are reserved by the terabyte.
        self._states = bytearray()

    # Asking

    def is_used(self, page: int) -> bool:
        """Say whether a page is allocated, and no call is at it."""
        return page < len(self._states) and self._states[page] == USED

    def access(self, page: int) -> AccessFlags:
        """Return what a page allows."""
        return self.restricted.get(page, AccessFlags.READ_WRITE)

    def top(self) -> int:
        """Return the page behind the highest one that is taken or that a call is at."""
        return len(self._states.rstrip(_AVAILABLE))

    def unbacked(self, pages: range) -> list[range]:
        """Return the free ones of unused pages that are claimed, as runs."""
        states = self._states[pages.start : pages.stop].translate(_RELEASE)
        return [range(pages.start + run.start(), pages.start + run.end()) for run in _FREE_RUN.finditer(states)]

    def spare_runs(self, pages: range) -> list[range]:
        """Return the spare ones of `pages` that no call is at, as runs."""
        return [run for run, state, busy in self.runs(pages) if state == SPARE and not busy]

    def claimed_runs(self, state: int, pages: range) -> list[range]:
        """Return which of `pages`, that are claimed, are in a state, as runs."""
        return [run for run, other, _ in self.runs(pages) if other == state]

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
            found = states.find(bytes(count), at)
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
        states = self._states[pages.start : pages.stop]
        used = len(states) - len(states.lstrip(bytes((USED,))))
        if used < len(pages):
            self._check_not_offloaded(pages.start + used)
            changing = used < len(states) and states[used] & _PENDING
            why = "is being changed by another call" if changing else "is not mapped"
            raise NotMapped(f"the page at offset {(pages.start + used) * self.page_size} {why}")

    def check_allocated(self, pages: range) -> None:
        """As `check_used`, but of pages that may be offloaded."""
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

    def _check_not_offloaded(self, page: int) -> None:
        if page < len(self._states) and self._states[page] == OFFLOADED:
            raise Offloaded(f"the page at offset {page * self.page_size} is offloaded: restore() it first")

    def runs(self, pages: range | None = None) -> Iterator[tuple[range, int, bool]]:
        """Yield those of `pages`, or of all, that are not free as runs of one state: (pages, state, busy).

        Busy are pages that a call is at.
        """
        first, states = (0, self._states) if pages is None else (pages.start, self._states[pages.start : pages.stop])
        for run in _TAKEN_RUN.finditer(states):
            state = run[1][0]
            yield range(first + run.start(), first + run.end()), state & ~_PENDING, bool(state & _PENDING)

    # Changing

    def take_spare(self, pages: range) -> bool:
        """Make pages used that are all spare, and that no call is at; say whether they were."""
        states = self._states
        if len(pages) == 1:  # the case that counts: a microsecond
            page = pages.start
            if page >= len(states) or states[page] != SPARE:
                return False
            states[page] = USED
            self.spare -= 1
            return True
        if states[pages.start : pages.stop] != bytes((SPARE,)) * len(pages):
            return False
        self.set(pages, USED)
        return True

    def set(self, pages: range, state: int) -> None:
        """Give pages another state: pages that are all claimed, and stay so, or none of which a call is at."""
        self._reach(pages)
        states = self._states
        before = states[pages.start : pages.stop].translate(_RELEASE)
        states[pages.start : pages.stop] = bytes((state | states[pages.start] & _PENDING,)) * len(pages)
        self.spare += len(pages) * (state == SPARE) - before.count(SPARE)
        if self.restricted and state not in (USED, OFFLOADED):
            for page in pages:
                self.restricted.pop(page, None)

    def claim(self, pages: range) -> None:
        """Keep all other calls off pages that none is at."""
        self._reach(pages)
        self._states[pages.start : pages.stop] = self._states[pages.start : pages.stop].translate(_CLAIM)

    def release(self, pages: range) -> None:
        """End a claim."""
        self._states[pages.start : pages.stop] = self._states[pages.start : pages.stop].translate(_RELEASE)

    def _reach(self, pages: range) -> None:
        missing = pages.stop - len(self._states)
        if missing > 0:
            self._states.extend(bytes(missing))
