"""`VirtualMemoryPool`: many addresses, and memory for the ones that are in use.

Owns the public calls. It checks the offsets, sizes and addresses that they take, and converts them to pages; its
`Backing` works on the pages. It knows a `Source`, never a broker, and must never map or unmap memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Literal, SupportsIndex

from ..arguments import (
    Progress,
    access_of,
    bytes_of,
    check_page_size,
    check_progress,
    deadline_of,
    location_of,
    rounded_up,
    whole_number,
)
from ..errors import InvalidOffset, InvalidRequest, NotMapped
from ..interrupts import device_failures, uninterrupted
from ..memory.lender import Lender, Source, lender_of, source_of
from ..memory.lifetime import Resource
from ..safetensors import segment_size
from ..tracebacks import SHORTENED, ends_at_the_caller, shorten
from ..types import MemoryStats, Move, PoolMapping
from ..views import Span
from ..vmm.driver import AccessFlags, Location
from ..vmm.sizes import MIB, Size, format_size, is_power_of_two
from . import compaction, report
from .ahead import Ahead
from .backing import Backing, Waitable
from .page_store import PageStore, check_segment, runs_in, shapes
from .page_table import Search
from .range import PoolRange, range_of

DEFAULT_PAGE_SIZE = 64 * MIB


@ends_at_the_caller(but=("allocate", "allocate_anywhere", "free", "grow"))
class VirtualMemoryPool(Resource):
    """Addresses for `virtual_capacity` bytes, backed page by page on demand. Thread-safe, and a context manager.

    Offsets and sizes are in bytes (sizes may be text, such as `"8GiB"`) and need no alignment: a call works on
    every page that its range touches. Whole pages are charged. `virtual_capacity` is rounded up to whole pages; only
    the process's address space limits it. The base address is a multiple of the page size.

    Up to `spare_pages` pages stay mapped and charged when they are freed. They keep their bytes, and allocating
    them again needs no call to the broker. `prepare` borrows spare pages in advance, `trim` releases them.

    With `ahead`, a thread of the library borrows spare pages before they are needed. `ahead` is the number of pages
    that it keeps ready. `"auto"` is as many pages as were allocated in the busiest 20 ms of the last 10 seconds, at
    least one page and at most 1 GiB. An allocation of few pages by `allocate_anywhere`, or at the lowest free
    addresses, then needs no call to the broker. The broker lends nothing ahead of need while others wait for memory.
    After a refusal the thread pauses, for a second at most.

    The source is a `Model`, for memory that a broker lends, or a `LocalSource`, for use without a broker.

    Raises `InvalidPageSize`, `InvalidRequest`, `ClosedError`, and `DeviceFailure` when the addresses cannot be
    reserved.
    """

    def __init__(
        self,
        source: Source | Lender,
        virtual_capacity: Size,
        page_size: Size = DEFAULT_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
        spare_pages: int = 0,
        ahead: int | Literal["auto"] = 0,
    ) -> None:
        spare_pages = whole_number("the number of spare pages", spare_pages)
        if spare_pages < 0:
            raise InvalidRequest(f"a pool keeps 0 or more spare pages, not {spare_pages}")
        self._page_size = check_page_size(page_size, source.driver.device.granularity)
        where = location_of(location)
        self._ahead = _ahead_of(ahead, self._page_size)
        self._capacity = rounded_up("a virtual capacity", virtual_capacity, self._page_size)
        count = self._capacity // self._page_size
        with device_failures():
            self._backing = Backing(
                source_of(source),
                user=self,
                count=count,
                page_size=self._page_size,
                location=where,
                spare_pages=spare_pages,
                ahead=self._ahead,
            )
        self._holding = self._backing.holding
        self._lender = lender_of(source)  # keeps the callbacks of its recalls
        self._on_host = source.driver.device.driver == "host"

    # What it is

    @property
    def capacity(self) -> int:
        """The bytes of addresses."""
        return self._capacity

    @property
    def base_address(self) -> int:
        """The address of offset 0, in this process. It is constant while the pool is open. Raises `ClosedError`."""
        self._holding.check_open()
        return self._holding.region.address

    @property
    def page_size(self) -> int:
        """The bytes of a page, the unit in which the pool grows and shrinks."""
        return self._page_size

    @property
    def lender(self) -> Source | Lender:
        """What lends the memory: the `Model`, or the `LocalSource`."""
        return self._lender

    @property
    def spare_pages(self) -> int:
        """How many freed pages may stay mapped."""
        return self._backing.spare_pages

    @property
    def ahead(self) -> int | Literal["auto"]:
        """How many pages are borrowed before they are needed."""
        if self._ahead is None:
            return 0
        return "auto" if self._ahead.fixed is None else self._ahead.fixed

    @property
    def physical_usage_bytes(self) -> int:
        """The bytes of memory that are mapped and charged: whole pages."""
        return len(self._holding.region.extents) * self._page_size

    def is_mapped(self, offset: SupportsIndex, size: Size = 1) -> bool:
        """Return whether all pages that [offset, offset + size) touches are allocated and have their memory.

        It is False if a page is offloaded, or if another call is changing it. Raises `InvalidOffset` for a range that
        does not lie in the pool, `InvalidRequest` for a size of 0, `ClosedError`.
        """
        self._holding.check_open()
        pages = self._touched(offset, size)
        return self._backing.is_used(pages)

    def stats(self) -> MemoryStats:
        """Return the pool's present figures; `MemoryStats` explains their limits. Raises `ClosedError`."""
        self._holding.check_open()
        return report.stats(self._backing.table)

    def mappings(self, *, by_page: bool = False) -> list[PoolMapping]:
        """Return rows with the state, access and extents of the pool's pages, in the order of their offsets.

        A row is a run of pages that are alike, or with `by_page` one page. Free pages have no row. Raises
        `ClosedError`.
        """
        self._holding.check_open()
        return report.mappings(self._backing.table, by_page=by_page)

    # Backing addresses

    def allocate(self, offset: SupportsIndex, size: Size, *, timeout: float | None = None) -> PoolRange:
        """Back every page that [offset, offset + size) touches, and return the range, an int: the address of `offset`.

        `timeout` is how many seconds the call may wait until the broker has enough free memory for all missing pages
        together, from 0 (not at all) to 24 hours. By default a request within the model's guarantee waits as long as
        the broker's configuration allows, and any other request does not wait. A request that exceeds the limit of the
        model or the tenant is refused at once. Without a broker no call waits. While the call waits, other calls on
        these pages are refused.

        All or nothing: after an error, nothing more is mapped or charged than before. There is one exception: Ctrl-C
        after the mapping of the last page is raised at the end, and the pages are allocated. Raises `InvalidOffset`
        beyond the capacity, `InvalidRequest` for a size of 0, `AlreadyMapped` when a page is backed already or
        another thread is changing it, `Offloaded`, `OutOfMemory` with the level that refused, `TooMany` when too many
        requests wait already, `DeviceFailure`, `DescriptorLimit`, `BrokerUnavailable`, `ClosedError`.
        """
        try:
            until = None if timeout is None else deadline_of(timeout)
            self._holding.check_open()
            offset, length, pages = self._checked(offset, size)
            self._backing.back([pages], size, until, within=(offset % self._page_size,))
        except SHORTENED as error:
            shorten(error)
            raise
        return range_of(self, self._holding.region.address + offset, offset, length)

    def allocate_ranges(
        self,
        ranges: Iterable[tuple[SupportsIndex, Size]],
        *,
        timeout: float | None = None,
        ahead: bool = False,
        wanted_bytes: Size = 0,
    ) -> None:
        """Back every page that any of the ranges touches, in one request: all of them, or none.

        A range is an offset and a size, as for `allocate`, and no two ranges may touch the same page. `timeout` is that
        of `allocate`. With `ahead`, the memory is requested ahead of need: the broker lends it only if nobody waits for
        memory, and the call does not wait. `wanted_bytes` is for a program that will allocate more soon: the total that
        it wants, including this call. While the call waits, the broker recalls that total from others at once. Raises
        what `allocate` raises, and `InvalidRequest` for ranges that share a page.
        """
        until, wanted = deadline_of(timeout), bytes_of("wanted_bytes", wanted_bytes)
        self._holding.check_open()
        offsets, runs = self._touched_by(ranges)
        if runs:
            within = [offset % self._page_size for offset in offsets]
            size = sum(map(len, runs)) * self._page_size
            self._backing.back(runs, size, until, within=within, ahead=ahead, wanted_bytes=wanted)

    def allocate_anywhere(self, size: Size, alignment: Size = 0, *, timeout: float | None = None) -> PoolRange:
        """Back `size` bytes in the lowest free run of pages that holds them, and return the range, an int: its address.

        The address is a multiple of the page size and of `alignment`, a power of two in bytes. Spare pages count as
        free, and a pool that borrows ahead uses a run of them first. `timeout` is that of
        `allocate`. Raises `OutOfVirtualMemory` if no free run of addresses is that long, and otherwise what `allocate`
        raises.
        """
        try:
            until = deadline_of(timeout)
            self._holding.check_open()
            length = bytes_of("a size", size, at_least=1)
            align = bytes_of("an alignment", alignment) if alignment != 0 else 0
            if align and not is_power_of_two(align):
                raise InvalidRequest(f"an alignment is a power of two, not {alignment!r}")
            base, step = self._holding.region.address, max(align, self._page_size) // self._page_size
            first = -(base // self._page_size) % step
            pages = self._backing.back_found(Search(length, step, first), until)
        except SHORTENED as error:
            shorten(error)
            raise
        offset = pages.start * self._page_size
        return range_of(self, base + offset, offset, length)

    def grow(self, size: Size, *, timeout: float | None = None) -> PoolRange:
        """Back the first `size` bytes after the highest allocated page, and return the range, an int: their address.

        Holes below stay as they are. A page that another thread is backing counts as allocated, so concurrent callers
        get neighbouring ranges. `timeout` is that of `allocate`. Raises `OutOfVirtualMemory` beyond the capacity, and
        otherwise what `allocate` raises.
        """
        try:
            until = deadline_of(timeout)
            self._holding.check_open()
            length = bytes_of("a size", size, at_least=1)
            pages = self._backing.back_found(Search(length, above=True), until)
        except SHORTENED as error:
            shorten(error)
            raise
        offset = pages.start * self._page_size
        return range_of(self, self._holding.region.address + offset, offset, length)

    def shrink(self, size: Size) -> None:
        """Free the pages of the last `size` bytes before the end of the highest allocated page.

        It undoes a `grow` of that size. Raises what `free` raises: `NotMapped` when there is a hole among the
        pages, and `InvalidOffset` when there are fewer.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        self._backing.drop(lambda: [self._backing.table.below(length)])

    def prepare(self, size: Size, *, timeout: float | None = None) -> None:
        """Back the next `size` bytes after the highest allocated page ahead of need, as spare pages.

        The next `grow`, or `allocate` there, needs no call to the broker. The pages are charged from now on, in
        addition to `spare_pages`. `timeout` is that of `allocate`. Raises what `grow` raises.
        """
        until = deadline_of(timeout)
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        self._backing.prepare(Search(length, above=True), until)

    def trim(self) -> int:
        """Release every spare page, and return the number of bytes released. Waits as `free` does.

        A pool that borrows ahead does so again from the next allocation on. The call also frees host memory that
        `restore` has kept pinned. Raises `DeviceFailure` and `ClosedError`.
        """
        self._holding.check_open()
        return self._backing.trim_all() * self._page_size

    def free(self, where: SupportsIndex, size: Size | None = None, *, after: Waitable | None = None) -> None:
        """Release an allocation, `free(memory)`, or every page that a range touches, `free(offset, size)`.

        `memory` is what `allocate`, `allocate_anywhere` or `grow` returned, or its address. The allocation ends before
        a page of it that was freed: what lies behind such a page is an allocation of its own, and begins at its first
        page. The pool keeps the addresses. The bytes of offloaded pages are dropped, and freed on the host.

        Waits once for the work that this process has submitted to the device, because unmapping does not wait. With
        `after`, such as a `torch.cuda.Event`, it calls `after.synchronize()` instead: record the event after the last
        work that may use the range. Do not call `free` during a CUDA graph capture, with or without `after`.

        It does not wait for the broker: the broker reads the release before this session's next request, and before it
        refuses any session for lack of memory. In a `__del__` that has interrupted another call of the library, this
        returns, and a thread releases soon. Raises `NotMapped` when a page is not backed, when no allocation begins at
        the address (a compaction moves allocations, and so changes their addresses), or when the range was freed
        already; `BufferError` while a view of it is alive; `InvalidOffset`, `InvalidRequest`, `ClosedError`, and what
        `after.synchronize` raises; nothing has changed then. Raises `DeviceFailure`. The memory is also released while
        the broker is unreachable.
        """
        try:
            self._holding.check_open()
            if after is not None:
                _check_fence(after)
            if size is None:
                if isinstance(where, PoolRange) and where.freed:
                    raise NotMapped(f"{where!r} was freed already")
                address = whole_number("an address", where, InvalidOffset)
                self._backing.drop(partial(self._backing.begun_at, address), after)
                if isinstance(where, PoolRange):
                    where.freed = True
            else:
                _, _, pages = self._checked(where, size)
                self._backing.drop(lambda: [pages], after)
        except SHORTENED as error:
            shorten(error)
            raise

    def free_ranges(self, ranges: Iterable[tuple[SupportsIndex, Size]], *, after: Waitable | None = None) -> None:
        """Release every page that any of the ranges touches, after a single wait for the device.

        `ranges` are those of `allocate_ranges`, and `after` is that of `free`. Raises what `free` raises;
        nothing has changed then, except that after a `DeviceFailure` the ranges that were unmapped before it are
        released.
        """
        self._holding.check_open()
        if after is not None:
            _check_fence(after)
        _, runs = self._touched_by(ranges)
        if runs:
            self._backing.drop(lambda: runs, after)

    def protect(self, offset: SupportsIndex, size: Size, access: AccessFlags | str) -> None:
        """Set the access of every page that [offset, offset + size) touches: `"read"`, `"none"` or `"read_write"`.

        It prevents mistakes of this process, not misuse. It lasts until the pages are freed, and compaction
        preserves it. On a GPU, a kernel that violates it ends the process's CUDA context.

        A reduction waits for the work that this process has submitted to the device. Raises `NotMapped` when a page is
        not allocated, `BufferError` for a reduction while a view of the page lives, `InvalidOffset`, `InvalidRequest`,
        `DeviceFailure`, `ClosedError`; nothing has changed then.
        """
        self._holding.check_open()
        pages = self._touched(offset, size)
        self._backing.protect(pages, access_of(access))

    def compact(self, *, dry_run: bool = False, on_move: Callable[[Move], object] | None = None) -> list[Move]:
        """Close holes among the allocated pages, lowest first, and return the moves. No bytes are copied.

        A contiguous run of allocated pages moves as one: its extents are mapped at lower addresses, and each page keeps
        its access. A run does not move while a view, a span or a pin of any part of it is alive, or another call is
        changing it. Spare pages are released first, including those that are just being borrowed; a pool that borrows
        ahead does so again from the next allocation on. Each move waits for the work that this process has submitted to
        the device.

        Addresses in moved runs become invalid: update them from the moves. They must not be used during the call, so a
        thread that works in the pool must pin its range first. An allocation that was aligned to more than a page
        (`allocate_anywhere`) may lose its alignment: pin it. `on_move` is called after each move, while the pool still
        refuses all other calls on the old and the new addresses, and no interrupt is raised in it. So it can update
        pointers before any other thread uses them. If the main thread calls `compact`, `on_move` runs in another
        thread. An exception that `on_move` raises ends the compaction; `on_move` has then been called for every move
        that was made.

        With `dry_run` nothing is changed, and the moves that it would make now are returned. Raises `InvalidRequest`,
        `CompactionFailed`, which has the moves that were made before, `DeviceFailure`, `ClosedError`. Each move happens
        whole or not at all.
        """
        self._holding.check_open()
        if on_move is not None and not callable(on_move):
            raise InvalidRequest(f"on_move is a function that is called with each move, not {on_move!r}")
        if dry_run:
            return compaction.plan(self._backing.table)
        return self._backing.compact(on_move)

    # On the host

    def offload(
        self,
        offset: SupportsIndex = 0,
        size: Size | None = None,
        *,
        to: PageStore | None = None,
        progress: Progress | None = None,
        despite_views: bool = False,
    ) -> int:
        """Copy the bytes of the pages that [offset, offset + size) touches to the host, and release their memory.

        Without a range it offloads the whole pool. It skips pages that are not allocated or are offloaded already, and
        releases spare pages without a copy; a pool that borrows ahead does so again from the next allocation on. The
        pages stay allocated and keep their addresses, but have no memory until `restore`. Returns the number of bytes
        copied. `progress(done, total)` is called with bytes, and an exception that it raises stops the copying. If the
        main thread calls `offload`, `progress` runs in another thread, so no interrupt is raised in it. Ctrl-C stops
        the copying between two chunks.

        The bytes go to pinned host memory of this process. The model is charged for it at the location `host`, as a
        declaration. With `to`, they go to a segment at that location that this process has created and not sealed. The
        segment is sealed at the end, and then outlives the process (`restore_from`). `offload_size` returns the size
        that it needs. After an `offload` to a segment has stopped half way, that segment takes no other pages until
        these are restored.

        `despite_views` offloads pages that living views and tensors use. These stay valid, at the same addresses, but
        **nothing may use them until `restore`**: an access ends the process on the host, and its CUDA context on a GPU.

        Waits for the work that this process has submitted to the device. Raises `OutOfMemory` when the host's limit
        refuses, `BufferError` while a view of a page or of `to` is alive, `NotMapped` when another call is changing a
        page, `InvalidOffset`, `InvalidRequest`, and what a segment raises; nothing has changed then. `DeviceFailure`,
        `ClosedError`, and an exception of `progress` may stop it half way: the pages copied until then are offloaded,
        the rest is unchanged, and the error's `metadata` has the bytes of both. If only the seal fails, because the
        broker is unreachable or a view of `to` was taken meanwhile, everything is offloaded, and `to.seal()` retries.
        """
        self._holding.check_open()
        check_progress(progress)
        pages = self._touched_or_all(offset, size)
        return uninterrupted(
            lambda: self._backing.offload(pages, to, progress, despite_views=despite_views), self._holding.interrupted
        )

    def offload_size(self, offset: SupportsIndex = 0, size: Size | None = None) -> int:
        """Return the bytes that a segment needs, header included, for an `offload` of this range now.

        Raises `NotMapped` when another call is changing a page, `InvalidOffset`, `InvalidRequest` and `ClosedError`.
        """
        self._holding.check_open()
        pages = self._touched_or_all(offset, size)
        return segment_size(shapes(self._backing.used_runs(pages), self._page_size))

    def restore(
        self,
        offset: SupportsIndex = 0,
        size: Size | None = None,
        *,
        progress: Progress | None = None,
        keep_pinned: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Borrow memory for the offloaded pages of [offset, offset + size), and copy their bytes back.

        The pages keep their addresses and their access. Without a range it restores the whole pool. It skips pages that
        are not offloaded. Pinned memory is freed and no longer declared. With `keep_pinned` it stays for the next
        `offload`, because pinning memory takes far longer than copying it. A segment stays as it is. Returns the number
        of bytes copied; `progress` is that of `offload`, and `timeout` that of `allocate`, in total for all pages.

        Raises `OutOfMemory` when there is not enough memory: the pages restored until then stay restored, the rest
        stays offloaded, and `metadata` has `restored_bytes` and `offloaded_bytes`. The same is true for every error
        half way. Also raises the other errors of `allocate`, and `NotMapped` when another call is changing a page.
        """
        until = deadline_of(timeout)
        self._holding.check_open()
        check_progress(progress)
        pages = self._touched_or_all(offset, size)
        return uninterrupted(
            lambda: self._backing.restore(pages, progress, until, keep_pinned=keep_pinned), self._holding.interrupted
        )

    def restore_from(
        self, segment: PageStore, *, progress: Progress | None = None, timeout: float | None = None
    ) -> int:
        """Restore pages that another pool, possibly of another process, has offloaded to `segment`.

        The pages keep their offsets, and nothing may be allocated there. The page size must divide their offsets and
        sizes. Afterwards the pages are as if this pool had offloaded and restored them, also after an error half way.
        `timeout` is that of `restore`. Returns the number of bytes copied. Raises `InvalidRequest` if `segment` is not
        a sealed segment of offloaded pages, or its pages do not fit this pool, `InvalidTensorIndex`, `AlreadyMapped`,
        and what `restore` raises.
        """
        until = deadline_of(timeout)
        self._holding.check_open()
        check_progress(progress)
        check_segment(segment, self._holding.source.driver)
        found = runs_in(segment, self._page_size, self._capacity)
        return uninterrupted(
            lambda: self._backing.restore_from(segment, found, progress, until), self._holding.interrupted
        )

    # Using it

    def view(self, offset: SupportsIndex, size: Size) -> memoryview:
        """Return [offset, offset + size) as a memoryview, on the host driver. It is writable if all its pages are.

        While it, or an object made from it, lives, the range cannot be freed, and a closed pool keeps its memory.
        Raises `NotMapped` when a page is not backed, `InvalidRequest` on a GPU, or if a page allows no access,
        `InvalidOffset` and `ClosedError`.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: wrap the address on a GPU")
        self._holding.check_open()
        offset, length = whole_number("an offset", offset, InvalidOffset), bytes_of("a size", size)
        pages = self._touched(offset, length)
        return self._backing.view(self, pages, offset, length)

    def span(self, offset: SupportsIndex, size: Size) -> Span:
        """Keep [offset, offset + size) mapped while the result lives: for code that passes on its addresses.

        Like a view, it prevents freeing the range, and a closed pool keeps its memory. An empty range keeps the
        page of its offset. Raises `NotMapped` when a page is not backed, `InvalidOffset`, `InvalidRequest` and
        `ClosedError`.
        """
        self._holding.check_open()
        offset, length = whole_number("an offset", offset, InvalidOffset), bytes_of("a size", size)
        pages = self._touched(offset, length or 1)
        return self._backing.span(self, pages, offset, length)

    def addresses(self, offset: SupportsIndex, size: Size) -> Span:
        """Keep the addresses [offset, offset + size) reserved while the result lives, whatever memory is there.

        Pages of the range can be allocated, freed and offloaded meanwhile, but `compact` moves nothing from or
        into it. A closed pool keeps its memory until the result is gone, so free them first. The caller must make sure
        that nothing uses an address while it has no memory: such an access ends the process on the host, and its CUDA
        context on a GPU. Raises `InvalidOffset`, `InvalidRequest` and `ClosedError`.
        """
        self._holding.check_open()
        offset, length = whole_number("an offset", offset, InvalidOffset), bytes_of("a size", size)
        self._touched(offset, length or 1)
        return self._holding.span(self, offset, length, keeps_memory=False)

    @contextmanager
    def pin(self, offset: SupportsIndex, size: Size) -> Iterator[int]:
        """Keep [offset, offset + size) at its address during a block; `as` gives the address.

        As with a living span, the range cannot be freed or moved, and its access cannot be reduced. Raises what
        `span` raises.
        """
        span = self.span(offset, size)
        try:
            yield span.address
        finally:
            del span

    # What the user gives

    def _touched(self, offset: SupportsIndex, size: Size) -> range:
        """Return the numbers of the pages that [offset, offset + size) touches, after checking both."""
        return self._checked(offset, size)[2]

    def _checked(self, offset: SupportsIndex, size: Size) -> tuple[int, int, range]:
        """Return both as ints, and the numbers of the pages that [offset, offset + size) touches."""
        length = bytes_of("a size", size, at_least=1)
        offset = whole_number("an offset", offset, InvalidOffset)
        # The comparison has no sum, so that it is also right in a language with 64-bit integers.
        if not 0 <= offset < self._capacity or length > self._capacity - offset:
            raise InvalidOffset(
                f"{length} bytes at offset {offset} do not lie in the pool's virtual capacity of {self._capacity} bytes"
            )
        pages = range(offset // self._page_size, (offset + length - 1) // self._page_size + 1)
        return offset, length, pages

    def _touched_by(self, ranges: Iterable[tuple[SupportsIndex, Size]]) -> tuple[list[int], list[range]]:
        """Return the offsets of ranges and the pages that each touches, both by address, after checking them."""
        found: list[tuple[int, range]] = []
        for given in ranges:
            if not isinstance(given, tuple) or len(given) != 2:
                raise InvalidRequest(f"a range is an offset and a size, not {given!r}")
            offset, _, pages = self._checked(*given)
            found.append((offset, pages))
        found.sort(key=itemgetter(0))
        for (_, before), (offset, pages) in pairwise(found):
            if pages.start < before.stop:
                raise InvalidRequest(f"two of the ranges touch the page of offset {offset}")
        return [offset for offset, _ in found], [pages for _, pages in found]

    def _touched_or_all(self, offset: SupportsIndex, size: Size | None) -> range:
        """Return the pages of a range. Without a size the range ends at the end of the pool."""
        pages = self._touched(offset, 1 if size is None else size)
        return pages if size is not None else range(pages.start, self._capacity // self._page_size)

    def __repr__(self) -> str:
        used, all_of_it = format_size(self.physical_usage_bytes), format_size(self._capacity)
        held = self._holding.views.held_by(", kept by ")
        return f"<membroker.VirtualMemoryPool of {all_of_it}, {used} backed{', closed' * self.closed}{held}>"

    def __str__(self) -> str:
        """Return the `repr`, and below it the map of the pages up to the highest allocated one."""
        return repr(self) if self.closed else f"{self!r}\n{report.text_map(self.mappings(), self._page_size)}"

    def _repr_html_(self) -> str:
        """Return the map for a notebook."""
        return report.html_map(repr(self), [] if self.closed else self.mappings())


def _check_fence(after: object) -> None:
    """Raise `InvalidRequest` for an object that cannot wait."""
    if not callable(getattr(after, "synchronize", None)):
        raise InvalidRequest(f"a fence has a method synchronize(), as torch.cuda.Event has, and {after!r} has none")


def _ahead_of(ahead: int | str, page_size: int) -> Ahead | None:
    """Return what keeps `ahead` pages ready, or None if that is 0."""
    if ahead == "auto":
        return Ahead(None, page_size)
    pages = whole_number('the number of pages ahead (or "auto")', ahead)
    if pages < 0:
        raise InvalidRequest(f'a pool borrows 0 or more pages ahead, or "auto", not {pages}')
    return Ahead(pages, page_size) if pages else None
