"""The CUDA driver on a real GPU: the driver contract, and the facts about CUDA that the design depends on.

If a test fails here, a fact is no longer true on this GPU or driver: look at the design, not only at the
code. Nothing else may use the GPU while this runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest

from membroker.testing import CHECKS, MakeDriver
from membroker.vmm import open_driver
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_gpu_keeps_a_drivers_promises(check: Callable[[MakeDriver], None]) -> None:
    check(partial(open_driver, "cuda", context=True))


def test_an_exported_descriptor_is_nvidias(gpu: CudaDriver) -> None:
    """Fact: a forked child frees the memory when it closes its /dev/nvidia* descriptors, exported ones included."""
    handle = gpu.create(gpu.device.granularity)
    descriptor = gpu.export(handle)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia")
    os.close(descriptor)
    gpu.release(handle)


def test_16_tib_of_addresses_are_reserved_in_one_call(worker: CudaDriver) -> None:
    address = worker.reserve(16 << 40)
    worker.unreserve(address, 16 << 40)
