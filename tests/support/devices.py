"""The two kinds of device that one text runs on: the host driver, and the first GPU.

`tests/conftest.py` makes the fixture `device` of them. Its parameter `cuda` has the marker `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from membroker.vmm import Driver, DriverUnavailable, Location, open_driver
from membroker.vmm.host.driver import HostDriver
from tests.support.daemons import Daemon, running
from tests.support.sizes import GIB, MIB


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device. `capacity` is what its daemon lends, in pages of `page` bytes."""

    kind: str
    capacity: int
    page: int
    open: Callable[[], AbstractContextManager[Driver]]
    running: Callable[..., AbstractContextManager[Daemon]]
    """Run a daemon of the device, with TOML keys above its own."""


@contextmanager
def host_driver() -> Iterator[Driver]:
    """Open a host driver of its own; at the end nothing is left on it."""
    driver = HostDriver()
    yield driver
    assert driver.memory(Location.DEVICE).used == 0
    driver.abandon()


@contextmanager
def cuda_driver() -> Iterator[Driver]:
    try:
        driver = open_driver("cuda", 0, context=True)
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU to test on: {error}")
    yield driver
    driver.close()


@contextmanager
def running_on_gpu(config: Mapping[str, Any] | None = None) -> Iterator[Daemon]:
    """Run a daemon on the first GPU; at the end the GPU has as much in use as before."""
    from membroker.vmm.cuda.driver import CudaDriver
    from tests.support.gpu import on_gpu

    try:
        gpu = CudaDriver()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU to test on: {error}")
    with on_gpu(gpu, config) as daemon:
        yield daemon
    gpu.close()


DEVICES: Mapping[str, Device] = {
    "host": Device("host", 256 * MIB, 2 * MIB, host_driver, running),
    "cuda": Device("cuda", 4 * GIB, 64 * MIB, cuda_driver, running_on_gpu),
}
