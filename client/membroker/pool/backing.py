"""`Backing`: the memory behind a pool's pages, and the order in which pages, extents and mappings change.

Owns the claims: a call takes its pages for itself, works on them, and lets go. It must never hold its lock during a
call of the source or the driver: two borrowers that wait for each other would stand still. What a user may ask for,
and with which offsets, is the pool's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ..arguments import Progress
from ..errors import AlreadyMapped, CompactionFailed
from ..interrupts import HeldOff
from ..memory.holding import Holding, Placing
from ..memory.lender import Lender, Source
from ..memory.local_source import asked_for
from ..memory.region import device_failures
from ..types import Move
from ..vmm.driver import AccessFlags, DriverError, Location
from ..vmm.sizes import format_size
from .offload import OffloadedPages, PageStore
from .page_table import FIXED, FREE, OFFLOADED, SPARE, USED, PageTable, next_move


class Backing:
    """`count` pages of `page_size` bytes of addresses, and what is mapped there. Up to `spare_pages` are kept.

    `table` is read and changed under `lock`. Pages are numbers; a range of them is chosen by a function, which is
    called under the lock, where others stand still.
    """

    def __init__(
        self, source: Source | Lender, count: int, page_size: int, location: Location, spare_pages: int
    ) -> None:
        self.holding = Holding(source, count * page_size, "pool", alignment=page_size)
        self.table = PageTable(count, page_size)
        self.lock = threading.Lock()
        self.spare_pages = spare_pages
        self._page_size = page_size
        self._location = location
        self.offloaded = OffloadedPages(self.holding, self.table, self.lock, location)

    def back(self, choose: Callable[[], range], asked: int, *, within: int = 0, spare: bool = False) -> range:
        """Back what is not backed of some unused pages: all of them, or none. Then they are used, or spare.

        `asked` is how many bytes the user wants there, `within` at which byte of the first page they begin.
        """
        with self._claim(choose, self.table.check_unused) as pages, ExitStack() as undo:
            with self.lock:
                missing = self.table.unbacked(pages)
            for run in missing:
                placing = Placing(self.holding.region, run.start * self._page_size)
                with asked_for(asked, f"in pages of {format_size(self._page_size)}"):
                    self.holding.source.borrow(self._page_size, len(run), self._location, placing)
                undo.callback(self._take_back, run, placing)
                self._commit(placing)
            with self.lock:
                self.table.set(pages, SPARE if spare else USED)
                if not spare:
                    self.table.begins[pages.start] = within
            undo.pop_all()
        return pages

    def _commit(self, placing: Placing) -> None:
        with self.lock:
            self.holding.check_open()
            self.holding.extents.update(placing.extents)

    def _take_back(self, pages: range, placing: Placing) -> None:
        placed = dict(placing.extents)
        try:
            placing.undo()
        except DriverError:
            with self.lock:  # mapped and charged, and nobody's
                self.table.set(pages, SPARE)
            raise
        with self.lock:
            for offset in placed:
                self.holding.extents.pop(offset, None)
        self.holding.source.give_back(list(placed.values()))

    def drop(self, choose: Callable[[], range]) -> None:
        """Give used pages back, or keep them all as spare ones; forget the bytes of offloaded ones."""
        if self.spare_pages and self._keep_spare(choose):
            return
        with self._claim(choose, self._check_droppable) as pages:
            with self.lock:
                used = self.table.claimed_runs(USED, pages)
            for run in used:
                self.holding.source.give_back(self._unbind(run))
            self.offloaded.drop(pages)

    def _keep_spare(self, choose: Callable[[], range]) -> bool:
        """Keep pages mapped that nobody uses any more, if there is room for all of them; say whether there was.

        What is protected is given back: it would have to be made writable for the next one.
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

    def trim(self, pages: range | None = None) -> int:
        """Give back every spare page of `pages`, or of all, that no other call is at; return how many those were."""
        wanted = range(self.table.count) if pages is None else pages
        with self._claim_runs(lambda: self.table.spare_runs(wanted)) as runs:
            for run in runs:
                self.holding.source.give_back(self._unbind(run))
        return sum(map(len, runs))

    def offload(self, pages: range, segment: PageStore | None, progress: Progress | None) -> int:
        """Copy the used ones of `pages` to the host, give the spare ones back, and return how many bytes it copied."""
        with self._claim_runs(lambda: self.table.runs_of(USED, pages), self._check_idle) as runs:
            if runs:
                self.holding.source.driver.synchronize()
            copied = self.offloaded.offload(runs, segment, progress)
        self.trim(pages)
        return copied

    def restore(self, pages: range, progress: Progress | None, *, keep_pinned: bool) -> int:
        """Bring the offloaded ones of `pages` back, and return how many bytes were copied."""
        with self._claim_runs(lambda: self.table.runs_of(OFFLOADED, pages)) as runs:
            return self.offloaded.restore(runs, progress, keep_pinned=keep_pinned)

    def restore_from(self, segment: PageStore, found: Mapping[range, int], progress: Progress | None) -> int:
        """Bring pages here that lie in a segment: runs, with the offset of each in it, in bytes."""
        for run in found:
            self.trim(run)
        with self._claim_runs(lambda: list(found), self._check_free) as runs:
            if runs:
                self.offloaded.adopt(segment, found)
                with self.lock:
                    self.table.begins.update((run.start, 0) for run in runs)
            return self.offloaded.restore(runs, progress)

    def _unbind(self, pages: range) -> list[int]:
        """Unmap pages that nobody else touches, and return the ids of their extents."""
        start, length = self._bytes(pages)
        self.holding.source.driver.synchronize()
        self.holding.region.unbind(start, length)
        with self.lock:
            self.table.set(pages, FREE)
            return [self.holding.extents.pop(page * self._page_size) for page in pages]

    def protect(self, pages: range, access: AccessFlags) -> None:
        """Set what used pages allow. Taking something away waits for the work on the device."""
        lowered = access is not AccessFlags.READ_WRITE
        with self._claim(lambda: pages, self._check_idle if lowered else self.table.check_used):
            if lowered:
                self.holding.source.driver.synchronize()
            self.holding.region.protect(access, *self._bytes(pages))
            with self.lock:
                self.table.restrict(pages, access)

    def plan(self) -> list[Move]:
        """Return what `compact` would do now. The lock is not held afterwards, so it may come to something else."""
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
        """Move runs of used pages down, one after the other, and return what was done."""
        moves: list[Move] = []
        with HeldOff(), device_failures(), self.holding.in_use():
            self.trim()
            cursor = 0
            while step := self._claim_move(cursor):
                cursor = step[0].stop
                try:
                    self._move(*step, on_move, moves)
                except DriverError as error:
                    raise CompactionFailed(f"after {len(moves)} moves: {error}", moves) from error
        return moves

    def _claim_move(self, cursor: int) -> tuple[range, range] | None:
        with self.lock:
            step = next_move(self.table.layout(self.pinned(), spare=FIXED), cursor)
            for pages in step or ():
                self.table.claim(pages)
        return step

    def _move(self, pages: range, to: range, on_move: Callable[[Move], object], moves: list[Move]) -> None:
        """Move pages that are claimed, with those where they go, and stay so until `on_move` has returned.

        Where a run moved over itself, an old address would else have another's bytes before anybody was told.
        """
        try:
            self.holding.source.driver.synchronize()
            self.holding.region.move(
                pages.start * self._page_size, to.start * self._page_size, self._page_size, len(to)
            )
            with self.lock:
                extents = self.holding.extents
                extent_ids = [extents.pop(page * self._page_size) for page in pages]
                extents.update(zip((page * self._page_size for page in to), extent_ids, strict=True))
                self.table.move(pages, to)
            moves.append(self._as_move(pages, to))
            on_move(moves[-1])
        finally:
            self._release([pages, to])

    def _as_move(self, pages: range, to: range) -> Move:
        old_offset, size = self._bytes(pages)
        return Move(old_offset, to.start * self._page_size, size)

    def pinned(self) -> list[range]:
        """Return the pages under each living view and span. The lock is held: no new one can come up."""
        start, size = self.holding.region.address, self._page_size
        ranges = self.holding.views.ranges()
        return [range((first - start) // size, (max(first, last - 1) - start) // size + 1) for first, last in ranges]

    def _check_idle(self, pages: range) -> None:
        """Raise unless the pages are used, and nothing of them is in anybody's hands."""
        self.table.check_used(pages)
        if not self.holding.views.any():
            return
        start, length = self._bytes(pages)
        if self.holding.views.any_in(self.holding.region.address + start, length):
            raise BufferError(f"a view or a pin of [{start}, {start + length}) is still alive: release it first")

    def _check_droppable(self, pages: range) -> None:
        """As `_check_idle`, of pages that may be offloaded as well."""
        used = [pages]
        if self.offloaded.size:
            self.table.check_allocated(pages)
            used = self.table.runs_of(USED, pages)
        for run in used:
            self._check_idle(run)

    def _check_free(self, pages: range) -> None:
        self.table.check_unused(pages)
        for spare in self.table.spare_runs(pages):
            raise AlreadyMapped(f"the page at offset {spare.start * self._page_size} is spare: trim() gives it back")

    @contextmanager
    def _claim(self, choose: Callable[[], range], check: Callable[[range], None]) -> Iterator[range]:
        """Keep all other calls off some pages, after `check` agreed, while the lock is not held."""
        with self._claim_runs(lambda: [choose()], check) as (pages,):
            yield pages

    @contextmanager
    def _claim_runs(
        self, choose: Callable[[], list[range]], check: Callable[[range], None] = lambda pages: None
    ) -> Iterator[list[range]]:
        """As `_claim`, of several runs of pages: all of them, or none."""
        with HeldOff(), device_failures(), self.holding.in_use():
            with self.lock:
                runs = choose()
                for pages in runs:
                    check(pages)
                for pages in runs:
                    self.table.claim(pages)
            try:
                yield runs
            finally:
                self._release(runs)

    def _release(self, ranges: Iterable[range]) -> None:
        with self.lock:
            for pages in ranges:
                self.table.release(pages)

    def _bytes(self, pages: range) -> tuple[int, int]:
        return pages.start * self._page_size, len(pages) * self._page_size
