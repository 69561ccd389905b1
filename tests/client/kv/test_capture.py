"""An engine's own `torch.zeros` over a pool, and where the blocks of its tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.sizes import MIB

from membroker.errors import InvalidRequest
from membroker.kv import Strided
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm.driver import DeviceInfo

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
from membroker.kv.capture import Capture, device_lent, strided  # noqa: E402 - needs torch


@pytest.fixture
def pool(lender: Lender) -> Iterator[VirtualMemoryPool]:
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
        yield pool
    collect()


MAKERS = [
    lambda: torch.zeros(3 * MIB, dtype=torch.int8),  # vLLM
    lambda: torch.empty((2, 96, 16, 512), dtype=torch.bfloat16),
    lambda: torch.zeros(96, 16, 512, device=torch.device("cpu")),  # in torch's default dtype
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_kv_tensor_is_addresses(pool: VirtualMemoryPool, make: Any) -> None:
    """It is as torch's own, but lies in the pool and has no memory before its pages are mapped."""
    own = make()
    with Capture(pool) as capture:
        first, second = make(), make()
    assert (first.shape, first.dtype, first.device, first.stride()) == (own.shape, own.dtype, own.device, own.stride())
    assert first.data_ptr() == pool.base_address
    assert second.data_ptr() == pool.base_address + 2 * PAGE
    assert capture.ranges == [(0, 3 * MIB), (2 * PAGE, 3 * MIB)]
    assert pool.physical_usage_bytes == 0
    pool.allocate_ranges(capture.ranges)
    assert not first.any()
    first.fill_(1)
    assert not second.any()
    assert make().data_ptr() not in (first.data_ptr(), second.data_ptr()), "after the block torch allocates by itself"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(PAGE - 1, dtype=torch.int8),
        lambda: torch.zeros(PAGE, device="meta"),
        lambda: torch.empty(4, PAGE, 1, 1, memory_format=torch.channels_last),
        lambda: torch.zeros(3 * PAGE, dtype=torch.int64),
    ],
)
def test_others_are_torchs_own(pool: VirtualMemoryPool, make: Any) -> None:
    with Capture(pool, wanted=lambda shape, dtype: dtype != torch.int64) as capture:
        made = make()
    assert capture.ranges == []
    assert made.device.type == "meta" or not pool.base_address <= made.data_ptr() < pool.base_address + 64 * PAGE


def test_where_the_blocks_of_a_tensor_are() -> None:
    """Keys and values apart, heads before tokens in the shape and after them in memory, and a view of one layer."""
    cache = torch.empty(2, 100, 16, 2, 8, dtype=torch.bfloat16)
    block, at = 512, cache.data_ptr()
    assert (
        strided(cache, 1) == strided(cache, -4) == [Strided(at, block, block), Strided(at + 100 * block, block, block)]
    )
    permuted = torch.empty(100, 16, 2, 8).permute(2, 0, 1, 3)
    assert strided(permuted, 1) == [Strided(permuted.data_ptr(), 1024, 1024)]
    layer = torch.empty(100, 4, 2, 16, 8)[:, 1]
    assert strided(layer, 0) == [Strided(layer.data_ptr(), 4 * 1024, 1024)]
    for tensor, dimension in ((torch.empty(1, 8).expand(4, 8), 0), (torch.empty(4, 0), 1)):
        with pytest.raises(InvalidRequest):
            strided(tensor, dimension)


@pytest.mark.parametrize(
    ("engine", "driver", "is_lent"),
    [("cpu", "host", True), ("cuda:1", "cuda", True), ("cuda:0", "cuda", False), ("cpu", "cuda", False)],
)
def test_an_engine_computes_where_the_broker_lends(engine: str, driver: str, is_lent: bool) -> None:
    """The broker's GPU is this process's number 1. An engine on another device could not use the addresses."""
    lender: Any = SimpleNamespace(device=DeviceInfo("GPU-1", "a GPU", driver, PAGE, ordinal=1))
    if is_lent:
        assert device_lent(lender, torch.device(engine)).type == torch.device(engine).type
    else:
        with pytest.raises(InvalidRequest, match=f"this engine computes on {engine}, and the broker lends memory of"):
            device_lent(lender, torch.device(engine))
