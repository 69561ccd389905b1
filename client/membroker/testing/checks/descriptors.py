"""What keeps memory alive, what is sealed, and which descriptors are imported."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack

from ...vmm.driver import AccessFlags
from ..harness import (
    PATTERN,
    MakeDriver,
    child_process,
    closed_descriptor,
    create_and_send,
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


def a_mapping_keeps_the_memory(make_driver: MakeDriver) -> None:
    """After its handle is released, an extent lives on in its mapping, and the handle is invalid."""
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
    """After `seal`, which may be called twice, the host driver maps the extent read-only; older mappings stay writable.

    A GPU's driver raises nothing, and still maps it as asked.
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
            expect(driver.read(late, 7) == mark, "the seal took away an older mapping")
        if driver.device.driver == "host":
            refused("a writable map of a sealed extent", driver.set_access, late, size, AccessFlags.READ_WRITE)
            refused("write to a sealed extent", driver.write, late, b"x")
        else:
            driver.set_access(late, size, AccessFlags.READ_WRITE)
        expect(driver.read(late, 7) == b"other's", "a request for more access took away the access that was there")


def an_imported_extent_is_not_exported(make_driver: MakeDriver) -> None:
    """CUDA cannot export an imported extent, so no driver may: a worker's code would break on a GPU."""
    with opened(make_driver) as driver, extent(driver, driver.device.granularity) as handle:
        with exported(driver, handle) as descriptor:
            imported = driver.import_extent(descriptor, handle.size)
        refused("export of an imported extent", driver.export, imported)
        driver.release(imported)


def a_foreign_descriptor_is_refused(make_driver: MakeDriver) -> None:
    """A pipe, a file and a closed descriptor are refused at import, or at map at the latest."""
    with opened(make_driver) as driver, tempfile.TemporaryFile() as file, ExitStack() as stack:
        size = driver.device.granularity
        file.truncate(size)
        ends = os.pipe()
        for end in ends:
            stack.callback(os.close, end)
        address = stack.enter_context(reserved(driver, size))
        for descriptor in (ends[0], file.fileno(), closed_descriptor()):
            refused("a foreign descriptor", import_and_map, driver, descriptor, size, address)
