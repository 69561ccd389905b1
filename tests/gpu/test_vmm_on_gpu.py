"""`membroker.vmm` on two real GPUs that reach each other: one range, copies and access.

If a test fails here, a fact is no longer true on this GPU or driver. Nothing is larger than 256 MiB.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from membroker.testing import TWO_DEVICE_CHECKS, MakeDriver
from membroker.vmm import (
    AccessFlags,
    AddressRange,
    DriverUnavailable,
    MappedRange,
    PhysicalMemory,
    open_driver,
)
from membroker.vmm.cuda.driver import CudaDriver
from membroker.vmm.sizes import MIB

pytestmark = pytest.mark.gpu

PATTERN = b"".join((number * 0x9E3779B1 & 0xFFFFFFFF).to_bytes(4, "little") for number in range(MIB // 4))
"""1 MiB in which no two words are equal: bytes that come from elsewhere show."""

make_first, make_second = (partial(open_driver, "cuda", ordinal, context=True) for ordinal in range(2))


@pytest.fixture
def neighbour(worker: CudaDriver) -> Iterator[CudaDriver]:
    """The second GPU, where there are two that reach each other."""
    import cuda.bindings.driver as cuda

    try:
        driver = CudaDriver(1, context=True)
    except DriverUnavailable as error:
        pytest.skip(f"no second GPU to test on: {error}")
    with ExitStack() as end:
        end.callback(driver.close)
        for one, other in ((worker, driver), (driver, worker)):
            result, reaches = cuda.cuDeviceCanAccessPeer(one.device.ordinal, other.device.ordinal)
            if int(result) or not reaches:
                pytest.skip(f"{one.device.uuid} does not reach {other.device.uuid}")
        yield driver


def copy_on_gpu(driver: CudaDriver, to: int, source: int, size: int) -> None:
    """Copy between two addresses in a GPU's own context, without a kernel, and wait."""
    import cuda.bindings.driver as cuda

    for call in (partial(cuda.cuCtxPushCurrent, driver._context), partial(cuda.cuMemcpyDtoD, to, source, size)):
        assert not int(call()[0])
    driver.synchronize()
    assert not int(cuda.cuCtxPopCurrent()[0])


@pytest.mark.parametrize("check", TWO_DEVICE_CHECKS, ids=lambda check: check.__name__)
def test_two_gpus_keep_their_promises(neighbour: CudaDriver, check: Callable[[MakeDriver, MakeDriver], None]) -> None:
    check(make_first, make_second)


def test_a_copy_without_a_kernel_crosses_from_gpu_to_gpu(
    worker: CudaDriver, neighbour: CudaDriver, state: Callable[[str, str], None]
) -> None:
    """One range, half of it on each GPU: a plain copy inside it crosses GPUs, in either context."""
    size = 128 * MIB
    both = {worker: AccessFlags.READ_WRITE, neighbour: AccessFlags.READ_WRITE}
    with (
        AddressRange(worker, 2 * size) as addresses,
        PhysicalMemory.create(worker, size) as near,
        PhysicalMemory.create(neighbour, size) as far,
        MappedRange(addresses, near, access=both) as here,
        MappedRange(addresses, far, offset=size, access=both) as there,
    ):
        data = PATTERN * (size // len(PATTERN))
        checksum = zlib.crc32(data)
        worker.write(here.address, data)
        copy_on_gpu(worker, there.address, here.address, size)
        assert zlib.crc32(neighbour.read(there.address, size)) == checksum
        worker.write(here.address, bytes(size))
        copy_on_gpu(neighbour, here.address, there.address, size)
        assert zlib.crc32(worker.read(here.address, size)) == checksum
        state("copied from GPU to GPU and back", f"2 x {size // MIB} MiB")
