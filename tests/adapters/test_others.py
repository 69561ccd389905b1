"""The adapters that need a GPU, as far as they go without one, and JAX over the host driver where it is installed.

What allocates for CuPy, RMM and Numba is one class, `BlockLending`, which is tested here over the host driver and a
real daemon. The frameworks themselves are tested on a GPU (tests/gpu/test_frameworks_on_gpu.py).
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.driver_errors import named
from tests.support.garbage import collect
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB

from membroker import Client
from membroker.adapters import cupy as cupy_adapter
from membroker.adapters import jax as jax_adapter
from membroker.adapters import numba as numba_adapter
from membroker.adapters import rmm as rmm_adapter
from membroker.adapters.blocks import ALIGNMENT, BlockLending
from membroker.checkpoint import publish_arrays
from membroker.errors import DeviceFailure, InvalidRequest, OutOfMemory
from membroker.model import Model
from membroker.vmm.driver import DriverError

pytestmark = pytest.mark.shared_daemon


class TestAbsent:
    """Each adapter can be imported without its framework, and says what to install when it is used."""

    @pytest.mark.parametrize(
        ("package", "use", "sentence"),
        [
            ("cupy", lambda model: cupy_adapter.memory_pool(model), "needs CuPy: pip install cupy-cuda13x"),
            ("rmm", lambda model: rmm_adapter.memory_resource(model), "needs RMM: pip install rmm-cu13"),
            ("numba.cuda", lambda model: numba_adapter.use(model), "needs Numba with CUDA: pip install 'numba-cuda"),
            ("jax", lambda model: jax_adapter.array(model.allocate(1), (1,), "U8"), "needs JAX: pip install 'jax"),
        ],
    )
    def test_a_plain_sentence(
        self, model: Model, monkeypatch: pytest.MonkeyPatch, package: str, use: Callable[[Model], Any], sentence: str
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=sentence):
            use(model)

    def test_the_host_twin_is_no_card(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """A developer's laptop with the framework installed and the host driver behind the broker."""
        for package, use in (
            ("cupy", cupy_adapter.memory_pool),
            ("rmm", rmm_adapter.memory_resource),
            ("numba.cuda", numba_adapter.memory_manager),
        ):
            monkeypatch.setitem(sys.modules, package, SimpleNamespace())
            with pytest.raises(InvalidRequest, match="needs a GPU"):
                use(model)


class TestLending:
    """What stands behind the malloc and the free of CuPy's pool, RMM's and Numba."""

    def test_small_blocks_share_a_buffer(self, daemon: Daemon, model: Model) -> None:
        """A thousand small arrays are one round trip to the broker and one charge, not two gigabytes."""
        lending = BlockLending(model)
        addresses = [lending.allocate(1 + 7 * number) for number in range(1000)]
        assert all(address % ALIGNMENT == 0 for address in addresses)
        assert daemon.books().lent_bytes == lending.held_bytes == 32 * MIB
        for address in addresses:
            lending.free(address)
        until(lambda: daemon.books().lent_bytes == 0)
        assert lending.used_bytes == lending.held_bytes == 0
        address = lending.allocate(40 * MIB + 1)
        assert daemon.books().lent_bytes == 42 * MIB, "a large block has a buffer of its own"
        lending.free(address)
        until(lambda: daemon.books().lent_bytes == 0)
        assert lending.allocate(0) == 0, "nothing is no address"
        lending.free(0)
        assert lending.held_bytes == 0

    def test_what_was_just_freed_can_be_borrowed_again(self, client: Client) -> None:
        """A framework frees its cache because it was refused, and asks again at once: the answer waits for that."""
        lending = BlockLending(client.model("limited", limit="34MiB"))
        for _ in range(20):
            address = lending.allocate(34 * MIB)
            with pytest.raises(OutOfMemory):
                lending.allocate(1)
            lending.free(address)
        lending.take_back()

    def test_the_device_is_waited_for_before_memory_is_used_again(
        self, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kernel still reads the block that was freed: the next one that gets it must not write before."""
        lending = BlockLending(model)
        kept, first = lending.allocate(512), lending.allocate(512)
        waits: list[int] = []
        monkeypatch.setattr(model.source, "later", lambda work: None, raising=True)
        monkeypatch.setattr(model.driver, "synchronize", lambda: waits.append(1))
        lending.free(first)
        assert waits == []
        assert lending.allocate(512) == first
        assert waits == [1]
        monkeypatch.undo()
        for address in (kept, first):
            lending.free(address)

    def test_a_device_that_cannot_be_waited_for_keeps_nothing(
        self, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While a graph is captured nobody may wait for the device: what is freed meanwhile comes back behind it."""
        lending = BlockLending(model)
        blocks = [lending.allocate(MIB) for _ in range(4)]

        def captured() -> None:
            raise DriverError("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900, "a graph is captured")

        monkeypatch.setattr(model.source, "later", lambda work: None)
        monkeypatch.setattr(model.driver, "synchronize", captured)
        for address in blocks:
            lending.free(address)
        with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
            lending.take_back()
        blocks.append(lending.allocate(MIB))
        assert len(set(blocks)) == 5, "a block that work may still use was lent again"
        monkeypatch.undo()
        lending.free(blocks.pop())
        lending.take_back()
        assert lending.used_bytes == lending.held_bytes == 0

    def test_free_takes_no_lock(self, model: Model) -> None:
        """The garbage collector may run a framework's finalizer in a thread that is inside the allocator."""
        lending = BlockLending(model)
        address = lending.allocate(512)
        with lending._lock, lending._returning:
            lending.free(address)
        lending.take_back()
        assert lending.held_bytes == 0

    def test_blocks_never_overlap(self, model: Model) -> None:
        """Four threads allocate and free at random; each block keeps the bytes that its owner wrote."""
        seed = chosen_seed()
        lending = BlockLending(model, "4MiB")
        faults: list[str] = []

        def churn(number: int) -> None:
            chance = random.Random(seed + number)
            mine: list[tuple[int, int, int]] = []
            for turn in range(400):
                if mine and chance.random() < 0.5:
                    address, size, mark = mine.pop(chance.randrange(len(mine)))
                    if ctypes.string_at(address, size) != bytes([mark]) * size:
                        faults.append(f"thread {number}, turn {turn}: {size} bytes at {address:#x}")
                    lending.free(address)
                else:
                    size, mark = chance.choice([1, 100, 5000, 300_000, 3 * MIB]), chance.randrange(256)
                    address = lending.allocate(size)
                    ctypes.memset(address, mark, size)
                    mine.append((address, size, mark))
                    if len(mine) > 12:
                        lending.free(mine.pop(0)[0])
            for address, _, _ in mine:
                lending.free(address)

        threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        lending.take_back()
        assert lending.used_bytes == lending.held_bytes == 0


class TestRmm:
    """RMM's two resources are stood in for: what is tested is what they are given, and what is put back."""

    @pytest.fixture
    def rmm(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        current: list[Any] = ["what was before"]
        mr = SimpleNamespace(
            CallbackMemoryResource=lambda allocate, deallocate: SimpleNamespace(a=allocate, d=deallocate),
            PoolMemoryResource=lambda upstream, **sizes: SimpleNamespace(upstream=upstream, **sizes),
            get_current_device_resource=lambda: current[-1],
            set_current_device_resource=current.append,
        )
        monkeypatch.setitem(sys.modules, "rmm", SimpleNamespace(mr=mr))
        monkeypatch.setattr(rmm_adapter, "check_card", lambda name, on_card: None)
        return mr

    def test_a_pool_begins_small_and_borrows_by_callbacks(
        self, daemon: Daemon, model: Model, rmm: SimpleNamespace
    ) -> None:
        """Left to itself RMM's pool begins with half of the GPU."""
        with rmm_adapter.use(model, maximum_bytes="128MiB") as pool:
            assert rmm.get_current_device_resource() is pool
            assert (pool.initial_pool_size, pool.maximum_pool_size) == (64 * MIB, 128 * MIB)
            address = pool.upstream.a(64 * MIB, None)
            ctypes.memset(address, 1, 64 * MIB)
            assert daemon.books().lent_bytes == 64 * MIB
            with pytest.raises(MemoryError):
                pool.upstream.a(1 << 40, None)
            pool.upstream.d(address, 64 * MIB, None)
            until(lambda: daemon.books().lent_bytes == 0)
        assert rmm.get_current_device_resource() == "what was before"


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self) -> Any:
        return pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

    def test_weights_of_a_segment(self, client: Client, model: Model, jax: Any) -> None:
        """A sealed segment is what JAX wants: constant. The array keeps it mapped after everybody closed it."""
        np = pytest.importorskip("numpy")
        weights = {"w": np.arange(1 << 20, dtype="<f4")}
        segment = publish_arrays(model, "weights", weights, metadata={"pad": "x" * 1000})
        offset = segment.index()["w"].offset
        aligned = -(-offset // 64) * 64
        array = jax_adapter.array(segment, (1000, 1000), "F32", aligned)
        assert array.unsafe_buffer_pointer() == segment.address + aligned
        segment.close()
        client.delete_segment("llama/weights")
        assert float(array[0, 1] - array[0, 0]) == 1.0
        assert model.stats().books["device"].used_bytes > 0
        jax.block_until_ready(array)
        del array
        collect()
        until(lambda: model.stats().books["device"].used_bytes == 0)

    def test_what_jax_would_copy(self, model: Model, jax: Any) -> None:
        with model.allocate("1MiB") as buffer:
            with pytest.raises(InvalidRequest, match="jax_enable_x64"):
                jax_adapter.array(buffer, (4,), "F64")
            with pytest.raises(InvalidRequest, match="aligned"):
                jax_adapter.array(buffer, (4,), "F32", offset=4)
