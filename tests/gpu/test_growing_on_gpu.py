"""Growable buffers and sparse arrays on a real GPU: what stays is not touched, also while a kernel uses it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.sizes import MIB, PAGE

from membroker.dlpack import export
from membroker.model import Model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LONG_CYCLES = 400_000_000
"""What torch's sleeping kernel is given: some 200 ms on an H200."""


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is installed here without CUDA")
    return torch


def warm_up(torch: Any, tensor: Any) -> None:
    """Load the kernels: the first launch of each waits for all that runs."""
    torch.cuda._sleep(1)
    tensor.add_(0)
    torch.cuda.synchronize()


class TestGrowableBuffer:
    def test_tensors_stay_valid(self, model: Model, torch: Any) -> None:
        """A cache grows in ten steps and shrinks again: earlier tensors keep their memory and contents."""
        adapter = pytest.importorskip("membroker.adapters.torch")
        with model.growable_buffer(0, "64GiB", PAGE) as buffer:
            address, step, parts = buffer.address, 3 * MIB, []
            for number in range(10):
                offset = buffer.grow(step)
                parts.append(adapter.tensor(buffer, (step // 2,), torch.bfloat16, offset).fill_(number))
                every = adapter.tensor(buffer, (buffer.size // 2,), torch.bfloat16)
                assert (buffer.address, every.data_ptr()) == (address, address)
                assert [part[-1].item() for part in parts] == list(range(number + 1))
                assert every[:: step // 2].tolist() == list(range(number + 1))
            parts[0].fill_(42)
            assert every[17].item() == 42
            with pytest.raises(BufferError, match="still used"):
                buffer.shrink(step)
            del every, parts[4:]
            buffer.resize(4 * step)
            assert (buffer.physical_usage_bytes, buffer.address) == (4 * step, address)
            assert all(bool((part == value).all()) for part, value in zip(parts, (42, 1, 2, 3), strict=True))
            parts.clear()

    def test_it_grows_beside_a_kernel(self, model: Model, torch: Any) -> None:
        """A kernel works on the beginning while the end grows: it does not wait, and no byte is lost."""
        with model.growable_buffer(PAGE, "1GiB", PAGE) as buffer:
            first = torch.from_dlpack(export(buffer, (PAGE // 4,), "F32"))
            warm_up(torch, first)
            torch.cuda._sleep(LONG_CYCLES)
            first.add_(1)
            buffer.resize(64 * PAGE)
            every = torch.from_dlpack(export(buffer, (16 * PAGE,), "F32"))
            every.add_(1)
            assert (first.double().sum().item(), every.double().sum().item()) == (PAGE // 2, PAGE // 4 + 16 * PAGE)
            del first, every


class TestSparseArray:
    def test_a_tile_in_place(self, model: Model, torch: Any) -> None:
        """torch writes a block of a cache in place, and everything around it stays absent."""
        with model.sparse_array((4096, 2, 1024, 8, 128), "BF16", tile_rows=1) as cache:
            cache.back(7, 4095)
            block = torch.from_dlpack(cache.tensor(7))
            assert (block.dtype, block.device.type, tuple(block.shape)) == (
                torch.bfloat16,
                "cuda",
                (1, 2, 1024, 8, 128),
            )
            assert block.data_ptr() == cache.address + 7 * cache.tile_size
            assert not block.any()
            block.fill_(1)
            torch.cuda.synchronize()
            assert cache.read(7) == b"\x80\x3f" * (2 * MIB)
            assert cache.read(4095) == bytes(4 * MIB)
            with pytest.raises(BufferError, match="still used"):
                cache.drop(7, 4095)
            del block
            cache.drop(7, 4095)
            cache.back(7)
            assert not torch.from_dlpack(cache.tensor(7)).any(), "a tile that is borrowed again must be zeroed"
