"""`VirtualMemoryPool`: many addresses, and memory behind the ones that are used.

Owns what a user may ask of it, in offsets and sizes; they become pages here, and a `Backing` works on those. It knows
a `Source`, never a broker, and must never map or unmap anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import groupby

from ..arguments import (
    Progress,
    access_of,
    bytes_of,
    check_page_size,
    check_progress,
    location_of,
    rounded_up,
    whole_number,
)
from ..deprecated import renamed
from ..errors import InvalidOffset, InvalidRequest, NotMapped, OutOfVirtualMemory
from ..interrupts import Operation, uninterrupted
from ..memory.lender import Lender, Source, source_of
from ..memory.lifetime import Resource
from ..memory.region import device_failures
from ..memory.views import Span
from ..types import MemoryStats, Move, PoolMapping
from ..vmm.driver import AccessFlags, Location
from ..vmm.sizes import MIB, format_size, is_power_of_two
from .backing import Backing
from .offload import PageStore, check_segment, runs_in, size_in_segment
from .page_table import OFFLOADED, SPARE, USED

DEFAULT_PAGE_SIZE = 64 * MIB
_STATES = {SPARE: "spare", OFFLOADED: "offloaded"}


@renamed(physical_memory_usage="physical_usage_bytes")
class VirtualMemoryPool(Resource):
    """Addresses for `virtual_capacity` bytes, backed page by page on demand. Thread-safe, and a context manager.

    Offsets and sizes are in bytes (sizes may be text, such as `"8GiB"`) and need no alignment: a call works on
    every page that its range touches. What is charged is whole pages. `virtual_capacity` is rounded up to whole
    pages; nothing but the process's address space limits it. The base address is a multiple of the page size.

    Up to `spare_pages` pages that are deallocated stay mapped and charged, with what is in them, and the next
    allocation of them costs no call; `prepare` lends ahead of need, `trim` gives back what is spare.

    The source is a `Model`, where a broker lends, or a `LocalSource`, without one.
    """

    def __init__(
        self,
        source: Source | Lender,
        virtual_capacity: int | str,
        page_size: int | str = DEFAULT_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
        spare_pages: int = 0,
    ) -> None:
        spare_pages = whole_number("the number of spare pages", spare_pages)
        if spare_pages < 0:
            raise InvalidRequest(f"a pool keeps 0 or more spare pages, not {spare_pages}")
        self._page_size = check_page_size(page_size, source.driver.device.granularity)
        where = location_of(location)
        self._capacity = rounded_up("a virtual capacity", virtual_capacity, self._page_size)
        count = self._capacity // self._page_size
        with device_failures():
            self._backing = Backing(source_of(source), self, count, self._page_size, where, spare_pages)
        self._holding, self._table, self._lock = self._backing.holding, self._backing.table, self._backing.lock
        self._on_host = source.driver.device.driver == "host"

    # What it is

    @property
    def capacity(self) -> int:
        """Bytes of addresses."""
        return self._capacity

    @property
    def base_address(self) -> int:
        """The address of offset 0, in this process; it stays the same as long as the pool is open."""
        self._holding.check_open()
        return self._holding.region.address

    @property
    def page_size(self) -> int:
        """Bytes of a page: the step in which the pool grows and shrinks."""
        return self._page_size

    @property
    def physical_usage_bytes(self) -> int:
        """Bytes of memory behind the addresses: whole pages."""
        return len(self._holding.region.extents) * self._page_size

    def is_mapped(self, offset: int, size: int | str = 1) -> bool:
        """Say whether all pages that [offset, offset + size) touches are allocated, and their memory is there.

        Not where a page is offloaded, or another call is at it. Raises `InvalidOffset` for what does not lie in the
        pool, `InvalidRequest` for a size of 0, `ClosedError`.
        """
        self._holding.check_open()
        pages = self._touched(offset, size)
        with self._lock:
            return self._table.is_used(pages)

    def stats(self) -> MemoryStats:
        """Return the pool's numbers at this moment; `MemoryStats` says what they do not tell."""
        self._holding.check_open()
        with self._lock:
            mapped, spare = len(self._holding.region.extents), self._table.spare
            largest, free = self._table.largest_free_run()
            offloaded = self._backing.offloaded.size
        return MemoryStats(
            virtual_capacity_bytes=self._capacity,
            physical_usage_bytes=mapped * self._page_size,
            mapped_pages=mapped,
            largest_free_run_bytes=largest * self._page_size,
            fragmentation_ratio=1 - largest / free if free else 0.0,
            spare_pages=spare,
            offloaded_bytes=offloaded,
        )

    def mappings(self, *, by_page: bool = False) -> list[PoolMapping]:
        """Return what is where, by offset: a row for each run of pages of which the same holds, or for each page."""
        self._holding.check_open()
        with self._lock:
            runs, pins = list(self._table.runs()), self._backing.pinned()
            extents, restricted = self._holding.extents, self._table.restricted.copy()
        # The lock is held no longer: this takes its time with many pages, and allocations go on meanwhile.
        pinned = {page for pages in pins for page in pages}
        rows = []
        for pages, state, busy in runs:
            common = "changing" if busy else _STATES.get(state)
            for alike in map(_page, pages) if by_page else _alike(pages, pinned, restricted):
                offset, end = alike.start * self._page_size, alike.stop * self._page_size
                access = restricted.get(alike.start, AccessFlags.READ_WRITE)
                behind = map(extents.get, range(offset, end, self._page_size))
                rows.append(
                    PoolMapping(
                        offset,
                        end - offset,
                        common or ("pinned" if alike.start in pinned else "used"),
                        access.name.lower(),
                        tuple(extent for extent in behind if extent is not None),
                    )
                )
        return rows

    # Backing addresses

    def allocate(self, offset: int, size: int | str) -> int:
        """Back every page that [offset, offset + size) touches, and return the address of `offset`.

        All or nothing: when it raises, nothing is mapped or charged that was not before; but Ctrl-C behind the last
        page's mapping is raised at the end, and the pages are allocated. Raises `InvalidOffset`
        beyond the capacity, `InvalidRequest` for a size of 0, `AlreadyMapped` when a page is backed already or
        another thread is at it, `OutOfMemory` with the level that refused, `DeviceFailure`, `DescriptorLimit`,
        `BrokerUnavailable`, `ClosedError`.
        """
        self._holding.check_open()
        offset = whole_number("an offset", offset, InvalidOffset)
        pages, within = self._touched(offset, size), offset % self._page_size
        if self._table.spare and self._backing.take_spare(lambda: pages, within):
            return self._holding.region.address + offset
        self._backing.back(lambda: pages, bytes_of("a size", size), within=within)
        return self._holding.region.address + offset

    def allocate_anywhere(self, size: int | str, alignment: int | str = 0) -> int:
        """Back `size` bytes at the lowest free addresses that hold them side by side, and return the first.

        It begins at a page, and at a multiple of `alignment` bytes, a power of two. Spare pages are free. `free` takes
        the address. Raises `OutOfVirtualMemory` where no free run of
        addresses is that long, and otherwise as `allocate`.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        count = -(-length // self._page_size)
        align = bytes_of("an alignment", alignment)
        if align and not is_power_of_two(align):
            raise InvalidRequest(f"an alignment is a power of two, not {alignment!r}")
        base, step = self._holding.region.address, max(align, self._page_size) // self._page_size
        first = -(base // self._page_size) % step
        pages = self._backing.back(lambda: self._table.first_fit(count, step, first), length)
        return base + pages.start * self._page_size

    def grow(self, size: int | str) -> int:
        """Back the first `size` bytes after the highest allocated page, and return their address.

        Holes below are left as they are. A page that another thread is backing counts as allocated, so threads that
        grow at once get neighbouring ranges. Raises `OutOfVirtualMemory` past the capacity, and otherwise as
        `allocate`.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        pages = self._backing.take_spare(lambda: self._above(length)) if self._table.spare else None
        if pages is None:
            pages = self._backing.back(lambda: self._above(length), length)
        return self._holding.region.address + pages.start * self._page_size

    def shrink(self, size: int | str) -> None:
        """Deallocate the pages of the last `size` bytes before the end of the highest allocated page.

        It undoes a `grow` of that size. Raises as `deallocate`: `NotMapped` when there is a hole among them, and
        `InvalidOffset` when there are not that many.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        self._backing.drop(lambda: self._below(length))

    def prepare(self, size: int | str) -> None:
        """Back the next `size` bytes after the highest allocated page ahead of need, as spare pages.

        The next `grow`, or `allocate` there, then asks nobody. They are charged from now on, beside `spare_pages`.
        Raises as `grow`.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        self._backing.back(lambda: self._above(length), length, spare=True)

    def trim(self) -> int:
        """Give back every spare page, and return how many bytes that was. Waits as `deallocate` does.

        Host memory that `restore` has kept pinned is freed as well.
        """
        self._holding.check_open()
        with Operation(self._holding):
            uninterrupted(self._backing.offloaded.trim)
        return self._backing.trim() * self._page_size

    def deallocate(self, offset: int, size: int | str) -> None:
        """Give back every page that [offset, offset + size) touches. Their addresses stay the pool's.

        The bytes of offloaded pages are forgotten, and freed on the host.

        Waits once for the work that this process has given to the device, because unmapping does not, and not for the
        broker: it hears of it before it takes whatever this session asks next, and before it refuses anybody for want
        of room. Raises `NotMapped` when a page is not backed, `BufferError` while a view of the range is alive,
        `InvalidOffset` and `InvalidRequest`; nothing has changed then. When the broker is away the memory is given back
        all the same.
        """
        self._holding.check_open()
        pages = self._touched(offset, size)
        self._backing.drop(lambda: pages)

    def free(self, address: int) -> None:
        """Give back the allocation that begins at `address`, as `allocate`, `allocate_anywhere` and `grow` returned it.

        What `deallocate` and `shrink` have taken of it is gone already. Raises as `deallocate`, and `NotMapped` where
        no allocation begins: a compaction moves allocations, and their addresses with them.
        """
        self._holding.check_open()
        wanted = whole_number("an address", address, InvalidOffset)
        self._backing.drop(lambda: self._begun_at(wanted))

    def protect(self, offset: int, size: int | str, access: AccessFlags | str) -> None:
        """Set what every page that [offset, offset + size) touches allows: `"read"`, `"none"` or `"read_write"`.

        A guard against accidents of this process, no security boundary. It lasts until the pages are deallocated,
        and goes with them when they are moved. On a card a kernel that breaks it ends the process's context.

        Taking something away waits for the work that this process has given to the device. Raises `NotMapped` when a
        page is not allocated, `BufferError` when something is to be taken away under a living view, `InvalidOffset`,
        `InvalidRequest`, `DeviceFailure`, `ClosedError`; nothing has changed then.
        """
        self._holding.check_open()
        pages = self._touched(offset, size)
        self._backing.protect(pages, access_of(access))

    def compact(self, *, dry_run: bool = False, on_move: Callable[[Move], object] | None = None) -> list[Move]:
        """Close holes among the allocated pages, lowest first, and return what was moved where. Copies no byte.

        The extents of a run of allocated pages without a gap are mapped lower instead, with what each page allows: the
        run moves as one, so what lies side by side stays so, or it stays where it is. It stays when a view, a span
        or a pin of any part of it is alive, or another call is at it. Spare pages are given back first. Each move
        waits for the work that this process has given to the device.

        Addresses in what was moved are dead: patch them by the moves. Nobody may use them meanwhile; another thread
        that works in the pool pins its range first. What was aligned to more than a page (`allocate_anywhere`) may not
        be so afterwards: pin it. `on_move` is called after each move, while all other calls on the
        addresses that were left and reached are still refused, and no interrupt is raised in it: with it, pointers
        are right before anybody can come upon them. A call of the main thread calls it in another thread. What it
        raises ends the compaction; it was told of all that moved.

        With `dry_run` nothing is changed, and what it would do now is returned. Raises `CompactionFailed`, which has
        the moves that were made before, `DeviceFailure`, `ClosedError`; each move happens whole or not at all.
        """
        self._holding.check_open()
        if on_move is not None and not callable(on_move):
            raise InvalidRequest(f"on_move is a function that is called with each move, not {on_move!r}")
        if dry_run:
            return self._backing.plan()
        tell = on_move or (lambda move: None)
        return uninterrupted(lambda: self._backing.compact(tell), self._holding.interrupted)

    # Offloading

    def offload(
        self,
        offset: int = 0,
        size: int | str | None = None,
        *,
        to: PageStore | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copy what is in the pages that [offset, offset + size) touches to the host, and give their memory back.

        The whole pool, unless a range is given. Pages that are not allocated, or are offloaded already, are passed
        over; spare ones are given back as they are. The pages stay allocated and their addresses the pool's, but
        nothing is behind them until `restore`. Returns how many bytes were copied; `progress` is told how many are
        done, of how many, and an exception of its own stops the copying. A call of the main thread calls it in
        another thread, so no interrupt is raised in it: Ctrl-C stops the copying between two chunks.

        The bytes lie in pinned memory of this process, for which its model is charged at the location host (a
        declaration); or in `to`, a segment of that location that this process has made and not sealed. It is sealed
        at the end, and then outlives the process (`restore_from`); `offload_size` says how large it has to be. One that
        has pages of an `offload` that stopped half way takes no others until they are restored.

        Waits for the work that this process has given to the device. Raises `OutOfMemory` when the host's limit
        refuses, `BufferError` while a view of a page or of `to` is alive, `NotMapped` when another call is at one, and
        what a segment raises; nothing has changed then. Stopped half way, by `DeviceFailure`, `ClosedError`, or
        `progress`, what had arrived is offloaded, the rest is as it was, and the error's numbers say how much is where.
        Where only the seal failed, for want of a broker or for a view of `to` that was taken meanwhile, all of it is
        offloaded, and `to.seal()` tries once more.
        """
        self._holding.check_open()
        check_progress(progress)
        pages = self._touched_or_all(offset, size)
        return uninterrupted(lambda: self._backing.offload(pages, to, progress), self._holding.interrupted)

    def offload_size(self, offset: int = 0, size: int | str | None = None) -> int:
        """Return how many bytes a segment needs for what `offload` of this range would copy now, and where it goes."""
        self._holding.check_open()
        pages = self._touched_or_all(offset, size)
        with self._lock:
            runs = self._table.runs_of(USED, pages)
        return size_in_segment(runs, self._page_size)

    def restore(
        self,
        offset: int = 0,
        size: int | str | None = None,
        *,
        progress: Progress | None = None,
        keep_pinned: bool = False,
    ) -> int:
        """Borrow memory for the offloaded pages of [offset, offset + size), and bring their bytes back.

        To the same addresses, which allow what they allowed. The whole pool, unless a range is given; pages that are
        not offloaded are passed over. What was pinned is freed and no longer declared; with `keep_pinned` it stays, and
        the next `offload` needs no other: to pin memory takes far longer than to copy it. A segment stays as it is.
        Returns how many bytes were copied; `progress` is that of `offload`.

        Raises `OutOfMemory` when there is not enough memory: what has come back is back, the rest stays offloaded, and
        `metadata` has the numbers, `restored_bytes` and `offloaded_bytes`. So it is with every error half way. Raises
        what `allocate` raises besides, and `NotMapped` when another call is at one of the pages.
        """
        self._holding.check_open()
        check_progress(progress)
        pages = self._touched_or_all(offset, size)
        return uninterrupted(
            lambda: self._backing.restore(pages, progress, keep_pinned=keep_pinned), self._holding.interrupted
        )

    def restore_from(self, segment: PageStore, *, progress: Progress | None = None) -> int:
        """Bring pages here that another pool, maybe of another process, has offloaded to `segment`.

        To the same offsets, where nothing may be allocated, in a pool of the same page size, or of one that fits. Then
        they are as if this pool had offloaded and restored them: also after an error half way. Raises `InvalidRequest`
        for what is no sealed segment of offloaded pages, or not of such a pool, `AlreadyMapped`, and what `restore`
        raises.
        """
        self._holding.check_open()
        check_progress(progress)
        check_segment(segment, self._holding.source.driver)
        found = runs_in(segment, self._page_size, self._capacity)
        return uninterrupted(lambda: self._backing.restore_from(segment, found, progress), self._holding.interrupted)

    # Using it

    def view(self, offset: int, size: int | str) -> memoryview:
        """Return [offset, offset + size) as a memoryview, on the host driver; writable where all of it is.

        While it lives, or anything made from it, the range cannot be deallocated, and a closed pool keeps its memory.
        Raises `NotMapped` when a page is not backed, and `InvalidRequest` on a card, or where no access is allowed.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: wrap the address on a card")
        self._holding.check_open()
        offset, length = whole_number("an offset", offset, InvalidOffset), bytes_of("a size", size)
        pages = self._touched(offset, length)
        with self._lock:
            access = self._check_access(pages)
            if access is AccessFlags.NONE:
                raise InvalidRequest(f"[{offset}, {offset + length}) allows no access: protect() it otherwise")
            view = self._holding.view(self, offset, length)
        return view if access is AccessFlags.READ_WRITE else view.toreadonly()

    def span(self, offset: int, size: int | str) -> Span:
        """Keep [offset, offset + size) mapped as long as the result lives: for whoever gives its addresses away.

        It is to the pool what a living view is: the range cannot be deallocated, and a closed pool keeps its memory.
        An empty range is where its first byte would be. Raises `NotMapped` when a page is not backed, `InvalidOffset`,
        `InvalidRequest` and `ClosedError`.
        """
        self._holding.check_open()
        offset, length = whole_number("an offset", offset, InvalidOffset), bytes_of("a size", size)
        pages = self._touched(offset, length or 1)
        with self._lock:
            writable = self._check_access(pages) is AccessFlags.READ_WRITE
            return self._holding.span(self, offset, length, writable=writable)

    @contextmanager
    def pin(self, offset: int, size: int | str) -> Iterator[int]:
        """Hold [offset, offset + size) where it is during a block, which gets its address.

        It can be neither deallocated nor moved nor be taken access from, as under a living span. Raises as `span`.
        """
        span = self.span(offset, size)
        try:
            yield span.address
        finally:
            del span

    def __repr__(self) -> str:
        used, all_of_it = format_size(self.physical_usage_bytes), format_size(self._capacity)
        return f"<membroker.VirtualMemoryPool of {all_of_it}, {used} backed{', closed' * self.closed}>"

    # Pages

    def _touched(self, offset: int, size: int | str) -> range:
        """Return the numbers of the pages that [offset, offset + size) touches, after checking both."""
        length = bytes_of("a size", size, at_least=1)
        offset = whole_number("an offset", offset, InvalidOffset)
        # Compared without a sum, as a language with 64-bit integers has to.
        if not 0 <= offset < self._capacity or length > self._capacity - offset:
            raise InvalidOffset(
                f"{length} bytes at offset {offset} do not lie in the pool's virtual capacity of {self._capacity} bytes"
            )
        return range(offset // self._page_size, (offset + length - 1) // self._page_size + 1)

    def _touched_or_all(self, offset: int, size: int | str | None) -> range:
        """Return the pages of a range that ends where the pool does unless it has a size."""
        pages = self._touched(offset, 1 if size is None else size)
        return pages if size is not None else range(pages.start, self._table.count)

    def _begun_at(self, address: int) -> range:
        """Return the pages of the allocation that begins at an address. The lock is held."""
        offset = address - self._holding.region.address
        page, within = divmod(offset, self._page_size)
        if not 0 <= offset < self._capacity:
            raise InvalidOffset(f"the address {address:#x} is not one of this pool's")
        if self._table.begins.get(page) != within:
            raise NotMapped(f"no allocation begins at the address {address:#x}: deallocate() takes any offset and size")
        return self._table.allocation(page)

    def _above(self, length: int) -> range:
        """Return the pages of `length` bytes behind all that is taken. The lock is held."""
        end = self._table.top() * self._page_size
        if length > self._capacity - end:
            raise OutOfVirtualMemory(
                length,
                self._capacity - end,
                f"cannot grow by {length} bytes: {self._capacity - end} of the pool's virtual capacity of "
                f"{self._capacity} bytes lie behind its highest allocated page",
            )
        return self._touched(end, length)

    def _below(self, length: int) -> range:
        """Return the pages of the last `length` bytes of what is taken. The lock is held."""
        top, count = self._table.top(), -(-length // self._page_size)
        if count > top:
            raise InvalidOffset(f"the highest allocated page ends at {top * self._page_size}, before {length} bytes")
        return range(top - count, top)

    def _check_access(self, pages: range) -> AccessFlags:
        """Return what all of some pages allow, after checking that they are used. The lock is held."""
        self._table.check_used(pages)
        return self._table.least_access(pages)


def _page(page: int) -> range:
    return range(page, page + 1)


def _alike(pages: range, pinned: Set[int], restricted: Mapping[int, AccessFlags]) -> Iterator[range]:
    """Cut a run where pins begin and end, and where pages allow something else."""
    if not (pinned or restricted):
        yield pages
        return
    for _, run in groupby(pages, lambda page: (page in pinned, restricted.get(page))):
        first, *rest = run
        yield range(first, first + len(rest) + 1)
