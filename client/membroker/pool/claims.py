"""Claims: a call claims the pages that it works on until it ends, and other calls refuse these pages meanwhile.

The library itself claims free and spare pages too, to borrow ahead and to release. The user cannot know of such a
claim: a call that needs one of these pages waits until it is over.

Owns the lock of a pool's table, and the checks before a claim. It must never hold the lock during a call of the source
or the driver: two borrowers that wait for each other would deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..errors import AlreadyMapped, OutOfVirtualMemory
from ..interrupts import Condition, Operation
from ..memory.lifetime import MappedMemory
from .page_table import USED, PageTable

Choose = Callable[[PageTable], Sequence[range]]
"""Picks runs of pages in the table, which does not change before they are claimed."""


class Claims:
    """The claims on the pages of `table`, whose memory is `holding`. The caller of a check holds `lock`."""

    def __init__(self, table: PageTable, holding: MappedMemory) -> None:
        self._own_ended = Condition()
        self.lock = self._own_ended.lock
        self.table = table
        self.holding = holding

    def claim(
        self,
        operation: Operation,
        choose: Choose,
        check: Callable[[range], None] | None = None,
        *,
        own: bool = False,
    ) -> Sequence[range]:
        """Claim the chosen runs of pages until the operation ends: all of them, or none if `check` raises.

        If they are refused because the library itself changes pages, it waits for that, and chooses again. A claim of
        the library's `own` does not.
        """
        claimed: list[range] = []
        operation.ends.append(partial(self._release_own if own else self.release, claimed))
        with self.lock:
            while True:
                runs: Sequence[range] = [range(self.table.count)]
                try:
                    runs = choose(self.table)
                    if check is not None:
                        for pages in runs:
                            check(pages)
                    break
                except (AlreadyMapped, OutOfVirtualMemory):
                    if own or not any(map(self.table.is_own, runs)):
                        raise
                self._own_ended.wait()
            for pages in runs:
                self.table.claim(pages, claimed, own=own)
        return runs

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

    def check_idle(self, pages: range) -> None:
        """Raise `NotMapped` unless the pages are used, and `BufferError` if a view or a pin of them is alive."""
        self.table.check_used(pages)
        if not self.holding.views.any():
            return
        start, length = pages.start * self.table.page_size, len(pages) * self.table.page_size
        if self.holding.views.any_in(self.holding.region.address + start, length):
            raise BufferError(f"a view or a pin of [{start}, {start + length}) is still alive: release it first")

    def check_droppable(self, pages: range) -> None:
        """Check as `check_idle` does, but accept offloaded pages too."""
        runs = [pages]
        if not self.table.is_used(pages):
            self.table.check_allocated(pages)
            runs = self.table.runs_of(USED, pages)
        for run in runs:
            self.check_idle(run)

    def check_free(self, pages: range) -> None:
        """Raise `AlreadyMapped` unless the pages have no memory."""
        self.table.check_unused(pages)
        for spare in self.table.spare_runs(pages):
            raise AlreadyMapped(f"the page at offset {spare.start * self.table.page_size} is spare: trim() releases it")

    def pinned(self, *, pages_only: bool = False) -> list[range]:
        """Return the pages of each living view and span, or only of those that keep the memory of the pages.

        No new one can be made while the caller holds the lock.
        """
        start, size = self.holding.region.address, self.table.page_size
        ranges = self.holding.views.ranges(pages_only=pages_only)
        return [range((first - start) // size, (max(first, last - 1) - start) // size + 1) for first, last in ranges]
