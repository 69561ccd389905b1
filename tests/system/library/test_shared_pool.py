"""`SharedMemoryPool`: the promises of candle-cuda-vmm's, its own examples, and one test for each of its faults.

In process and, where they are deep, over a real daemon: the same tests.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.fake_lender import PAGE, FlakyDriver
from tests.support.garbage import collect
from tests.support.sizes import GIB, MIB
from tests.support.threads import together

import membroker
from membroker import LocalSource, SharedMemoryPool, VirtualMemoryPool
from membroker.errors import (
    ClosedError,
    DeviceFailure,
    InvalidOffset,
    InvalidPageSize,
    InvalidRequest,
    ModelAlreadyExists,
    ModelInUse,
    ModelNotFound,
    NotMapped,
    OutOfMemory,
    OutOfVirtualMemory,
)
from membroker.types import GlobalMemoryStats
from membroker.vmm import Location


@dataclass
class Lending:
    """The lender, its driver, and how many bytes the lender's own books say."""

    lender: membroker.Client | LocalSource
    driver: FlakyDriver
    daemon: Daemon | None

    @property
    def lent(self) -> int:
        if self.daemon is not None:
            return int(self.daemon.books().lent_bytes)
        assert isinstance(self.lender, LocalSource)
        return self.lender.physical_usage_bytes


@pytest.fixture(scope="module")
def broker() -> Iterator[Daemon]:
    """One daemon for all tests, which has everything back after each."""
    with running({"host_capacity": "64MiB"}) as daemon:
        yield daemon


both = pytest.mark.parametrize("where", ["local", pytest.param("broker", marks=pytest.mark.deep)], indirect=True)


@pytest.fixture
def where(request: pytest.FixtureRequest) -> Iterator[Lending]:
    """The lender, which has everything back at the end: both ways to lend, where a test says so."""
    driver = FlakyDriver()
    if getattr(request, "param", "local") == "local":
        with LocalSource(driver) as source:
            yield Lending(source, driver, None)
            collect()
            until(lambda: source.physical_usage_bytes == 0)
    else:
        daemon = request.getfixturevalue("broker")
        with membroker.connect(daemon.endpoint(), driver=driver) as client:
            yield Lending(client, driver, daemon)
            collect()
            until(lambda: daemon.books().lent_bytes == 0)
            assert daemon.models() == [], "a model is still registered"
    driver.close()


@pytest.fixture
def shared(where: Lending) -> Iterator[SharedMemoryPool]:
    """A shared pool with a limit of 16 pages; `llama-7b` has 64 pages of addresses, and `gpt2` 32."""
    with SharedMemoryPool(where.lender, 16 * PAGE, PAGE) as shared:
        shared.register_model("llama-7b", 64 * PAGE)
        shared.register_model("gpt2", 32 * PAGE)
        yield shared


@both
class TestSeed:
    """What the seed's documentation, its tests and its examples ask for."""

    def test_the_documented_example(self, where: Lending) -> None:
        """Two models of 64 and 32 GB of addresses under a limit of 32 GB, here of 128 MiB; one allocates."""
        with SharedMemoryPool(where.lender, "128MiB", "2MiB") as shared:
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

    def test_simple_usage(self, where: Lending) -> None:
        """The seed's example of one pool: a large capacity, two allocations, what is mapped, and all released."""
        lender = where.lender
        model = None if isinstance(lender, LocalSource) else lender.model("m", virtual_capacity="128GiB")
        with VirtualMemoryPool(model or lender, 128 * GIB, 2 * MIB) as pool:  # type: ignore[arg-type]
            assert (pool.capacity, pool.page_size, pool.physical_usage_bytes) == (128 * GIB, 2 * MIB, 0)
            first = pool.allocate(0, 64 * MIB)
            second = pool.allocate(GIB, 32 * MIB)
            assert (first, second) == (pool.base_address, pool.base_address + GIB)
            assert pool.physical_usage_bytes == 96 * MIB
            assert [pool.is_mapped(offset) for offset in (0, 64 * MIB, GIB)] == [True, False, True]
            stats = pool.stats()
            assert (stats.virtual_capacity_bytes, stats.physical_usage_bytes, stats.mapped_pages) == (
                128 * GIB,
                96 * MIB,
                48,
            )
            pool.free(0, 64 * MIB)
            assert [(move.old_offset, move.new_offset, move.size) for move in pool.compact()] == [(GIB, 0, 32 * MIB)]
            pool.free(0, 32 * MIB)
            assert pool.physical_usage_bytes == 0
        if model is not None:
            model.unregister()

    def test_kv_cache_simulation(self, where: Lending) -> None:
        """The seed's inference engine: three models' caches grow with their requests and shrink when those end.

        The sums are those of the engine's own books at every step, and a full device refuses one model only.
        """
        per_token, limit = 64 * 1024, 96 * MIB
        caches = {"llama-7b": 4096, "mistral-7b": 8192, "gpt2": 1024}
        with SharedMemoryPool(where.lender, limit, PAGE) as engine:
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
            assert where.lent == 0

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

    def test_out_of_physical_memory(self, shared: SharedMemoryPool, where: Lending) -> None:
        """The limit holds for all models together, and the error has the seed's numbers; nothing has changed."""
        shared.allocate_for_model("llama-7b", 10 * PAGE)
        with pytest.raises(OutOfMemory) as refused:
            shared.allocate_for_model("gpt2", 7 * PAGE)
        assert (refused.value.requested_bytes, refused.value.available_bytes) == (7 * PAGE, 6 * PAGE)
        assert isinstance(refused.value, OutOfMemory)
        assert shared.global_stats().physical_usage_bytes == where.lent == 10 * PAGE
        shared.allocate_for_model("gpt2", 6 * PAGE)
        shared.deallocate_for_model("llama-7b", 0, PAGE)
        shared.allocate_for_model("gpt2", PAGE)


@both
class TestFaultsOfTheSeed:
    def test_successive_allocations(self, shared: SharedMemoryPool, where: Lending) -> None:
        """There every allocation lands at offset 0, so the second one fails. Here each has its own, stable address."""
        addresses = [shared.allocate_for_model("gpt2", PAGE) for _ in range(4)]
        assert len(set(addresses)) == 4
        for number, address in enumerate(addresses):
            where.driver.write(address, b"%04d" % number)
        base = shared.pool("gpt2").base_address
        shared.deallocate_for_model("gpt2", addresses[1] - base, PAGE)
        assert shared.allocate_for_model("gpt2", PAGE) == addresses[1]
        for number in (0, 2, 3):
            assert where.driver.read(addresses[number], 4) == b"%04d" % number

    @pytest.mark.parametrize("mappings", [0, 1, 5, 11])
    def test_a_failure_half_way(self, shared: SharedMemoryPool, where: Lending, mappings: int) -> None:
        """There the pages before the one that fails leak. Here nothing of it stays, mapped or counted."""
        shared.allocate_for_model("gpt2", PAGE)
        where.driver.maps_left = mappings
        with pytest.raises(DeviceFailure):
            shared.allocate_for_model("gpt2", 12 * PAGE)
        where.driver.maps_left = None
        assert shared.get_model_stats("gpt2").mapped_pages == 1
        assert shared.global_stats().physical_usage_bytes == where.lent == PAGE
        shared.allocate_for_model("gpt2", 15 * PAGE)

    def test_no_sum_overflows(self, shared: SharedMemoryPool, where: Lending) -> None:
        """There offset + size wraps around, and passes the check. Here it is compared without a sum."""
        shared.allocate_for_model("gpt2", 2 * PAGE)
        for offset, size in [(2**64 - 1, 2), (2**63 - 1, 2**63 - 1), (PAGE, 2**63 - 1), (-1, 2)]:
            with pytest.raises(InvalidOffset):
                shared.deallocate_for_model("gpt2", offset, size)
            for too_much in (2**63 - 1, 33 * PAGE):
                with pytest.raises((OutOfVirtualMemory, OutOfMemory)):
                    shared.allocate_for_model("gpt2", too_much)
            assert shared.global_stats().physical_usage_bytes == where.lent == 2 * PAGE

    def test_usage_counts_the_pages_touched(self, shared: SharedMemoryPool, where: Lending) -> None:
        """There usage is the rounded size; a range over a border touches one page more, and the sums drift apart."""
        shared.allocate_for_model("gpt2", 1)
        shared.allocate_for_model("gpt2", PAGE + 1)
        assert shared.global_stats().physical_usage_bytes == where.lent == 3 * PAGE
        shared.deallocate_for_model("gpt2", 2 * PAGE - 1, 2)  # two bytes, and two pages
        assert shared.global_stats().physical_usage_bytes == where.lent == PAGE
        with pytest.raises(NotMapped):
            shared.deallocate_for_model("gpt2", 0, 3 * PAGE)
        shared.deallocate_for_model("gpt2", PAGE - 1, 1)
        assert shared.global_stats().physical_usage_bytes == where.lent == 0

    def test_unregistering_counts_right(self, shared: SharedMemoryPool, where: Lending) -> None:
        """There the sum after an unregistration is wrong. Here what the model held is the others' again."""
        shared.allocate_for_model("llama-7b", 9 * PAGE)
        shared.allocate_for_model("gpt2", 3 * PAGE)
        shared.deallocate_for_model("llama-7b", 4 * PAGE, 2 * PAGE)
        shared.unregister_model("llama-7b")
        assert shared.global_stats() == GlobalMemoryStats(16 * PAGE, 3 * PAGE, 1)
        assert where.lent == 3 * PAGE
        shared.allocate_for_model("gpt2", 13 * PAGE)
        with pytest.raises(ModelNotFound):
            shared.allocate_for_model("llama-7b", 1)
        shared.unregister_model("gpt2")
        shared.register_model("llama-7b", 8 * PAGE)
        assert shared.global_stats() == GlobalMemoryStats(16 * PAGE, 0, 1)
        assert shared.get_model_stats("llama-7b").virtual_capacity_bytes == 8 * PAGE


class TestModels:
    def test_a_model_has_its_own_limit(self, shared: SharedMemoryPool, where: Lending) -> None:
        """A small model beside a large one; who refused is told."""
        shared.register_model("small", 64 * PAGE, limit=2 * PAGE)
        shared.allocate_for_model("small", 2 * PAGE)
        with pytest.raises(OutOfMemory) as refused:
            shared.allocate_for_model("small", PAGE)
        assert (refused.value.level, refused.value.requested_bytes, refused.value.available_bytes) == ("model", PAGE, 0)
        assert shared.global_stats().physical_usage_bytes == where.lent == 2 * PAGE
        shared.allocate_for_model("gpt2", 14 * PAGE)
        with pytest.raises(OutOfMemory) as refused:
            shared.allocate_for_model("llama-7b", PAGE)
        assert refused.value.level == "shared pool"

    @both
    def test_a_failed_registration_leaves_nothing(self, where: Lending) -> None:
        """The numbers are wrong, or the name, or there are no such addresses: it can be registered afterwards."""
        names: list[Any] = [None, 7, b"m", ["m"]]
        with SharedMemoryPool(where.lender, page_size=PAGE) as shared:
            for name in names:
                with pytest.raises(InvalidRequest):
                    shared.register_model(name, PAGE)
            for capacity, error in ((0, InvalidRequest), ("much", InvalidRequest), (2**62, DeviceFailure)):
                with pytest.raises(error):
                    shared.register_model("m", capacity)
                assert shared.global_stats() == GlobalMemoryStats(None, 0, 0)
                with pytest.raises(ModelNotFound):
                    shared.pool("m")
            shared.register_model("m", PAGE)
        with SharedMemoryPool(where.lender, page_size=4096) as shared, pytest.raises(InvalidPageSize):
            shared.register_model("m", PAGE)

    def test_a_model_with_living_views_is_not_unregistered(self, shared: SharedMemoryPool, where: Lending) -> None:
        """A request still runs in the model's memory: it is told before anything has changed."""
        shared.allocate_for_model("gpt2", 2 * PAGE)
        before = shared.global_stats()
        with shared.pool("gpt2").pin(PAGE, 1), pytest.raises(ModelInUse):
            shared.unregister_model("gpt2")
        assert shared.global_stats() == before
        shared.unregister_model("gpt2")
        assert where.lent == 0

    @both
    def test_a_model_that_could_not_be_given_back(self, shared: SharedMemoryPool, where: Lending) -> None:
        """While a graph is captured: it is unregistered later, and the broker then knows nothing of it."""
        shared.register_model("m", 4 * PAGE)
        shared.allocate_for_model("m", 2 * PAGE)
        where.driver.lost = True
        with pytest.raises(DeviceFailure):
            shared.unregister_model("m")
        where.driver.lost = False
        assert where.lent == 2 * PAGE
        shared.unregister_model("m")
        assert where.lent == 0
        with pytest.raises(ModelNotFound):
            shared.pool("m")
        if isinstance(where.lender, membroker.Client):
            assert "m" not in [model.name.rpartition("/")[2] for model in where.lender.models()]

    @both
    def test_close_gives_everything_back(self, where: Lending) -> None:
        shared = SharedMemoryPool(where.lender, page_size=PAGE)
        shared.register_model("m", 8 * PAGE)
        shared.allocate_for_model("m", 2 * PAGE)
        view = shared.pool("m").view(0, 4)
        shared.close()
        shared.close()
        for call in (
            partial(shared.allocate_for_model, "m", 1),
            partial(shared.register_model, "n", PAGE),
            partial(shared.unregister_model, "m"),
            partial(shared.pool, "m"),
        ):
            with pytest.raises(ClosedError):
                call()
        assert where.lent == 2 * PAGE, "a view keeps its memory"
        del view
        until(lambda: where.lent == 0)
        assert shared.global_stats() == GlobalMemoryStats(None, 0, 0)
        if isinstance(where.lender, membroker.Client):
            where.lender.model("m").unregister()  # which it could not leave while it was charged

    def test_a_forked_child_waits_for_nobody(self) -> None:
        """A thread of the parent is in the midst of a call at the fork: the child is told, and does not hang."""
        script = """
import os, signal, sys, threading, membroker
source = membroker.LocalSource("host")
shared = membroker.SharedMemoryPool(source, page_size="2MiB")
shared.register_model("m", "4MiB")
with shared._lock, source._lock:  # as another thread would
    child = os.fork()
    if not child:
        signal.alarm(120)
        for call in (lambda: shared.allocate_for_model("m", 1), lambda: shared.register_model("n", "2MiB"),
                     lambda: shared.unregister_model("m"), lambda: shared.get_model_stats("m"),
                     lambda: membroker.VirtualMemoryPool(source, "2MiB", "2MiB")):
            try:
                call()
            except membroker.ClosedError as error:
                assert "process" in str(error), error
            else:
                sys.exit(1)
        shared.global_stats()
        shared.close()
        source.close()
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
shared.allocate_for_model("m", 1)
"""
        command = [sys.executable, "-X", "dev", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    @both
    def test_at_the_host(self, where: Lending) -> None:
        """Models whose pages are the host's memory; their limits are the host's, too."""
        with SharedMemoryPool(where.lender, 4 * PAGE, PAGE, "host") as shared:
            shared.register_model("m", 8 * PAGE, limit=2 * PAGE)
            shared.allocate_for_model("m", 2 * PAGE)
            assert where.lent == 0, "it is the device's memory"
            if where.daemon is None:
                assert where.driver.memory(Location.HOST).used == 2 * PAGE
            else:
                assert where.daemon.device().locations[1].lent_bytes == 2 * PAGE
            with pytest.raises(OutOfMemory) as refused:
                shared.allocate_for_model("m", PAGE)
            assert refused.value.level == "model"


def test_models_of_many_threads(where: Lending) -> None:
    """Each thread registers its own model, works in it, and unregisters it; one name is wanted by all of them."""
    won: list[int] = []
    with SharedMemoryPool(where.lender, 12 * PAGE, PAGE) as shared:

        def host(number: int) -> None:
            choose = random.Random(number)
            try:
                shared.register_model("wanted", PAGE)
                won.append(number)
            except ModelAlreadyExists:
                pass
            name = f"model-{number}"
            shared.register_model(name, 64 * PAGE)
            base = shared.pool(name).base_address
            for _ in range(20):
                try:
                    address = shared.allocate_for_model(name, choose.randint(1, 3) * PAGE)
                except OutOfMemory:
                    continue
                where.driver.write(address, b"%08d" % number)
                assert shared.global_stats().physical_usage_bytes <= 12 * PAGE
                assert where.driver.read(address, 8) == b"%08d" % number
                if choose.random() < 0.7:
                    shared.deallocate_for_model(name, address - base, 1)
            shared.unregister_model(name)

        together([partial(host, number) for number in range(6)])
        assert len(won) == 1
        assert shared.global_stats() == GlobalMemoryStats(12 * PAGE, 0, 1)
        assert where.lent == 0


class TestBesideTheClientsOwn:
    """A program that registers a model by itself hosts it in a shared pool as well."""

    @pytest.fixture
    def client(self, broker: Daemon) -> Iterator[membroker.Client]:
        with membroker.connect(broker.endpoint()) as client:
            yield client
        assert broker.models() == [], "a model is still registered"

    @pytest.mark.parametrize("shared_first", [False, True])
    def test_its_registration_outlives_the_shared_pools(self, client: membroker.Client, shared_first: bool) -> None:
        with SharedMemoryPool(client, page_size=PAGE) as shared:
            if shared_first:
                shared.register_model("m", 8 * PAGE)
            mine = client.model("m", virtual_capacity=8 * PAGE)
            if not shared_first:
                shared.register_model("m", 8 * PAGE)
            shared.unregister_model("m")
            mine.allocate(PAGE).close()
            shared.register_model("m", 8 * PAGE)
        mine.allocate(PAGE).close()
        mine.unregister()
        assert client.models() == []

    @pytest.mark.parametrize("page_size", [3, PAGE])
    def test_a_registration_that_fails(self, client: membroker.Client, page_size: int) -> None:
        """No such page size, or no such addresses: the client's own is as it was."""
        mine = client.model("m")
        with SharedMemoryPool(client, page_size=page_size) as shared, pytest.raises((InvalidPageSize, DeviceFailure)):
            shared.register_model("m", 2**62)
        mine.allocate(PAGE).close()
        mine.unregister()

    def test_it_leaves_for_both(self, client: membroker.Client) -> None:
        """The client leaves the model outright: nothing is left for the shared pool to leave."""
        mine = client.model("m")
        with SharedMemoryPool(client, page_size=PAGE) as shared:
            shared.register_model("m", 8 * PAGE)
            mine.unregister()
            shared.unregister_model("m")
        assert client.models() == []

    def test_two_shared_pools(self, client: membroker.Client) -> None:
        with SharedMemoryPool(client, page_size=PAGE) as one, SharedMemoryPool(client, page_size=PAGE) as other:
            one.register_model("m", 8 * PAGE)
            other.register_model("m", 8 * PAGE)
            one.unregister_model("m")
            other.allocate_for_model("m", PAGE)
        assert client.models() == []


def test_a_broker_that_is_away() -> None:
    """It dies while models are hosted: what is mapped goes on, and the end of the shared pool raises nothing."""
    with running() as daemon, membroker.connect(daemon.endpoint(), outage=0) as client:
        shared = SharedMemoryPool(client, page_size=PAGE)
        shared.register_model("m", 8 * PAGE)
        address = shared.allocate_for_model("m", PAGE)
        daemon.kill()
        view = shared.pool("m").view(0, 4)
        view[:] = b"fine"
        del view
        assert shared.pool("m").base_address == address
        with pytest.raises(membroker.BrokerUnavailable):
            until(lambda: shared.allocate_for_model("m", PAGE) and False)
        assert shared.global_stats().physical_usage_bytes == PAGE
        shared.close()
        assert shared.global_stats().physical_usage_bytes == 0
