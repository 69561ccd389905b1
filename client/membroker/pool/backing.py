"""`Backing`: the memory of a pool's pages, and the order in which pages, extents and mappings change.

Owns the table of pages. A call claims its pages, works on them, and releases the claim. The pool checks the user's
requests and converts offsets to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Protocol

from ..arguments import Progress
from ..errors import (
    ClosedError,
    InvalidOffset,
    InvalidRequest,
    NotMapped,
    OutOfMemory,
    OutOfVirtualMemory,
    ThreadLimit,
)
from ..interrupts import Operation, uninterrupted
from ..memory.lender import Source
from ..memory.lifetime import MappedMemory, Placing
from ..memory.local_source import add_asked
from ..reentry import in_a_finalizer
from ..types import Move
from ..views import Span
from ..vmm.driver import AccessFlags, Location
from ..vmm.sizes import Size
from . import compaction
from .ahead import MOST_PER_CALL, Ahead
from .offload import OffloadedPages
from .page_store import PageStore
from .page_table import FREE, OFFLOADED, SPARE, USED, PageTable, Search, as_runs


class Waitable(Protocol):
    """The end of work that uses some pages: `torch.cuda.Event`, or any other object that can wait."""

    def synchronize(self) -> object:
        """Return when the work is over. What it raises is raised by the call that waits."""
        ...


class Backing:
    """`count` pages of `page_size` bytes of addresses, and their memory. Up to `spare_pages` stay mapped when dropped.

    `user` is the user's object, the pool, which this must never keep alive. `ahead` says how many spare pages are
    borrowed before they are needed. Pages are numbers.
    """

    def __init__(
        self,
        source: Source,
        *,
        user: object,
        count: int,
        page_size: int,
        location: Location,
        spare_pages: int,
        ahead: Ahead | None,
    ) -> None:
        self.holding: MappedMemory = MappedMemory(source, user, count * page_size, "pool", alignment=page_size)
        self.table: PageTable = PageTable(count, page_size, self.holding)
        self._lock = self.table.lock
        self.spare_pages = spare_pages
        self._source = source
        self._page_size = page_size
        self._location = location
        self._offloaded = OffloadedPages(self.table, source, location)
        self.holding.spare = self._give_asked
        # How often pages were kept as spare pages, and how often before the last wait for the device.
        self._keeps = 0
        self._clean_keeps = 0
        self._driver = source.driver  # while the memory is there, its source has a driver
        self._is_never_busy = self._driver.device.driver == "host"
        self._ahead = ahead
        if ahead is not None:
            try:
                ahead.start(self.keep_ahead)
            except ThreadLimit:
                self.holding.end()
                raise

    # Allocating

    def back(
        self,
        runs: Sequence[range],
        asked: Size,
        until: float | None,
        *,
        within: Sequence[int],
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> None:
        """Allocate unused runs of pages, all or nothing: the missing ones are mapped by one request to the source.

        `asked` is the size that the user requested. The user's part of each run begins at byte `within` of its first
        page. `until`, `ahead` and `wanted_bytes` are the source's.
        """
        if self.table.spare and self._take_spare(runs, within):
            return
        try:
            with Operation(self.holding) as operation:
                missing = self.table.claim_unused(operation.ends, runs)
                self._borrow(operation, runs, missing, until, ahead=ahead, wanted_bytes=wanted_bytes)
                self._mark_used(operation, runs, within)
        except OutOfMemory as error:
            if self._wait_for_ahead() and self._take_spare(runs, within):
                return
            add_asked(error, asked, "pages", self._page_size)
            raise
        if self._ahead is not None:
            self._ahead.took(sum(map(len, runs)), self.table.spare)

    def back_found(self, search: Search, until: float | None) -> range:
        """Allocate the unused pages that a search finds, as `back` does, and return them."""
        if self.table.spare and (found := self._take_found(search)):
            return found
        try:
            with Operation(self.holding) as operation:
                pages, missing = self.table.claim_found(operation.ends, search)
                self._borrow(operation, [pages], missing, until)
                self._mark_used(operation, [pages])
        except OutOfMemory as error:
            if self._wait_for_ahead() and (found := self._take_found(search)):
                return found
            add_asked(error, search.length, "pages", self._page_size)
            raise
        if self._ahead is not None:
            self._ahead.took(len(pages), self.table.spare)
        return pages

    def prepare(self, search: Search, until: float | None) -> None:
        """Make the pages that a search finds spare, by the wish of the user."""
        try:
            with Operation(self.holding) as operation:
                pages, missing = self.table.claim_found(operation.ends, search)
                self._borrow_spare(operation, [pages], missing, until)
        except OutOfMemory as error:
            add_asked(error, search.length, "pages", self._page_size)
            raise

    def _borrow(
        self,
        operation: Operation,
        runs: Sequence[range],
        missing: Sequence[range],
        until: float | None,
        *,
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> None:
        """Borrow and map the missing pages of claimed runs. The caller marks the runs."""
        size = self._page_size
        operation.undo.append(partial(self._take_back, runs))
        if missing:
            placing = Placing(self.holding, *[range(run.start * size, run.stop * size, size) for run in missing])
            operation.undo.append(placing.take_back)
            count, where = sum(map(len, missing)), self._location
            self._source.borrow(size, count, where, placing, until, ahead=ahead, wanted_bytes=wanted_bytes)

    def _mark_used(self, operation: Operation, runs: Sequence[range], within: Sequence[int] = (0,)) -> None:
        """Mark claimed runs used, whose pages have their memory: they are allocated."""
        with self._lock:
            self.holding.check_open()
            for pages, offset in zip(runs, within, strict=True):
                self.table.set(pages, USED)
                self.table.begins[pages.start] = offset
            operation.undo.clear()

    def _borrow_spare(
        self,
        operation: Operation,
        runs: Sequence[range],
        missing: Sequence[range],
        until: float | None,
        *,
        ahead: bool = False,
    ) -> None:
        """Borrow the missing pages of claimed runs, and mark the runs spare; `ahead` is the wish of the library."""
        self._borrow(operation, runs, missing, until, ahead=ahead)
        with self._lock:
            self.holding.check_open()
            for pages in runs:
                self.table.set(pages, SPARE)
            self.table.fresh.update(*missing)
            if self._ahead is not None and not ahead:
                self.table.prepared.update(*runs)
            operation.undo.clear()

    def _take_back(self, runs: Sequence[range]) -> None:
        """Make claimed pages unused again: spare if they have memory, as after a failure to unmap, and free if not."""
        extents = self.holding.region.extents
        with self._lock:
            for pages in runs:
                self.table.set(pages, FREE)
                for run in as_runs(page for page in pages if page * self._page_size in extents):
                    self.table.set(run, SPARE)

    def _take_spare(self, runs: Sequence[range], within: Sequence[int] = (0,)) -> bool:
        """Allocate pages if they are one run and all of them are spare; return whether it did."""
        with self._lock:
            if len(runs) > 1 or not self.table.take_spare(runs[0], within[0]):
                return False
            left = self.table.spare
        if self._ahead is not None:
            self._ahead.took(len(runs[0]), left)
        return True

    def _take_found(self, search: Search) -> range | None:
        """Allocate the pages that a search finds, if all of them are spare. Those that are ready go first."""
        with self._lock:
            pages = self.table.find_spare(search) if self._ahead is not None else None
            try:
                pages = pages or self.table.find(search)
            except OutOfVirtualMemory:
                return None  # the claim raises it, or waits for pages that the library changes
            return pages if self._take_spare([pages]) else None

    def _wait_for_ahead(self) -> bool:
        """After a refusal, wait for what was asked ahead: it counts against the guarantee, and may be the rest of it.

        Return whether the pool borrows ahead.
        """
        if self._ahead is None:
            return False
        self.table.wait_for_own(range(self.table.count))
        return True

    # Releasing

    def drop(self, find: Callable[[], Sequence[range]], after: Waitable | None = None) -> None:
        """Release used pages, or keep all of them as spare pages. Drop the bytes of offloaded pages.

        `find` returns the pages, as runs. It is called under the lock, perhaps twice. This waits once, for `after`, or
        for all work on the device if that is None. In a finalizer that has interrupted a call of the library, it
        returns at once, and another thread does it soon.
        """
        if in_a_finalizer():
            self._source.later(partial(_unless_closed, self.drop, find, after))
            return
        if self._keep_spare(find):
            return
        with Operation(self.holding) as operation:
            with self._lock:
                runs = find()
                used = self.table.claim_droppable(operation.ends, runs)
            if used:
                self._unbind(used, operation, after)
            if self._offloaded.size:
                for pages in runs:
                    uninterrupted(partial(self._offloaded.drop, pages))

    def begun_at(self, address: int) -> list[range]:
        """Return the pages of the allocation that begins at an address. The caller holds the lock."""
        offset = address - self.holding.region.address
        page, within = divmod(offset, self._page_size)
        if not 0 <= page < self.table.count:
            raise InvalidOffset(f"the address {address:#x} is not one of this pool's")
        if self.table.begins.get(page) != within:
            raise NotMapped(f"no allocation begins at the address {address:#x}: free(offset, size) takes any pages")
        return [self.table.allocation(page)]

    def _keep_spare(self, find: Callable[[], Sequence[range]]) -> bool:
        """Keep the pages that `find` returns as spare pages, unless there are too many then; return whether it did.

        Protected pages are released instead: the next allocation would have to make them writable.
        """
        most = self.spare_pages if self._ahead is None else max(self.spare_pages, self._ahead.target)
        if not most:
            return False
        with self._lock:
            table, runs = self.table, find()
            if table.spare + sum(map(len, runs)) > most:
                return False
            for pages in runs:
                if self._offloaded.size and table.runs_of(OFFLOADED, pages):
                    return False
                self.table.check_idle(pages)
                if table.restricted and not table.restricted.keys().isdisjoint(pages):
                    return False
            self._keeps += 1
            for pages in runs:
                table.keep_spare(pages)
            return True

    def trim(self, pages: range | None = None) -> int:
        """Release every spare page of `pages`, or of the pool, that no other call has claimed; return their number."""
        wanted = range(self.table.count) if pages is None else pages
        with Operation(self.holding) as operation:
            with self._lock:
                runs = self.table.spare_runs(wanted)
                self.table.claim(operation.ends, runs)
            if runs:
                self._unbind(runs, operation)
        return sum(map(len, runs))

    def keep_ahead(self) -> bool:
        """Borrow missing spare pages, or release those that are too many: one call. Return whether there is more to do.

        Called by the thread of `Ahead`. Raises what `Source.borrow` raises, but for refusals, and `ClosedError`.
        """
        ahead, table = self._ahead, self.table
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
            with Operation(self.holding) as operation:
                with self._lock:
                    pages = table.next_free(len(few))
                    runs = [pages] if pages and not ahead.is_resting else []
                    self.table.claim(operation.ends, runs, own=True)
                self._borrow_spare(operation, runs, runs, None, ahead=True)
        except OutOfMemory:
            ahead.refused()
            return False
        ahead.granted()
        if runs and ahead.is_resting:  # they came too late: the pool has released its spare pages meanwhile
            self._give_surplus(len(few))
            return False
        return missing > len(few)

    def _give_surplus(self, count: int) -> None:
        """Release `count` spare pages as `_give_spare` does, except those that the user has prepared."""
        self._give_spare(count * self._page_size, but=self.table.prepared)

    def _rest(self) -> None:
        """Borrow nothing ahead until the next allocation."""
        if self._ahead is not None:
            self._ahead.is_resting = True

    def _give_asked(self, size: int, is_asked_for: Callable[[int], bool]) -> None:
        """Release spare pages that the broker asks for, and borrow none ahead for a while: others need the memory."""
        if self._give_spare(size, is_asked_for) and self._ahead is not None:
            self._ahead.refused()

    def _give_spare(
        self, size: int, is_asked_for: Callable[[int], bool] | None = None, but: Set[int] = frozenset()
    ) -> bool:
        """Release spare pages that no work on the device can use, the highest ones first, without waiting for it.

        The pages in `but` stay. Return whether any page was released.
        """
        with Operation(self.holding) as operation:
            count = -(-size // self._page_size)
            with self._lock:
                runs = self._clean_runs(count, but)
                if (
                    runs
                    and is_asked_for is not None
                    and not is_asked_for(self.holding.region.extents[runs[0].start * self._page_size][0])
                ):
                    return False
                self.table.claim(operation.ends, runs, own=True)
            if runs:
                operation.forward(partial(self._let_go, runs))
        return bool(runs)

    def _clean_runs(self, count: int, but: Set[int]) -> list[range]:
        """Return the highest `count` clean spare pages that are not in `but`, as runs. The caller holds the lock."""
        table = self.table
        all_clean = self._is_never_busy or self._keeps == self._clean_keeps
        spare = [page for run in table.spare_runs(range(table.count)) for page in run if page not in but]
        return as_runs([page for page in spare if all_clean or page in table.fresh][-count:])

    def trim_all(self) -> int:
        """Free the host memory that is kept pinned, and release every spare page; return the number of pages."""
        self._rest()
        with Operation(self.holding):
            uninterrupted(self._offloaded.trim)
        return self.trim()

    def offload(
        self, pages: range, segment: PageStore | None, progress: Progress | None, *, despite_views: bool
    ) -> int:
        """Copy the used ones of `pages` to the host, release the spare ones, and return the number of bytes copied."""
        self._rest()
        with Operation(self.holding) as operation:
            with self._lock:
                runs = self.table.runs_of(USED, pages)
                for run in runs:
                    self.table.check_idle(run, despite_views=despite_views)
                self.table.claim(operation.ends, runs)
            if runs:
                self._driver.synchronize()
            copied = self._offloaded.offload(runs, segment, progress)
        self.trim(pages)
        return copied

    def restore(self, pages: range, progress: Progress | None, until: float | None, *, keep_pinned: bool) -> int:
        """Restore the offloaded ones of `pages`, and return the number of bytes copied."""
        with Operation(self.holding) as operation:
            with self._lock:
                runs = self.table.runs_of(OFFLOADED, pages)
                self.table.claim(operation.ends, runs)
            return self._offloaded.restore(runs, progress, until, keep_pinned=keep_pinned)

    def restore_from(
        self, segment: PageStore, found: Mapping[range, int], progress: Progress | None, until: float | None
    ) -> int:
        """Restore pages from a segment: `found` has runs, with the offset of each in the segment, in bytes."""
        self._rest()
        for run in found:
            self.table.wait_for_own(run)
            self.trim(run)
        with Operation(self.holding) as operation:
            runs = list(found)
            self.table.claim_unused(operation.ends, runs, free=True)
            if runs:
                self._offloaded.adopt(segment, found)
            return self._offloaded.restore(runs, progress, until)

    def _unbind(self, runs: Sequence[range], operation: Operation, after: Waitable | None = None) -> None:
        """Wait once, unmap claimed pages, and release their extents."""
        if after is None:
            keeps = self._keeps
            self._driver.synchronize()
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
                        self.table.set(pages, FREE)

    def protect(self, pages: range, access: AccessFlags) -> None:
        """Set the access of used pages. A reduction waits for the work on the device."""
        lowered = access is not AccessFlags.READ_WRITE
        with Operation(self.holding) as operation:
            with self._lock:
                if lowered:
                    self.table.check_idle(pages)
                else:
                    self.table.check_used(pages)
                self.table.claim(operation.ends, [pages])
            if lowered:
                self._driver.synchronize()
            self.holding.region.protect(access, *self._bytes(pages))
            with self._lock:
                self.table.restrict(pages, access)

    def compact(self, on_move: Callable[[Move], object] | None) -> list[Move]:
        """Release the spare pages, then move runs of used pages to lower addresses, and return the moves.

        No page that the library changes by itself may lie in a hole. It waits for those that it borrows, releases all
        spare ones, and waits for those that it is releasing.
        """
        self._rest()
        everywhere = range(self.table.count)
        self.table.wait_for_own(everywhere)
        self.trim()
        self.table.wait_for_own(everywhere)
        return uninterrupted(lambda: compaction.compact(self.table, on_move), self.holding.interrupted)

    # What there is

    def is_used(self, pages: range) -> bool:
        """Return whether all of them are allocated, and no call has claimed one."""
        with self._lock:
            return self.table.is_used(pages)

    def used_runs(self, pages: range) -> list[range]:
        """Return those of `pages` that are used, as runs. Raises `NotMapped` if one of them is claimed."""
        with self._lock:
            return self.table.runs_of(USED, pages)

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
        self.table.check_used(pages)
        return self.table.least_access(pages)

    def _bytes(self, pages: range) -> tuple[int, int]:
        return pages.start * self._page_size, len(pages) * self._page_size


def _unless_closed(release: Callable[..., None], *arguments: object) -> None:
    with suppress(ClosedError):  # its end has released them
        release(*arguments)
