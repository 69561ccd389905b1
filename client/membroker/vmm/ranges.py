"""Addresses, physical memory and their union as context managers: the three nouns of virtual memory management.

Owns the closing order, by references: a `MappedRange` keeps its memory and its addresses, and addresses with
something mapped in them refuse to close. It must never talk to a broker; that is a region's work.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from membroker.vmm.driver import AccessFlags, Driver, Handle, Location
from membroker.vmm.sizes import round_up


class _Closable:
    """A `with` block that closes."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AddressRange(_Closable):
    """`size` bytes of reserved addresses, rounded up to the granularity, with nothing behind them.

    `alignment` is in bytes, a power of two; 0 asks for the granularity. Raises `DriverError`.
    """

    def __init__(self, driver: Driver, size: int, alignment: int = 0) -> None:
        self.driver = driver
        self.size = round_up(size, driver.device.granularity)
        self.address = driver.reserve(self.size, alignment)
        self.closed = False

    @property
    def end(self) -> int:
        """The first address behind the range."""
        return self.address + self.size

    def contains(self, address: int, size: int = 1) -> bool:
        """Say whether all `size` bytes at `address` lie inside the range."""
        return self.address <= address and size >= 0 and address + size <= self.end

    def close(self) -> None:
        """Give the addresses back. Raises `DriverError` and changes nothing while something is mapped there."""
        if not self.closed:
            self.driver.unreserve(self.address, self.size)
            self.closed = True


class PhysicalMemory(_Closable):
    """One extent, held by a handle.

    Closing drops the handle; the memory lives on while a mapping or a descriptor keeps it, so closing right
    after mapping is the usual order.
    """

    def __init__(self, driver: Driver, handle: Handle) -> None:
        self.driver, self.handle = driver, handle
        self.closed = False

    @classmethod
    def create(cls, driver: Driver, size: int, location: Location = Location.DEVICE) -> Self:
        """Create an extent of `size` bytes, rounded up to the granularity, zero-filled."""
        return cls(driver, driver.create(round_up(size, driver.device.granularity), location))

    @classmethod
    def from_descriptor(cls, driver: Driver, descriptor: int, size: int, location: Location = Location.DEVICE) -> Self:
        """Take up the extent of `size` bytes behind `descriptor`, which stays the caller's."""
        return cls(driver, driver.import_extent(descriptor, size, location))

    @property
    def size(self) -> int:
        """The extent's bytes."""
        return self.handle.size

    def export(self) -> int:
        """Return a new descriptor of the extent, the caller's to close."""
        return self.driver.export(self.handle)

    def close(self) -> None:
        """Drop the handle."""
        if not self.closed:
            self.driver.release(self.handle)
            self.closed = True


class MappedRange(_Closable):
    """`memory` bound whole into `addresses` at `offset` bytes, with `access`.

    It keeps both alive: neither can be collected under it. The same memory may be mapped many times
    (aliasing). Raises `DriverError`, with nothing mapped.
    """

    def __init__(
        self,
        addresses: AddressRange,
        memory: PhysicalMemory,
        offset: int = 0,
        access: AccessFlags = AccessFlags.READ_WRITE,
    ) -> None:
        if addresses.driver is not memory.driver:
            raise ValueError("the addresses and the memory belong to different drivers")
        self.addresses, self.memory = addresses, memory
        self.driver, self.size = addresses.driver, memory.size
        self.address = addresses.address + offset
        self.closed = False
        self.driver.map(self.address, memory.handle)
        try:
            self.set_access(access)
        except BaseException:
            self.driver.unmap(self.address, self.size)
            raise

    def set_access(self, access: AccessFlags) -> None:
        """Set what the whole mapping allows."""
        self.driver.set_access(self.address, self.size, access)
        self.access = access

    def close(self) -> None:
        """Wait for this process's work on the device, then unmap. The addresses stay reserved."""
        if not self.closed:
            self.driver.synchronize()
            self.driver.unmap(self.address, self.size)
            self.closed = True
