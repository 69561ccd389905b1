"""The CUDA driver on a real GPU: the driver contract, and the facts about CUDA that the design depends on.

If a test fails here, a fact is no longer true on this GPU or driver: look at the design, not only at the
code. Nothing else may use the GPU while this runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from membroker.testing import CHECKS, MakeDriver
from membroker.vmm import DriverError, DriverUnavailable, Location, open_driver
from membroker.vmm.cuda.driver import CudaDriver
from membroker.vmm.sizes import MIB

pytestmark = pytest.mark.gpu

_PRELUDE = """
import os, sys
import cuda.bindings.driver as cuda
from membroker.vmm import *
from membroker.vmm.cuda.driver import CudaDriver
def say(word):
    print(word, flush=True)
def wait():
    sys.stdin.readline()
"""


@pytest.fixture(scope="module", autouse=True)
def _a_gpu() -> None:
    try:
        CudaDriver().close()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU to test on: {error}")


@pytest.fixture
def broker() -> Iterator[CudaDriver]:
    """The GPU as a broker uses it: without a context."""
    driver = CudaDriver()
    yield driver
    driver.close()


@pytest.fixture
def worker() -> Iterator[CudaDriver]:
    """The GPU as a worker uses it."""
    driver = CudaDriver(context=True)
    yield driver
    driver.close()


def used(driver: CudaDriver) -> int:
    memory = driver.memory(Location.DEVICE)
    return memory.used


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run `code` in a process of its own; it prints with `say` and reads a line with `wait`."""
    command = [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def expect_word(started: subprocess.Popen[str], word: str) -> None:
    assert started.stdout.readline().strip() == word


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_gpu_keeps_a_drivers_promises(check: Callable[[MakeDriver], None]) -> None:
    check(partial(open_driver, "cuda", context=True))


def test_the_broker_has_no_context() -> None:
    """Fact: cuInit and cuDeviceGet are enough to create, export, import and release."""
    code = """
        driver = CudaDriver()
        handle = driver.create(driver.device.granularity)
        descriptor = driver.export(handle)
        driver.release(driver.import_extent(descriptor, handle.size))
        os.close(descriptor)
        driver.release(handle)
        _, _, active = cuda.cuDevicePrimaryCtxGetState(cuda.cuDeviceGet(0)[1])
        _, current = cuda.cuCtxGetCurrent()
        say(f"active {active} current {int(current)}")
    """
    with process(code) as started:
        expect_word(started, "active 0 current 0")


def test_a_process_without_a_context_costs_under_5_mib(broker: CudaDriver) -> None:
    """Fact: about 3 MiB; with a context it is 518."""
    before = used(broker)
    code = """
        driver = CudaDriver()
        handle = driver.create(driver.device.granularity)
        os.close(driver.export(handle))
        driver.release(handle)
        say("ready")
        wait()
    """
    with process(code) as started:
        expect_word(started, "ready")
        assert used(broker) - before < 5 * MIB
        assert dict(broker.processes()).get(started.pid, 0) < 5 * MIB


def test_an_imported_extent_cannot_be_exported_again(broker: CudaDriver) -> None:
    """Fact: CUDA_ERROR_INVALID_VALUE. A worker cannot lend what it has borrowed."""
    handle = broker.create(broker.device.granularity)
    descriptor = broker.export(handle)
    imported = broker.import_extent(descriptor, handle.size)
    os.close(descriptor)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        broker.export(imported)


def test_an_extent_is_never_mapped_in_part(worker: CudaDriver) -> None:
    """Fact: cuMemMap takes a whole handle; a smaller size is CUDA_ERROR_NOT_SUPPORTED, or INVALID_VALUE."""
    size = worker.device.granularity
    handle, address = worker.create(2 * size), worker.reserve(2 * size)
    descriptor = worker.export(handle)
    half = worker.import_extent(descriptor, size)
    os.close(descriptor)
    with pytest.raises(DriverError, match=r"cuMemMap failed: CUDA_ERROR_(NOT_SUPPORTED|INVALID_VALUE)"):
        worker.map(address, half)
    worker.unreserve(address, 2 * size)


def test_an_exported_descriptor_is_nvidias(broker: CudaDriver) -> None:
    """Fact: a forked child frees the memory when it closes its /dev/nvidia* descriptors, exported ones included."""
    handle = broker.create(broker.device.granularity)
    descriptor = broker.export(handle)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia")
    os.close(descriptor)


def test_16_tib_of_addresses_are_reserved_in_one_call(worker: CudaDriver) -> None:
    address = worker.reserve(16 << 40)
    worker.unreserve(address, 16 << 40)
