"""Managed memory on a real GPU: hints as CUDA itself reports them, and bytes that both sides see.

At most 64 MiB of managed memory at a time. If a test fails here, CUDA's rules have changed, or the fake, on which the
same hints are tested without a GPU, does not behave like one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from membroker.managed.hints import (
    ManagedMemoryHints,
    UnifiedBuffer,
)
from membroker.vmm import Location
from membroker.vmm.cuda.driver import CudaDriver
from membroker.vmm.cuda.gpu import load_bindings
from membroker.vmm.sizes import MIB

pytestmark = pytest.mark.gpu

HOST, NOWHERE = -1, -2
"""`CU_DEVICE_CPU` and `CU_DEVICE_INVALID`, as CUDA reports a location."""
SIZE = 16 * MIB


@pytest.fixture
def worker(worker: CudaDriver) -> CudaDriver:
    """The GPU as a worker uses it, where it takes hints."""
    kind = load_bindings().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
    if not worker.in_context("cuDeviceGetAttribute", kind, worker.device.ordinal):
        pytest.skip("this GPU has no concurrent managed access")
    return worker


@pytest.fixture
def buffer(worker: CudaDriver) -> Iterator[UnifiedBuffer]:
    with UnifiedBuffer(worker, SIZE) as made:
        yield made


@pytest.fixture
def hints(buffer: UnifiedBuffer) -> ManagedMemoryHints:
    return ManagedMemoryHints.from_unified(buffer)


def attribute(buffer: UnifiedBuffer, name: str, offset: int = 0, size: int = SIZE) -> Any:
    """Return what CUDA says of a range: a location as one number, or a list of them."""
    kind = getattr(load_bindings().CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    width = 16 if name == "ACCESSED_BY" else 4
    assert isinstance(buffer.driver, CudaDriver)
    return buffer.driver.in_context("cuMemRangeGetAttribute", width, kind, buffer.address + offset, size)


def fill(buffer: UnifiedBuffer, value: int, offset: int, size: int) -> None:
    """Have the GPU set bytes, and wait for it."""
    assert isinstance(buffer.driver, CudaDriver)
    buffer.driver.in_context("cuMemsetD8", buffer.address + offset, value, size)
    buffer.driver.synchronize()


def test_each_advice_is_read_back(buffer: UnifiedBuffer, hints: ManagedMemoryHints) -> None:
    """CUDA reports each hint that was set, and no hint after it was cleared."""
    assert attribute(buffer, "READ_MOSTLY") == 0
    hints.set_read_mostly()
    assert attribute(buffer, "READ_MOSTLY") == 1
    hints.unset_read_mostly()
    assert attribute(buffer, "READ_MOSTLY") == 0
    assert attribute(buffer, "PREFERRED_LOCATION") == NOWHERE
    hints.set_preferred_location(0)
    assert attribute(buffer, "PREFERRED_LOCATION") == 0
    hints.set_preferred_location("host")
    assert attribute(buffer, "PREFERRED_LOCATION") == HOST
    hints.unset_preferred_location()
    assert attribute(buffer, "PREFERRED_LOCATION") == NOWHERE
    hints.set_accessed_by(0)
    assert 0 in attribute(buffer, "ACCESSED_BY")
    hints.set_accessed_by("host")
    hints.unset_accessed_by(Location.HOST)
    assert 0 in attribute(buffer, "ACCESSED_BY")
    hints.unset_accessed_by(0)
    assert set(attribute(buffer, "ACCESSED_BY")) == {NOWHERE}


def test_prefetches_are_read_back(worker: CudaDriver, buffer: UnifiedBuffer, hints: ManagedMemoryHints) -> None:
    """To the GPU, to the host, and only a part; the bytes do not change."""
    view = buffer.view()
    view[:] = bytes([7]) * SIZE
    assert attribute(buffer, "LAST_PREFETCH_LOCATION") == NOWHERE
    hints.prefetch_to(0)
    assert attribute(buffer, "LAST_PREFETCH_LOCATION") == 0
    hints.prefetch_to("host")
    assert attribute(buffer, "LAST_PREFETCH_LOCATION") == HOST
    hints.prefetch_range(4 * MIB, "4MiB", "device")
    assert attribute(buffer, "LAST_PREFETCH_LOCATION", 4 * MIB, 4 * MIB) == 0
    assert attribute(buffer, "LAST_PREFETCH_LOCATION", 8 * MIB, 8 * MIB) == HOST
    assert attribute(buffer, "LAST_PREFETCH_LOCATION") == NOWHERE
    worker.synchronize()
    assert view.tobytes() == bytes([7]) * SIZE


def test_both_sides_see_one_memory(buffer: UnifiedBuffer, hints: ManagedMemoryHints) -> None:
    """The GPU writes a half, the processor the other; wherever the pages are, each reads what both wrote."""
    half = SIZE // 2
    hints.prefetch_to(0)
    fill(buffer, 0x5A, 0, half)
    view = buffer.view()
    view[half:] = bytes([0xA5]) * half
    assert (view[0], view[half - 1], view[half], view[-1]) == (0x5A, 0x5A, 0xA5, 0xA5)
    hints.prefetch_to(0)
    fill(buffer, 0x11, half - 1, 2)
    assert view[half - 2 : half + 2].tobytes() == b"\x5a\x11\x11\xa5"
