"""Growable buffers and sparse arrays on a real GPU: what stays is not touched, and nothing is unmapped while a kernel
uses it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.gpu import near, on_gpu, used
from tests.support.sizes import MIB, PAGE

import membroker
from membroker.dlpack import export
from membroker.errors import NotMapped, OutOfMemory
from membroker.model import Model
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LONG_CYCLES = 400_000_000
"""What torch's sleeping kernel is given: some 200 ms on an H200."""


@pytest.fixture(scope="module")
def daemon(gpu: CudaDriver) -> Iterator[Daemon]:
    """A daemon that owns 4 GiB of the GPU. This process's context stays when it ends."""
    with on_gpu(gpu, back=False) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[membroker.Client]:
    with membroker.connect(str(daemon.endpoint())) as client:
        yield client


@pytest.fixture
def model(daemon: Daemon, client: membroker.Client) -> Iterator[Model]:
    """A model; at the end of each test all its memory has been released."""
    yield client.model("growing", virtual_capacity="8GiB")
    gc.collect()
    until(lambda: daemon.books().lent_bytes == 0)


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

    def test_new_pages_are_zero_and_old_bytes_are_old(self, model: Model, torch: Any) -> None:
        """Memory that a shrink released is zeroed when it is borrowed again; what stayed of the last page keeps its
        bytes.
        """
        with model.growable_buffer(4 * PAGE, "1GiB", PAGE) as buffer:
            torch.from_dlpack(export(buffer, (4 * PAGE,), "U8")).fill_(0x5A)
            buffer.resize(PAGE + 100)
            buffer.resize(4 * PAGE)
            every = torch.from_dlpack(export(buffer, (4 * PAGE,), "U8"))
            assert bool((every[: 2 * PAGE] == 0x5A).all())
            assert not every[2 * PAGE :].any()
            del every

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

    def test_shrinking_waits_for_the_kernel(self, model: Model, torch: Any) -> None:
        """A kernel still runs on a stream of its own after the last reference to its tensor is gone."""
        with model.growable_buffer(8 * PAGE, "1GiB", PAGE) as buffer:
            last = torch.from_dlpack(export(buffer, (PAGE // 4,), "F32", 7 * PAGE))
            stream, done = torch.cuda.Stream(), torch.cuda.Event()
            warm_up(torch, last)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG_CYCLES)
                last.add_(1)
                done.record()
            del last
            assert not done.query(), "the kernel ended too early: the test shows nothing"
            buffer.resize(PAGE)
            assert done.query()
            torch.cuda.synchronize()

    def test_the_gpu_has_it_back(self, gpu: CudaDriver, model: Model, daemon: Daemon) -> None:
        """The GPU's own figure rises and falls with the buffer; a refusal has the numbers and changes nothing."""
        with model.growable_buffer(PAGE, "64GiB") as buffer:
            assert buffer.physical_usage_bytes == 16 * MIB
            before = used(gpu)
            buffer.resize("1GiB")
            until(lambda: near(used(gpu), before + 1024 * MIB))
            with pytest.raises(OutOfMemory) as refused:
                buffer.resize("8GiB")
            assert refused.value.level == "capacity"
            assert buffer.size == daemon.books().lent_bytes == 1024 * MIB
            buffer.resize(0)
            until(lambda: near(used(gpu), before))
            assert daemon.books().lent_bytes == 0

    def test_cupy(self, model: Model) -> None:
        """By DLPack and by the CUDA array interface of what `export` returns, which holds its range."""
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed here")
        with model.growable_buffer(PAGE, "1GiB", PAGE) as buffer:
            for take in (cupy.from_dlpack, cupy.asarray):
                array = take(export(buffer, (PAGE // 4,), "I32"))
                array[...] = 3
                buffer.grow(PAGE)
                assert (array.data.ptr, int(array.sum())) == (buffer.address, 3 * PAGE // 4)
                with pytest.raises(BufferError):
                    buffer.resize(PAGE // 2)
                del array
            buffer.resize(0)


class TestSparseArray:
    def test_copies(self, model: Model, daemon: Daemon) -> None:
        """Rows are written and read across tile borders; an absent tile is an error or zero, and takes no memory."""
        with (
            model.sparse_array((1 << 30, 256), "F32") as table,
            model.sparse_array((1 << 30, 256), "F32", absent="zero") as zeros,
        ):
            text = os.urandom(3 * 2048 * 1024)
            for array in (table, zeros):
                array.write(5000, text)
                assert array.read(5000, 3 * 2048) == text
                assert array.tiles() == [2, 3, 4, 5]
            with pytest.raises(NotMapped, match="tile 6 "):
                table.read(6 * 2048 - 1, 2)
            assert zeros.read(6 * 2048, 2048) == bytes(PAGE)
            assert zeros.read(4096, 5000 - 4096) == bytes((5000 - 4096) * 1024)
            assert daemon.books().lent_bytes == 8 * PAGE
            table.drop(3, 5)
            assert table.tiles() == [2, 4]
            assert table.read(4 * 2048, 2048) == text[(4 * 2048 - 5000) * 1024 :][:PAGE]

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

    def test_a_kernel_over_several_tiles(self, model: Model, torch: Any) -> None:
        """A gather of rows by their numbers, as from a dense table: tiles that lie side by side are one tensor."""
        adapter = pytest.importorskip("membroker.adapters.torch")
        with model.sparse_array((1_000_000, 1024), "F16") as table:
            table.back(10, 11, 12)
            first = 10 * table.tile_rows
            rows = adapter.tensor(table, (3 * table.tile_rows, 1024), torch.float16, 10 * table.tile_size)
            rows.copy_(torch.arange(3 * table.tile_rows, device="cuda")[:, None].expand_as(rows))
            wanted = torch.tensor([2047, 1, 3000, 1024], device="cuda")
            assert rows[wanted].mean(1).tolist() == [2047, 1, 3000, 1024]
            torch.cuda.synchronize()
            assert table.read(first + 1024) == torch.full((1024,), 1024.0, dtype=torch.float16).numpy().tobytes()
            del rows

    def test_float8(self, model: Model, torch: Any) -> None:
        """In place with torch's own dtype, and by copies of one byte per element."""
        adapter = pytest.importorskip("membroker.adapters.torch")
        with model.sparse_array((1000, 4096), "F8_E4M3") as table:
            table.write(0, b"\x38" * 4096)
            row = adapter.tensor(table, (4096,), torch.float8_e4m3fn)
            assert row.float().sum().item() == 4096
            del row

    def test_dropping_waits_for_the_kernel(self, model: Model, torch: Any) -> None:
        with model.sparse_array((64, PAGE // 4), "F32") as array:
            array.back(3)
            tile = torch.from_dlpack(array.tensor(3))
            stream, done = torch.cuda.Stream(), torch.cuda.Event()
            warm_up(torch, tile)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG_CYCLES)
                tile.add_(1)
                done.record()
            del tile
            assert not done.query(), "the kernel ended too early: the test shows nothing"
            array.drop(3)
            assert done.query()
            torch.cuda.synchronize()
