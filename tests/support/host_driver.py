"""What the tests of the host driver share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from membroker.vmm import (
    AccessFlags,
    Handle,
    Location,
    open_driver,
)
from membroker.vmm.host.driver import GRANULARITY, HostDriver

make_host = partial(open_driver, "host")


def used(driver: HostDriver, location: Location = Location.DEVICE) -> int:
    return driver.memory(location).used


def mapped(driver: HostDriver, size: int = GRANULARITY) -> tuple[int, Handle]:
    handle, address = driver.create(size), driver.reserve(size)
    driver.map(address, handle)
    driver.set_access(address, size, AccessFlags.READ_WRITE)
    return address, handle


@contextmanager
def lent(driver: HostDriver) -> Iterator[int]:
    (descriptor,) = driver.lend(GRANULARITY, 1)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def copies(driver: HostDriver) -> dict[str, int]:
    return {name: os.dup(descriptor) for name, descriptor in driver.survivors().items()}
