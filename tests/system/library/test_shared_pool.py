"""`SharedMemoryPool` over a real daemon: what is lent, and when the broker knows its models.

What it does in any case is in `tests/client/test_shared_pool.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.fake_lender import PAGE, FlakyDriver
from tests.support.garbage import collect
from tests.support.sizes import MIB

import membroker
from membroker import SharedMemoryPool
from membroker.errors import DeviceFailure, ModelNotFound, OutOfMemory
from membroker.types import GlobalMemoryStats


@pytest.fixture(scope="module")
def broker() -> Iterator[Daemon]:
    """One daemon for all tests, which has everything back after each."""
    with running({"host_capacity": "64MiB"}) as daemon:
        yield daemon


@pytest.fixture
def driver() -> Iterator[FlakyDriver]:
    driver = FlakyDriver()
    yield driver
    driver.close()


@pytest.fixture
def client(broker: Daemon, driver: FlakyDriver) -> Iterator[membroker.Client]:
    with membroker.connect(broker.endpoint(), driver=driver) as client:
        yield client
        collect()
        until(lambda: broker.books().lent_bytes == 0)
        assert broker.models() == [], "a model is still registered"


def test_kv_cache_simulation(broker: Daemon, client: membroker.Client) -> None:
    """The seed's engine: three caches grow and shrink, and its sums are right at every step."""
    per_token, limit = 64 * 1024, 96 * MIB
    caches = {"llama-7b": 4096, "mistral-7b": 8192, "gpt2": 1024}
    with SharedMemoryPool(client, limit, PAGE) as engine:
        requests: dict[str, list[tuple[int, int]]] = {name: [] for name in caches}
        for name, tokens in caches.items():
            engine.register_model(name, tokens * per_token)
        choose, refused = random.Random(7), 0
        for _ in range(120):
            name = choose.choice(list(caches))
            if requests[name] and choose.random() < 0.4:
                address, size = requests[name].pop(choose.randrange(len(requests[name])))
                engine.deallocate_for_model(name, address - engine.pool(name).base_address, size)
            else:
                size = choose.choice((64, 128, 256)) * per_token
                try:
                    requests[name].append((engine.allocate_for_model(name, size), size))
                except OutOfMemory:
                    refused += 1
            for each, held in requests.items():
                assert engine.get_model_stats(each).physical_usage_bytes == sum(size for _, size in held)
            usage = sum(size for held in requests.values() for _, size in held)
            assert engine.global_stats() == GlobalMemoryStats(limit, usage, 3)
        assert refused > 0, "the device was never full"
        for name in caches:
            engine.unregister_model(name)
        assert engine.global_stats() == GlobalMemoryStats(limit, 0, 0)
        assert broker.books().lent_bytes == 0


def test_a_model_that_could_not_be_given_back(broker: Daemon, client: membroker.Client, driver: FlakyDriver) -> None:
    """While a graph is captured: it is unregistered later, and the broker then knows nothing of it."""
    with SharedMemoryPool(client, page_size=PAGE) as shared:
        shared.register_model("m", 4 * PAGE)
        shared.allocate_for_model("m", 2 * PAGE)
        driver.lost = True
        with pytest.raises(DeviceFailure):
            shared.unregister_model("m")
        driver.lost = False
        assert broker.books().lent_bytes == 2 * PAGE
        shared.unregister_model("m")
        assert broker.books().lent_bytes == 0
        with pytest.raises(ModelNotFound):
            shared.pool("m")
        assert client.models() == []
