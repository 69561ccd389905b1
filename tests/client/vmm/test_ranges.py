"""Addresses, memory and mappings as `with` blocks: closing in any order, bounds, and what the three compose to."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import permutations

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.devices import Device
from tests.support.driver_errors import named
from tests.support.forks import in_a_child
from tests.support.garbage import collect
from tests.support.host_driver import used
from tests.support.sizes import MIB

from membroker.errors import AlreadyMapped, ClosedError, InvalidOffset, InvalidRequest, NotMapped
from membroker.vmm import AccessFlags, AddressRange, DriverError, MappedRange, PhysicalMemory, allocation_granularity
from membroker.vmm.host.driver import GRANULARITY, HostDriver

PATTERN = b"".join((number * 0x9E3779B1 & 0xFFFFFFFF).to_bytes(4, "little") for number in range(MIB // 4))
"""1 MiB in which no two words are equal: bytes that come from elsewhere show."""
DENIED = "EACCES|CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def addresses(driver: HostDriver) -> Iterator[AddressRange]:
    """Addresses for four granules."""
    with AddressRange(driver, 4 * GRANULARITY) as addresses:
        yield addresses


@pytest.fixture
def memory(driver: HostDriver) -> Iterator[PhysicalMemory]:
    with PhysicalMemory.create(driver, GRANULARITY) as memory:
        yield memory


# What they are


def test_sizes_are_rounded_up_to_the_granularity(driver: HostDriver) -> None:
    """The twin recommends nothing besides, so code that asks for the recommended size works there too."""
    assert allocation_granularity(driver) == allocation_granularity(driver, recommended=True) == GRANULARITY
    with AddressRange(driver, 1) as addresses, PhysicalMemory.create(driver, "3MiB") as memory:
        assert (addresses.size, memory.size) == (GRANULARITY, 2 * GRANULARITY)


@pytest.mark.parametrize("size", [0, -1, (1 << 63) - 1, 1 << 64, 1.5, True, "much"])
def test_a_size_that_is_none_is_refused(driver: HostDriver, size: int) -> None:
    """2^63-1 itself is a size, but not in whole granules."""
    for make in (AddressRange, PhysicalMemory.create):
        with pytest.raises(InvalidRequest):
            make(driver, size)
    for alignment in (-1, 3, GRANULARITY + 1, 1 << 63):
        with pytest.raises(InvalidRequest):
            AddressRange(driver, GRANULARITY, alignment)


def test_a_range_knows_its_end_and_what_it_contains(driver: HostDriver) -> None:
    with AddressRange(driver, 2 * GRANULARITY, alignment=1 << 30) as addresses:
        assert addresses.base % (1 << 30) == 0 < addresses.base
        assert used(driver) == 0, "addresses cost no memory"
        assert addresses.alignment == 1 << 30
        assert addresses.end == addresses.base + 2 * GRANULARITY
        assert addresses.contains(addresses.base, 2 * GRANULARITY)
        assert not addresses.contains(addresses.base, 2 * GRANULARITY + 1)
        assert not addresses.contains(addresses.base - 1)
        assert not addresses.contains(addresses.end)
        assert not addresses.contains(addresses.base, -1)
        assert not addresses.contains(addresses.end - 1, 1 << 64)
        place = f"VA[0x{addresses.base:016x}..0x{addresses.end:016x}"
        assert repr(addresses) == f"<AddressRange {place}, {2 * GRANULARITY} bytes, align={1 << 30}]>"


# Closing


@pytest.mark.parametrize("order", list(permutations(("addresses", "memory", "mapping"))), ids=" ".join)
def test_any_order_of_closing_gives_all_back_and_none_too_early(device: Device, order: tuple[str, ...]) -> None:
    """Blocks end, exceptions fly and finalizers run in any order: the bytes are there until the mapping is closed."""
    with device.open() as driver:
        size = driver.device.granularity
        addresses, memory = AddressRange(driver, size), PhysicalMemory.create(driver, size)
        parts = {"addresses": addresses, "memory": memory, "mapping": MappedRange(addresses, memory)}
        address = addresses.base
        driver.write(address, PATTERN)
        for name in order:
            if not parts["mapping"].closed:
                assert driver.read(address, len(PATTERN)) == PATTERN
            parts[name].close()
        other = driver.create(size)
        with pytest.raises(DriverError, check=named("EINVAL", "CUDA_ERROR_INVALID_VALUE")):
            driver.map(address, other)
        driver.release(other)


def test_memory_may_be_closed_under_its_mapping(driver: HostDriver, addresses: AddressRange) -> None:
    """The usual order of a borrower: map, then drop the handle, and the mapping keeps the bytes."""
    memory = PhysicalMemory.create(driver, GRANULARITY)
    with MappedRange(addresses, memory) as mapping:
        assert str(memory) == f"PhysAlloc[handle=0x{memory.handle.value:016x}, {GRANULARITY} bytes, dev=0]"
        memory.close()
        assert memory.mapped
        driver.write(mapping.address, b"kept")
        assert driver.read(mapping.address, 4) == b"kept"
    assert used(driver) == 0
    with pytest.raises(ClosedError, match="PhysAlloc"):
        MappedRange(addresses, memory)
    with pytest.raises(ClosedError):
        memory.export()


def test_a_mapping_keeps_its_memory_and_its_addresses(driver: HostDriver) -> None:
    """User code keeps only the mapping; the collector must not take what it stands on."""
    addresses, memory = AddressRange(driver, GRANULARITY), PhysicalMemory.create(driver, GRANULARITY)
    mapping = MappedRange(addresses, memory)
    addresses.close()
    memory.close()
    kept = weakref.ref(addresses), weakref.ref(memory)
    del addresses, memory
    collect()
    assert all(reference() is not None for reference in kept)
    mapping.close()
    del mapping
    collect()
    assert all(reference() is None for reference in kept)


def test_two_threads_close_once(driver: HostDriver, addresses: AddressRange, memory: PhysicalMemory) -> None:
    """A second unmap would tear out what another thread has mapped there meanwhile."""
    unmapped: list[int] = []
    unmap = driver.unmap
    driver.unmap = lambda address, size: (unmapped.append(address), unmap(address, size))[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            mapping, start = MappedRange(addresses, memory), threading.Barrier(4)
            ends = [pool.submit(lambda m=mapping, s=start: (s.wait(DEADLINE_SECONDS), m.close())) for _ in range(4)]
            for end in ends:
                end.result(DEADLINE_SECONDS)
    assert len(unmapped) == 20


def test_the_addresses_are_given_back_once(
    driver: HostDriver, memory: PhysicalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the last mapping while the addresses go: they may be a stranger's already."""
    given_back: list[int] = []
    addresses = AddressRange(driver, GRANULARITY)
    mapping = MappedRange(addresses, memory)
    unreserve = driver.unreserve

    def unreserve_beside_a_close(address: int, size: int) -> None:
        given_back.append(address)
        if len(given_back) == 1:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(mapping.close).result(DEADLINE_SECONDS)
        unreserve(address, size)

    monkeypatch.setattr(driver, "unreserve", unreserve_beside_a_close)
    addresses.close()
    mapping.close()
    assert given_back == [addresses.base]


def test_closing_a_mapping_waits_for_work_first(
    driver: HostDriver, addresses: AddressRange, memory: PhysicalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card does not wait by itself: unmapping under a kernel faults it."""
    calls: list[str] = []
    mapping = MappedRange(addresses, memory)
    unmap = driver.unmap
    monkeypatch.setattr(driver, "synchronize", lambda: calls.append("synchronize"))

    def unmap_after(address: int, size: int) -> None:
        calls.append("unmap")
        unmap(address, size)

    monkeypatch.setattr(driver, "unmap", unmap_after)
    mapping.close()
    assert calls == ["synchronize", "unmap"]


def test_a_forked_childs_objects_are_closed(driver: HostDriver, addresses: AddressRange) -> None:
    """They are the parent's: leaving the blocks in the child calls no driver, and warns of nothing."""
    with PhysicalMemory.create(driver, GRANULARITY) as memory, MappedRange(addresses, memory) as mapping:

        def body() -> None:
            for each in (addresses, memory, mapping):
                assert each.closed
                each.close()
                each.__del__()
            for call in (memory.export, mapping.get_access, lambda: MappedRange(addresses, memory, GRANULARITY)):
                with pytest.raises(ClosedError, match="forked"):
                    call()

        with addresses._lock, memory._lock, mapping._lock:
            in_a_child(body)
        driver.write(mapping.address, b"the parent's")


# Mapping


@pytest.mark.parametrize("offset", [-GRANULARITY, 4 * GRANULARITY, 1 << 62, 1 << 64, -(1 << 64)])
def test_nothing_is_mapped_outside_of_the_range(
    driver: HostDriver, addresses: AddressRange, memory: PhysicalMemory, offset: int
) -> None:
    """A neighbour's reservation may begin where this one ends: an offset beyond must not reach into it."""
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(AddressRange(driver, 4 * GRANULARITY))
        with pytest.raises(InvalidOffset):
            MappedRange(addresses, memory, offset)
    assert addresses.mappings == []
    assert not memory.mapped


def test_access_is_nothing_until_it_is_granted_and_can_be_changed(device: Device) -> None:
    """On a GPU, too, NONE takes back what was granted; the bytes stay."""
    with device.open() as driver, ExitStack() as parts:
        size = driver.device.granularity
        addresses = parts.enter_context(AddressRange(driver, size))
        memory = parts.enter_context(PhysicalMemory.create(driver, size))
        mapping = parts.enter_context(MappedRange(addresses, memory, access={}))
        assert mapping.get_access() is AccessFlags.NONE
        with pytest.raises(DriverError, match=DENIED):
            driver.read(mapping.address, 1)
        mapping.set_access(AccessFlags.READ)
        with pytest.raises(DriverError, match=DENIED):
            driver.write(mapping.address, b"x")
        mapping.set_access(AccessFlags.READ_WRITE)
        driver.write(mapping.address, b"kept")
        assert mapping.get_access() is AccessFlags.READ_WRITE
        mapping.set_access(AccessFlags.NONE)
        assert mapping.get_access() is AccessFlags.NONE
        with pytest.raises(DriverError, match=DENIED):
            driver.read(mapping.address, 1)
        mapping.set_access(AccessFlags.READ)
        assert driver.read(mapping.address, 4) == b"kept"
        mapping.close()
        with pytest.raises(ClosedError):
            mapping.set_access(AccessFlags.READ)


@pytest.mark.parametrize("call", ["map", "set_access"])
def test_a_mapping_that_fails_is_not_left_behind(
    driver: HostDriver, addresses: AddressRange, memory: PhysicalMemory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_arguments: object) -> None:
        raise DriverError("mprotect", "EACCES", 13)

    with monkeypatch.context() as patch:
        patch.setattr(driver, call, refuse)
        with pytest.raises(DriverError, check=named("EACCES")):
            MappedRange(addresses, memory)
    assert addresses.mappings == []
    assert not memory.mapped
    MappedRange(addresses, memory).close()


def test_the_mappings_that_fill_a_part_of_a_range(driver: HostDriver, addresses: AddressRange) -> None:
    """Two side by side, of two sizes, and a hole behind them."""
    with (
        PhysicalMemory.create(driver, 2 * GRANULARITY) as large,
        PhysicalMemory.create(driver, GRANULARITY) as small,
        MappedRange(addresses, small) as first,
        MappedRange(addresses, large, GRANULARITY) as second,
    ):
        assert addresses.mappings_in(0, 3 * GRANULARITY) == [first, second]
        assert addresses.mappings_in(GRANULARITY, 2 * GRANULARITY) == [second]
        for offset, size in ((0, 4 * GRANULARITY), (0, 2 * GRANULARITY), (2 * GRANULARITY, GRANULARITY)):
            with pytest.raises(NotMapped):
                addresses.mappings_in(offset, size)
        with pytest.raises(InvalidOffset):
            addresses.mappings_in(0, 5 * GRANULARITY)
        with pytest.raises(AlreadyMapped):
            MappedRange(addresses, large)


def test_a_range_grows_and_shrinks_in_place(driver: HostDriver) -> None:
    """Resize in place: the address, a view of what was there, and its bytes stay as they are."""
    with AddressRange(driver, 8 * GRANULARITY) as addresses, ExitStack() as pages:
        for number in range(8):
            with PhysicalMemory.create(driver, GRANULARITY) as memory:
                pages.enter_context(MappedRange(addresses, memory, offset=number * GRANULARITY))
            assert used(driver) == (number + 1) * GRANULARITY
            if not number:
                begun_with = driver.view(addresses.base, GRANULARITY)
                begun_with[:5] = b"first"
            driver.write(addresses.base + (number + 1) * GRANULARITY - 1, bytes([number]))
        whole = driver.view(addresses.base, 8 * GRANULARITY)
        assert [whole[(number + 1) * GRANULARITY - 1] for number in range(8)] == list(range(8))
        whole.release()
        for mapping in addresses.mappings[3:]:
            mapping.close()
        assert used(driver) == 3 * GRANULARITY
        begun_with[0:1] = b"F"
        assert driver.read(addresses.base, 5) == b"First"
        assert driver.read(addresses.base + 3 * GRANULARITY - 1, 1) == b"\2"


def test_a_descriptor_becomes_memory_again(driver: HostDriver) -> None:
    with PhysicalMemory.create(driver, GRANULARITY) as memory:
        descriptor = memory.export()
        with PhysicalMemory.from_descriptor(driver, descriptor, GRANULARITY) as imported:
            os.close(descriptor)
            assert imported.size == GRANULARITY
    assert used(driver) == 0
