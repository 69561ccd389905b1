"""Addresses, memory and mappings as `with` blocks: the order of closing, and what the three compose to."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from membroker.vmm import AccessFlags, AddressRange, DriverError, Location, MappedRange, PhysicalMemory
from membroker.vmm.host import GRANULARITY, HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.abandon()


def used(driver: HostDriver) -> int:
    return driver.memory(Location.DEVICE).used


def test_leaving_the_blocks_gives_everything_back(driver: HostDriver) -> None:
    with (
        AddressRange(driver, GRANULARITY) as addresses,
        PhysicalMemory.create(driver, GRANULARITY) as memory,
        MappedRange(addresses, memory) as mapping,
    ):
        driver.write(mapping.address, b"bytes")
        assert used(driver) == GRANULARITY
    assert used(driver) == 0
    for each in (addresses, memory, mapping):
        assert each.closed
        each.close()


def test_sizes_are_rounded_up_to_the_granularity(driver: HostDriver) -> None:
    with AddressRange(driver, 1) as addresses, PhysicalMemory.create(driver, GRANULARITY + 1) as memory:
        assert (addresses.size, memory.size) == (GRANULARITY, 2 * GRANULARITY)


def test_a_range_knows_its_end_and_what_it_contains(driver: HostDriver) -> None:
    with AddressRange(driver, 2 * GRANULARITY, alignment=1 << 30) as addresses:
        assert addresses.address % (1 << 30) == 0
        assert addresses.end == addresses.address + 2 * GRANULARITY
        assert addresses.contains(addresses.address, 2 * GRANULARITY)
        assert not addresses.contains(addresses.address, 2 * GRANULARITY + 1)
        assert not addresses.contains(addresses.address - 1)
        assert not addresses.contains(addresses.end)
        assert not addresses.contains(addresses.address, -1)


def test_addresses_with_something_mapped_refuse_to_close(driver: HostDriver) -> None:
    """Closing in the wrong order must not tear memory from under running work."""
    addresses = AddressRange(driver, GRANULARITY)
    mapping = MappedRange(addresses, PhysicalMemory.create(driver, GRANULARITY))
    driver.write(mapping.address, b"alive")
    with pytest.raises(DriverError, match="still mapped"):
        addresses.close()
    assert not addresses.closed
    assert driver.read(mapping.address, 5) == b"alive"
    mapping.close()
    addresses.close()


def test_memory_may_be_closed_under_its_mapping(driver: HostDriver) -> None:
    """The usual order of a borrower: map, then drop the handle, and the mapping keeps the bytes."""
    with AddressRange(driver, GRANULARITY) as addresses:
        memory = PhysicalMemory.create(driver, GRANULARITY)
        with MappedRange(addresses, memory) as mapping:
            memory.close()
            driver.write(mapping.address, b"kept")
            assert driver.read(mapping.address, 4) == b"kept"
        assert used(driver) == 0


def test_a_mapping_keeps_its_memory_and_its_addresses(driver: HostDriver) -> None:
    """User code keeps only the mapping; the collector must not take what it stands on."""
    addresses, memory = AddressRange(driver, GRANULARITY), PhysicalMemory.create(driver, GRANULARITY)
    mapping = MappedRange(addresses, memory)
    kept = weakref.ref(addresses), weakref.ref(memory)
    del addresses, memory
    gc.collect()
    assert all(reference() is not None for reference in kept)
    mapping.close()


def test_access_can_be_lowered_and_raised(driver: HostDriver) -> None:
    with (
        AddressRange(driver, GRANULARITY) as addresses,
        PhysicalMemory.create(driver, GRANULARITY) as memory,
        MappedRange(addresses, memory, access=AccessFlags.READ) as mapping,
    ):
        with pytest.raises(DriverError, match="read-only"):
            driver.write(mapping.address, b"x")
        mapping.set_access(AccessFlags.READ_WRITE)
        driver.write(mapping.address, b"x")
        assert mapping.access is AccessFlags.READ_WRITE


def test_a_mapping_that_gets_no_access_is_not_left_behind(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise DriverError("mprotect", "EACCES", 13)

    with (
        AddressRange(driver, GRANULARITY) as addresses,
        PhysicalMemory.create(driver, GRANULARITY) as memory,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(driver, "set_access", refuse)
            with pytest.raises(DriverError, match="EACCES"):
                MappedRange(addresses, memory)
        MappedRange(addresses, memory).close()


def test_closing_a_mapping_waits_for_work_first(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card does not wait by itself: unmapping under a kernel faults it."""
    calls: list[str] = []
    with (
        AddressRange(driver, GRANULARITY) as addresses,
        PhysicalMemory.create(driver, GRANULARITY) as memory,
    ):
        mapping = MappedRange(addresses, memory)
        unmap = driver.unmap
        monkeypatch.setattr(driver, "synchronize", lambda: calls.append("synchronize"))

        def unmap_after(address: int, size: int) -> None:
            calls.append("unmap")
            unmap(address, size)

        monkeypatch.setattr(driver, "unmap", unmap_after)
        mapping.close()
    assert calls == ["synchronize", "unmap"]


def test_parts_of_two_drivers_do_not_mix(driver: HostDriver) -> None:
    other = HostDriver()
    with AddressRange(driver, GRANULARITY) as addresses, PhysicalMemory.create(other, GRANULARITY) as memory:
        with pytest.raises(ValueError, match="different drivers"):
            MappedRange(addresses, memory)
        with pytest.raises(DriverError, match="another driver's"):
            driver.map(addresses.address, memory.handle)
    other.close()


def test_one_memory_under_two_addresses(driver: HostDriver) -> None:
    with (
        AddressRange(driver, 2 * GRANULARITY) as addresses,
        PhysicalMemory.create(driver, GRANULARITY) as memory,
        MappedRange(addresses, memory) as first,
        MappedRange(addresses, memory, offset=GRANULARITY) as second,
    ):
        driver.write(first.address, b"alias")
        assert driver.read(second.address, 5) == b"alias"


def test_a_buffer_grows_in_place(driver: HostDriver) -> None:
    """A growable buffer: addresses for the largest size, memory for today's."""
    with AddressRange(driver, 8 * GRANULARITY) as addresses, ExitStack() as pages:
        for number in range(8):
            memory = pages.enter_context(PhysicalMemory.create(driver, GRANULARITY))
            pages.enter_context(MappedRange(addresses, memory, offset=number * GRANULARITY))
            assert used(driver) == (number + 1) * GRANULARITY
            driver.write(addresses.address + number * GRANULARITY, bytes([number]))
        assert [driver.read(addresses.address + n * GRANULARITY, 1)[0] for n in range(8)] == list(range(8))


def test_a_descriptor_becomes_memory_again(driver: HostDriver) -> None:
    with PhysicalMemory.create(driver, GRANULARITY) as memory:
        descriptor = memory.export()
        with PhysicalMemory.from_descriptor(driver, descriptor, GRANULARITY) as imported:
            os.close(descriptor)
            assert imported.size == GRANULARITY
    assert used(driver) == 0
