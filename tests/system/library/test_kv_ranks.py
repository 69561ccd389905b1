"""An elastic cache in two ranks: two processes, each with a pool and a broker of its own, as under vLLM's TP 2.

This process schedules. Each block that a request touches is written and read in both ranks: one without memory would
end the rank.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from tests.support.daemons import hold_still, running, until
from tests.support.sizes import MIB
from tests.support.sleeping import Books, books, command, done, refused, refused_with
from tests.support.toy_engine import Request, ToyEngine
from tests.support.toy_serving import BLOCKS, an_engine, step, steps
from tests.support.workers import PAGE, workers

import membroker
from membroker.errors import ClosedError
from membroker.kv import ElasticCache, Layout, Sleeper, Strided, sleeper
from membroker.kv.ranks import Ranks

pytestmark = pytest.mark.deep

KEY = b"of one engine"
RANK = f"""
import ctypes, multiprocessing, threading
from membroker.kv.rank import Rank
multiprocessing.current_process().authkey = {KEY!r}
pool = client.model("m", virtual_capacity={BLOCKS * MIB}).pool(page_size=PAGE)
weights = client.model("w", virtual_capacity=3 * PAGE).pool(page_size=PAGE)
marks, passed, emptied = {{}}, [1 << 40], []
def look(block, mark):
    for address in (pool.base_address + block * MIB, pool.base_address + (block + 1) * MIB - 4):
        word = ctypes.c_uint32.from_address(address)
        assert marks.get(block) != mark or word.value == mark, f"block {{block}} lost its bytes"
        word.value = mark
    marks[block] = mark
def empty():
    emptied.append(weights.physical_usage_bytes)
    return threading.Lock()  # it is not used, and cannot be sent
rank = Rank(pool, lambda: passed[0], weights=weights, also=empty)
"""
HALF_FREE = {"tenants": {"red": {}, "blue": {"guarantee": 48 * MIB}}, "capacity": 64 * MIB, "recall_seconds": 60.0}


class Engine:
    """Two daemons with a rank at each, and the toy engine that is served by the ranks' memory."""

    def __init__(self, stack: ExitStack, first: dict[str, Any], second: dict[str, Any], toy: ToyEngine) -> None:
        self.daemons = [stack.enter_context(running(config)) for config in (first, second)]
        self.workers = stack.enter_context(workers(2))
        for worker, daemon in zip(self.workers, self.daemons, strict=True):
            worker.connect(daemon, outage=0.0).do(RANK)
        self.ranks = stack.enter_context(Ranks([worker.ask("rank.address") for worker in self.workers], PAGE))
        self.cache = ElasticCache(self.ranks, Layout(0, PAGE, BLOCKS, [Strided(0, MIB, MIB)]), keep="1GiB")
        self.toy = toy
        toy.look = self._look
        self.cache.attach(toy)

    def _look(self, block: int) -> None:
        for worker in self.workers:
            worker.do(f"look({block}, {self.toy.used[block].mark})")

    def until(self, state: Callable[[], object]) -> None:
        """Step until it is so."""
        steps(self.cache, self.toy, state)

    def used(self) -> list[int]:
        """Return the bytes that the cache has borrowed from each broker."""
        return [books(daemon, "m").device for daemon in self.daemons]


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an engine, over daemons with these configurations."""
    before = multiprocessing.current_process().authkey
    multiprocessing.current_process().authkey = KEY
    with ExitStack() as stack:

        def begin(first: dict[str, Any], second: dict[str, Any], **toy: bool) -> Engine:
            return Engine(stack, first, second, an_engine(**toy))

        yield begin
    multiprocessing.current_process().authkey = before


def test_a_group_has_memory_in_both_ranks_or_is_not_used(start: Start) -> None:
    """The second broker has three pages left. So the engine has no more of the first one's, besides the one that is
    borrowed while the second is asked. When there is room, it gets all that it wants.
    """
    engine = start({}, {})
    assert engine.used() == [PAGE, PAGE]
    with membroker.connect(engine.daemons[1].endpoint("blue")) as blue:
        with blue.model("other").allocate(256 * MIB - 4 * PAGE):
            engine.toy.add(Request(7))
            engine.toy.add(Request(20))
            engine.until(lambda: engine.toy.finished == 1)
            refused = engine.cache.stats().refusals
            engine.until(lambda: engine.cache.stats().refusals > refused + 1)
            assert engine.cache.stats().blocks <= 8, "a block is used that has no memory in the second rank"
            assert engine.used()[0] <= 5 * PAGE
            assert engine.toy.finished == 1
        engine.until(lambda: engine.toy.finished == 2)
    assert engine.cache.stats().grants >= 9
    engine.until(lambda: engine.used() == [PAGE, PAGE])
    engine.cache.close()
    until(lambda: engine.used() == [0, 0])


def test_a_broker_that_is_away_is_not_waited_for(start: Start) -> None:
    """Requests that fit are served meanwhile, and the others when it is back."""
    engine = start({}, {})
    with hold_still(engine.daemons[1]):
        engine.toy.add(Request(1))
        engine.toy.add(Request(30))
        for _ in range(100):
            step(engine.cache, engine.toy)
        assert (engine.toy.finished, len(engine.toy.waiting)) == (1, 1)
    engine.until(lambda: engine.toy.finished == 2)
    engine.daemons[0].kill()
    engine.toy.add(Request(31))
    refused = engine.cache.stats().refusals
    engine.until(lambda: engine.cache.stats().refusals > refused)
    engine.daemons[0].start_again()
    engine.until(lambda: engine.toy.finished == 3)
    engine.cache.close()


def test_two_brokers_recall_at_a_time(start: Start) -> None:
    """Each gets its answer as soon as its own memory is back, of a busy engine too."""
    engine = start(HALF_FREE, HALF_FREE)
    for _ in range(3):
        engine.toy.add(Request(20, decode_left=1 << 40))
    engine.until(lambda: len(engine.toy.running) == 3)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        sizes = 48 * MIB, 24 * MIB
        waiting = []
        for daemon, rank, size in zip(engine.daemons, engine.ranks._ranks, sizes, strict=True):
            owner = stack.enter_context(membroker.connect(daemon.endpoint("blue"))).model("owner")
            waiting.append(pool.submit(partial(owner.allocate, size, timeout=600)))
            until(lambda rank=rank: rank.recall)
        engine.until(lambda: all(one.done() for one in waiting))
        for one in waiting:
            stack.enter_context(one.result())
        assert engine.toy.preempted
        assert engine.toy.running or engine.toy.waiting
    for request in engine.toy.running + engine.toy.waiting:
        request.decode_left = 1
    engine.until(lambda: engine.toy.finished == 3)
    engine.cache.close()


def test_nothing_goes_before_the_last_rank_has_passed_the_fence(start: Start) -> None:
    engine = start({}, {})
    engine.toy.make_fence = lambda: Passed(engine.ranks)  # type: ignore[assignment,return-value]
    engine.workers[1].do("passed[0] = 0")
    engine.toy.add(Request(20))
    engine.until(lambda: engine.toy.finished)
    engine.until(lambda: engine.cache.stats().going_bytes and engine.toy.fences[0].looks > 10)
    assert min(engine.used()) >= 20 * MIB
    engine.workers[1].do("passed[0] = 1")
    engine.until(lambda: engine.used() == [PAGE, PAGE])
    engine.cache.close()


class Passed:
    """A fence behind step 1."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self._ranks.passed() >= 1


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_is_no_surprise_to_the_scheduler(start: Start, dead: int) -> None:
    """Only the cache's threads end. The close releases the memory of the other rank, which answers no more recalls."""
    engine = start({}, {})
    engine.workers[dead].kill()
    until(lambda: engine.used()[dead] == 0)
    engine.toy.add(Request(20))
    until(lambda: step(engine.cache, engine.toy) or not engine.cache._threads[0].is_alive())
    assert (engine.toy.finished, engine.cache.stats().blocks) == (0, 2)
    with pytest.raises(ClosedError, match="a rank of this engine has ended"):
        engine.cache.close()
    until(lambda: engine.used() == [0, 0])
    assert engine.workers[1 - dead].ask("client.model('m').recall_callback is None")


def test_nothing_waits_for_a_rank_after_the_close(start: Start) -> None:
    """The second broker is away, and a question waits for it. The cache's threads end, and no connection is left."""
    engine = start({}, {})
    with hold_still(engine.daemons[1]):
        engine.toy.add(Request(30))
        steps(engine.cache, engine.toy, lambda: engine.ranks._ranks[1].ask._lock.locked())
        engine.ranks.close()
        until(lambda: not any(thread.is_alive() for thread in engine.cache._threads))
        assert all(line._connection.closed for rank in engine.ranks._ranks for line in (rank.ask, rank.tell))
        for worker in engine.workers:
            until(lambda worker=worker: worker.ask("rank._scheduler._connection.closed"))


# Sleep


class Slept:
    """An engine with weights in each rank, at rest, with the sleeper that its scheduler has."""

    def __init__(self, stack: ExitStack, engine: Engine) -> None:
        self.engine = engine
        for worker in engine.workers:
            worker.do(f"weights.allocate(0, {WEIGHTS})")
            worker.do("weights.view(0, 5)[:] = b'hello'")
        engine.cache.rest()
        self.sleeper = stack.enter_context(Sleeper(engine.cache, engine.ranks.weights, also=engine.ranks.also))

    def sleep(self, at: int) -> None:
        """Let an operator put it to sleep at one of the brokers: all memory of all ranks is released."""
        assert "(KV cache 2.0 MiB, weights 6.0 MiB)" in done(command(self.engine.daemons[at], "sleep", "m"))
        assert self.books() == [(Books(0, 0), Books(0, WEIGHTS))] * 2

    def books(self) -> list[tuple[Books, Books]]:
        """Return what the cache and the weights have of each broker."""
        return [(books(daemon, "m"), books(daemon, "w")) for daemon in self.engine.daemons]

    def request(self, blocks: int) -> None:
        """Have a request come in."""
        self.engine.cache.wake()
        self.sleeper.wake()
        self.engine.toy.add(Request(blocks))

    def serve(self, blocks: int = 7) -> None:
        """Serve a request, with all weights."""
        before = self.engine.toy.finished
        self.request(blocks)
        self.engine.until(lambda: self.engine.toy.finished > before)
        self.check_weights()
        self.engine.cache.rest()
        until(lambda: self.engine.used() == [PAGE, PAGE])

    def check_weights(self) -> None:
        """Look at the weights of each rank. This ends a rank that has none."""
        assert [worker.ask("bytes(weights.view(0, 5)).decode()") for worker in self.engine.workers] == ["hello"] * 2


WEIGHTS = 3 * PAGE
HOST = {"capacity": 64 * MIB, "host_capacity": 64 * MIB}


@pytest.fixture
def slept(start: Start) -> Iterator[Slept]:
    """An engine that can sleep."""
    engine = start(HOST, HOST)
    with ExitStack() as stack:
        yield Slept(stack, engine)
    engine.cache.close()


def test_all_ranks_sleep_and_wake_whichever_broker_is_asked(slept: Slept) -> None:
    """And the next request wakes all of them."""
    slept.serve()
    for at in (0, 1):
        slept.sleep(at)
        slept.serve()
        slept.sleep(at)
        done(command(slept.engine.daemons[1 - at], "wake", "m"))
        slept.check_weights()
        assert slept.engine.used() == [PAGE, PAGE]
    assert [worker.ask("emptied") for worker in slept.engine.workers] == [[WEIGHTS] * 4] * 2


def test_no_rank_computes_before_the_last_one_has_its_memory(slept: Slept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tenant has taken it meanwhile: both operators read so, and the other rank releases what it cannot use."""
    monkeypatch.setattr(sleeper, "GIVE_WAY_SECONDS", 5.0)
    slept.sleep(0)
    with (
        membroker.connect(slept.engine.daemons[1].endpoint("blue")) as blue,
        blue.model("owner").allocate(60 * MIB),
    ):
        slept.request(7)
        until(lambda: slept.books()[0][1] == Books(WEIGHTS, 0))
        for daemon in slept.engine.daemons:
            refused_with("waits for memory: ", daemon, "wake", "m", "--timeout", "1.5")
        for _ in range(100):
            step(slept.engine.cache, slept.engine.toy)
        assert not slept.engine.toy.finished
        until(lambda: slept.books()[0][1] == Books(0, WEIGHTS))
    slept.engine.until(lambda: slept.engine.toy.finished)
    slept.serve()
    slept.sleep(1)


def test_a_rank_that_dies_in_its_sleep_ends_the_engine(start: Start) -> None:
    """Its sleeper does not wait for it. The other rank answers an operator until the engine has ended, too."""
    with ExitStack() as stack:
        engine = start(HOST, HOST)
        one = Slept(stack, engine)
        one.sleep(0)
        engine.workers[1].kill()
        with pytest.raises(ClosedError), one.sleeper.awake():
            pass
        engine.ranks.close()
        assert "its engine does not serve yet, or has ended" in refused(command(engine.daemons[0], "sleep", "m"))
