"""An engine's own `torch.zeros` over a pool, and where the blocks of its tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.sizes import KIB, MIB

from membroker.errors import InvalidRequest, OutOfVirtualMemory
from membroker.kv import ElasticCache, Layout, Strided
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
    lambda: torch.zeros(size=(3 * MIB,), dtype=torch.int8, device="cpu"),
    lambda: torch.empty((2, 96, 16, 512), dtype=torch.bfloat16),
    lambda: torch.zeros(96, 16, 512, device=torch.device("cpu")),  # in torch's default dtype
    lambda: torch.empty(torch.Size([3, MIB]), dtype=torch.uint8),
]


@pytest.mark.parametrize("number", range(len(MAKERS)))
def test_a_kv_tensor_is_addresses(pool: VirtualMemoryPool, number: int) -> None:
    """It is as torch's own, but lies in the pool and has no memory before its pages are mapped."""
    make = MAKERS[number]
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
        lambda: torch.ones(PAGE, dtype=torch.int8),
        lambda: torch.zeros(PAGE, device="meta"),
        lambda: torch.zeros(PAGE, requires_grad=True),
        lambda: torch.empty(4, PAGE, 1, 1, memory_format=torch.channels_last),
        lambda: torch.zeros((PAGE,), out=torch.empty(0)),
        lambda: torch.zeros(0, PAGE),
        lambda: torch.zeros(3 * PAGE, dtype=torch.int64),
    ],
)
def test_others_are_torchs_own(pool: VirtualMemoryPool, make: Any) -> None:
    with Capture(pool, wanted=lambda shape, dtype: dtype != torch.int64) as capture:
        made = make()
    assert capture.ranges == []
    assert made.device.type == "meta" or not pool.base_address <= made.data_ptr() < pool.base_address + 64 * PAGE


def test_in_the_block_of_a_device(pool: VirtualMemoryPool) -> None:
    """`with torch.device(...)` decides where a tensor without a device is."""
    with Capture(pool) as capture, torch.device("meta"):
        assert torch.zeros(PAGE).device.type == "meta"
        torch.zeros(PAGE, device="cpu", dtype=torch.int8)
    assert capture.ranges == [(0, PAGE)]


def test_what_is_refused(pool: VirtualMemoryPool) -> None:
    with Capture(pool), pytest.raises(OutOfVirtualMemory):
        torch.zeros(64 * PAGE + 1, dtype=torch.int8)
    with Capture(pool), pytest.raises(TypeError):
        torch.zeros("much")


class TestStrided:
    def test_block_major(self) -> None:
        """[blocks, layers, 2, tokens, heads, dim]: one part."""
        cache = torch.empty(100, 4, 2, 16, 2, 8, dtype=torch.bfloat16, device="meta")
        block = 4 * 2 * 16 * 2 * 8 * 2
        assert strided(cache, 0) == [Strided(cache.data_ptr(), block, block)]

    def test_keys_and_values_apart(self) -> None:
        cache = torch.empty(2, 100, 16, 2, 8, dtype=torch.bfloat16)
        block, at = 512, cache.data_ptr()
        assert strided(cache, 1) == [Strided(at, block, block), Strided(at + 100 * block, block, block)]
        assert strided(cache, -4) == strided(cache, 1)

    def test_a_layer_of_a_block_major_cache(self) -> None:
        """A view of one layer: its blocks are small, and far apart."""
        layer = torch.empty(100, 4, 2, 16, 8)[:, 1]
        assert strided(layer, 0) == [Strided(layer.data_ptr(), 4 * 1024, 1024)]

    def test_permuted(self) -> None:
        """Heads before tokens in the shape, and after them in memory: shapes tell nothing, strides do."""
        cache = torch.empty(100, 16, 2, 8).permute(2, 0, 1, 3)
        assert strided(cache, 1) == [Strided(cache.data_ptr(), 1024, 1024)]

    @pytest.mark.parametrize("dimension", [0, 1])
    def test_blocks_that_are_not_apart(self, dimension: int) -> None:
        with pytest.raises(InvalidRequest):
            strided(torch.empty(1, 8).expand(4, 8) if not dimension else torch.empty(4, 0), dimension)


def test_from_the_tensors_to_a_cache(pool: VirtualMemoryPool) -> None:
    """All steps in the order of an engine: its tensors, their layout, and a cache that maps what is wanted."""
    with Capture(pool) as capture:
        layers = [torch.zeros(2, 64, 16, 2, 32, dtype=torch.float32) for _ in range(4)]
    assert len(capture.ranges) == 0, "64 blocks of 4 KiB are less than a page: torch's own"
    with Capture(pool) as capture:
        layers = [torch.zeros(2, 64, 64, 8, 32, dtype=torch.float32) for _ in range(4)]
    parts = [part for layer in layers for part in strided(layer, 1)]
    layout = Layout(pool.base_address, PAGE, 64, parts)
    assert (layout.groups, layout.bytes_of(1), len(layout.members(1))) == (2, 8 * PAGE, 32)
    assert layout.block_bytes == 8 * 64 * KIB
    with ElasticCache(pool, layout) as cache:
        assert cache.prepare(32)
        for layer in layers:
            layer[:, :32] = 7
            assert layer[:, :32].eq(7).all()
        assert pool.physical_usage_bytes == 8 * PAGE


@pytest.mark.parametrize(
    ("engine", "driver", "is_lent"),
    [
        ("cpu", "host", True),
        ("cuda:1", "cuda", True),
        ("cuda", "cuda", True),  # whichever is the current one
        ("cuda:0", "cuda", False),
        ("cuda:0", "host", False),
        ("cpu", "cuda", False),
    ],
)
def test_an_engine_computes_where_the_broker_lends(engine: str, driver: str, is_lent: bool) -> None:
    """The broker's GPU is this process's number 1. An engine on another device could not use the addresses."""
    lender: Any = SimpleNamespace(device=DeviceInfo("GPU-1", "a GPU", driver, PAGE, ordinal=1))
    if is_lent:
        assert device_lent(lender, torch.device(engine)).type == torch.device(engine).type
    else:
        with pytest.raises(InvalidRequest, match=f"this engine computes on {engine}, and the broker lends memory of"):
            device_lent(lender, torch.device(engine))
