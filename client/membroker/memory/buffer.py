"""`Buffer`: one contiguous extent, mapped in this process.

Owns only its `MappedMemory`, which releases memory and addresses when the buffer is closed, or garbage, and no view of
it is left. It must never round the size that it reports: `size` is the requested size.
"""

from __future__ import annotations

from typing import Any

from ..arguments import bytes_of, check_range, deadline_of, location_of, rounded_up
from ..errors import InvalidRequest, OutOfMemory
from ..interrupts import Operation, device_failures
from ..tracebacks import ends_at_the_caller
from ..views import Span
from ..vmm.driver import Location
from ..vmm.sizes import Size
from .byte_access import ByteAccess
from .lender import Lender, Source, source_of
from .lifetime import MappedMemory, Placing
from .local_source import add_asked


@ends_at_the_caller()
class Buffer(ByteAccess):
    """`size` bytes at `address`, borrowed from a source. A context manager. `Model.allocate` makes it.

    `size` is in bytes, or text such as `"8MiB"`. New memory is zero. On GPUs this was measured, but CUDA does not
    promise it. The host driver gets zeroed pages from the kernel. `timeout` is that of `Model.allocate`.

    Raises `InvalidRequest`, `OutOfMemory` with the level that refused, `DeviceFailure`, `DescriptorLimit`,
    `BrokerUnavailable` and `ClosedError`; nothing is borrowed then.
    """

    def __init__(
        self,
        source: Source | Lender,
        size: Size,
        location: Location | str = Location.DEVICE,
        *,
        timeout: float | None = None,
    ) -> None:
        until = None if timeout is None else deadline_of(timeout)
        self._size = bytes_of("a buffer", size, at_least=1)
        self._location = location_of(location)
        device = source.driver.device
        self._extent_size = rounded_up("a buffer", self._size, device.granularity)
        self._on_host = device.driver == "host"
        lender = source_of(source)
        self._lender = source  # keeps the callbacks of its recalls
        with device_failures():
            self._holding = MappedMemory(lender, self, self._extent_size, "buffer")
        placing = Placing(self._holding, [0])
        with Operation(self._holding) as operation:
            operation.undo += [self._holding.end, placing.take_back]
            try:
                lender.borrow(self._extent_size, 1, self._location, placing, until)
            except OutOfMemory as error:
                add_asked(error, self._size, "granules", device.granularity)
                raise
            operation.undo.clear()

    @property
    def size(self) -> int:
        """The requested size, in bytes."""
        return self._size

    @property
    def extent_size(self) -> int:
        """The bytes that are mapped and charged: `size`, rounded up to the device's granularity."""
        return self._extent_size

    @property
    def location(self) -> str:
        """`device` or `host`."""
        return self._location.value

    def view(self) -> memoryview:
        """Return the bytes as a writable memoryview, on the host driver. The buffer keeps its memory while it lives.

        Raises `InvalidRequest` on a GPU, because the CPU cannot read its memory, and `ClosedError`.
        """
        if not self._on_host:
            raise InvalidRequest("only the host driver's memory can be viewed: use __cuda_array_interface__ on a GPU")
        return self._holding.view(self, 0, self._size)

    def span(self, offset: int, size: int) -> Span:
        """Keep the memory while the result lives: for code that passes on addresses in [offset, offset + size), bytes.

        After `close` the memory is released when the last span and the last view are gone. Raises `InvalidRequest` for
        a range that does not lie in the buffer, and `ClosedError`.
        """
        offset, size = check_range(offset, size, self._size, "a buffer")
        return self._holding.span(self, offset, size)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as a CUDA array of uint8. The consumer must keep the buffer open: `close` unmaps the memory.

        It exists only on a GPU. Raises `AttributeError` elsewhere, as the protocol requires, and `ClosedError`.
        """
        if self._on_host:
            raise AttributeError("the host driver's memory is no CUDA array: use view()")
        return {"shape": (self._size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self._holding.region.address:#x}"
        return f"<membroker.Buffer of {self._size} bytes, {state}{self._holding.views.held_by(', kept by ')}>"
