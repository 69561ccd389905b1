"""`Region`: a range of addresses with extents bound into it, in this process.

Owns one reservation and the table of what is mapped where in it. Knows a driver and nothing of brokers, ids or
pages, and must never wait for work on the device: who unmaps has synchronised.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from ..errors import DescriptorLimit, DeviceFailure
from ..vmm.driver import AccessFlags, Driver, DriverError, DriverLimit, Handle


class _DeviceFailures:
    """A block whose driver's errors are the library's. No generator: it stands around each allocation."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DriverError):
            out_of_descriptors = isinstance(error, DriverLimit) and error.name == "EMFILE"
            raise (DescriptorLimit if out_of_descriptors else DeviceFailure)(str(error)) from error


_device_failures = _DeviceFailures()


def device_failures() -> _DeviceFailures:
    """Turn a driver's error into `DeviceFailure`, or `DescriptorLimit` where descriptors ran out."""
    return _device_failures


class Region:
    """`size` bytes of addresses from `address`, a multiple of `alignment` and the granularity, reserved until `close`.

    Offsets and sizes are in bytes. Not for two threads in the same part of it at once: different parts are fine.
    Failures are the driver's (`DriverError`) and leave nothing behind.
    """

    def __init__(self, driver: Driver, size: int, alignment: int = 0) -> None:
        self._driver = driver
        self._extents: dict[int, int] = {}
        self.size = size
        self.address = driver.reserve(size, alignment)

    def bind(self, offset: int, handles: Sequence[Handle], access: AccessFlags = AccessFlags.READ_WRITE) -> int:
        """Map whole extents side by side from `offset` on, all or none, and return how many bytes that is."""
        end = offset
        with ExitStack() as undo:
            for handle in handles:
                self._driver.map(self.address + end, handle)
                undo.callback(self._driver.unmap, self.address + end, handle.size)
                end += handle.size
            self._driver.set_access(self.address + offset, end - offset, access)
            self._note(offset, handles)
            undo.pop_all()
        return end - offset

    def bind_descriptors(self, offset: int, descriptors: Sequence[int], size: int) -> int:
        """Map the extents behind descriptors, each of `size` bytes, side by side; return how many bytes that is."""
        self._driver.map_descriptors(self.address + offset, descriptors, size)
        end = offset + size * len(descriptors)
        self._extents.update(dict.fromkeys(range(offset, end, size), size))
        return end - offset

    def _note(self, offset: int, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self._extents[offset] = handle.size
            offset += handle.size

    def protect(self, access: AccessFlags, offset: int = 0, size: int | None = None) -> None:
        """Set what all that is mapped allows, or the whole extents that fill [offset, offset + size)."""
        for start, length in self.runs() if size is None else [(offset, size)]:
            self._driver.set_access(self.address + start, length, access)

    def move(self, offset: int, new_offset: int, size: int, count: int) -> None:
        """Map `count` extents of `size` bytes from `offset` on at `new_offset` instead, as they are. All or none."""
        self._driver.move(self.address + offset, self.address + new_offset, size, count)
        for start in range(offset, offset + size * count, size):
            del self._extents[start]
        self._extents.update(dict.fromkeys(range(new_offset, new_offset + size * count, size), size))

    def unbind(self, offset: int, size: int) -> None:
        """Unmap the whole extents that fill [offset, offset + size), in one call of the driver."""
        self._driver.unmap(self.address + offset, size)
        end = offset + size
        while offset < end:
            offset += self._extents.pop(offset)

    def runs(self) -> list[tuple[int, int]]:
        """Return what is mapped as (offset, size) of each run without a gap, in order."""
        if len(self._extents) == 1:
            return list(self._extents.items())
        runs: list[tuple[int, int]] = []
        for offset, size in sorted(self._extents.items()):
            if runs and sum(runs[-1]) == offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((offset, size))
        return runs

    def __contains__(self, offset: int) -> bool:
        """Say whether an extent is mapped from this offset on."""
        return offset in self._extents

    def clear(self) -> None:
        """Unmap everything, run by run. What was unmapped before a failure is unmapped."""
        for offset, size in self.runs():
            self.unbind(offset, size)

    def close(self) -> None:
        """Unmap everything, and give the addresses back."""
        self.clear()
        self._driver.unreserve(self.address, self.size)
