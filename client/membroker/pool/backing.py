"""`Backing`: the memory of a pool's pages, and the order in which pages, extents and mappings change.

Owns the table of pages with its lock, and the claims: a call claims its pages, works on them, and releases the claim.
It must never hold its lock during a call of the source or the driver: two borrowers that wait for each other would
deadlock. The pool checks the user's requests and converts offsets to pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ..arguments import Progress
from ..errors import AlreadyMapped, CompactionFailed, OutOfMemory
from ..interrupts import Operation, uninterrupted
from ..memory.lender import Source
from ..memory.lifetime import MappedMemory, Placing
from ..memory.local_source import add_asked
from ..types import Move
from ..vmm.driver import AccessFlags, DriverError, Location
from .offload import OffloadedPages, PageStore
from .page_table import FIXED, FREE, OFFLOADED, SPARE, USED, PageTable, next_move


class Backing:
    """`count` pages of `page_size` bytes of addresses, and their memory. Up to `spare_pages` stay mapped when dropped.

    `table` is read and changed under `lock`. Pages are numbers. A function chooses a range of them, and is called under
    the lock, so that the table does not change before the claim.
    """

    def __init__(
        self, source: Source, pool: object, count: int, page_size: int, location: Location, spare_pages: int
    ) -> None:
        self.holding = MappedMemory(source, pool, count * page_size, "pool", alignment=page_size)
        self.table = PageTable(count, page_size)
        self.lock = threading.Lock()
        self.spare_pages = spare_pages
        self._source = source
        self._page_size = page_size
        self._location = location
        self.offloaded = OffloadedPages(self.holding, source, self.table, self.lock, location)

    def back(self, choose: Callable[[], range], asked: int | str, *, within: int = 0, spare: bool = False) -> range:
        """Map the missing pages of an unused range, all or nothing, and mark the range used, or spare.

        `asked` is the size that the user requested. Its first byte is byte `within` of the first page.
        """
        with Operation(self.holding) as operation:
            pages = self._claim(operation, choose, self.table.check_unused)
            with self.lock:
                missing, before = self.table.unbacked(pages), self.table.picture(pages)
            operation.undo.append(lambda: self._restore(pages, before))
            for run in missing:
                offsets = range(run.start * self._page_size, run.stop * self._page_size, self._page_size)
                placing = Placing(self.holding, offsets)
                operation.undo.append(placing.take_back)
                try:
                    self._source.borrow(self._page_size, len(run), self._location, placing)
                except OutOfMemory as error:
                    add_asked(error, asked, "pages", self._page_size)
                    raise
            with self.lock:
                self.holding.check_open()
                self.table.set(pages, SPARE if spare else USED)
                if not spare:
                    self.table.begins[pages.start] = within
                operation.undo.clear()
        return pages

    def _restore(self, pages: range, before: bytes) -> None:
        """Reset claimed pages to their states in `before`. Pages that the driver failed to unmap become spare."""
        with self.lock:
            self.table.restore(pages, before)
            for page in pages:
                if page * self._page_size in self.holding.region.extents:
                    self.table.set(range(page, page + 1), SPARE)

    def drop(self, choose: Callable[[], range]) -> None:
        """Release used pages, or keep all of them as spare pages. Drop the bytes of offloaded pages."""
        if self.spare_pages and self._keep_spare(choose):
            return
        with Operation(self.holding) as operation:
            pages = self._claim(operation, choose, self._check_droppable)
            with self.lock:
                used = self.table.claimed_runs(USED, pages)
            for run in used:
                self._unbind(run, operation)
            if self.offloaded.size:
                uninterrupted(lambda: self.offloaded.drop(pages))

    def _keep_spare(self, choose: Callable[[], range]) -> bool:
        """Keep deallocated pages mapped as spare pages, if all of them fit; return whether they did.

        Protected pages are released instead: the next allocation would have to make them writable.
        """
        with self.lock:
            pages, table = choose(), self.table
            if table.spare + len(pages) > self.spare_pages:
                return False
            if self.offloaded.size and table.runs_of(OFFLOADED, pages):
                return False
            self._check_idle(pages)
            if table.restricted and not table.restricted.keys().isdisjoint(pages):
                return False
            table.keep_spare(pages)
            return True

    def take_spare(self, choose: Callable[[], range], within: int = 0) -> range | None:
        """Allocate pages if all of them are spare, and return them; otherwise return None."""
        with self.lock:
            pages = choose()
            return pages if self.table.take_spare(pages, within) else None

    def trim(self, pages: range | None = None) -> int:
        """Release every spare page of `pages`, or of the pool, that no other call has claimed; return their number."""
        wanted = range(self.table.count) if pages is None else pages
        with Operation(self.holding) as operation:
            runs = self._claim_runs(operation, lambda: self.table.spare_runs(wanted))
            for run in runs:
                self._unbind(run, operation)
        return sum(map(len, runs))

    def offload(self, pages: range, segment: PageStore | None, progress: Progress | None) -> int:
        """Copy the used ones of `pages` to the host, release the spare ones, and return the number of bytes copied."""
        with Operation(self.holding) as operation:
            runs = self._claim_runs(operation, lambda: self.table.runs_of(USED, pages), self._check_idle)
            if runs:
                self._source.driver.synchronize()
            copied = self.offloaded.offload(runs, segment, progress)
        self.trim(pages)
        return copied

    def restore(self, pages: range, progress: Progress | None, *, keep_pinned: bool) -> int:
        """Restore the offloaded ones of `pages`, and return the number of bytes copied."""
        with Operation(self.holding) as operation:
            runs = self._claim_runs(operation, lambda: self.table.runs_of(OFFLOADED, pages))
            return self.offloaded.restore(runs, progress, keep_pinned=keep_pinned)

    def restore_from(self, segment: PageStore, found: Mapping[range, int], progress: Progress | None) -> int:
        """Restore pages from a segment: `found` has runs, with the offset of each in the segment, in bytes."""
        for run in found:
            self.trim(run)
        with Operation(self.holding) as operation:
            runs = self._claim_runs(operation, lambda: list(found), self._check_free)
            if runs:
                self.offloaded.adopt(segment, found)
                with self.lock:
                    self.table.begins.update((run.start, 0) for run in runs)
            return self.offloaded.restore(runs, progress)

    def _unbind(self, pages: range, operation: Operation) -> None:
        """Unmap claimed pages, and release their extents."""
        self._source.driver.synchronize()
        operation.forward(lambda: self._let_go(pages))

    def _let_go(self, pages: range) -> None:
        self.holding.remove([self._bytes(pages)])
        with self.lock:
            self.table.set(pages, FREE)

    def protect(self, pages: range, access: AccessFlags) -> None:
        """Set the access of used pages. A reduction waits for the work on the device."""
        lowered = access is not AccessFlags.READ_WRITE
        with Operation(self.holding) as operation:
            self._claim(operation, lambda: pages, self._check_idle if lowered else self.table.check_used)
            if lowered:
                self._source.driver.synchronize()
            self.holding.region.protect(access, *self._bytes(pages))
            with self.lock:
                self.table.restrict(pages, access)

    def plan(self) -> list[Move]:
        """Return the moves that `compact` would make now. They may differ later, because the lock is released."""
        with self.lock:
            layout = self.table.layout(self.pinned(), spare=FREE)
        moves, cursor = [], 0
        while step := next_move(layout, cursor):
            pages, to = step
            layout[pages.start : pages.stop] = bytes(len(pages))
            layout[to.start : to.stop] = bytes((USED,)) * len(to)
            moves.append(self._as_move(pages, to))
            cursor = pages.stop
        return moves

    def compact(self, on_move: Callable[[Move], object]) -> list[Move]:
        """Move runs of used pages to lower addresses, one after the other, and return the moves."""
        moves: list[Move] = []
        self.trim()
        with Operation(self.holding):
            cursor: int | None = 0
            while cursor is not None:
                try:
                    cursor = self._compact_once(cursor, on_move, moves)
                except DriverError as error:
                    raise CompactionFailed(f"after {len(moves)} moves: {error}", moves) from error
        return moves

    def _compact_once(self, cursor: int, on_move: Callable[[Move], object], moves: list[Move]) -> int | None:
        """Make the next move from page `cursor` on, and return the page to continue at; None if no run can move.

        The old and the new pages stay claimed until `on_move` has returned. When a run moves over itself, an old
        address would otherwise have other bytes before the user knows of the move.
        """
        claimed: list[range] = []
        try:
            with self.lock:
                step = next_move(self.table.layout(self.pinned(), spare=FIXED), cursor)
                if step is None:
                    return None
                for run in step:
                    self.table.claim(run, claimed)
            pages, to = step
            self._source.driver.synchronize()
            self.holding.region.move(
                pages.start * self._page_size, to.start * self._page_size, self._page_size, len(to)
            )
            with self.lock:
                self.table.move(pages, to)
            moves.append(self._as_move(pages, to))
            on_move(moves[-1])
            return pages.stop
        finally:
            self._release(claimed)

    def _as_move(self, pages: range, to: range) -> Move:
        old_offset, size = self._bytes(pages)
        return Move(old_offset, to.start * self._page_size, size)

    def pinned(self) -> list[range]:
        """Return the pages of each living view and span. The caller holds the lock, so no new one can be created."""
        start, size = self.holding.region.address, self._page_size
        ranges = self.holding.views.ranges()
        return [range((first - start) // size, (max(first, last - 1) - start) // size + 1) for first, last in ranges]

    def _check_idle(self, pages: range) -> None:
        """Raise `NotMapped` unless the pages are used, and `BufferError` if a view or a pin of them is alive."""
        self.table.check_used(pages)
        if not self.holding.views.any():
            return
        start, length = self._bytes(pages)
        if self.holding.views.any_in(self.holding.region.address + start, length):
            raise BufferError(f"a view or a pin of [{start}, {start + length}) is still alive: release it first")

    def _check_droppable(self, pages: range) -> None:
        """Check as `_check_idle` does, but accept offloaded pages too."""
        used = [pages]
        if self.offloaded.size:
            self.table.check_allocated(pages)
            used = self.table.runs_of(USED, pages)
        for run in used:
            self._check_idle(run)

    def _check_free(self, pages: range) -> None:
        self.table.check_unused(pages)
        for spare in self.table.spare_runs(pages):
            raise AlreadyMapped(f"the page at offset {spare.start * self._page_size} is spare: trim() releases it")

    def _claim(self, operation: Operation, choose: Callable[[], range], check: Callable[[range], None]) -> range:
        """Claim the chosen pages until the operation ends, unless `check` raises. Other calls then refuse them."""
        claimed: list[range] = []
        operation.ends.append(lambda: self._release(claimed))
        with self.lock:
            pages = choose()
            check(pages)
            self.table.claim(pages, claimed)
        return pages

    def _claim_runs(
        self, operation: Operation, choose: Callable[[], list[range]], check: Callable[[range], None] | None = None
    ) -> list[range]:
        """Claim several runs of pages, as `_claim` does: all of them, or none."""
        claimed: list[range] = []
        operation.ends.append(lambda: self._release(claimed))
        with self.lock:
            runs = choose()
            if check is not None:
                for pages in runs:
                    check(pages)
            for pages in runs:
                self.table.claim(pages, claimed)
        return runs

    def _release(self, claimed: list[range]) -> None:
        with self.lock:
            self.table.release(claimed)

    def _bytes(self, pages: range) -> tuple[int, int]:
        return pages.start * self._page_size, len(pages) * self._page_size
