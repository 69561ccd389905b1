"""Borrowed memory in each installed framework, without a copy, with a real GPU and a real daemon.

All frameworks share this process's primary context with the library, as they do in an engine. What a framework must be
told before its first use of the GPU runs in a process of its own.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB, PAGE

from membroker import Client
from membroker.checkpoint import publish_arrays
from membroker.dlpack import export
from membroker.model import Model

# XLA takes three quarters of the GPU otherwise.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

LONG_CYCLES = 400_000_000
"""What torch's sleeping kernel is given: some 200 ms on an H200."""


def package(name: str) -> Any:
    """Return a framework, or skip with a sentence where it is not installed or sees no GPU."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed on this machine: {error}")
    if name == "torch" and not module.cuda.is_available():
        pytest.skip("torch is installed here without CUDA")
    if name == "jax":
        try:
            module.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"jax is installed here without CUDA: {error}")
    return module


def put(model: Model, address: int, data: bytes) -> None:
    model.driver.write(address, data)


def take(model: Model, address: int, size: int) -> bytes:
    return model.driver.read(address, size)


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        return package("torch")

    def test_a_sealed_segment(self, client: Client, model: Model, torch: Any) -> None:
        """The weights of a model, attached and used in place: torch takes read-only memory by DLPack."""
        numpy = package("numpy")
        publish_arrays(model, "weights", {"w": numpy.arange(1 << 20, dtype="<f4")}).close()
        with client.attach("llama/weights") as segment:
            info = segment.index()["w"]
            tensor = torch.from_dlpack(export(segment, info.shape, info.dtype, info.offset))
            assert tensor.data_ptr() == segment.address + info.offset
            assert tensor.double().sum().item() == (1 << 20) * ((1 << 20) - 1) / 2
            del tensor
        client.delete_segment("llama/weights")


class TestCupy:
    @pytest.fixture
    def cupy(self) -> Any:
        return package("cupy")

    @pytest.fixture
    def adapter(self, cupy: Any) -> Any:
        return importlib.import_module("membroker.adapters.cupy")

    def test_an_array_over_a_buffer(self, daemon: Daemon, model: Model, cupy: Any, adapter: Any) -> None:
        """The array has the buffer's address, writes are in place, and it keeps the memory after the buffer is
        closed.
        """
        buffer = model.allocate(PAGE)
        array = adapter.array(buffer, (16, 4), "F32", offset=512)
        assert array.data.ptr == buffer.address + 512
        array[...] = 1
        cupy.cuda.runtime.deviceSynchronize()
        assert take(model, buffer.address + 512, 4).hex() == "0000803f"
        part = array[3:5]
        buffer.close()
        del array
        assert float(part.sum()) == 8
        assert daemon.books().lent_bytes == PAGE
        del part
        until(lambda: daemon.books().lent_bytes == 0)

    def test_cupy_computes_in_borrowed_memory(self, daemon: Daemon, model: Model, cupy: Any, adapter: Any) -> None:
        """Arrays made in the block are in borrowed memory; they stay valid after the block, and are released when
        they are deleted.
        """
        before = cupy.cuda.get_allocator()
        with adapter.use(model) as pool:
            small = [cupy.full(100, number, "f4") for number in range(100)]
            assert daemon.books().lent_bytes == 32 * MIB
            large = cupy.ones((16, MIB), "f4")
            assert daemon.books().lent_bytes == 96 * MIB
            total = float(large.sum()) + sum(float(array[0]) for array in small)
            assert total == 16 * MIB + 4950
        assert cupy.cuda.get_allocator() == before
        assert float(large[0, 0]) == 1
        del large, small
        pool.free_all_blocks()
        until(lambda: daemon.books().lent_bytes == 0)

    def test_a_refusal_is_cupys_own_error(self, daemon: Daemon, client: Client, cupy: Any, adapter: Any) -> None:
        """What the pool caches is released first: a second array as large as the limit fits once the first is
        deleted.
        """
        model = client.model("small", limit="64MiB")
        with adapter.use(model):
            for _ in range(5):
                array = cupy.zeros(60 * MIB, "u1")
                del array
                array = cupy.zeros(64 * MIB, "u1")
                with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
                    cupy.zeros(1, "u1")
                del array
        until(lambda: daemon.books().lent_bytes == 0)

    def test_another_stream_still_reads_what_is_given_back(
        self, daemon: Daemon, model: Model, cupy: Any, adapter: Any
    ) -> None:
        """An array and its pool are deleted while a stream still works on them: the pool waits, and nothing faults."""
        torch = package("torch")
        done, stream = torch.cuda.Event(), torch.cuda.Stream()
        with adapter.use(model) as pool:
            array = cupy.zeros(MIB, "f4")
            tensor = torch.from_dlpack(array)
            cupy.cuda.runtime.deviceSynchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG_CYCLES)
                tensor.add_(1)
                done.record()
            del array, tensor
            pool.free_all_blocks()
            until(lambda: daemon.books().lent_bytes == 0)
            assert done.query()
        torch.cuda.synchronize()


class TestJax:
    @pytest.fixture
    def jax(self) -> Any:
        return package("jax")

    @pytest.fixture
    def adapter(self, jax: Any) -> Any:
        return importlib.import_module("membroker.adapters.jax")

    @pytest.mark.parametrize(("dtype", "bits"), [("F32", "0000803f"), ("BF16", "803f"), ("I32", "01000000")])
    def test_an_array_over_a_buffer(
        self, daemon: Daemon, model: Model, jax: Any, adapter: Any, dtype: str, bits: str
    ) -> None:
        buffer = model.allocate(PAGE)
        put(model, buffer.address, bytes.fromhex(bits * 1024))
        array = adapter.array(buffer, (32, 32), dtype)
        assert array.unsafe_buffer_pointer() == buffer.address
        assert next(iter(array.devices())).platform in ("gpu", "cuda")
        buffer.close()
        assert float((array @ array)[0, 0]) == 32
        assert daemon.books().lent_bytes == PAGE
        del array
        gc.collect()
        until(lambda: daemon.books().lent_bytes == 0)

    def test_a_sealed_segment(self, client: Client, model: Model, jax: Any, adapter: Any) -> None:
        numpy = package("numpy")
        publish_arrays(model, "constants", {"w": numpy.arange(4096, dtype="<f4")}).close()
        with client.attach("llama/constants") as segment:
            info = segment.index()["w"]
            array = adapter.array(segment, info.shape, info.dtype, info.offset)
            assert array.unsafe_buffer_pointer() == segment.address + info.offset
            assert float(jax.jit(lambda x: x.sum())(array)) == 4096 * 4095 / 2
            del array
            gc.collect()
        client.delete_segment("llama/constants")


def run_alone(daemon: Daemon, code: str) -> None:
    """Run `code` in a process of its own, with `model` of a client; skip where it says so with status 77."""
    prelude = f"""
import sys
import membroker
client = membroker.connect({str(daemon.endpoint())!r})
model = client.model("alone", limit="256MiB")
def used():
    return model.stats().books["device"].used_bytes
"""
    command = [sys.executable, "-c", prelude + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


def test_numba_computes_in_borrowed_memory(daemon: Daemon) -> None:
    """Its arrays are in borrowed memory, an array over a buffer has the buffer's address, and a refusal has the
    numbers.
    """
    code = """
        try:
            from numba import cuda
            from numba.cuda import HostOnlyCUDAMemoryManager
        except ImportError as error:
            print(f"numba.cuda is not installed on this machine: {error}", file=sys.stderr)
            sys.exit(77)
        if not cuda.is_available():
            print("numba.cuda is installed on this machine and finds no CUDA", file=sys.stderr)
            sys.exit(77)
        import gc
        import time
        import numpy
        from membroker.adapters import numba as adapter
        from membroker.errors import OutOfMemory

        adapter.use(model)
        ours = cuda.device_array(1000, "f4")
        assert used() == 32 << 20, used()
        ours.copy_to_device(numpy.full(1000, 2, "f4"))  # copies alone: a kernel would need NVVM
        assert ours.copy_to_host().sum() == 2000
        moved = cuda.to_device(numpy.arange(1 << 20, dtype="f4"))
        assert moved.copy_to_host()[-1] == (1 << 20) - 1
        buffer = model.allocate("2MiB")
        over = adapter.array(buffer, (8,), "I32")
        assert over.__cuda_array_interface__["data"][0] == buffer.address
        over.copy_to_device(numpy.full(8, 5, "i4"))
        cuda.synchronize()
        assert model.driver.read(buffer.address, 4) == bytes([5, 0, 0, 0])
        try:
            cuda.device_array(1 << 30, "u1")
        except OutOfMemory as error:
            assert error.level == "model"
        else:
            raise AssertionError("a gigabyte of 256 MiB")
        assert cuda.current_context().get_memory_info().total > 1 << 30
        del ours, moved, over
        buffer.close()
        gc.collect()
        for _ in range(1000):
            if used() == 0:
                break
            time.sleep(0.01)
        assert used() == 0, used()
    """
    run_alone(daemon, code)


def test_rmm_allocates_borrowed_memory(daemon: Daemon) -> None:
    """RMM's pool borrows from the broker, a refusal is a MemoryError, and closing the pool releases everything."""
    code = """
        try:
            import rmm
        except ImportError as error:
            print(f"rmm is not installed on this machine: {error}", file=sys.stderr)
            sys.exit(77)
        import gc
        from membroker.adapters import rmm as adapter

        with adapter.use(model) as pool:
            assert used() == 64 << 20, used()
            buffers = [rmm.DeviceBuffer(size=1 << 20) for _ in range(100)]
            assert used() >= 100 << 20, used()
            try:
                rmm.DeviceBuffer(size=1 << 30)
            except MemoryError:
                pass
            else:
                raise AssertionError("a gigabyte of 256 MiB")
        del buffers, pool
        gc.collect()
    """
    run_alone(daemon, code)
