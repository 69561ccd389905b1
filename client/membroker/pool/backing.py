"""`Backing`: the memory of a pool's pages, and the order in which pages, extents and mappings change.

Owns the table of pages. A call claims its pages, works on them, and releases the claim (`claims`). The pool checks the
user's requests and converts offsets to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Protocol

from ..arguments import Progress
from ..errors import AlreadyMapped, ClosedError, InvalidRequest, OutOfMemory, OutOfVirtualMemory
from ..interrupts import Operation, uninterrupted
from ..memory.lender import Source
from ..memory.lifetime import MappedMemory, Placing
from ..memory.local_source import add_asked
from ..memory.views import Span
from ..reentry import in_a_finalizer
from ..types import Move
from ..vmm.driver import AccessFlags, Location
from . import compaction
from .ahead import MOST_PER_CALL, Ahead
from .claims import Choose, Claims
from .offload import OffloadedPages
from .page_store import PageStore
from .page_table import FREE, OFFLOADED, SPARE, USED, PageTable, as_runs


class Fence(Protocol):
    """The end of work that uses some pages: `torch.cuda.Event`, or any other object that can wait."""

    def synchronize(self) -> object:
        """Return when the work is over. What it raises is raised by the call that waits."""
        ...


class Backing:
    """`count` pages of `page_size` bytes of addresses, and their memory. Up to `spare_pages` stay mapped when dropped.

    `ahead` says how many spare pages are borrowed before they are needed. Pages are numbers.
    """

    def __init__(
        self,
        source: Source,
        pool: object,
        count: int,
        page_size: int,
        location: Location,
        spare_pages: int,
        ahead: Ahead | None,
    ) -> None:
        self.holding = MappedMemory(source, pool, count * page_size, "pool", alignment=page_size)
        self._table = PageTable(count, page_size)
        self.claims = Claims(self._table, self.holding)
        self._lock = self.claims.lock
        self.spare_pages = spare_pages
        self._source = source
        self._page_size = page_size
        self._location = location
        self._offloaded = OffloadedPages(self.claims, source, location)
        self.holding.spare = self._give_asked
        # How often pages were kept as spare pages, and how often before the last wait for the device.
        self._keeps = 0
        self._clean_keeps = 0
        self._is_never_busy = source.driver.device.driver == "host"
        self._ahead = ahead
        if ahead is not None:
            ahead.start(self.keep_ahead)

    def back(
        self,
        choose: Choose,
        asked: int | str,
        until: float | None,
        *,
        within: Sequence[int] = (0,),
        spare: bool = False,
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> Sequence[range]:
        """Map the missing pages of unused runs by one request to the source, all or nothing; mark them used, or spare.

        `asked` is the size that the user requested. The user's part of each run begins at byte `within` of its first
        page. `until`, `ahead` and `wanted_bytes` are the source's. Spare pages that are borrowed ahead are the wish of
        the library, not of a user.
        """
        if self._table.spare and not spare and (pages := self._take_spare(choose, within[0])):
            return [pages]
        size = self._page_size
        try:
            with Operation(self.holding) as operation:
                runs = self.claims.claim(operation, choose, self._table.check_unused, own=spare and ahead)
                with self._lock:
                    missing = [run for pages in runs for run in self._table.unbacked(pages)]
                operation.undo.append(partial(self._take_back, runs))
                if missing:
                    offsets = [range(run.start * size, run.stop * size, size) for run in missing]
                    placing = Placing(self.holding, *offsets)
                    operation.undo.append(placing.take_back)
                    borrow, count, place = self._source.borrow, sum(map(len, missing)), self._location
                    borrow(size, count, place, placing, until, ahead=ahead, wanted_bytes=wanted_bytes)
                with self._lock:
                    self.holding.check_open()
                    for pages, offset in zip(runs, within, strict=True):
                        self._table.set(pages, SPARE if spare else USED)
                        if not spare:
                            self._table.begins[pages.start] = offset
                    if spare:
                        self._table.fresh.update(*missing)
                        if self._ahead is not None and not ahead:
                            self._table.prepared.update(*runs)
                    operation.undo.clear()
        except OutOfMemory as error:
            if self._ahead is not None and not spare:
                # What was asked ahead counts against the guarantee, and may be the rest of it.
                self.claims.wait_for_own(range(self._table.count))
                if found := self._take_spare(choose, within[0]):
                    return [found]
            add_asked(error, asked, "pages", size)
            raise
        if self._ahead is not None and not spare:
            self._ahead.took(sum(map(len, runs)), self._table.spare)
        return runs

    def _take_back(self, runs: Sequence[range]) -> None:
        """Make claimed pages unused again: spare if they have memory, as after a failure to unmap, and free if not."""
        extents = self.holding.region.extents
        with self._lock:
            for pages in runs:
                self._table.set(pages, FREE)
                for run in as_runs(page for page in pages if page * self._page_size in extents):
                    self._table.set(run, SPARE)

    def drop(self, choose: Choose, after: Fence | None = None) -> None:
        """Release used pages, or keep all of them as spare pages. Drop the bytes of offloaded pages.

        It waits once, for `after`, or for all work on the device if that is None. In a finalizer that has interrupted
        a call of the library, it returns at once, and another thread does it soon.
        """
        if in_a_finalizer():
            self._source.later(partial(self._drop_later, choose, after))
            return
        most = self.spare_pages if self._ahead is None else max(self.spare_pages, self._ahead.target)
        if most and self._keep_spare(choose, most):
            return
        with Operation(self.holding) as operation:
            runs = self.claims.claim(operation, choose, self.claims.check_droppable)
            used = []
            with self._lock:
                for pages in runs:
                    used += self._table.claimed_runs(USED, pages)
            if used:
                self._unbind(used, operation, after)
            if self._offloaded.size:
                for pages in runs:
                    uninterrupted(partial(self._offloaded.drop, pages))

    def _drop_later(self, choose: Choose, after: Fence | None) -> None:
        with suppress(ClosedError):  # its end has released them
            self.drop(choose, after)

    def _keep_spare(self, choose: Choose, most: int) -> bool:
        """Keep deallocated pages mapped as spare pages, unless there are more than `most` then; return whether it did.

        Protected pages are released instead: the next allocation would have to make them writable.
        """
        with self._lock:
            table = self._table
            runs = choose(table)
            if table.spare + sum(map(len, runs)) > most:
                return False
            for pages in runs:
                if self._offloaded.size and table.runs_of(OFFLOADED, pages):
                    return False
                self.claims.check_idle(pages)
                if table.restricted and not table.restricted.keys().isdisjoint(pages):
                    return False
            self._keeps += 1
            for pages in runs:
                table.keep_spare(pages)
            return True

    def _take_spare(self, choose: Choose, within: int) -> range | None:
        """Allocate pages if they are one run and all of them are spare, and return them; otherwise return None."""
        with self._lock:
            try:
                pages, *others = choose(self._table)
            except OutOfVirtualMemory:
                return None  # the claim raises it, or waits for pages that the library changes
            if others or not self._table.take_spare(pages, within):
                return None
            left = self._table.spare
        if self._ahead is not None:
            self._ahead.took(len(pages), left)
        return pages

    def trim(self, pages: range | None = None) -> int:
        """Release every spare page of `pages`, or of the pool, that no other call has claimed; return their number."""
        wanted = range(self._table.count) if pages is None else pages
        with Operation(self.holding) as operation:
            runs = self.claims.claim(operation, lambda table: table.spare_runs(wanted))
            if runs:
                self._unbind(runs, operation)
        return sum(map(len, runs))

    def keep_ahead(self) -> bool:
        """Borrow missing spare pages, or release those that are too many: one call. Return whether there is more to do.

        Called by the thread of `Ahead`. Raises what `Source.borrow` raises, but for refusals, and `ClosedError`.
        """
        ahead, table = self._ahead, self._table
        assert ahead is not None
        self.holding.check_open()
        target = ahead.work_out()
        with self._lock:
            missing, few = target - table.spare, table.next_free(min(MOST_PER_CALL, max(1, target - table.spare)))
            kept = table.spare - table.prepared_left()
        if kept > 2 * target + self.spare_pages:
            self._give_surplus(kept - target)
            return False
        if missing <= 0 or not few or ahead.is_paused or ahead.is_resting:
            return False
        try:
            size = len(few) * self._page_size
            runs = self.back(partial(self._next_free, len(few)), size, None, spare=True, ahead=True)
        except (OutOfMemory, AlreadyMapped):
            ahead.refused()
            return False
        ahead.granted()
        if runs and ahead.is_resting:  # they came too late: the pool has released its spare pages meanwhile
            self._give_surplus(len(few))
            return False
        return missing > len(few)

    def _next_free(self, most: int, table: PageTable) -> list[range]:
        """Choose what to borrow ahead: nothing if the pool has begun to rest. The caller holds the lock."""
        assert self._ahead is not None
        pages = table.next_free(most)
        return [pages] if pages and not self._ahead.is_resting else []

    def _give_surplus(self, count: int) -> None:
        """Release `count` spare pages as `_give_spare` does, except those that the user has prepared."""
        self._give_spare(count * self._page_size, lambda _: True, self._table.prepared)

    def _rest(self) -> None:
        """Borrow nothing ahead until the next allocation."""
        if self._ahead is not None:
            self._ahead.is_resting = True

    def _give_asked(self, size: int, is_asked_for: Callable[[int], bool]) -> None:
        """Release spare pages that the broker asks for, and borrow none ahead for a while: others need the memory."""
        if self._give_spare(size, is_asked_for) and self._ahead is not None:
            self._ahead.refused()

    def _give_spare(self, size: int, is_asked_for: Callable[[int], bool], but: Set[int] = frozenset()) -> bool:
        """Release spare pages that no work on the device can use, the highest ones first, without waiting for it.

        The pages in `but` stay. Return whether any page was released.
        """
        with Operation(self.holding) as operation:
            count = -(-size // self._page_size)
            runs = self.claims.claim(operation, lambda _: self._clean_runs(count, is_asked_for, but), own=True)
            if runs:
                operation.forward(partial(self._let_go, runs))
        return bool(runs)

    def _clean_runs(self, count: int, is_asked_for: Callable[[int], bool], but: Set[int]) -> list[range]:
        """Return the highest `count` clean spare pages that are not in `but`, as runs. The caller holds the lock."""
        table = self._table
        all_clean = self._is_never_busy or self._keeps == self._clean_keeps
        spare = [page for run in table.spare_runs(range(table.count)) for page in run if page not in but]
        clean = [page for page in spare if all_clean or page in table.fresh][-count:]
        if not clean or not is_asked_for(self.holding.region.extents[clean[0] * self._page_size][0]):
            return []
        return as_runs(clean)

    def trim_all(self) -> int:
        """Free the host memory that is kept pinned, and release every spare page; return the number of pages."""
        self._rest()
        with Operation(self.holding):
            uninterrupted(self._offloaded.trim)
        return self.trim()

    def offload(self, pages: range, segment: PageStore | None, progress: Progress | None) -> int:
        """Copy the used ones of `pages` to the host, release the spare ones, and return the number of bytes copied."""
        self._rest()
        with Operation(self.holding) as operation:
            runs = self.claims.claim(operation, lambda table: table.runs_of(USED, pages), self.claims.check_idle)
            if runs:
                self._source.driver.synchronize()
            copied = self._offloaded.offload(runs, segment, progress)
        self.trim(pages)
        return copied

    def restore(self, pages: range, progress: Progress | None, until: float | None, *, keep_pinned: bool) -> int:
        """Restore the offloaded ones of `pages`, and return the number of bytes copied."""
        with Operation(self.holding) as operation:
            runs = self.claims.claim(operation, lambda table: table.runs_of(OFFLOADED, pages))
            return self._offloaded.restore(runs, progress, until, keep_pinned=keep_pinned)

    def restore_from(
        self, segment: PageStore, found: Mapping[range, int], progress: Progress | None, until: float | None
    ) -> int:
        """Restore pages from a segment: `found` has runs, with the offset of each in the segment, in bytes."""
        self._rest()
        for run in found:
            self.claims.wait_for_own(run)
            self.trim(run)
        with Operation(self.holding) as operation:
            runs = self.claims.claim(operation, lambda _: list(found), self.claims.check_free)
            if runs:
                self._offloaded.adopt(segment, found)
            return self._offloaded.restore(runs, progress, until)

    def _unbind(self, runs: Sequence[range], operation: Operation, after: Fence | None = None) -> None:
        """Wait once, unmap claimed pages, and release their extents."""
        if after is None:
            keeps = self._keeps
            self._source.driver.synchronize()
            self._clean_keeps = max(self._clean_keeps, keeps)
        else:
            after.synchronize()
        operation.forward(partial(self._let_go, runs))

    def _let_go(self, runs: Sequence[range]) -> None:
        """Unmap and release claimed pages. If the driver fails, those that it has unmapped are free."""
        try:
            self.holding.remove(map(self._bytes, runs))
        finally:
            with self._lock:
                for pages in runs:
                    if pages.start * self._page_size not in self.holding.region.extents:
                        self._table.set(pages, FREE)

    def protect(self, pages: range, access: AccessFlags) -> None:
        """Set the access of used pages. A reduction waits for the work on the device."""
        lowered = access is not AccessFlags.READ_WRITE
        check = self.claims.check_idle if lowered else self._table.check_used
        with Operation(self.holding) as operation:
            self.claims.claim(operation, lambda _: [pages], check)
            if lowered:
                self._source.driver.synchronize()
            self.holding.region.protect(access, *self._bytes(pages))
            with self._lock:
                self._table.restrict(pages, access)

    def compact(self, on_move: Callable[[Move], object]) -> list[Move]:
        """Release the spare pages, then move runs of used pages to lower addresses, and return the moves.

        No page that the library changes by itself may lie in a hole. It waits for those that it borrows, releases all
        spare ones, and waits for those that it is releasing.
        """
        self._rest()
        everywhere = range(self._table.count)
        self.claims.wait_for_own(everywhere)
        self.trim()
        self.claims.wait_for_own(everywhere)
        return uninterrupted(lambda: compaction.compact(self.claims, on_move), self.holding.interrupted)

    # What there is

    def is_used(self, pages: range) -> bool:
        """Return whether all of them are allocated, and no call has claimed one."""
        with self._lock:
            return self._table.is_used(pages)

    def used_runs(self, pages: range) -> list[range]:
        """Return those of `pages` that are used, as runs. Raises `NotMapped` if one of them is claimed."""
        with self._lock:
            return self._table.runs_of(USED, pages)

    def view(self, keeper: object, pages: range, offset: int, size: int) -> memoryview:
        """Return bytes of used pages, writable if all of these pages are. Raises `InvalidRequest` without access."""
        with self._lock:
            access = self._access(pages)
            if access is AccessFlags.NONE:
                raise InvalidRequest(f"[{offset}, {offset + size}) allows no access: protect() it otherwise")
            view = self.holding.view(keeper, offset, size)
        return view if access is AccessFlags.READ_WRITE else view.toreadonly()

    def span(self, keeper: object, pages: range, offset: int, size: int) -> Span:
        """Keep bytes of used pages mapped while the result lives."""
        with self._lock:
            writable = self._access(pages) is AccessFlags.READ_WRITE
            return self.holding.span(keeper, offset, size, writable=writable)

    def _access(self, pages: range) -> AccessFlags:
        """Return the most restrictive access of used pages, after checking them. The caller holds the lock."""
        self._table.check_used(pages)
        return self._table.least_access(pages)

    def _bytes(self, pages: range) -> tuple[int, int]:
        return pages.start * self._page_size, len(pages) * self._page_size
