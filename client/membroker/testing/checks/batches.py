"""Calls for many extents at once: lend, map, move. Each does all or nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from ...vmm.driver import AccessFlags, DriverOutOfMemory, Location
from ..harness import (
    TRUTH_BYTES,
    MakeDriver,
    closed_descriptor,
    expect,
    extent,
    lent,
    map_extent,
    mapped_handle,
    open_descriptors,
    opened,
    refused,
    reserved,
    used_bytes,
    wait_until,
)


def extents_are_lent_as_descriptors(make_driver: MakeDriver) -> None:
    """`lend` returns descriptors of fresh extents, which alone keep them: CLOEXEC; the last close frees an extent."""
    with opened(make_driver) as driver:
        size = 2 * driver.device.granularity
        with lent(driver, size, 1):  # a driver may open descriptors of its own for the first
            pass
        for location in Location:
            before = open_descriptors()
            with lent(driver, size, 3, location) as descriptors:
                expect(len(set(descriptors)) == 3, f"{descriptors} are not three descriptors")
                expect(open_descriptors() == before + 3, "lend left something else open")
                expect(not any(map(os.get_inheritable, descriptors)), "a child process would inherit an extent")
                for descriptor in descriptors:
                    handle = driver.import_extent(descriptor, size, location)
                    with mapped_handle(driver, handle) as address:
                        expect(driver.read(address, size) == bytes(size), "a lent extent is not zero, or lent twice")
                        driver.write(address, b"\xff" * size)
        expect(driver.lend(size, 0) == [], "no extents are some descriptors")
        used = used_bytes(driver)
        os.close(driver.lend(TRUTH_BYTES, 1)[0])
        wait_until(lambda: used_bytes(driver) <= used + TRUTH_BYTES // 2, "an extent lives without its descriptor")


def all_is_lent_or_nothing(make_driver: MakeDriver) -> None:
    """A `lend` that fails, at once or at its last extent, leaves no descriptor open and no memory in use."""
    with opened(make_driver) as driver:
        granule, memory = driver.device.granularity, driver.memory(Location.DEVICE)
        calls: list[Callable[[], object]] = [partial(driver.lend, size, 2) for size in (0, 1, granule + 1, -granule)]
        if memory is not None:  # the first of them fits
            most = max(granule, memory.free // 5 * 3 // granule * granule)
            calls.append(partial(driver.lend, most, 2))
        with lent(driver, granule, 1):
            pass
        before, used = open_descriptors(), used_bytes(driver)
        errors = [refused("a lend that cannot work", call) for call in calls]
        if memory is not None:
            expect(isinstance(errors[-1], DriverOutOfMemory), f"{errors[-1]!r} is no DriverOutOfMemory")
        expect(open_descriptors() == before, "a refused lend left descriptors open")
        wait_until(lambda: used_bytes(driver) <= used + TRUTH_BYTES // 2, "a refused lend left no memory in use")
        with lent(driver, granule, 1):
            pass


def descriptors_are_mapped_side_by_side(make_driver: MakeDriver) -> None:
    """`map_descriptors` maps each extent at its place with the access asked for; descriptors stay open."""
    with opened(make_driver) as driver, ExitStack() as stack:
        size = 2 * driver.device.granularity
        first, second = (stack.enter_context(reserved(driver, 5 * size)) for _ in range(2))
        with lent(driver, size, 1):
            pass
        before = open_descriptors()
        with lent(driver, size, 3) as descriptors:
            driver.map_descriptors(first + size, descriptors, size)
            driver.map_descriptors(second, descriptors[::-1], size, AccessFlags.READ)
            expect(open_descriptors() == before + 3, "mapping closed a descriptor of its caller's, or kept one")
            for number in range(3):
                driver.write(first + (1 + number) * size, bytes([number + 1]) * 16)
        expect(open_descriptors() == before, "a mapping holds a descriptor")
        for number in range(3):
            shown = driver.read(second + (2 - number) * size, 16)
            expect(shown == bytes([number + 1]) * 16, "an extent is not where it should be, or lives no longer")
        if driver.device.driver == "host":
            refused("write to what may only be read", driver.write, second, b"x")
        driver.unmap(first + 2 * size, size)
        driver.unmap(first + size, size)
        driver.unmap(first + 3 * size, size)
        driver.unmap(second, 3 * size)


def all_is_mapped_or_nothing(make_driver: MakeDriver) -> None:
    """A `map_descriptors` that fails, at any extent, leaves all addresses free and all descriptors open."""
    with opened(make_driver) as driver, tempfile.TemporaryFile() as file, ExitStack() as stack:
        size = 2 * driver.device.granularity
        file.truncate(size)
        address = stack.enter_context(reserved(driver, 4 * size))
        good = stack.enter_context(lent(driver, size, 3))
        (small,) = stack.enter_context(lent(driver, size // 2, 1))
        taken = stack.enter_context(extent(driver, size))
        map_extent(driver, address + 3 * size, taken)
        driver.write(address + 3 * size, b"taken")
        driver.map_descriptors(address, good, size)
        driver.unmap(address, 3 * size)
        before = open_descriptors()
        for at in range(3):
            for wrong in (small, file.fileno(), closed_descriptor()):
                mixed = [*good[:at], wrong, *good[at + 1 :]]
                refused("a wrong descriptor among good ones", driver.map_descriptors, address, mixed, size)
        refused("half of each extent", driver.map_descriptors, address, good, size // 2)
        refused("no granules", driver.map_descriptors, address, good, size - 1)
        refused("map over a mapping", driver.map_descriptors, address + size, good, size)
        refused("map over the end", driver.map_descriptors, address + 2 * size, good, size)
        refused("map outside of any reservation", driver.map_descriptors, size, good, size)
        expect(open_descriptors() == before, "a refused map closed a descriptor, or left one open")
        expect(driver.read(address + 3 * size, 5) == b"taken", "a refused map changed what was mapped")
        driver.map_descriptors(address, good, size)  # every address is free, every descriptor works
        driver.write(address, b"works")
        driver.unmap(address, 4 * size)


def extents_are_moved_without_a_copy(make_driver: MakeDriver) -> None:
    """`move` maps extents at other addresses, lower or higher, overlapping or not, with their bytes and access."""
    with opened(make_driver) as driver, ExitStack() as stack:
        size = 2 * driver.device.granularity
        address = stack.enter_context(reserved(driver, 6 * size))
        other = stack.enter_context(reserved(driver, size))
        with lent(driver, size, 3) as descriptors:
            driver.map_descriptors(address + 2 * size, descriptors, size)
        before = open_descriptors()
        for number in range(3):
            driver.write(address + (2 + number) * size, bytes([number + 1]) * 16)
        driver.set_access(address + 4 * size, size, AccessFlags.READ)
        place = 2
        for new in (1, 0, 3, 2, 0):
            driver.move(address + place * size, address + new * size, size, 3)
            place = new
            for number in range(3):
                shown = driver.read(address + (place + number) * size, 16)
                expect(shown == bytes([number + 1]) * 16, "an extent was moved to a wrong place, or lost its bytes")
            driver.write(address + place * size + 64, b"written")
            refused("write to what may only be read", driver.write, address + (place + 2) * size, b"x")
            with extent(driver, size) as handle:
                free = address + (5 if place < 3 else 0) * size
                driver.map(free, handle)
                driver.unmap(free, size)
        driver.move(address, other, size)
        expect(driver.read(other, 16) == b"\x01" * 16, "an extent that was moved elsewhere shows other bytes")
        expect(open_descriptors() == before, "a move left a descriptor open")
        driver.unmap(other, size)
        driver.unmap(address + size, 2 * size)


def all_is_moved_or_nothing(make_driver: MakeDriver) -> None:
    """A `move` that fails, at any extent, leaves everything mapped where it was, as it was."""
    with opened(make_driver) as driver, ExitStack() as stack:
        size = 2 * driver.device.granularity
        address = stack.enter_context(reserved(driver, 7 * size))
        with lent(driver, size, 3) as descriptors:
            driver.map_descriptors(address + 3 * size, descriptors[:2], size)
            driver.map_descriptors(address, descriptors[2:], size)
        driver.write(address, b"other")
        driver.write(address + 3 * size, b"first")
        driver.set_access(address + 4 * size, size, AccessFlags.READ)
        before, used = open_descriptors(), used_bytes(driver)
        first = address + 3 * size
        calls: tuple[Callable[[], object], ...] = (
            partial(driver.move, first, address, size, 2),  # over a mapping, with its first extent
            partial(driver.move, first, address - size, size, 2),  # out of the reservation, and over that
            partial(driver.move, first, address + 6 * size, size, 2),  # over the end, with its second
            partial(driver.move, first, address + size, size, 3),  # more than is mapped
            partial(driver.move, first, address + size, size // 2, 4),  # halves
            partial(driver.move, first, address + size, 2 * size, 1),  # two as one
            partial(driver.move, first + size // 2, address + size, size, 1),  # from a middle
            partial(driver.move, first, first - size // 2, size, 1),  # by half an extent
            partial(driver.move, first, address + size + size // 4, size, 1),  # to no granule
            partial(driver.move, first, first, size, 1),  # nowhere
            partial(driver.move, first, address + size, size, 0),  # nothing
            partial(driver.move, address + size, address + 2 * size, size, 1),  # where nothing is mapped
        )
        for call in calls * 3:
            refused(f"a move that cannot be: {call}", call)
        expect(driver.read(address, 5) == b"other", "a refused move changed what was mapped there")
        expect(driver.read(first, 5) == b"first", "a refused move lost what it was to move")
        driver.write(first, b"again")
        refused("write to what may only be read", driver.write, first + size, b"x")
        expect(open_descriptors() == before, "a refused move left a descriptor open")
        expect(used_bytes(driver) - used < TRUTH_BYTES // 2, "a refused move took memory")
        driver.unmap(first, 2 * size)
        driver.unmap(address, size)
