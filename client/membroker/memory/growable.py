"""`GrowableBuffer`: a buffer that grows and shrinks at its end. Its address never changes.

Owns the number of bytes in use, and the pages that back them. It knows a `Source` and a `Region`, never a broker, and
must never hold its lock during a call of the source or the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..arguments import bytes_of, check_page_size, check_range, deadline_of, location_of, rounded_up
from ..errors import InvalidRequest, OutOfMemory, OutOfVirtualMemory
from ..interrupts import KeyedLocks, Operation, device_failures
from ..tracebacks import ends_at_the_caller
from ..views import Span
from ..vmm.driver import Location
from ..vmm.sizes import MIB, Size, format_size, round_up
from .byte_access import ByteAccess
from .lender import Lender, Source, source_of
from .lifetime import MappedMemory, Placing
from .local_source import add_asked

DEFAULT_PAGE_SIZE = 16 * MIB
"""The cost of growing depends on the number of pages: 1 GiB takes an H200's driver 28 ms in pages of 2 MiB, and 2.7 ms
in pages of 16 MiB.

A buffer wastes up to one page, and a worker has more buffers than pools. That is why this is less than a pool's 64 MiB.
"""


@ends_at_the_caller()
class GrowableBuffer(ByteAccess):
    """`size` bytes at `address`, and addresses for `capacity` bytes. Thread-safe, and a context manager.

    Sizes are in bytes, or text such as `"8GiB"`. Addresses cost nothing, so `capacity` may be generous. It is rounded
    up to whole pages. Memory is borrowed and released by the page, and each page is an extent:
    `physical_usage_bytes` is charged, `size` is in use. The address never changes, so growing and shrinking copy no
    bytes, and views and tensors of the remaining bytes stay valid.

    A new page is zero (the drivers' contract). The last page keeps its bytes beyond `size`: after `shrink` and `grow`
    within that page they have their old values.

    One call at a time resizes, and a second one waits for the first. Views, spans and figures never wait for a resize.

    `Model.growable_buffer` makes it. Raises `InvalidPageSize`, `InvalidRequest`, and what `resize` raises.
    """

    def __init__(
        self,
        source: Source | Lender,
        size: Size,
        capacity: Size,
        page_size: Size = DEFAULT_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
        *,
        timeout: float | None = None,
    ) -> None:
        self._page_size = check_page_size(page_size, source.driver.device.granularity)
        self._location = location_of(location)
        self._capacity = rounded_up("a capacity", capacity, self._page_size)
        first_size = bytes_of("a size", size)
        if first_size > self._capacity:
            raise InvalidRequest(f"a size of {first_size} bytes is more than the capacity, {self._capacity} bytes")
        self._size = 0
        self._turns = KeyedLocks()
        # Keeps the size constant while a view or a span is created.
        self._lock = threading.Lock()
        self._on_host = source.driver.device.driver == "host"
        self._source = source_of(source)
        self._lender = source  # keeps the callbacks of its recalls
        with device_failures():
            self._holding = MappedMemory(self._source, self, self._capacity, "growable buffer")
        with Operation(self._holding) as operation:
            operation.undo.append(self._holding.end)
            self.resize(first_size, timeout=timeout)
            operation.undo.clear()

    # What it is

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    @property
    def capacity(self) -> int:
        """The bytes of addresses, which limit the size."""
        return self._capacity

    @property
    def page_size(self) -> int:
        """The bytes of a page, the unit in which memory is borrowed and released."""
        return self._page_size

    @property
    def physical_usage_bytes(self) -> int:
        """Bytes that are mapped and charged: whole pages."""
        return len(self._holding.region.extents) * self._page_size

    # Growing and shrinking

    def resize(self, size: Size, *, timeout: float | None = None) -> None:
        """Grow or shrink the buffer at its end to `size` bytes. All or nothing.

        `timeout` is how many seconds growing may wait for memory, as in `Model.allocate`. Another call that resizes
        waits for this one meanwhile.

        Growing raises `OutOfVirtualMemory` beyond the capacity, `OutOfMemory` with the level that refused, `TooMany`,
        `DeviceFailure`, `DescriptorLimit`, `BrokerUnavailable`. Shrinking first waits for all work that this process
        has submitted to the device, then releases whole pages, also while the broker is unreachable. It raises
        `DeviceFailure`, and `BufferError` while a view, a span or a tensor uses bytes that it would remove. Both raise
        `ClosedError`. After any of these errors the buffer is unchanged.
        """
        target, until = bytes_of("a size", size), deadline_of(timeout)
        with self._resizing() as operation:
            if target > self._capacity:
                raise OutOfVirtualMemory(
                    target,
                    self._capacity,
                    f"a buffer cannot have {target} bytes: its capacity is {self._capacity} bytes",
                )
            self._become(target, operation, until)

    def grow(self, by: Size, *, timeout: float | None = None) -> int:
        """Add `by` bytes at the end, and return the offset of the first one. Concurrent callers get disjoint ranges.

        `timeout` is that of `resize`. Raises what `resize` raises.
        """
        more, until = bytes_of("a growth", by), deadline_of(timeout)
        with self._resizing() as operation:
            offset = self._size
            if more > self._capacity - offset:
                raise OutOfVirtualMemory(
                    more,
                    self._capacity - offset,
                    f"a buffer of {offset} bytes cannot grow by {more}: its capacity is {self._capacity} bytes",
                )
            self._become(offset + more, operation, until)
            return offset

    def shrink(self, by: Size) -> None:
        """Remove `by` bytes from the end. Raises what `resize` raises, and `InvalidRequest` if `size` is less."""
        less = bytes_of("a reduction", by)
        with self._resizing() as operation:
            if less > self._size:
                raise InvalidRequest(f"a buffer of {self._size} bytes cannot shrink by {less}")
            self._become(self._size - less, operation, None)

    @contextmanager
    def _resizing(self) -> Iterator[Operation]:
        with Operation(self._holding) as operation:
            self._turns.take({0}, operation)
            self._holding.check_open()  # another thread may have closed it while this call waited
            yield operation

    def _become(self, size: int, operation: Operation, until: float | None) -> None:
        before = self._size
        operation.undo.append(partial(setattr, self, "_size", before))
        if size >= before:
            try:
                self._back(round_up(size, self._page_size), operation, until)
            except OutOfMemory as error:
                add_asked(error, size - before, "pages", self._page_size)
                raise
            self._size = size
        else:
            self._cut(size, operation)
        operation.undo.clear()

    def _back(self, end: int, operation: Operation, until: float | None) -> None:
        backed = self.physical_usage_bytes
        if end > backed:
            placing = Placing(self._holding, range(backed, end, self._page_size))
            operation.undo.append(placing.take_back)
            self._source.borrow(self._page_size, (end - backed) // self._page_size, self._location, placing, until)
            self._holding.check_open()  # if it was closed meanwhile, the undo releases the new pages

    def _cut(self, size: int, operation: Operation) -> None:
        with self._lock:
            if held := self._holding.views.held_in(self._holding.region.address + size, self._size - size):
                raise BufferError(f"[{size}, {self._size}) is still used by {held}: release it first")
            self._size = size
        end, backed = round_up(size, self._page_size), self.physical_usage_bytes
        if end < backed:
            self._source.driver.synchronize()
            operation.forward(partial(self._holding.remove, [(end, backed - end)]))

    # Its bytes

    def view(self) -> memoryview:
        """Return the bytes as a writable memoryview of the size at this moment, on the host driver.

        While it lives, the buffer keeps this memory and cannot shrink into it, but can grow. Raises `InvalidRequest` on
        a GPU, because the CPU cannot read its memory, and `ClosedError`.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: make a tensor of it on a GPU")
        self._holding.check_open()
        with self._lock:
            return self._holding.view(self, 0, self._size)

    def span(self, offset: int, size: int) -> Span:
        """Keep the memory while the result lives: for code that passes on addresses in [offset, offset + size), bytes.

        Like a view, it prevents shrinking into the range. Raises `InvalidRequest` for a range beyond the buffer's
        present size, and `ClosedError`.
        """
        self._holding.check_open()
        with self._lock:
            offset, size = check_range(offset, size, self._size, "a buffer")
            return self._holding.span(self, offset, size)

    # Its end

    def __repr__(self) -> str:
        sizes = f"{format_size(self._size)} of {format_size(self._capacity)}"
        held = self._holding.views.held_by(", kept by ")
        return f"<membroker.GrowableBuffer of {sizes}{', closed' * self.closed}{held}>"
