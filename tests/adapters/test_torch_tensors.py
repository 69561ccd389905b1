"""PyTorch over the host driver: tensors over what the broker lends, with a real daemon."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.daemons import until
from tests.support.sizes import MIB
from tests.support.tensors import bytes_of

import membroker

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
adapter = pytest.importorskip("membroker.adapters.torch")

pytestmark = pytest.mark.shared_daemon
DTYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]


class TestTensor:
    def test_every_dtype(self, model: membroker.Model) -> None:
        """A tensor over a buffer is the buffer's bytes, whatever its dtype, and what is written shows in both."""
        with model.allocate("2MiB") as buffer:
            for dtype in (getattr(torch, name) for name in DTYPES if hasattr(torch, name)):
                tensor = adapter.tensor(buffer, (3, 4), dtype, offset=4096)
                assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (3, 4), True)
                assert tensor.data_ptr() == buffer.address + 4096
                pattern = bytes(index % 2 for index in range(12 * dtype.itemsize))
                buffer.view()[4096 : 4096 + len(pattern)] = pattern
                assert bytes_of(tensor) == pattern
                tensor.view(torch.uint8).fill_(1)
                assert buffer.view()[4096 : 4096 + len(pattern)] == b"\1" * len(pattern)
                assert tuple(adapter.tensor(buffer, (0, 5), dtype, offset=buffer.size).shape) == (0, 5)
                del tensor

    def test_a_sparse_array(self, model: membroker.Model) -> None:
        """Any rows of tiles that are there, over the borders of tiles, in any dtype of torch; no others."""
        with model.sparse_array((8192, 1024), "BF16") as table:
            table.back(1, 2)
            rows = adapter.tensor(table, (1024, 1024), torch.bfloat16, 2 * MIB + MIB).fill_(3)
            assert table[1024 + 512].astype("float32").tolist() == [3.0] * 1024
            with pytest.raises(membroker.NotMapped, match="tile 3 "):
                adapter.tensor(table, (1024, 1024), torch.bfloat16, 5 * MIB)
            del rows
            table.drop(1, 2)

    def test_what_does_not_fit(self, model: membroker.Model) -> None:
        with model.allocate("2MiB") as buffer, pytest.raises(membroker.InvalidRequest, match="do not lie"):
            adapter.tensor(buffer, (2 * MIB,), torch.uint8, 1)


class TestAddressTensor:
    """A tensor over addresses of a pool, as an engine's KV cache: pages come and go beneath it."""

    def test_pages_come_and_go(self, model: membroker.Model) -> None:
        with model.pool(page_size="2MiB") as pool:
            cache = adapter.address_tensor(pool, (2, 64, 1 << 16), "bfloat16", 4 * MIB)
            assert cache.shape == (2, 64, 1 << 16)
            assert cache.data_ptr() == pool.base_address + 4 * MIB
            assert pool.physical_usage_bytes == 0
            pool.allocate(4 * MIB + (9 << 17), "2MiB")  # rows of 128 KiB
            cache[0, 9] = 1.5
            assert cache[0, 9].sum() == 1.5 * (1 << 16)
            assert cache[0, 10].sum() == 0
            pool.free(4 * MIB + (9 << 17), "2MiB")
            assert pool.physical_usage_bytes == 0
            pool.allocate(4 * MIB + (9 << 17), "2MiB")
            assert cache[0, 9].sum() == 0, "a page that is new has no bytes of before"


class TestEmpty:
    """Tensor first: a program names a shape and a dtype, and no address, offset or number of bytes."""

    @pytest.mark.parametrize("kind", ["model", "pool", "local", "local pool"])
    def test_its_memory_is_released_with_its_last_reference(self, model: membroker.Model, kind: str) -> None:
        with membroker.LocalSource("host") as local:
            lender: Any = local if "local" in kind else model
            source = membroker.VirtualMemoryPool(lender, "64MiB", page_size="2MiB") if "pool" in kind else lender

            def used() -> int:
                return int(local.physical_usage_bytes if lender is local else model.used_bytes)

            tensor = adapter.empty(source, (1024, 768), torch.float16)
            assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((1024, 768), torch.float16, True)
            assert used() == 2 * MIB
            other = adapter.empty(source, (1024, 1024))
            assert other.dtype == torch.get_default_dtype()
            assert other.data_ptr() != tensor.data_ptr()
            tensor.fill_(1.5)
            part = tensor[7:9].t()
            del tensor
            assert used() == 6 * MIB
            assert part.sum() == 1.5 * 2 * 768
            del part
            until(lambda: used() == 4 * MIB)
            if "pool" in kind:
                with pytest.raises(BufferError, match="empty"):
                    source.free(other.data_ptr())
                source.close()
            assert other.zero_().sum() == 0, "a closed pool keeps it"
            del other
            until(lambda: used() == 0)

    def test_what_is_refused_borrows_nothing(self, model: membroker.Model) -> None:
        with model.pool("64MiB", page_size="2MiB") as pool:
            for source in (model, pool):
                for shape, dtype in (((-1,), "F32"), ((2, 2), "F5"), ((2.0,), "F32"), ((1 << 40, 1 << 40), "F32")):
                    with pytest.raises(membroker.InvalidRequest):
                        adapter.empty(source, shape, dtype)
                with pytest.raises((membroker.OutOfMemory, membroker.OutOfVirtualMemory)):
                    adapter.empty(source, (1 << 30,), "F32", timeout=0)
                nothing = adapter.empty(source, (0, 5), "BF16")
                assert (nothing.shape, nothing.dtype) == ((0, 5), torch.bfloat16)
            assert model.used_bytes == 0
