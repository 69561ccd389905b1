"""The elastic cache on the host driver: real pages and threads, an engine that writes to its blocks, played recalls.

A block that is used without memory ends the test process, as a GPU would end the context.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from tests.client.kv.test_balloon import check
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.driver_errors import failing_from
from tests.support.fake_lender import PAGE
from tests.support.seeds import chosen_seed
from tests.support.sizes import KIB, MIB
from tests.support.toy_engine import Fence, Request, ToyEngine
from tests.support.toy_serving import BLOCKS, Recall, Recalled, an_engine, serving, step, steps

from membroker.errors import ClosedError, InvalidRequest
from membroker.kv import ElasticCache, Layout, Strided
from membroker.kv import cache as cache_module
from membroker.pool.pool import VirtualMemoryPool


class Silent:
    """What a lender does before it lends: it notes that it is asked, and waits for the test."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.asked.set()
        assert self.answer.wait(DEADLINE_SECONDS)


@contextmanager
def idle(lender: Recalled, engine: ToyEngine, blocks: int, **bounds: Any) -> Iterator[ElasticCache]:
    """A cache whose engine has finished a request of so many blocks."""
    with serving(lender, engine, **bounds) as cache:
        engine.add(Request(blocks, decode_left=1))
        steps(cache, engine, lambda: engine.finished)
        yield cache


def broken(*_: object) -> Fence:
    raise RuntimeError("a CUDA error")


def test_it_grows_and_shrinks(lender: Recalled) -> None:
    """Ten blocks are needed: they come, and after the request all but the first page goes, without a wait."""
    waits: list[None] = []
    lender.driver.before_synchronize = lambda: waits.append(None)
    engine = an_engine()
    with serving(lender, engine) as cache:
        assert lender.lent_bytes == PAGE
        engine.add(Request(10))
        steps(cache, engine, lambda: engine.finished)
        assert cache.stats().grants
        steps(cache, engine, lambda: lender.lent_bytes == PAGE)
        until(lambda: cache.stats().charged_bytes == PAGE)
        assert sum(fence.looks for fence in engine.fences)
        assert waits == [], "it waited for all work on the device"


def test_the_scheduler_never_waits_for_the_broker(lender: Recalled) -> None:
    """The broker is silent. The engine serves on in what it has, and gets the rest when the broker answers."""
    silent, engine = Silent(), an_engine()
    with idle(lender, engine, 1) as cache:
        lender.before_borrow = silent
        engine.add(Request(30))
        steps(cache, engine, silent.asked.is_set)
        for _ in range(100):
            step(cache, engine)
        assert (engine.finished, len(engine.waiting)) == (1, 1)
        silent.answer.set()
        steps(cache, engine, lambda: engine.finished == 2)


def test_nothing_goes_before_its_fence(lender: Recalled) -> None:
    """Work that was queued before may still use the pages. What is wanted meanwhile comes back without a request."""
    engine = an_engine()
    engine.make_fence = lambda: Fence(passed=False)
    with idle(lender, engine, 20) as cache:
        lent = lender.lent_bytes
        steps(cache, engine, lambda: cache.stats().going_bytes)
        looks = engine.fences[-1].looks
        steps(cache, engine, lambda: engine.fences[-1].looks > looks + 10)
        assert lender.lent_bytes == lent
        grants = cache.stats().grants
        engine.add(Request(20, decode_left=1))
        steps(cache, engine, lambda: engine.finished == 2)
        assert cache.stats().grants == grants
        engine.make_fence = Fence
        for fence in engine.fences:
            fence.passed = True
        steps(cache, engine, lambda: lender.lent_bytes == PAGE)


class Unrecorded(Fence):
    """A fence that cannot be asked."""

    query = broken


def test_a_fence_that_fails_keeps_its_own_pages_only(lender: Recalled) -> None:
    """It was never recorded, say. Nobody knows when its step is over, so its pages stay; all others go."""
    engine = an_engine()
    engine.make_fence = lambda: Fence() if engine.fences else Unrecorded()
    with serving(lender, engine, block=MIB) as cache:
        engine.add(short := Request(9, decode_left=1 << 60))  # block 0 is in the first of five pages
        engine.add(long := Request(10, decode_left=1 << 60))
        steps(cache, engine, lambda: len(engine.running) == 2)  # or the second would take what the first one had
        short.decode_left = 1
        steps(cache, engine, lambda: engine.fences)
        kept = cache.stats().going_bytes
        assert kept
        long.decode_left = 1
        steps(cache, engine, lambda: lender.lent_bytes == PAGE + kept)


def test_a_group_comes_whole_or_not_at_all(lender: Recalled) -> None:
    """Four tensors, so a group is four pages. There is room for seven: one group, and nothing of a second."""
    lender.capacity = 7 * PAGE
    engine = an_engine()
    with serving(lender, engine, block=64 * KIB, layers=4, keep=0) as cache:
        engine.add(Request(40))
        steps(cache, engine, lambda: cache.stats().refusals)
        assert lender.lent_bytes == 4 * PAGE
        lender.capacity = 8 * PAGE
        steps(cache, engine, lambda: engine.finished)


def test_bounds(lender: Recalled) -> None:
    """The floor is there from the beginning and stays; the limit is not passed, whatever is needed."""
    engine = an_engine()
    lender.capacity = 5 * PAGE
    with serving(lender, engine, block=MIB, floor=3 * PAGE) as cache:
        until(lambda: lender.lent_bytes == 3 * PAGE)
        engine.add(Request(7, decode_left=1 << 60))
        engine.add(Request(7))
        steps(cache, engine, lambda: lender.lent_bytes == 5 * PAGE and engine.running)
        assert len(engine.running) == 1
        engine.running[0].decode_left = 1
        steps(cache, engine, lambda: engine.finished == 2)
        cache.rest()
        until(lambda: lender.lent_bytes == 3 * PAGE)


def test_prepare_and_attach(lender: Recalled) -> None:
    """A warm-up writes to the lowest blocks before the engine has a scheduler; what is too much goes after it."""
    engine = an_engine()
    with VirtualMemoryPool(lender, BLOCKS * MIB, PAGE) as pool:
        tensor = Strided(pool.base_address, MIB, MIB)
        with ElasticCache(pool, Layout(pool.base_address, PAGE, BLOCKS, [tensor])) as cache:
            assert cache.prepare(20)
            pool.view(0, 20 * MIB)[:] = bytes(20 * MIB)
            lender.capacity = lender.lent_bytes
            assert not cache.prepare(30, timeout=0.1)
            with pytest.raises(InvalidRequest, match="attach"):
                cache.grow()
            cache.attach(engine)
            assert sorted(engine.free) == list(range(1, 20))
            steps(cache, engine, lambda: lender.lent_bytes == PAGE)
        for call in (cache.grow, lambda: cache.prepare(1), cache.stats):
            with pytest.raises(ClosedError):
                call()


def test_no_event_is_looked_at_during_a_capture(lender: Recalled) -> None:
    engine, looks = an_engine(), []

    class Watched(Fence):
        def query(self) -> bool:
            looks.append(self)
            return super().query()

    engine.make_fence = lambda: Watched(passed=False)
    with serving(lender, engine) as cache:
        engine.add(Request(10, decode_left=1))
        steps(cache, engine, lambda: looks)
        with cache.capturing():
            count = len(looks)
            for _ in range(20):
                step(cache, engine)
                time.sleep(0.002)
            assert len(looks) == count
        until(lambda: len(looks) > count)


def test_what_has_lost_a_part_of_its_memory_is_not_used_again(lender: Recalled) -> None:
    """The driver has unmapped two of four layers when it fails. A request comes: it gets all of them, or another page.

    The rest is released when the driver can do it.
    """
    engine = an_engine()
    with idle(lender, engine, 40, block=64 * KIB, layers=4, keep=0) as cache:
        with failing_from(lender.driver, "unmap", 3):
            steps(cache, engine, lambda: lender.lent_bytes == 6 * PAGE)
            engine.add(Request(40))
            for _ in range(10):
                step(cache, engine)
        steps(cache, engine, lambda: engine.finished == 2)
        steps(cache, engine, lambda: lender.lent_bytes == 4 * PAGE)


def test_what_comes_after_the_end_is_released(lender: Recalled, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker answers a question when the cache has been closed. The pool stays open, and has nothing."""
    monkeypatch.setattr(cache_module, "CLOSE_SECONDS", 0.01)
    silent, engine = Silent(), an_engine()
    with serving(lender, engine) as cache:
        lender.before_borrow = silent
        engine.add(Request(10))
        steps(cache, engine, silent.asked.is_set)
        cache.close()
        assert lender.lent_bytes == 0
        silent.answer.set()
        until(lambda: not cache._threads[0].is_alive())
        assert lender.lent_bytes == 0


@pytest.mark.parametrize("what", ["cache", "pool"])
@pytest.mark.parametrize("call", [lambda cache: cache.wait(DEADLINE_SECONDS), lambda cache: cache.prepare(BLOCKS)])
def test_a_close_ends_what_waits_for_blocks(lender: Recalled, what: str, call: Callable[[ElasticCache], bool]) -> None:
    """The broker has no more. Another thread waits for blocks, and hears at once that none will come."""
    with serving(lender, an_engine()) as cache, ThreadPoolExecutor(1) as waiting:
        lender.capacity = 0
        waits = waiting.submit(call, cache)
        until(lambda: cache._state._changed._waiters)
        (cache if what == "cache" else cache._pages.pool).close()
        with pytest.raises(ClosedError):
            waits.result(DEADLINE_SECONDS)
        with pytest.raises(ClosedError):
            cache.wait(DEADLINE_SECONDS)


@pytest.mark.deep
@pytest.mark.parametrize("number", range(12))
def test_random_traffic(lender: Recalled, number: int) -> None:
    """Requests, refusals, recalls and rests in any order: blocks keep their bytes, and all requests finish.

    The time that a step of the scheduler takes is printed.
    """
    seed = chosen_seed()
    rng = random.Random(seed + number)
    engine = ToyEngine(BLOCKS, rng, caches=rng.random() < 0.5, preempts=rng.random() < 0.7)
    kind = rng.choice([{"block": 768 * KIB}, {"block": 3000 * KIB}, {"block": 96 * KIB, "layers": 5}])
    took = []
    with serving(lender, engine, **kind, keep=rng.choice([0, 4 * PAGE]), ahead=rng.choice([0, 2 * PAGE])) as cache:
        recalls: list[Recall] = []
        for _ in range(400):
            if rng.random() < 0.3:
                cache.wake()
                engine.add(Request(rng.randrange(1, 9), rng.randrange(3), decode_left=rng.randrange(1, 30)))
            if rng.random() < 0.05:
                lender.capacity = rng.choice([3, 10, 1000]) * 5 * PAGE
            if rng.random() < 0.03 and all(recall.answers for recall in recalls):
                recalls.append(lender.recall(rng.randrange(1, 10) * PAGE, seconds=0.3))
            began = time.perf_counter()
            step(cache, engine)
            took.append(time.perf_counter() - began)
            if not (engine.waiting or engine.running):
                cache.rest()
            with cache._state._lock:
                check(cache._balloon)
        lender.capacity = 1 << 40
        steps(cache, engine, lambda: not (engine.waiting or engine.running))
        until(lambda: all(recall.answers for recall in recalls))
        assert all(recall.answers == 1 for recall in recalls)
        cache.rest()
        until(lambda: cache.stats().going_bytes == 0)
    took.sort()
    print(f"{len(recalls)} recalls, {engine.finished} requests, {engine.preempted} preempted; a step takes")
    print(f"{1e6 * took[len(took) // 2]:.0f} us p50, {1e3 * took[-1]:.1f} ms at most")
