"""`SharedMemoryPool`: the promises of candle-cuda-vmm's, its own examples, and one test for each of its faults.

The lender is this process. What differs over a broker is in `tests/system/library/test_shared_pool.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tests.support.daemons import until
from tests.support.fake_lender import PAGE, FlakyDriver
from tests.support.garbage import collect
from tests.support.sizes import GIB, MIB

from membroker import LocalSource, SharedMemoryPool
from membroker.errors import ModelAlreadyExists, ModelInUse, ModelNotFound, OutOfMemory
from membroker.types import GlobalMemoryStats


@pytest.fixture
def driver() -> Iterator[FlakyDriver]:
    driver = FlakyDriver()
    yield driver
    driver.close()


@pytest.fixture
def source(driver: FlakyDriver) -> Iterator[LocalSource]:
    """The lender, which has everything back at the end."""
    with LocalSource(driver) as source:
        yield source
        collect()
        until(lambda: source.physical_usage_bytes == 0)


@pytest.fixture
def shared(source: LocalSource) -> Iterator[SharedMemoryPool]:
    """A shared pool with a limit of 16 pages; `llama-7b` has 64 pages of addresses, and `gpt2` 32."""
    with SharedMemoryPool(source, 16 * PAGE, PAGE) as shared:
        shared.register_model("llama-7b", 64 * PAGE)
        shared.register_model("gpt2", 32 * PAGE)
        yield shared


class TestSeed:
    """What the seed's documentation, its tests and its examples ask for."""

    def test_the_documented_example(self, source: LocalSource) -> None:
        """Two models of 64 and 32 GB of addresses under a limit of 32 GB, here of 128 MiB; one allocates."""
        with SharedMemoryPool(source, "128MiB", "2MiB") as shared:
            shared.register_model("llama-7b", 64 * GIB)
            shared.register_model("gpt2", "32GiB")
            address = shared.allocate_for_model("llama-7b", "64MiB")
            assert address == shared.pool("llama-7b").base_address
            assert shared.get_model_stats("llama-7b").physical_usage_bytes == 64 * MIB
            assert shared.get_model_stats("gpt2").physical_usage_bytes == 0
            assert shared.get_model_stats("gpt2").virtual_capacity_bytes == 32 * GIB
            assert shared.global_stats() == GlobalMemoryStats(128 * MIB, 64 * MIB, 2)
            shared.deallocate_for_model("llama-7b", 0, "64MiB")
            shared.unregister_model("gpt2")
            assert shared.global_stats() == GlobalMemoryStats(128 * MIB, 0, 1)

    def test_a_model_is_registered_once(self, shared: SharedMemoryPool) -> None:
        shared.allocate_for_model("gpt2", PAGE)
        before = shared.global_stats()
        with pytest.raises(ModelAlreadyExists):
            shared.register_model("gpt2", PAGE)
        assert shared.global_stats() == before
        assert shared.get_model_stats("gpt2").virtual_capacity_bytes == 32 * PAGE

    def test_a_model_that_is_not_there(self, shared: SharedMemoryPool) -> None:
        calls = (
            shared.get_model_stats,
            shared.unregister_model,
            shared.pool,
            partial(shared.allocate_for_model, size=1),
            partial(shared.deallocate_for_model, offset=0, size=1),
        )
        for call in calls:
            with pytest.raises(ModelNotFound, match="opt"):
                call("opt")

    def test_out_of_physical_memory(self, shared: SharedMemoryPool, source: LocalSource) -> None:
        """The limit holds for all models together, and the error has the seed's numbers; nothing has changed."""
        shared.allocate_for_model("llama-7b", 10 * PAGE)
        with pytest.raises(OutOfMemory) as refused:
            shared.allocate_for_model("gpt2", 7 * PAGE)
        assert (refused.value.requested_bytes, refused.value.available_bytes) == (7 * PAGE, 6 * PAGE)
        assert shared.global_stats().physical_usage_bytes == source.physical_usage_bytes == 10 * PAGE
        shared.allocate_for_model("gpt2", 6 * PAGE)
        shared.deallocate_for_model("llama-7b", 0, PAGE)
        shared.allocate_for_model("gpt2", PAGE)


class TestFaultsOfTheSeed:
    def test_unregistering_counts_right(self, shared: SharedMemoryPool, source: LocalSource) -> None:
        """There the sum after an unregistration is wrong. Here what the model held is the others' again."""
        shared.allocate_for_model("llama-7b", 9 * PAGE)
        shared.allocate_for_model("gpt2", 3 * PAGE)
        shared.deallocate_for_model("llama-7b", 4 * PAGE, 2 * PAGE)
        shared.unregister_model("llama-7b")
        assert shared.global_stats() == GlobalMemoryStats(16 * PAGE, 3 * PAGE, 1)
        assert source.physical_usage_bytes == 3 * PAGE
        shared.allocate_for_model("gpt2", 13 * PAGE)
        with pytest.raises(ModelNotFound):
            shared.allocate_for_model("llama-7b", 1)
        shared.unregister_model("gpt2")
        shared.register_model("llama-7b", 8 * PAGE)
        assert shared.global_stats() == GlobalMemoryStats(16 * PAGE, 0, 1)
        assert shared.get_model_stats("llama-7b").virtual_capacity_bytes == 8 * PAGE


class TestModels:
    def test_a_model_has_its_own_limit(self, shared: SharedMemoryPool, source: LocalSource) -> None:
        """A small model beside a large one; who refused is told."""
        shared.register_model("small", 64 * PAGE, limit=2 * PAGE)
        shared.allocate_for_model("small", 2 * PAGE)
        with pytest.raises(OutOfMemory) as refused:
            shared.allocate_for_model("small", PAGE)
        assert (refused.value.level, refused.value.requested_bytes, refused.value.available_bytes) == ("model", PAGE, 0)
        assert shared.global_stats().physical_usage_bytes == source.physical_usage_bytes == 2 * PAGE
        shared.allocate_for_model("gpt2", 14 * PAGE)
        with pytest.raises(OutOfMemory) as refused:
            shared.allocate_for_model("llama-7b", PAGE)
        assert refused.value.level == "shared pool"

    def test_a_model_with_living_views_is_not_unregistered(self, shared: SharedMemoryPool, source: LocalSource) -> None:
        """A request still runs in the model's memory: it is told before anything has changed."""
        shared.allocate_for_model("gpt2", 2 * PAGE)
        before = shared.global_stats()
        with shared.pool("gpt2").pin(PAGE, 1), pytest.raises(ModelInUse):
            shared.unregister_model("gpt2")
        assert shared.global_stats() == before
        shared.unregister_model("gpt2")
        assert source.physical_usage_bytes == 0
