"""Claims: a call claims the pages that it works on until it ends, and other calls refuse these pages meanwhile.

The library itself claims free and spare pages too, to borrow ahead and to release. The user cannot know of such a
claim: a call that needs one of these pages waits until it is over.

Owns the lock of a pool's table, and the checks before a claim. It must never hold the lock during a call of the source
or the driver: two borrowers that wait for each other would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..errors import AlreadyMapped, OutOfVirtualMemory
from ..interrupts import Condition, Operation
from ..memory.lifetime import MappedMemory
from .page_table import USED, PageTable, Search


class Claims:
    """The claims on the pages of `table`, whose memory is `holding`.

    The caller of `claim` or of a check holds `lock`. The caller of a method that waits must not hold it.
    """

    def __init__(self, table: PageTable, holding: MappedMemory) -> None:
        self._own_ended = Condition()
        self.lock = self._own_ended.lock
        self.table = table
        self.holding = holding

    def claim(self, operation: Operation, runs: Sequence[range], *, own: bool = False) -> None:
        """Claim runs of pages until the operation ends. The caller holds the lock, under which it has checked them."""
        claimed: list[range] = []
        operation.ends.append(partial(self._release_own if own else self.release, claimed))
        for pages in runs:
            self.table.claim(pages, claimed, own=own)

    def claim_unused(self, operation: Operation, runs: Sequence[range], *, free: bool = False) -> list[range]:
        """Claim pages that are free or spare, or only `free` ones, all or nothing; return the free ones, as runs.

        It waits while the library itself changes any of them. Raises `AlreadyMapped`.
        """
        with self.lock:
            while True:
                missing: list[range] = []
                try:
                    for pages in runs:
                        missing += self.table.unbacked(pages)
                        if free:
                            self.table.check_not_spare(pages)
                    break
                except AlreadyMapped:
                    if not any(map(self.table.is_own, runs)):
                        raise
                self._own_ended.wait()
            self.claim(operation, runs)
        return missing

    def claim_found(self, operation: Operation, search: Search) -> tuple[range, list[range]]:
        """Claim the unused pages that a search finds; return them, and then the free ones, as runs.

        It waits while the library itself changes pages that would do.
        """
        with self.lock:
            while True:
                try:
                    if not self.table.is_own(pages := self.table.find(search)):
                        break
                except OutOfVirtualMemory:
                    if not self.table.is_own(range(self.table.count)):
                        raise
                self._own_ended.wait()
            missing = self.table.unbacked(pages)
            self.claim(operation, [pages])
        return pages, missing

    def claim_droppable(self, operation: Operation, runs: Sequence[range]) -> list[range]:
        """Claim used or offloaded pages, and return the used ones, as runs.

        Raises `NotMapped`, and `BufferError` if a view or a pin of them is alive.
        """
        used: list[range] = []
        with self.lock:
            for pages in runs:
                if self.table.is_used(pages):
                    used.append(pages)
                else:
                    self.table.check_allocated(pages)
                    used += self.table.runs_of(USED, pages)
            for run in used:
                self._check_unpinned(run)
            self.claim(operation, runs)
        return used

    def wait_for_own(self, pages: range) -> None:
        """Wait until the library itself changes none of `pages`. Ctrl-C ends the wait."""
        with self.lock:
            while self.table.is_own(pages):
                self._own_ended.wait()

    def release(self, claimed: list[range]) -> None:
        """End each claim once, and remove it from the list."""
        with self.lock:
            self.table.release(claimed)

    def _release_own(self, claimed: list[range]) -> None:
        with self.lock:
            self.table.release(claimed)
            self._own_ended.tell_all()

    def check_idle(self, pages: range, *, despite_views: bool = False) -> None:
        """Raise `NotMapped` unless the pages are used, and `BufferError` if a view or a pin of them is alive."""
        self.table.check_used(pages)
        if not despite_views:
            self._check_unpinned(pages)

    def _check_unpinned(self, pages: range) -> None:
        if not self.holding.views.any():
            return
        start, length = pages.start * self.table.page_size, len(pages) * self.table.page_size
        if held := self.holding.views.held_in(self.holding.region.address + start, length):
            raise BufferError(f"[{start}, {start + length}) is still used by {held}: release it first")

    def pinned(self, *, pages_only: bool = False) -> list[range]:
        """Return the pages of each living view and span, or only of those that keep the memory of the pages.

        No new one can be made while the caller holds the lock.
        """
        start, size = self.holding.region.address, self.table.page_size
        ranges = self.holding.views.ranges(pages_only=pages_only)
        return [range((first - start) // size, (max(first, last - 1) - start) // size + 1) for first, last in ranges]
