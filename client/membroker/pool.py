"""`VirtualMemoryPool`: many addresses, and memory behind the ones that are used.

Owns the order in which pages, their extents and their mappings change; what each page is at a moment stands in a
`PageTable`. It knows a `Source` and a `Region`, never a broker, and must never hold its lock during a call of the
source or the driver: two borrowers that wait for each other would stand still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from membroker.convert import bytes_of, location_of
from membroker.errors import AlreadyMapped, InvalidOffset, InvalidPageSize, InvalidRequest
from membroker.holding import Holding, Placing
from membroker.interrupts import HeldOff
from membroker.offload import OffloadedPages, Progress, check_segment, runs_in, size_in_segment
from membroker.page_table import FREE, OFFLOADED, SPARE, USED, PageTable
from membroker.region import device_failures
from membroker.source import Source
from membroker.types import MemoryStats
from membroker.views import Span
from membroker.vmm.driver import Location
from membroker.vmm.sizes import MAX_BYTES, MIB, format_size, is_power_of_two, round_up

if TYPE_CHECKING:
    from membroker.segment import Segment

DEFAULT_PAGE_SIZE = 64 * MIB


class VirtualMemoryPool:
    """Addresses for `virtual_capacity` bytes, backed page by page on demand. Thread-safe, and a context manager.

    Offsets and sizes are in bytes (sizes may be text, such as `"8GiB"`) and need no alignment: a call works on
    every page that its range touches. What is charged is whole pages. `virtual_capacity` is rounded up to whole
    pages; nothing but the process's address space limits it.

    Up to `spare_pages` pages that are deallocated stay mapped and charged, with what is in them, and the next
    allocation of them costs no call; `prepare` lends ahead of need, `trim` gives back what is spare.
    """

    def __init__(
        self,
        source: Source,
        virtual_capacity: int | str,
        page_size: int | str = DEFAULT_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
        spare_pages: int = 0,
    ) -> None:
        if spare_pages < 0:
            raise InvalidRequest(f"a pool keeps no less than 0 spare pages, not {spare_pages}")
        self._page_size = _check_page_size(page_size, source.driver.device.granularity)
        self._location = location_of(location)
        self._capacity = round_up(bytes_of("virtual_capacity", virtual_capacity, at_least=1), self._page_size)
        if self._capacity > MAX_BYTES:
            raise InvalidRequest(f"a virtual capacity of {virtual_capacity!r} rounds up to more than 2^63-1 bytes")
        with device_failures():
            self._holding = Holding(source, self._capacity, "pool", alignment=self._page_size)
        self._on_host = source.driver.device.driver == "host"
        self._pages = PageTable(self._capacity // self._page_size, self._page_size)
        self._spare_pages = spare_pages
        self._lock = threading.Lock()
        self._offloaded = OffloadedPages(self._holding, self._pages, self._lock, self._location)
        self._holding.owned_by(self)

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
    def physical_memory_usage(self) -> int:
        """Bytes of memory behind the addresses: whole pages."""
        return len(self._holding.extents) * self._page_size

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._holding.closed

    def is_mapped(self, offset: int) -> bool:
        """Say whether the byte at `offset` is allocated. Raises `InvalidOffset` outside the pool."""
        self._holding.check_open()
        page = self._touched(offset, 1).start
        with self._lock:
            return self._pages.is_used(page)

    def stats(self) -> MemoryStats:
        """Return the pool's numbers at this moment."""
        self._holding.check_open()
        with self._lock:
            mapped, spare, offloaded = len(self._holding.extents), self._pages.spare, self._offloaded.size
            largest, free = self._pages.largest_free_run()
        return MemoryStats(
            virtual_capacity=self._capacity,
            physical_usage=mapped * self._page_size,
            mapped_pages=mapped,
            largest_free_run=largest * self._page_size,
            fragmentation_ratio=1 - largest / free if free else 0.0,
            spare_pages=spare,
            offloaded_bytes=offloaded,
        )

    # Backing addresses

    def allocate(self, offset: int, size: int | str) -> int:
        """Back every page that [offset, offset + size) touches, and return the address of `offset`.

        All or nothing: when it raises, nothing is mapped or charged that was not before. Raises `InvalidOffset`
        beyond the capacity, `InvalidRequest` for a size of 0, `AlreadyMapped` when a page is backed already or
        another thread is at it, `OutOfMemory` with the level that refused, `DeviceFailure`, `DescriptorLimit`,
        `BrokerUnavailable`, `ClosedError`.
        """
        self._holding.check_open()
        pages = self._touched(offset, size)
        if self._pages.spare:
            with self._lock:
                if self._pages.take_spare(pages):
                    return self._holding.region.address + offset
        self._back(lambda: pages)
        return self._holding.region.address + offset

    def grow(self, size: int | str) -> int:
        """Back the first `size` bytes after the highest backed page, and return their address.

        Holes below are left as they are. A page that another thread is backing counts as backed, so threads that
        grow at once get neighbouring ranges. Raises as `allocate`.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        pages = self._back(lambda: self._above(length))
        return self._holding.region.address + pages.start * self._page_size

    def prepare(self, size: int | str) -> None:
        """Back the next `size` bytes after the highest allocated page ahead of need, as spare pages.

        The next `grow`, or `allocate` there, then asks nobody. They are charged from now on, beside `spare_pages`.
        Raises as `allocate`.
        """
        self._holding.check_open()
        length = bytes_of("a size", size, at_least=1)
        self._back(lambda: self._above(length), spare=True)

    def trim(self) -> int:
        """Give back every spare page, and return how many bytes that was. Waits as `deallocate` does."""
        self._holding.check_open()
        return self._trim(range(self._pages.count))

    def _trim(self, pages: range) -> int:
        with (
            HeldOff(),
            device_failures(),
            self._holding.in_use(),
            self._claim_runs(lambda: self._pages.spare_runs(pages)) as runs,
        ):
            for run in runs:
                self._holding.source.give_back(self._unbind(run))
        return sum(map(len, runs)) * self._page_size

    def _back(self, choose: Callable[[], range], *, spare: bool = False) -> range:
        """Back what is not backed of some unused pages: all of them, or none. Then they are used, or spare."""
        with (
            HeldOff(),
            device_failures(),
            self._holding.in_use(),
            self._claim(choose, self._pages.check_unused) as pages,
            ExitStack() as undo,
        ):
            with self._lock:
                missing = self._pages.unbacked(pages)
            for run in missing:
                placing = Placing(self._holding.region, run.start * self._page_size)
                self._holding.source.borrow(self._page_size, len(run), self._location, placing)
                undo.callback(self._take_back, placing)
                self._commit(placing)
            with self._lock:
                self._pages.set(pages, SPARE if spare else USED)
            undo.pop_all()
        return pages

    def _commit(self, placing: Placing) -> None:
        with self._lock:
            self._holding.check_open()
            self._holding.extents.update(placing.extents)

    def _take_back(self, placing: Placing) -> None:
        with self._lock:
            for offset in placing.extents:
                self._holding.extents.pop(offset, None)
        extent_ids = list(placing.extents.values())
        placing.undo()
        self._holding.source.give_back(extent_ids)

    def deallocate(self, offset: int, size: int | str) -> None:
        """Give back every page that [offset, offset + size) touches. Their addresses stay the pool's.

        The bytes of pages that are offloaded are forgotten, and freed on the host.

        Waits once for the work that this process has given to the device, because unmapping does not. Raises
        `NotMapped` when a page is not backed, `BufferError` while a view of the range is alive, `InvalidOffset`
        and `InvalidRequest`; nothing has changed then. When the broker is away the memory is given back all the same.
        """
        self._holding.check_open()
        touched = self._touched(offset, size)
        if self._spare_pages and self._keep_spare(touched):
            return
        with (
            HeldOff(),
            device_failures(),
            self._holding.in_use(),
            self._claim(lambda: touched, self._check_removable) as pages,
        ):
            with self._lock:
                runs = self._pages.claimed_runs(USED, pages)
            for run in runs:
                self._holding.source.give_back(self._unbind(run))
            self._offloaded.drop(pages)

    def _keep_spare(self, pages: range) -> bool:
        """Keep pages mapped that nobody uses any more, if there is room for all of them; say whether there was."""
        with self._lock:
            if self._pages.spare + len(pages) > self._spare_pages:
                return False
            self._check_removable(pages)
            if self._offloaded.size and self._pages.runs_of(OFFLOADED, pages):
                return False
            self._pages.set(pages, SPARE)
            return True

    def _unbind(self, pages: range) -> list[int]:
        """Unmap pages that nobody else touches, and return the ids of their extents."""
        start, length = pages.start * self._page_size, len(pages) * self._page_size
        self._holding.source.driver.synchronize()
        self._holding.region.unbind(start, length)
        with self._lock:
            self._pages.set(pages, FREE)
            return [self._holding.extents.pop(page * self._page_size) for page in pages]

    # Offloading

    def offload(
        self,
        offset: int = 0,
        size: int | str | None = None,
        *,
        to: Segment | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copy what is in the pages that [offset, offset + size) touches to the host, and give their memory back.

        The whole pool, unless a range is given. Pages that are not allocated, or offloaded already, are passed over;
        spare ones are given back as they are. The pages stay allocated and their addresses the pool's, but nothing is
        behind them until `restore`. Returns how many bytes were copied; `progress` is told how many are done, of how
        many, and an exception of its own stops the copying.

        The bytes lie in pinned memory of this process, for which its model is charged at the location host (a
        declaration); or in `to`, a segment of that location that this process has made and not sealed: it is sealed
        at the end, and then outlives the process (`restore_from`). `offload_size` says how large it has to be.

        Waits for the work that this process has given to the device. Raises `OutOfMemory` when the host's limit
        refuses, `BufferError` while a view of a page is alive, `NotMapped` when another call is at one, and what a
        segment raises; nothing has changed then. Stopped half way, by `DeviceFailure`, `ClosedError`, or `progress`,
        what had arrived is offloaded, the rest is as it was, and the error's numbers say how much is where.
        """
        self._holding.check_open()
        pages = self._touched_or_all(offset, size)
        with (
            HeldOff(),
            device_failures(),
            self._holding.in_use(),
            self._claim_runs(lambda: self._pages.runs_of(USED, pages), self._check_removable) as runs,
        ):
            if runs:
                self._holding.source.driver.synchronize()
            copied = self._offloaded.offload(runs, to, progress)
        self._trim(pages)
        return copied

    def offload_size(self, offset: int = 0, size: int | str | None = None) -> int:
        """Return how many bytes a segment needs for what `offload` of this range would copy now, and where it goes."""
        self._holding.check_open()
        pages = self._touched_or_all(offset, size)
        with self._lock:
            runs = self._pages.runs_of(USED, pages)
        return size_in_segment(runs, self._page_size)

    def restore(self, offset: int = 0, size: int | str | None = None, *, progress: Progress | None = None) -> int:
        """Borrow memory for the offloaded pages of [offset, offset + size), and bring their bytes back.

        At the same addresses, which allow what they allowed. The whole pool, unless a range is given; pages that are
        not offloaded are passed over. What was pinned is freed and no longer declared; a segment stays as it is.
        Returns how many bytes were copied; `progress` is that of `offload`.

        Raises `OutOfMemory` when there is not enough memory: what has come back is back, the rest stays offloaded, and
        `metadata` has the numbers, `restored_bytes` and `offloaded_bytes`. So it is with every error half way. Raises
        what `allocate` raises besides, and `NotMapped` when another call is at one of the pages.
        """
        self._holding.check_open()
        pages = self._touched_or_all(offset, size)
        with (
            HeldOff(),
            device_failures(),
            self._holding.in_use(),
            self._claim_runs(lambda: self._pages.runs_of(OFFLOADED, pages)) as runs,
        ):
            return self._offloaded.restore(runs, progress)

    def restore_from(self, segment: Segment, *, progress: Progress | None = None) -> int:
        """Bring pages here that another pool, of another process maybe, has offloaded to `segment`.

        At the same offsets, where nothing may be allocated; the pool has the same page size, or one that fits. Then
        they are as if this pool had offloaded them and restored them: also after an error half way. Raises
        `InvalidRequest` for what is no segment of offloaded pages, or not of such a pool, `AlreadyMapped`, and what
        `restore` raises.
        """
        self._holding.check_open()
        check_segment(segment, self._holding.source.driver)
        found = runs_in(segment, self._page_size, self._capacity)
        self.trim()
        with (
            HeldOff(),
            device_failures(),
            self._holding.in_use(),
            self._claim_runs(lambda: list(found), self._check_free) as runs,
        ):
            self._offloaded.adopt(segment, found)
            return self._offloaded.restore(runs, progress)

    # Its bytes

    def view(self, offset: int, size: int | str) -> memoryview:
        """Return [offset, offset + size) as a writable memoryview, on the host driver.

        While it lives, or anything made from it, the range cannot be deallocated, and a closed pool keeps its memory.
        Raises `NotMapped` when a page is not backed, and `InvalidRequest` on a card.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: wrap the address on a card")
        self._holding.check_open()
        pages, length = self._touched(offset, size), bytes_of("a size", size)
        with self._holding.in_use(), self._lock:
            self._pages.check_used(pages)
            return self._holding.views.make(self, self._holding.region.address + offset, length)

    def span(self, offset: int, size: int | str) -> Span:
        """Keep [offset, offset + size) mapped as long as the result lives: for whoever gives its addresses away.

        It is to the pool what a living view is: the range cannot be deallocated, and a closed pool keeps its memory.
        An empty range is where its first byte would be. Raises `NotMapped` when a page is not backed, `InvalidOffset`,
        `InvalidRequest` and `ClosedError`.
        """
        self._holding.check_open()
        length = bytes_of("a size", size)
        pages = self._touched(offset, length or 1)
        with self._holding.in_use(), self._lock:
            self._pages.check_used(pages)
            return self._holding.span(self, offset, length)

    def close(self) -> None:
        """Unmap and give back everything, addresses too. Idempotent; raises nothing when the broker is away.

        With living views, or calls in other threads, it happens when the last of them has ended.
        """
        with device_failures():
            self._holding.end()

    def __enter__(self) -> VirtualMemoryPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        used, all_of_it = format_size(self.physical_memory_usage), format_size(self._capacity)
        return f"<membroker.VirtualMemoryPool of {all_of_it}, {used} backed{', closed' * self.closed}>"

    # Pages

    def _touched(self, offset: int, size: int | str) -> range:
        """Return the numbers of the pages that [offset, offset + size) touches, after checking both."""
        length = bytes_of("a size", size, at_least=1)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise InvalidOffset(f"an offset is an int of bytes, not {type(offset).__name__}")
        # Compared without a sum, as a language with 64-bit integers has to.
        if not 0 <= offset < self._capacity or length > self._capacity - offset:
            raise InvalidOffset(
                f"{length} bytes at offset {offset} do not lie in the pool's virtual capacity of {self._capacity} bytes"
            )
        return range(offset // self._page_size, (offset + length - 1) // self._page_size + 1)

    def _touched_or_all(self, offset: int, size: int | str | None) -> range:
        """Return the pages of a range that ends where the pool does unless it has a size."""
        pages = self._touched(offset, 1 if size is None else size)
        return pages if size is not None else range(pages.start, self._pages.count)

    @contextmanager
    def _claim_runs(
        self, choose: Callable[[], list[range]], check: Callable[[range], None] = lambda _: None
    ) -> Iterator[list[range]]:
        """As `_claim`, of several runs: all of them, or none."""
        with self._lock:
            runs = choose()
            for run in runs:
                check(run)
            for run in runs:
                self._pages.claim(run)
        try:
            yield runs
        finally:
            with self._lock:
                for run in runs:
                    self._pages.release(run)

    @contextmanager
    def _claim(self, choose: Callable[[], range], check: Callable[[range], None]) -> Iterator[range]:
        """Keep all other calls off some pages, after `check` agreed, while the lock is not held."""
        with self._lock:
            pages = choose()
            check(pages)
            self._pages.claim(pages)
        try:
            yield pages
        finally:
            with self._lock:
                self._pages.release(pages)

    def _above(self, length: int) -> range:
        """Return the pages of `length` bytes behind all that is taken. The lock is held."""
        return self._touched(self._pages.top() * self._page_size, length)

    def _check_free(self, pages: range) -> None:
        self._pages.check_unused(pages)
        for spare in self._pages.spare_runs(pages):
            raise AlreadyMapped(f"the page at offset {spare.start * self._page_size} is spare: trim() gives it back")

    def _check_removable(self, pages: range) -> None:
        self._pages.check_allocated(pages)
        start, length = pages.start * self._page_size, len(pages) * self._page_size
        if self._holding.views.any_in(self._holding.region.address + start, length):
            raise BufferError(f"a view of [{start}, {start + length}) is still alive: release it first")


def _check_page_size(page_size: int | str, granularity: int) -> int:
    try:
        value = bytes_of("a page size", page_size)
    except InvalidRequest as error:
        raise InvalidPageSize(str(error)) from error
    if not is_power_of_two(value) or value < granularity:
        raise InvalidPageSize(
            f"a page size is a power of two and at least {format_size(granularity)}, the device's granularity, "
            f"not {page_size!r}"
        )
    return value
