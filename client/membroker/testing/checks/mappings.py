"""What is created, reserved and mapped: sizes, addresses, aliases and access."""

from __future__ import annotations

from contextlib import ExitStack

from ...vmm.driver import AccessFlags, Location
from ...vmm.sizes import is_power_of_two
from ..harness import (
    MakeDriver,
    expect,
    exported,
    extent,
    import_and_map,
    map_extent,
    mapped,
    mapped_handle,
    opened,
    refused,
    reserved,
)


def sizes_are_granules(make_driver: MakeDriver) -> None:
    """The granularity is a power of two, and a size that is not a multiple of it is refused."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        expect(is_power_of_two(granule), f"a granularity of {granule} bytes")
        for size in (0, 1, granule - 1, granule + 1, -granule, 1 << 63, 1 << 70):
            refused(f"create({size})", driver.create, size)
            refused(f"reserve({size})", driver.reserve, size)
        for alignment in (3, granule - 1, -granule, 1 << 64):
            refused(f"reserve at {alignment}", driver.reserve, granule, alignment)


def fresh_memory_is_zero(make_driver: MakeDriver) -> None:
    """A new extent reads as zero, also right after another of that size was written and released."""
    with opened(make_driver) as driver:
        size = 2 * driver.device.granularity
        for _ in range(3):
            with mapped(driver, size) as (address, _handle):
                expect(driver.read(address, size) == bytes(size), "a fresh extent holds bytes that are not zero")
                driver.write(address, b"\xff" * size)


def host_memory_works_like_the_devices(make_driver: MakeDriver) -> None:
    """An extent at the host location is created, exported, imported, mapped, written and read."""
    with opened(make_driver) as driver, mapped(driver, driver.device.granularity, Location.HOST) as held:
        address, handle = held
        driver.write(address, b"host")
        with exported(driver, handle) as descriptor:
            imported = driver.import_extent(descriptor, handle.size, Location.HOST)
        with mapped_handle(driver, imported) as alias:
            expect(driver.read(alias, 4) == b"host", "an imported host extent shows other bytes")


def reservations_are_aligned(make_driver: MakeDriver) -> None:
    """A reservation begins at a multiple of the granularity, or of the alignment that was asked for."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        for alignment in (0, granule, 16 * granule):
            with reserved(driver, 3 * granule, alignment) as address:
                expect(address % max(alignment, granule) == 0, f"{address:#x} is not aligned to {alignment}")


def a_reservation_is_given_back_whole(make_driver: MakeDriver) -> None:
    """Part of a reservation cannot be released, nor one in which something is mapped."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        with reserved(driver, 4 * granule) as address:
            refused("unreserve of a part", driver.unreserve, address, granule)
            refused("unreserve from the middle", driver.unreserve, address + granule, 3 * granule)
            with extent(driver, granule) as handle:
                driver.map(address + granule, handle)
                refused("unreserve under a mapping", driver.unreserve, address, 4 * granule)
                driver.unmap(address + granule, granule)


def an_extent_is_mapped_whole_in_a_reservation(make_driver: MakeDriver) -> None:
    """A map over the end of a reservation, outside of all, at an odd address, or of part of an extent is refused."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        with extent(driver, 2 * granule) as handle, reserved(driver, 2 * granule) as address:
            refused("map over the end of the reservation", driver.map, address + granule, handle)
            refused("map at an unaligned address", driver.map, address + granule // 2, handle)
            refused("map outside of any reservation", driver.map, granule, handle)
            with exported(driver, handle) as descriptor:
                refused("map of half an extent", import_and_map, driver, descriptor, granule, address)
            driver.map(address, handle)
            driver.unmap(address, 2 * granule)


def addresses_are_the_processs(make_driver: MakeDriver) -> None:
    """Another driver of the device maps into this one's reservation, and unmaps there. Handles are a driver's own."""
    with opened(make_driver) as driver, opened(make_driver) as other:
        size = driver.device.granularity
        with reserved(driver, 2 * size) as address, extent(driver, size) as ours, extent(other, size) as theirs:
            refused("map of another driver's handle", driver.map, address, theirs)
            map_extent(driver, address, ours)
            map_extent(other, address + size, theirs)
            refused("map over another driver's mapping", driver.map, address + size, ours)
            refused("map over the end of another driver's reservation", other.map, address + 2 * size, theirs)
            refused("unreserve under another driver's mapping", driver.unreserve, address, 2 * size)
            other.write(address, b"ours")
            driver.write(address + size, b"theirs")
            expect(driver.read(address, 4) + other.read(address + size, 6) == b"ourstheirs", "other bytes are shown")
            driver.set_access(address, 2 * size, AccessFlags.READ)
            expect(other.get_access(address) is AccessFlags.READ, "one device has two kinds of access to a mapping")
            other.unmap(address, 2 * size)


def nothing_is_mapped_over_a_mapping(make_driver: MakeDriver) -> None:
    """A map that touches a mapping is refused, and the mapping keeps its bytes."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        with (
            reserved(driver, 4 * granule) as address,
            extent(driver, 2 * granule) as first,
            extent(driver, 2 * granule) as second,
        ):
            map_extent(driver, address + granule, first)
            driver.write(address + granule, b"first")
            for place in (address, address + granule, address + 2 * granule):
                refused("map over a mapping", driver.map, place, second)
            expect(driver.read(address + granule, 5) == b"first", "a refused map changed what was mapped")
            driver.unmap(address + granule, 2 * granule)


def whole_mappings_are_unmapped(make_driver: MakeDriver) -> None:
    """Part of a mapping cannot be unmapped. Several whole ones can, in one call, and can be mapped again."""
    with opened(make_driver) as driver, ExitStack() as stack:
        granule = driver.device.granularity
        address = stack.enter_context(reserved(driver, 4 * granule))
        handles = [stack.enter_context(extent(driver, 2 * granule)) for _ in range(2)]
        for place, handle in zip((address, address + 2 * granule), handles, strict=True):
            map_extent(driver, place, handle)
        driver.write(address, b"still here")
        refused("unmap of half a mapping", driver.unmap, address, granule)
        refused("unmap of one and a half mappings", driver.unmap, address, 3 * granule)
        refused("unmap of a mapping's second half", driver.unmap, address + granule, granule)
        expect(driver.read(address, 10) == b"still here", "a refused unmap unmapped something")
        driver.unmap(address, 4 * granule)
        driver.map(address + granule, handles[0])
        driver.unmap(address + granule, 2 * granule)


def one_extent_is_mapped_many_times(make_driver: MakeDriver) -> None:
    """Two mappings of one extent show the same bytes (aliasing)."""
    with opened(make_driver) as driver, mapped(driver, driver.device.granularity) as (address, handle):
        with mapped_handle(driver, handle, keep=True) as alias:
            driver.write(address, b"one")
            expect(driver.read(alias, 3) == b"one", "the alias shows other bytes")
            driver.write(alias, b"two")
        expect(driver.read(address, 3) == b"two", "bytes written through the alias are lost")


def access_is_as_it_was_set(make_driver: MakeDriver) -> None:
    """A fresh mapping allows no access; READ allows no write; set_access over a hole is refused and changes nothing."""
    with opened(make_driver) as driver, ExitStack() as stack:
        granule = driver.device.granularity
        address = stack.enter_context(reserved(driver, 3 * granule))
        for number in range(2):
            driver.map(address + number * granule, stack.enter_context(extent(driver, granule)))
        refused("read of a mapping without access", driver.read, address, 1)
        expect(driver.get_access(address) is AccessFlags.NONE, "a fresh mapping shows some access")
        driver.set_access(address, 2 * granule, AccessFlags.READ_WRITE)
        driver.write(address + granule, b"bytes")
        expect(driver.get_access(address + granule) is AccessFlags.READ_WRITE, "READ_WRITE does not show")
        driver.set_access(address, 2 * granule, AccessFlags.READ)
        expect(driver.get_access(address + 2 * granule - 1) is AccessFlags.READ, "READ does not show")
        expect(driver.read(address + granule, 5) == b"bytes", "READ does not allow a read")
        refused("write to a read-only mapping", driver.write, address, b"x")
        refused("access to a hole", driver.set_access, address, 3 * granule, AccessFlags.READ_WRITE)
        refused("write after a refused set_access", driver.write, address, b"x")
        driver.unmap(address, 2 * granule)
