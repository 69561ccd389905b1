"""The device's figures, errors, threads, copies, and the end of a driver."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ...vmm.driver import AccessFlags, DriverOutOfMemory, Handle, Location
from ...vmm.sizes import round_up
from ..harness import (
    DEADLINE_SECONDS,
    PATTERN,
    TRUTH_BYTES,
    MakeDriver,
    child_process,
    create_and_hand_over,
    expect,
    exported,
    follow_one_extent,
    import_and_map,
    keep_descriptor,
    keep_mapping,
    mapped,
    open_descriptors,
    opened,
    refused,
    release_at,
    used_bytes,
    wait_until,
    work,
)

_ERROR_NAME = re.compile(r"CUDA_ERROR_\w+|NVML_ERROR_\w+|E[A-Z0-9]+")


def memory_follows_births_and_deaths(make_driver: MakeDriver) -> None:
    """The device's figure falls only when the last holder in any process is gone, and then it does fall."""
    for keep in (keep_descriptor, keep_mapping):
        with opened(make_driver) as driver:
            if driver.memory(Location.DEVICE) is None:
                return
            follow_one_extent(driver, keep, make_driver)


def a_successor_knows_what_was_lent(make_driver: MakeDriver) -> None:
    """A driver that takes over a killed driver's survivors counts extents that live on until their last holder ends."""
    with opened(make_driver) as driver:
        if driver.memory(Location.DEVICE) is None:
            return
        driver.release(driver.create(TRUTH_BYTES))
        most_alone = used_bytes(driver) + TRUTH_BYTES // 2
    with child_process(create_and_hand_over, make_driver) as child:
        descriptor, survivors = child.receive_survivors()
        child.kill()
    # Without survivors, `make_driver` need not take the argument.
    with opened(partial(make_driver, survivors=survivors) if survivors else make_driver) as successor:
        expect(successor.survivors() == survivors, "the survivors were not taken over")
        expect(used_bytes(successor) > most_alone, "the figure lacks what a dead process's driver lent")
        os.close(descriptor)
        wait_until(lambda: used_bytes(successor) <= most_alone, "an old extent's end shows in the figure")


def too_much_is_out_of_memory(make_driver: MakeDriver) -> None:
    """Creating more than the device has raises `DriverOutOfMemory` and changes no figure; less works afterwards."""
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
    """Threads create, map, write and release at once, each sees its own bytes, and all memory is released."""
    with opened(make_driver) as driver, ThreadPoolExecutor(8) as pool:
        used = used_bytes(driver)
        for finished in [pool.submit(work, driver, bytes([number])) for number in range(8)]:
            finished.result(DEADLINE_SECONDS)
        wait_until(lambda: used_bytes(driver) <= used + TRUTH_BYTES // 2, "the threads' memory is released")


def one_of_two_releases_wins(make_driver: MakeDriver) -> None:
    """Of two threads that release the same handle exactly one is refused."""
    with opened(make_driver) as driver, ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            handle, start = driver.create(driver.device.granularity), threading.Barrier(2)
            outcomes = [pool.submit(release_at, driver, handle, start) for _ in range(2)]
            expect(sum(each.result(DEADLINE_SECONDS) for each in outcomes) == 1, "a handle was released twice")


def copies_arrive_when_they_are_waited_for(make_driver: MakeDriver) -> None:
    """A copier copies device and host memory to pinned memory and back, in the order of the calls."""
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
    """A copy over the end of pinned or mapped memory or into read-only memory is refused, and so is a wrong unpin."""
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


def a_closed_driver_refuses(make_driver: MakeDriver) -> None:
    """After `close` every call raises `DriverError`; a second `close` does nothing."""
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
