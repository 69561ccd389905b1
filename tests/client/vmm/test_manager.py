"""`VirtualMemoryManager` on the host driver: the API and the checks of oxicuda's `virtual_memory.rs`, with real calls.

tests/docs/migrating_tests.md maps that file's own tests to these. Its driver calls are stubs that return NotSupported:
where it tests that, the test here makes the call. Its sizes are of 4096 bytes; a device's are granules of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.driver_errors import named

from membroker.errors import AlreadyMapped, ClosedError, InvalidOffset, InvalidRequest, NotMapped, StillMapped
from membroker.vmm import AccessFlags, DriverError, DriverOutOfMemory, Location, MappingRecord, VirtualMemoryManager
from membroker.vmm.host.driver import GRANULARITY, HostDriver

GRANULE = GRANULARITY


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(total_bytes=8 * GRANULE)
    yield driver
    driver.abandon()


@pytest.fixture
def manager(driver: HostDriver) -> Iterator[VirtualMemoryManager]:
    with VirtualMemoryManager(driver) as manager:
        yield manager
    assert driver.memory(Location.DEVICE).used == 0
    assert driver._process.addresses.reservations(driver._number) == []


# Addresses


@pytest.mark.parametrize(
    ("size", "alignment", "why"),
    [
        (0, GRANULE, "multiple"),
        (-GRANULE, GRANULE, "multiple"),
        (3 * GRANULE, 2 * GRANULE, "multiple"),
        (1 << 63, GRANULE, "multiple"),
        (GRANULE, 0, "power of two"),
        (1 << 70, 1 << 70, "power of two"),
        (4096, 4096, "at least"),
    ],
)
def test_reserve_refuses(manager: VirtualMemoryManager, size: int, alignment: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        manager.reserve(size, alignment)


def test_release(manager: VirtualMemoryManager, driver: HostDriver) -> None:
    """The addresses are given back, and the range is of no use after it."""
    va, phys = manager.reserve(GRANULE, GRANULE), manager.alloc_physical(GRANULE)
    manager.release(va)
    assert driver._process.addresses.reservations(driver._number) == []
    for call in (lambda: manager.release(va), lambda: manager.map(va, phys, 0), lambda: manager.mappings(va)):
        with pytest.raises(ClosedError):
            call()


def test_release_refuses_a_range_in_use(manager: VirtualMemoryManager, driver: HostDriver) -> None:
    va, phys = manager.reserve(GRANULE, GRANULE), manager.alloc_physical(GRANULE)
    mapping = manager.map(va, phys, 0)
    manager.set_access(va, 0, AccessFlags.READ_WRITE)
    with pytest.raises(StillMapped, match="1 mappings"):
        manager.release(va)
    assert not va.closed
    driver.write(mapping.address, b"alive")
    manager.unmap(va, 0, GRANULE)
    manager.release(va)


# Memory


@pytest.mark.parametrize("size", [0, -GRANULE, 4096, GRANULE + 1, 1 << 63, 1 << 70])
def test_alloc_physical_refuses(manager: VirtualMemoryManager, size: int) -> None:
    with pytest.raises(InvalidRequest):
        manager.alloc_physical(size, 0)


def test_alloc_physical_is_of_a_device_that_is_here_and_has_the_memory(manager: VirtualMemoryManager) -> None:
    with pytest.raises(InvalidRequest, match=" 1, only 0"):
        manager.alloc_physical(GRANULE, 1)
    with pytest.raises(DriverOutOfMemory):
        manager.alloc_physical(9 * GRANULE)


def test_free_physical(manager: VirtualMemoryManager, driver: HostDriver) -> None:
    """Not while it is mapped anywhere, also by code that uses the nouns; then once."""
    va, phys = manager.reserve(GRANULE, GRANULE), manager.alloc_physical(GRANULE)
    assert (phys.size, phys.device_ordinal, driver.memory(Location.DEVICE).used) == (GRANULE, 0, GRANULE)
    manager.map(va, phys, 0)
    with pytest.raises(StillMapped):
        manager.free_physical(phys)
    assert not phys.closed
    manager.unmap(va, 0, GRANULE)
    manager.free_physical(phys)
    assert driver.memory(Location.DEVICE).used == 0
    with pytest.raises(ClosedError):
        manager.free_physical(phys)


# Mapping


def test_map_validates_alignment_and_bounds(manager: VirtualMemoryManager) -> None:
    """An offset is a multiple of the range's own alignment, which may be larger than a granule."""
    phys = manager.alloc_physical(GRANULE)
    for alignment in (GRANULE, 2 * GRANULE):
        va = manager.reserve(4 * GRANULE, alignment)
        for offset in (1, alignment - 1, alignment // 2, -1):
            with pytest.raises(InvalidOffset, match=f"multiple of {alignment}"):
                manager.map(va, phys, offset)
        for offset in (4 * GRANULE, -2 * GRANULE, (1 << 64) - 2 * GRANULE):
            with pytest.raises(InvalidOffset):
                manager.map(va, phys, offset)
        assert manager.mappings(va) == []


def test_map(manager: VirtualMemoryManager, driver: HostDriver) -> None:
    """A fresh mapping allows nothing; what is there is not mapped over; unmapped memory can be mapped again."""
    va, phys = manager.reserve(2 * GRANULE, GRANULE), manager.alloc_physical(GRANULE)
    mapping = manager.map(va, phys, GRANULE)
    with pytest.raises(DriverError, check=named("EACCES")):
        driver.read(mapping.address, 1)
    with pytest.raises(AlreadyMapped):
        manager.map(va, phys, GRANULE)
    manager.set_access(va, 0, AccessFlags.READ_WRITE)
    driver.write(va.base + GRANULE, b"kept")
    manager.unmap(va, GRANULE, GRANULE)
    manager.map(va, phys, 0)
    manager.set_access(va, 0, AccessFlags.READ)
    assert driver.read(va.base, 4) == b"kept"


def test_unmap(manager: VirtualMemoryManager, driver: HostDriver) -> None:
    """Whole mappings, several at once; a hole or part of one is refused and nothing is unmapped."""
    va = manager.reserve(4 * GRANULE, GRANULE)
    for offset in (0, GRANULE):
        manager.map(va, manager.alloc_physical(GRANULE), offset)
    manager.map(va, manager.alloc_physical(2 * GRANULE), 2 * GRANULE)
    before = manager.mappings(va)
    for offset, size in ((0, 3 * GRANULE), (3 * GRANULE, GRANULE), (0, GRANULE + 1)):
        with pytest.raises(NotMapped):
            manager.unmap(va, offset, size)
    assert manager.mappings(va) == before
    manager.unmap(va, GRANULE, 3 * GRANULE)
    assert [record.va_offset for record in manager.mappings(va)] == [0]
    with pytest.raises(NotMapped):
        manager.unmap(va, 0, 2 * GRANULE)
    for offset, size in ((0, 5 * GRANULE), (4 * GRANULE, GRANULE), (-GRANULE, GRANULE), (0, 0), (1, (1 << 64) - 1)):
        with pytest.raises(InvalidOffset):
            manager.unmap(va, offset, size)


def test_an_unmap_that_cannot_wait_for_the_device(
    manager: VirtualMemoryManager, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture begins on the card between two mappings that it waits for: both are as they were."""
    va = manager.reserve(2 * GRANULE, GRANULE)
    for offset in (0, GRANULE):
        manager.map(va, manager.alloc_physical(GRANULE), offset)
    waited = iter([True, False])

    def synchronize() -> None:
        if not next(waited):
            raise DriverError("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "synchronize", synchronize)
        with pytest.raises(DriverError, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
            manager.unmap(va, 0, 2 * GRANULE)
    assert [mapping.va_offset for mapping in manager.mappings(va)] == [0, GRANULE]
    manager.unmap(va, 0, 2 * GRANULE)


# Access


def test_set_access(manager: VirtualMemoryManager, driver: HostDriver) -> None:
    """Of all that is mapped in the range, holes or not."""
    va = manager.reserve(3 * GRANULE, GRANULE)
    with pytest.raises(NotMapped):
        manager.set_access(va, 0, AccessFlags.READ)
    for offset in (0, 2 * GRANULE):
        manager.map(va, manager.alloc_physical(GRANULE), offset)
    manager.set_access(va, 0, AccessFlags.READ_WRITE)
    driver.write(va.base + 2 * GRANULE, b"x")
    with pytest.raises(InvalidRequest, match=" 7,"):
        manager.set_access(va, 7, AccessFlags.READ)


def test_mapping_record_fields(manager: VirtualMemoryManager) -> None:
    """A record is a plain value; the manager lists what is really there."""
    assert [str(flags) for flags in AccessFlags] == ["None", "Read", "ReadWrite"]
    va, phys = manager.reserve(4 * GRANULE, GRANULE), manager.alloc_physical(GRANULE)
    for offset in (3 * GRANULE, GRANULE):
        manager.map(va, phys, offset)
    manager.set_access(va, 0, AccessFlags.READ)
    handle = phys.handle.value
    assert manager.mappings(va) == [
        MappingRecord(GRANULE, GRANULE, handle, AccessFlags.READ),
        MappingRecord(3 * GRANULE, GRANULE, handle, AccessFlags.READ),
    ]


# The manager


def test_a_manager_has_one_driver_for_each_device(driver: HostDriver) -> None:
    other = HostDriver()
    for drivers in ((), (driver, other), (driver, driver)):
        with pytest.raises(InvalidRequest):
            VirtualMemoryManager(*drivers)
    other.close()
