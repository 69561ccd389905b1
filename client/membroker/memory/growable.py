"""`GrowableBuffer`: bytes that grow and shrink at their end, at an address that stays.

Owns how many bytes are in use, and which pages are behind them. It knows a `Source` and a `Region`, never a broker,
and must never hold its lock during a call of the source or the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..arguments import bytes_of, check_page_size, check_range, location_of, rounded_up
from ..deprecated import renamed
from ..errors import InvalidRequest, OutOfVirtualMemory
from ..interrupts import Operation, Turns
from ..vmm.driver import Location
from ..vmm.sizes import MIB, format_size, round_up
from .lender import Lender, Source, source_of
from .lifetime import MappedMemory, Placing, Resource
from .local_source import asked_for
from .region import device_failures
from .views import Span

DEFAULT_PAGE_SIZE = 16 * MIB
"""Growing costs by the page, hardly by the byte: 1 GiB takes an H200's driver 28 ms in pages of 2 MiB, 2.7 ms in these.

On the other side, a buffer holds up to a page that it does not use, and a worker has more buffers than pools: hence
less than a pool's 64 MiB.
"""


@renamed(physical_memory_usage="physical_usage_bytes")
class GrowableBuffer(Resource):
    """`size` bytes at `address`, and addresses for `capacity` bytes. Thread-safe, and a context manager.

    Sizes are in bytes, or text such as `"8GiB"`. Addresses cost nothing, so `capacity` may be generous; it is rounded
    up to whole pages. Memory comes and goes by the page, each an extent of its own: `physical_usage_bytes` is
    charged, `size` is in use. The address never changes, so neither growing nor shrinking touches what stays: no byte
    of it is copied, and views and tensors of it stay valid.

    A page that is new is zero (the drivers' contract). What is left of the last page keeps its bytes: after `shrink`
    and `grow` within it they are there again.

    One call at a time resizes; a second one waits for the first. Views, spans and figures wait for nobody.

    `Model.growable_buffer` makes it. Raises `InvalidPageSize`, `InvalidRequest`, and what `resize` raises.
    """

    def __init__(
        self,
        source: Source | Lender,
        size: int | str,
        capacity: int | str,
        page_size: int | str = DEFAULT_PAGE_SIZE,
        location: Location | str = Location.DEVICE,
    ) -> None:
        self._page_size = check_page_size(page_size, source.driver.device.granularity)
        self._location = location_of(location)
        self._capacity = rounded_up("a capacity", capacity, self._page_size)
        first_size = bytes_of("a size", size)
        if first_size > self._capacity:
            raise InvalidRequest(f"a size of {first_size} bytes is more than the capacity, {self._capacity} bytes")
        self._size = 0
        self._turns = Turns()
        # Guards the size against views and spans that are just being made.
        self._lock = threading.Lock()
        self._on_host = source.driver.device.driver == "host"
        self._source = source_of(source)
        with device_failures():
            self._holding = MappedMemory(self._source, self, self._capacity, "growable buffer")
        with Operation(self._holding) as operation:
            operation.undo.append(self._holding.end)
            self.resize(first_size)
            operation.undo.clear()

    # What it is

    @property
    def address(self) -> int:
        """The first byte's address, in this process; it stays the same as long as the buffer is open."""
        self._holding.check_open()
        return self._holding.region.address

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    @property
    def capacity(self) -> int:
        """Bytes of addresses: what the size may become."""
        return self._capacity

    @property
    def page_size(self) -> int:
        """Bytes of a page: the step in which memory comes and goes."""
        return self._page_size

    @property
    def physical_usage_bytes(self) -> int:
        """Bytes that are mapped and charged: whole pages."""
        return len(self._holding.region.extents) * self._page_size

    # Growing and shrinking

    def resize(self, size: int | str) -> None:
        """Make it `size` bytes, by growing or shrinking at the end. All or nothing.

        Growing raises `OutOfVirtualMemory` beyond the capacity, `OutOfMemory` with the level that refused,
        `DeviceFailure`, `DescriptorLimit`, `BrokerUnavailable`. Shrinking gives whole pages back, after all work that
        this process has given to the device; it raises `BufferError` while a view, a span or a tensor of bytes that
        would go is alive, and `DeviceFailure`. When the broker is away, memory is given back all the same. Both raise
        `ClosedError`; with any of these the buffer is as it was.
        """
        target = bytes_of("a size", size)
        with self._resizing() as operation:
            if target > self._capacity:
                raise OutOfVirtualMemory(
                    target,
                    self._capacity,
                    f"a buffer cannot have {target} bytes: its capacity is {self._capacity} bytes",
                )
            self._become(target, operation)

    def grow(self, by: int | str) -> int:
        """Add `by` bytes at the end, and return the offset of the first: who grows at once with others gets his own.

        Raises as `resize`.
        """
        more = bytes_of("a growth", by)
        with self._resizing() as operation:
            offset = self._size
            if more > self._capacity - offset:
                raise OutOfVirtualMemory(
                    more,
                    self._capacity - offset,
                    f"a buffer of {offset} bytes cannot grow by {more}: its capacity is {self._capacity} bytes",
                )
            self._become(offset + more, operation)
            return offset

    def shrink(self, by: int | str) -> None:
        """Take `by` bytes off the end. Raises as `resize`, and `InvalidRequest` where there are less."""
        less = bytes_of("a reduction", by)
        with self._resizing() as operation:
            if less > self._size:
                raise InvalidRequest(f"a buffer of {self._size} bytes cannot shrink by {less}")
            self._become(self._size - less, operation)

    @contextmanager
    def _resizing(self) -> Iterator[Operation]:
        with Operation(self._holding) as operation:
            self._turns.take({0}, operation)
            self._holding.check_open()  # it may have been closed while this call waited for its turn
            yield operation

    def _become(self, size: int, operation: Operation) -> None:
        before = self._size
        operation.undo.append(lambda: self._set_size(before))
        if size >= before:
            with asked_for(size - before, f"in pages of {format_size(self._page_size)}"):
                self._back(round_up(size, self._page_size), operation)
            self._size = size
        else:
            self._cut(size, operation)
        operation.undo.clear()

    def _set_size(self, size: int) -> None:
        self._size = size

    def _back(self, end: int, operation: Operation) -> None:
        backed = self.physical_usage_bytes
        if end > backed:
            placing = Placing(self._holding, range(backed, end, self._page_size))
            operation.undo.append(placing.take_back)
            self._source.borrow(self._page_size, (end - backed) // self._page_size, self._location, placing)
            self._holding.check_open()  # closed meanwhile: what came is released at the end of this call

    def _cut(self, size: int, operation: Operation) -> None:
        with self._lock:
            self._check_unseen(size)
            self._size = size
        end, backed = round_up(size, self._page_size), self.physical_usage_bytes
        if end < backed:
            self._source.driver.synchronize()
            operation.forward(lambda: self._holding.remove([(end, backed - end)]))

    def _check_unseen(self, size: int) -> None:
        if self._holding.views.any_in(self._holding.region.address + size, self._size - size):
            raise BufferError(f"a view of [{size}, {self._size}) is still alive: release it first")

    # Its bytes

    def view(self) -> memoryview:
        """Return the bytes as a writable memoryview of the size at this moment, on the host driver.

        It keeps the memory, and the buffer from shrinking into it; growing does not mind it. Raises `InvalidRequest` on
        a card, whose memory the processor cannot read, and `ClosedError`.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: make a tensor of it on a card")
        self._holding.check_open()
        with self._lock:
            return self._holding.view(self, 0, self._size)

    def span(self, offset: int, size: int) -> Span:
        """Keep the memory as long as the result lives: for whoever gives addresses in [offset, offset + size) away.

        It is what a living view is. Raises `InvalidRequest` for a range that does not lie in the buffer as it is, and
        `ClosedError`.
        """
        self._holding.check_open()
        with self._lock:
            offset, size = check_range(offset, size, self._size, "a buffer")
            return self._holding.span(self, offset, size)

    # Its end

    def __repr__(self) -> str:
        sizes = f"{format_size(self._size)} of {format_size(self._capacity)}"
        return f"<membroker.GrowableBuffer of {sizes}{', closed' * self.closed}>"
