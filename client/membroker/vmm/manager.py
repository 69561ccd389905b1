"""`VirtualMemoryManager`: addresses and memory of one process's devices, by plain calls without rounding.

Owns only what its calls made. It is built on the classes of `ranges`, which may be used beside it. It does not round
sizes, grants no access by itself, and must never release what is still mapped.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ..errors import InvalidOffset, InvalidRequest, NotMapped, StillMapped
from .driver import AccessFlags, Driver
from .ranges import AddressRange, Closable, MappedRange, PhysicalMemory
from .sizes import MAX_BYTES, is_power_of_two

VirtualAddressRange = AddressRange
PhysicalAllocation = PhysicalMemory


@dataclass(frozen=True, slots=True)
class MappingRecord:
    """One mapping of a range: `size` bytes from `va_offset` on, and what one device may do with them.

    `phys_handle` is the value of the memory's handle in this process. The handle may be closed by now.
    """

    va_offset: int
    size: int
    phys_handle: int
    access: AccessFlags


class VirtualMemoryManager(Closable):
    """Reserve, allocate, map and grant access on the devices of `drivers`, by ordinal. A context manager.

    Sizes, offsets and alignments are in bytes, and exact. A refused call changes nothing: `InvalidRequest` and
    `InvalidOffset` for numbers, `StillMapped`, `NotMapped`, `AlreadyMapped`, `ClosedError`, and `DriverError` if the
    device refuses. Any thread may call, but not two at once on the same part of a range.

    Closing unmaps and releases everything that was made here.
    """

    def __init__(self, *drivers: Driver) -> None:
        self._drivers = {driver.device.ordinal: driver for driver in drivers}
        if len(self._drivers) < len(drivers) or len({driver.device.driver for driver in drivers}) != 1:
            found = ", ".join(f"{driver.device.driver} {driver.device.ordinal}" for driver in drivers) or "none"
            raise InvalidRequest(f"a manager takes one driver per device, all of one kind, not {found}")
        self._ranges: set[AddressRange] = set()
        self._memories: set[PhysicalMemory] = set()
        self._open()

    def reserve(self, size: int, alignment: int) -> VirtualAddressRange:
        """Reserve `size` bytes of addresses, a multiple of `alignment`, which is a power of two.

        Both must also be multiples of the granularity.
        """
        self.check_open()
        driver = next(iter(self._drivers.values()))
        granularity = driver.device.granularity
        if not (granularity <= alignment <= MAX_BYTES and is_power_of_two(alignment)):
            raise InvalidRequest(f"an alignment is a power of two and at least {granularity}, not {alignment}")
        if not 0 < size <= MAX_BYTES or size % alignment:
            raise InvalidRequest(f"a size is a positive multiple of the alignment, {alignment}, not {size}")
        addresses = AddressRange(driver, size, alignment)
        self._ranges.add(addresses)
        return addresses

    def release(self, va: VirtualAddressRange) -> None:
        """Release a range of addresses. Raises `StillMapped` while something is mapped there."""
        self._check(va, self._ranges)
        if va.mappings:
            raise StillMapped(f"{len(va.mappings)} mappings are still in {va}: unmap them first")
        va.close()
        self._ranges.discard(va)

    def alloc_physical(self, size: int, device_ordinal: int = 0) -> PhysicalAllocation:
        """Create `size` bytes of zero-filled memory on a device, a multiple of its granularity, not mapped yet."""
        self.check_open()
        driver = self._driver(device_ordinal)
        if not 0 < size <= MAX_BYTES or size % driver.device.granularity:
            raise InvalidRequest(f"a size is a positive multiple of {driver.device.granularity}, not {size}")
        memory = PhysicalMemory.create(driver, size)
        self._memories.add(memory)
        return memory

    def free_physical(self, phys: PhysicalAllocation) -> None:
        """Release memory. Raises `StillMapped` while it is mapped anywhere in this process."""
        self._check(phys, self._memories)
        if phys.mapped:
            raise StillMapped(f"{phys} is still mapped: unmap it first")
        phys.close()
        self._memories.discard(phys)

    def map(self, va: VirtualAddressRange, phys: PhysicalAllocation, offset: int) -> MappedRange:
        """Map all of `phys` into `va` at `offset`, a multiple of the range's alignment.

        No device has access until `set_access`. Raises `InvalidOffset` if the memory does not fit, and `AlreadyMapped`.
        """
        self._check(va, self._ranges)
        self._check(phys, self._memories)
        if offset % va.alignment:
            raise InvalidOffset(f"an offset in {va} is a multiple of {va.alignment}, not {offset}")
        return MappedRange(va, phys, offset, access={})

    def unmap(self, va: VirtualAddressRange, offset: int, size: int) -> None:
        """Wait for the work of the devices with access, and unmap the mappings that fill [offset, offset + size).

        Their memory can be mapped again. Raises `InvalidOffset` outside the range, and `NotMapped` unless whole
        mappings fill it. If waiting for a device fails, nothing is unmapped. If a device refuses one unmap, the earlier
        mappings are unmapped.
        """
        self._check(va, self._ranges)
        mappings = va.mappings_in(offset, size)
        for mapping in mappings:
            mapping.synchronize()
        for mapping in mappings:
            mapping.close()

    def set_access(self, va: VirtualAddressRange, device_ordinal: int, flags: AccessFlags) -> None:
        """Set what one device may do with everything mapped in `va`. Raises `NotMapped` if nothing is mapped."""
        self._check(va, self._ranges)
        driver, mappings = self._driver(device_ordinal), va.mappings
        if not mappings:
            raise NotMapped(f"nothing is mapped in {va}")
        with ExitStack() as undo:
            for mapping in mappings:
                before = mapping.get_access(driver)
                mapping.set_access(flags, driver)
                undo.callback(mapping.set_access, before, driver)
            undo.pop_all()

    def mappings(self, va: VirtualAddressRange, device_ordinal: int = 0) -> list[MappingRecord]:
        """Return the mappings of `va` in order, with what one device may do with each."""
        self._check(va, self._ranges)
        driver = self._driver(device_ordinal)
        return [
            MappingRecord(mapping.offset, mapping.size, mapping.memory.handle.value, mapping.get_access(driver))
            for mapping in va.mappings
        ]

    def _driver(self, ordinal: int) -> Driver:
        driver = self._drivers.get(ordinal)
        if driver is None:
            raise InvalidRequest(
                f"this manager has no device {ordinal}, only {', '.join(map(str, sorted(self._drivers)))}"
            )
        return driver

    def _check(self, part: AddressRange | PhysicalMemory, own: set[AddressRange] | set[PhysicalMemory]) -> None:
        self.check_open()
        part.check_open()
        if part not in own:
            raise InvalidRequest(f"{part} was not made by this manager")

    def _give_back(self) -> None:
        with ExitStack() as steps:
            for memory in self._memories:
                steps.callback(memory.close)
            for addresses in self._ranges:
                steps.callback(addresses.close)
                for mapping in addresses.mappings:
                    steps.callback(mapping.close)

    def __str__(self) -> str:
        return f"a manager of {len(self._ranges)} ranges and {len(self._memories)} allocations"
