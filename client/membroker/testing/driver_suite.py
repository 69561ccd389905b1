"""The promises of a driver as checks: what every `Driver` must do, on a card and on its host twin.

Owns the conformance suite. `check_driver(make_driver)` runs it all; `CHECKS` is the same as a tuple, one
function for each promise, to be given to `pytest.mark.parametrize`. `check_two_devices(make_first, make_second)` and
`TWO_DEVICE_CHECKS` are what drivers of two devices that reach each other promise besides. It must never look inside a
driver: a check calls what the contract has, and starts processes of its own. Bytes are moved by `write` and `read`.

`make_driver` is called in other processes too, so it must be picklable: a function of an importable module, or
`functools.partial(open_driver, "host")`. It takes `survivors=` where its drivers have any. Nothing else may use the
device's memory while a check runs.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from ..vmm.driver import AccessFlags, DriverOutOfMemory, Handle, Location
from ..vmm.sizes import is_power_of_two, round_up
from .harness import (
    DEADLINE_SECONDS,
    PATTERN,
    TRUTH_BYTES,
    MakeDriver,
    child_process,
    closed_descriptor,
    create_and_hand_over,
    create_and_send,
    expect,
    exported,
    extent,
    follow_one_extent,
    import_and_map,
    keep_descriptor,
    keep_mapping,
    lent,
    map_extent,
    mapped,
    mapped_handle,
    open_descriptors,
    opened,
    refused,
    release_at,
    reserved,
    used_bytes,
    wait_until,
    work,
)
from .two_devices import TWO_DEVICE_CHECKS

__all__ = ["CHECKS", "TWO_DEVICE_CHECKS", "MakeDriver", "check_driver", "check_two_devices", "wait_until"]

_ERROR_NAME = re.compile(r"CUDA_ERROR_\w+|NVML_ERROR_\w+|E[A-Z0-9]+")


def check_driver(make_driver: MakeDriver) -> None:
    """Run every check, each on a driver of its own; raise `AssertionError` at the first broken promise."""
    for check in CHECKS:
        check(make_driver)


def check_two_devices(make_first: MakeDriver, make_second: MakeDriver) -> None:
    """Run every check of two devices; raise `AssertionError` at the first broken promise."""
    for check in TWO_DEVICE_CHECKS:
        check(make_first, make_second)


# The promises, one function each


def sizes_are_granules(make_driver: MakeDriver) -> None:
    """The granularity is a power of two, and nothing is created or reserved that is no multiple of it."""
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
    """Part of a reservation cannot be given back, and none in which something is mapped."""
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
    """No map over the end of a reservation, outside of all, at an odd address, or of part of an extent."""
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
    """Another driver of the device maps into this one's reservation and unmaps there; handles are one driver's."""
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
    """Part of a mapping is never unmapped; several whole ones are, in one call, and can be mapped again."""
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
    """A fresh mapping allows nothing; READ allows no write; a range with a hole is refused unchanged."""
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


def a_mapping_keeps_the_memory(make_driver: MakeDriver) -> None:
    """After the release of its handle an extent lives in its mapping, and the handle is gone."""
    with opened(make_driver) as driver, reserved(driver, driver.device.granularity) as address:
        handle = driver.create(driver.device.granularity)
        map_extent(driver, address, handle)
        driver.write(address, b"kept")
        driver.release(handle)
        expect(driver.read(address, 4) == b"kept", "the mapping lost its bytes with the handle")
        refused("a second release", driver.release, handle)
        refused("export of a released handle", driver.export, handle)
        refused("map of a released handle", driver.map, address, handle)
        driver.unmap(address, driver.device.granularity)


def a_descriptor_keeps_the_memory(make_driver: MakeDriver) -> None:
    """An exported descriptor is CLOEXEC, the caller's own, outlives the handle, and survives its import."""
    with opened(make_driver) as driver:
        with mapped(driver, driver.device.granularity) as (address, handle):
            driver.write(address, b"kept")
            descriptor = driver.export(handle)
        try:
            expect(not os.get_inheritable(descriptor), "an exported descriptor would leak through exec")
            for _ in range(2):
                imported = driver.import_extent(descriptor, driver.device.granularity)
                with mapped_handle(driver, imported) as alias:
                    expect(driver.read(alias, 4) == b"kept", "the descriptor lost the bytes")
        finally:
            os.close(descriptor)


def a_descriptor_outlives_its_creator(make_driver: MakeDriver) -> None:
    """An extent whose creator was killed is imported from its descriptor with its bytes."""
    with opened(make_driver) as driver, child_process(create_and_send, make_driver) as child:
        descriptor = child.receive_descriptor()
        child.kill()
        try:
            handle = driver.import_extent(descriptor, driver.device.granularity)
        finally:
            os.close(descriptor)
        with mapped_handle(driver, handle) as address:
            expect(driver.read(address, len(PATTERN)) == PATTERN, "a dead creator's bytes are lost")


def what_is_sealed_is_only_read(make_driver: MakeDriver) -> None:
    """After `seal`, which may be said twice, the twin maps an extent writable no more; what is writable stays so.

    A card raises nothing, and goes on mapping it as it is asked to.
    """
    with opened(make_driver) as driver, ExitStack() as stack:
        size = driver.device.granularity
        handle = driver.create(size, sealable=True)
        address = stack.enter_context(mapped_handle(driver, handle))
        driver.write(address, b"written")
        with exported(driver, handle) as descriptor:
            early = stack.enter_context(mapped_handle(driver, driver.import_extent(descriptor, size)))
            driver.seal(descriptor)
            driver.seal(descriptor)
            imported = driver.import_extent(descriptor, size)
        stack.callback(driver.release, imported)
        late = stack.enter_context(reserved(driver, size))
        driver.map(late, imported)
        stack.callback(driver.unmap, late, size)
        driver.set_access(late, size, AccessFlags.READ)
        expect(driver.read(late, 7) == b"written", "a sealed extent shows other bytes")
        for place, mark in ((address, b"maker's"), (early, b"other's")):
            driver.write(place, mark)
            expect(driver.read(late, 7) == mark, "the seal took a mapping from who had it")
        if driver.device.driver == "host":
            refused("a writable map of what is sealed", driver.set_access, late, size, AccessFlags.READ_WRITE)
            refused("write to what is sealed", driver.write, late, b"x")
        else:
            driver.set_access(late, size, AccessFlags.READ_WRITE)
        expect(driver.read(late, 7) == b"other's", "asking for more took the access that was there")


def an_imported_extent_is_not_exported(make_driver: MakeDriver) -> None:
    """CUDA cannot export what was imported, so no driver may: a worker's code would break on a card."""
    with opened(make_driver) as driver, extent(driver, driver.device.granularity) as handle:
        with exported(driver, handle) as descriptor:
            imported = driver.import_extent(descriptor, handle.size)
        refused("export of an imported extent", driver.export, imported)
        driver.release(imported)


def a_foreign_descriptor_is_refused(make_driver: MakeDriver) -> None:
    """A pipe, a file and a closed descriptor are no extents: refused at import, or at the latest at map."""
    with opened(make_driver) as driver, tempfile.TemporaryFile() as file, ExitStack() as stack:
        size = driver.device.granularity
        file.truncate(size)
        ends = os.pipe()
        for end in ends:
            stack.callback(os.close, end)
        address = stack.enter_context(reserved(driver, size))
        for descriptor in (ends[0], file.fileno(), closed_descriptor()):
            refused("a foreign descriptor", import_and_map, driver, descriptor, size, address)


def extents_are_lent_as_descriptors(make_driver: MakeDriver) -> None:
    """`lend` returns descriptors that alone keep fresh extents: nobody inherits them, and the last close frees them."""
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
    """`map_descriptors` maps each extent at its place, with the access that was asked for; descriptors stay open."""
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
    """A `map_descriptors` that fails, at whichever extent, leaves every address free and descriptors to their owner."""
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
    """`move` binds extents at other addresses, down or up, over where they were too, with their bytes and access."""
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
    """A `move` that cannot be, at whichever extent, leaves everything mapped where it was, as it was."""
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


def memory_follows_births_and_deaths(make_driver: MakeDriver) -> None:
    """The device's figure falls only when the last holder in any process is gone, and then it does fall."""
    for keep in (keep_descriptor, keep_mapping):
        with opened(make_driver) as driver:
            if driver.memory(Location.DEVICE) is None:
                return
            follow_one_extent(driver, keep, make_driver)


def a_successor_knows_what_was_lent(make_driver: MakeDriver) -> None:
    """A driver made with a killed one's survivors shows the extents that live on, and sees the last holder's end."""
    with opened(make_driver) as driver:
        if driver.memory(Location.DEVICE) is None:
            return
        driver.release(driver.create(TRUTH_BYTES))
        most_alone = used_bytes(driver) + TRUTH_BYTES // 2
    with child_process(create_and_hand_over, make_driver) as child:
        descriptor, survivors = child.receive_survivors()
        child.kill()
    # Where there are none, `make_driver` need not know the word.
    with opened(partial(make_driver, survivors=survivors) if survivors else make_driver) as successor:
        expect(successor.survivors() == survivors, "the survivors were not taken over")
        expect(used_bytes(successor) > most_alone, "the figure lacks what a dead process's driver lent")
        os.close(descriptor)
        wait_until(lambda: used_bytes(successor) <= most_alone, "an old extent's end shows in the figure")


def too_much_is_out_of_memory(make_driver: MakeDriver) -> None:
    """More than the device has is `DriverOutOfMemory`, changes no figure, and less works afterwards."""
    with opened(make_driver) as driver:
        memory = driver.memory(Location.DEVICE)
        if memory is None:
            return
        size = round_up(memory.total, driver.device.granularity) + driver.device.granularity
        error = refused("create of more than the device has", driver.create, size)
        expect(isinstance(error, DriverOutOfMemory), f"{error!r} is no DriverOutOfMemory")
        expect(used_bytes(driver) - memory.used < TRUTH_BYTES // 2, "a refused create took memory")
        with mapped(driver, driver.device.granularity) as (address, _handle):
            driver.write(address, b"works")


def errors_carry_the_drivers_names(make_driver: MakeDriver) -> None:
    """Every error says which call failed and the driver's own name and number for it."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        unknown = Handle(1 << 62, granule, Location.DEVICE)
        failures = (
            refused("create", driver.create, 1),
            refused("release", driver.release, unknown),
            refused("export", driver.export, unknown),
            refused("map", driver.map, granule, unknown),
            refused("unmap", driver.unmap, granule, granule),
            refused("set_access", driver.set_access, granule, granule, AccessFlags.READ),
            refused("unreserve", driver.unreserve, granule, granule),
        )
        for error in failures:
            expect(bool(error.call) and error.code != 0, f"{error!r} names no call or no code")
            expect(bool(_ERROR_NAME.fullmatch(error.name)), f"{error.name!r} is no driver's name")


def a_failure_leaves_nothing_behind(make_driver: MakeDriver) -> None:
    """Refused calls, many times, leave as many descriptors, as much memory and the same mappings as before."""
    with opened(make_driver) as driver, mapped(driver, driver.device.granularity) as (address, handle):
        size = handle.size
        with exported(driver, handle) as descriptor, tempfile.TemporaryFile() as file:
            calls: tuple[Callable[[], object], ...] = (
                partial(driver.create, size + 1),
                partial(driver.create, 1 << 60),
                partial(driver.import_extent, descriptor, size + 1),
                partial(import_and_map, driver, file.fileno(), size, address),
                partial(driver.map, address, handle),
            )
            for call in calls:
                refused("a call that cannot work", call)
            before, used = open_descriptors(), used_bytes(driver)
            for call in calls * 20:
                refused("a call that cannot work", call)
            expect(open_descriptors() == before, "refused calls left descriptors open")
            expect(used_bytes(driver) - used < TRUTH_BYTES // 2, "refused calls left memory in use")
        driver.write(address, b"works")


def threads_work_side_by_side(make_driver: MakeDriver) -> None:
    """Threads create, map, write and release at once, each sees its own bytes, and all is given back."""
    with opened(make_driver) as driver, ThreadPoolExecutor(8) as pool:
        used = used_bytes(driver)
        for finished in [pool.submit(work, driver, bytes([number])) for number in range(8)]:
            finished.result(DEADLINE_SECONDS)
        wait_until(lambda: used_bytes(driver) <= used + TRUTH_BYTES // 2, "the threads' memory is given back")


def one_of_two_releases_wins(make_driver: MakeDriver) -> None:
    """Of two threads that release the same handle exactly one is refused."""
    with opened(make_driver) as driver, ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            handle, start = driver.create(driver.device.granularity), threading.Barrier(2)
            outcomes = [pool.submit(release_at, driver, handle, start) for _ in range(2)]
            expect(sum(each.result(DEADLINE_SECONDS) for each in outcomes) == 1, "a handle was released twice")


def a_closed_driver_refuses(make_driver: MakeDriver) -> None:
    """After `close` every call is a `DriverError`; closing again is nothing."""
    driver = make_driver()
    handle = driver.create(driver.device.granularity, sealable=True)
    with exported(driver, handle) as descriptor:
        driver.close()
        driver.close()
        refused("create on a closed driver", driver.create, handle.size)
        refused("export on a closed driver", driver.export, handle)
        refused("seal on a closed driver", driver.seal, descriptor)
        refused("memory of a closed driver", driver.memory, Location.DEVICE)
        refused("processes of a closed driver", driver.processes)
        refused("survivors of a closed driver", driver.survivors)
        refused("pin of a closed driver", driver.pin, 1)
        refused("copier of a closed driver", driver.copier)
        refused("lend of a closed driver", driver.lend, handle.size, 1)
        refused("move of a closed driver", driver.move, 2 * handle.size, handle.size, handle.size)
        refused("map_descriptors of a closed driver", driver.map_descriptors, handle.size, [descriptor], handle.size)


def copies_arrive_when_they_are_waited_for(make_driver: MakeDriver) -> None:
    """A copier brings bytes to pinned memory and back, of the device's memory and of the host's, in the order asked."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        pinned, copier = driver.pin(granule + 1), driver.copier()
        try:
            for location in Location:
                with mapped(driver, granule, location) as (address, _handle):
                    driver.write(address, PATTERN)
                    driver.synchronize()
                    copier.copy(pinned + 1, address, granule)
                    there = copier.mark()
                    copier.copy(address + granule // 2, pinned + 1, len(PATTERN))
                    back = copier.mark()
                    copier.wait(there)
                    copier.wait(back)
                    found = driver.read(address + granule // 2, len(PATTERN))
                    expect(found == PATTERN, f"the copier brought {found!r} back from pinned memory ({location.value})")
        finally:
            copier.close()
            driver.unpin(pinned)


def copies_are_refused_where_access_is(make_driver: MakeDriver) -> None:
    """No copy over the end of what is pinned or mapped, none into what is only read; and no odd unpin."""
    with opened(make_driver) as driver:
        granule = driver.device.granularity
        pinned, copier = driver.pin(granule), driver.copier()
        with mapped(driver, granule) as (address, _handle):
            refused("a copy over the end of what is pinned", copier.copy, pinned + 1, address, granule)
            refused("a copy over the end of what is mapped", copier.copy, pinned, address + 1, granule)
            refused("a copy of nothing", copier.copy, pinned, address, 0)
            driver.set_access(address, granule, AccessFlags.READ)
            refused("a copy into what is only read", copier.copy, address, pinned, granule)
        copier.close()
        refused("unpin from the middle", driver.unpin, pinned + granule // 2)
        driver.unpin(pinned)
        refused("a second unpin", driver.unpin, pinned)
        for size in (0, -1, 1 << 63):
            refused(f"pin({size})", driver.pin, size)


CHECKS: tuple[Callable[[MakeDriver], None], ...] = (
    sizes_are_granules,
    fresh_memory_is_zero,
    host_memory_works_like_the_devices,
    reservations_are_aligned,
    a_reservation_is_given_back_whole,
    an_extent_is_mapped_whole_in_a_reservation,
    addresses_are_the_processs,
    nothing_is_mapped_over_a_mapping,
    whole_mappings_are_unmapped,
    one_extent_is_mapped_many_times,
    access_is_as_it_was_set,
    a_mapping_keeps_the_memory,
    a_descriptor_keeps_the_memory,
    a_descriptor_outlives_its_creator,
    what_is_sealed_is_only_read,
    an_imported_extent_is_not_exported,
    a_foreign_descriptor_is_refused,
    extents_are_lent_as_descriptors,
    all_is_lent_or_nothing,
    descriptors_are_mapped_side_by_side,
    all_is_mapped_or_nothing,
    extents_are_moved_without_a_copy,
    all_is_moved_or_nothing,
    memory_follows_births_and_deaths,
    a_successor_knows_what_was_lent,
    too_much_is_out_of_memory,
    errors_carry_the_drivers_names,
    a_failure_leaves_nothing_behind,
    threads_work_side_by_side,
    one_of_two_releases_wins,
    copies_arrive_when_they_are_waited_for,
    copies_are_refused_where_access_is,
    a_closed_driver_refuses,
)
"""Every promise; each is called with `make_driver` and raises `AssertionError` where it is broken."""
