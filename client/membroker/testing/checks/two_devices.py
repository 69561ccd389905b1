"""Drivers of two devices that reach each other: access of each, addresses of both.

Bytes are moved by `write` and `read`, which are one device's, so that what a device may not touch is refused.
"""

from __future__ import annotations

from contextlib import ExitStack

from ...vmm.driver import AccessFlags, Location
from ..harness import (
    TRUTH_BYTES,
    MakeDriver,
    both_opened,
    expect,
    exported,
    extent,
    map_extent,
    mapped_handle,
    refused,
    reserved,
    used_bytes,
    wait_until,
)


def devices_are_told_apart(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """Two devices of one kind have two UUIDs and two ordinals."""
    with both_opened(make_first, make_second) as (first, second):
        ours, theirs = first.device, second.device
        expect(ours.driver == theirs.driver, "these are drivers of two kinds")
        expect(ours.uuid != theirs.uuid and ours.ordinal != theirs.ordinal, f"{ours} and {theirs} are one device")


def access_is_a_devices_own(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """Only one device has access to a mapping until the other is granted some; then each has what it was granted."""
    with both_opened(make_first, make_second) as (first, second):
        size = first.device.granularity
        with extent(first, size) as handle, mapped_handle(first, handle, keep=True) as address:
            first.write(address, b"first")
            expect(second.get_access(address) is AccessFlags.NONE, "a device has access that nobody granted it")
            refused("read by a device without access", second.read, address, 5)
            refused("write by a device without access", second.write, address, b"x")
            second.set_access(address, size, AccessFlags.READ)
            expect(second.read(address, 5) == b"first", "a device reads other bytes than were written")
            refused("write by a device that may read", second.write, address, b"x")
            expect(first.get_access(address) is AccessFlags.READ_WRITE, "one device's access took the other's")
            first.write(address, b"again")
            expect(second.read(address, 5) == b"again", "a device does not see what another wrote")
            second.set_access(address, size, AccessFlags.READ_WRITE)
            first.set_access(address, size, AccessFlags.READ)
            second.write(address, b"other")
            expect(first.read(address, 5) == b"other", "a device does not see what another wrote to its memory")
            refused("write by the owner, which may read", first.write, address, b"x")


def a_range_has_extents_of_two_devices(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """Extents of both stand side by side in one reservation; one call grants, writes and unmaps across them."""
    with both_opened(make_first, make_second) as (first, second), ExitStack() as stack:
        size = first.device.granularity
        address = stack.enter_context(reserved(first, 5 * size))
        for number in range(5):
            owner = (first, second)[number % 2]
            owner.map(address + number * size, stack.enter_context(extent(owner, size)))
        refused("one device's handle, by the other", first.map, address, stack.enter_context(extent(second, size)))
        first.set_access(address, 5 * size, AccessFlags.READ_WRITE)
        pattern = bytes(range(256)) * (5 * size // 256)
        first.write(address, pattern)
        second.set_access(address + size, 2 * size, AccessFlags.READ)
        expect(second.read(address + size, 2 * size) == pattern[size : 3 * size], "other bytes across two extents")
        second.set_access(address + 4 * size, size, AccessFlags.READ)
        refused("read over an extent in the middle that is not granted", second.read, address + 2 * size, 3 * size)
        expect(second.read(address + 4 * size, 256) == pattern[:256], "a refused read cost a device more than that")
        expect(first.read(address, 5 * size) == pattern, "bytes are lost between two devices' extents")
        second.unmap(address, 5 * size)


def memory_is_counted_where_it_is(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """An extent that another device maps is in use on its own device, until the last mapping is gone."""
    with both_opened(make_first, make_second) as (first, second):
        if first.memory(Location.DEVICE) is None or second.memory(Location.DEVICE) is None:
            return
        for driver in (first, second):
            driver.release(driver.create(TRUTH_BYTES))
        before = used_bytes(first), used_bytes(second)
        with reserved(first, TRUTH_BYTES) as address:
            handle = second.create(TRUTH_BYTES)
            map_extent(second, address, handle)
            first.set_access(address, TRUTH_BYTES, AccessFlags.READ_WRITE)
            second.release(handle)
            wait_until(
                lambda: used_bytes(second) - before[1] >= TRUTH_BYTES // 2, "a birth shows in its device's figure"
            )
            expect(used_bytes(first) - before[0] < TRUTH_BYTES // 2, "one device's memory counts on another")
            first.unmap(address, TRUTH_BYTES)
        wait_until(lambda: used_bytes(second) - before[1] < TRUTH_BYTES // 2, "a death shows in its device's figure")


def a_descriptor_crosses_drivers(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """One device's driver imports, maps and reads what the other's exported: a descriptor belongs to no driver."""
    with both_opened(make_first, make_second) as (first, second):
        size = first.device.granularity
        with extent(first, size) as handle, mapped_handle(first, handle, keep=True) as address:
            first.write(address, b"crossed")
            with exported(first, handle) as descriptor:
                imported = second.import_extent(descriptor, size)
            with mapped_handle(second, imported) as alias:
                expect(second.read(alias, 7) == b"crossed", "another device's driver imported other bytes")
                expect(first.get_access(alias) is AccessFlags.NONE, "the alias has access that nobody granted it")
