"""An engine that sleeps, over the host driver: real pages and threads, a toy engine, and an operator's word.

A block or a weight that is used without memory ends the test process, as a GPU would end the context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.client.kv.conftest import Slept
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_lender import PAGE
from tests.support.toy_engine import Fence, Request, ToyEngine
from tests.support.toy_serving import an_engine, serving, step, steps

from membroker.errors import ClosedError, SessionLost
from membroker.kv import ElasticCache, Sleeper, sleeper
from membroker.pool.pool import VirtualMemoryPool
from membroker.types import SleepRequest, SleepStatus

WEIGHTS = 3 * PAGE


class Scene:
    """A cache, its engine, and weights in a pool of their own, whose first bytes are told."""

    def __init__(self, lender: Slept, engine: ToyEngine, cache: ElasticCache, sleeper: Sleeper) -> None:
        self.lender, self.engine, self.cache, self.sleeper = lender, engine, cache, sleeper

    def ask(self, *, wake: bool = False, keep: bool = False, within: float = 30.0) -> SleepStatus:
        return self.sleeper.answer(SleepRequest(wake, keep, time.monotonic() + within))

    def until_asleep(self, *, keep: bool = False) -> SleepStatus:
        until(lambda: self.ask(keep=keep).state == "asleep")
        asleep = self.ask(keep=keep)
        assert asleep.asleep_ms is not None
        assert not asleep.by_itself
        return replace(asleep, asleep_ms=None)

    def broker_asks(self, idle: float = 0.0) -> SleepStatus:
        """Ask as the broker does by itself: it may sleep if it had no request for so long; 0: it only says."""
        return self.sleeper.answer(SleepRequest(False, False, time.monotonic(), idle))

    def serve(self, blocks: int = 10) -> None:
        """Serve one request, as an engine does: it wakes, and waits without a free block until it may compute."""
        before = self.engine.finished
        self.cache.wake()
        self.sleeper.wake()
        self.engine.add(Request(blocks, prefix=1))
        steps(self.cache, self.engine, lambda: self.engine.finished > before)
        self.until_awake()
        self.cache.rest()

    def until_awake(self) -> None:
        """The engine has computed: all memory is there. It can have begun a moment before it is called awake."""
        assert not self.cache._state.is_suspended, "it computed in its sleep"
        until(lambda: self.sleeper.state == "awake")


@contextmanager
def asleep(lender: Slept) -> Iterator[Scene]:
    with scene(lender) as one:
        one.cache.rest()
        one.until_asleep()
        yield one


@contextmanager
def scene(lender: Slept, *, caches: bool = False, **bounds: object) -> Iterator[Scene]:
    engine = an_engine(caches=caches)
    with VirtualMemoryPool(lender, WEIGHTS, PAGE) as weights, serving(lender, engine, **bounds) as cache:
        weights.allocate(0, WEIGHTS)
        weights.view(0, 5)[:] = b"hello"
        also: list[int] = []
        with Sleeper(cache, weights, also=lambda: also.append(lender.lent_bytes)) as sleeper:
            yield Scene(lender, engine, cache, sleeper)
            assert all(size >= WEIGHTS for size in also), "it was called after the weights had gone"
            if sleeper.state == "awake":
                assert bytes(weights.view(0, 5)) == b"hello"


def test_all_memory_goes_and_comes_with_the_next_request(lender: Slept) -> None:
    """The cache with its first page and its prefixes, and the weights: nothing is lent while it sleeps."""
    with scene(lender, caches=True) as one:
        one.serve()
        cached = lender.lent_bytes - WEIGHTS
        assert cached > PAGE
        assert one.until_asleep() == SleepStatus("asleep", cached, WEIGHTS)
        assert lender.lent_bytes == 0
        assert one.cache.stats().charged_bytes == 0
        assert len(one.engine.free) == 0
        one.serve()
        assert lender.lent_bytes >= WEIGHTS + PAGE
        one.until_asleep()
        until(lambda: one.ask(wake=True).state == "awake")
        assert lender.lent_bytes == WEIGHTS + PAGE
        one.serve()


def test_an_engine_whose_loop_goes_on_makes_its_own_turns(lender: Slept) -> None:
    """SGLang's scheduler counts its pages while it is idle: no other thread may take any then, nor for a sleep."""
    with scene(lender) as one:
        callers, hold = set[int](), one.engine.hold

        def noted(blocks: list[int]) -> None:
            callers.add(threading.get_ident())
            hold(blocks)

        one.engine.hold = noted  # type: ignore[assignment, method-assign]
        for _ in range(2):
            one.serve()
            one.cache.wake()
            callers.clear()
            assert one.ask().state == "busy"

            def fell_asleep() -> bool:
                one.cache.turn(is_idle=True)
                return one.sleeper.state == "asleep"

            until(fell_asleep)
            assert (lender.lent_bytes, callers) == (0, {threading.get_ident()})
        one.cache.turn()
        assert not one.cache.is_resting
        one.serve()


def test_weights_stay_as_asked_and_if_the_host_has_no_room(lender: Slept) -> None:
    """The cache goes all the same, and the operator reads why."""
    with scene(lender) as one:
        one.cache.rest()
        assert one.until_asleep(keep=True) == SleepStatus("asleep", PAGE, 0, "weights kept: as asked")
        assert lender.lent_bytes == WEIGHTS
        assert one.until_asleep() == SleepStatus("asleep", PAGE, WEIGHTS)
        one.serve()
        lender.host_capacity = PAGE
        assert one.until_asleep().detail == "weights kept: the lender's host"
        one.serve()


def test_a_busy_engine_does_not_sleep(lender: Slept) -> None:
    """It says so, serves on, and sleeps when it rests; not after the operator has left."""
    with scene(lender) as one:
        assert one.ask().state == "busy", "it does not rest"
        one.engine.growth = 0.3
        one.engine.add(Request(10))
        for _ in range(20):
            step(one.cache, one.engine)
        assert one.ask(within=0.0).detail == "its engine has requests"
        steps(one.cache, one.engine, lambda: one.engine.finished)
        one.cache.rest()
        one.ask(within=0.0)
        until(lambda: one.sleeper._request is None)
        assert one.sleeper.state == "awake"
        one.until_asleep()


class Clock:
    """The time of `Sleeper`, which a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.skipped = 0.0
        monotonic = time.monotonic
        monkeypatch.setattr(sleeper.time, "monotonic", lambda: monotonic() + self.skipped)


def test_an_idle_engine_sleeps_by_itself_and_says_so(lender: Slept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before its time, not when it is only asked how far it is, and not after a request has come meanwhile."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(sleeper, "BEGIN_SECONDS", DEADLINE_SECONDS)  # once asked is enough, however late it begins
    with scene(lender, caches=True) as one:
        assert one.broker_asks(0.001) == SleepStatus("awake"), "it has not begun to rest: no idle time is told"
        one.serve()
        clock.skipped += 100
        told = one.broker_asks(3_600.0)
        assert told.state == "awake"
        assert 100_000 <= (told.idle_ms or 0) < 160_000
        assert one.broker_asks().idle_ms
        one.serve()
        assert (one.broker_asks(90.0).idle_ms or 0) < 90_000, "a request has come"
        assert one.sleeper._request is None
        assert one.sleeper.state == "awake"
        clock.skipped += 100
        one.broker_asks(90.0)
        until(lambda: one.broker_asks().state == "asleep")
        assert lender.lent_bytes == 0
        clock.skipped += 50
        told = one.broker_asks(90.0)
        assert told.by_itself
        assert 50_000 <= (told.asleep_ms or 0) < 110_000
        assert one.ask().by_itself, "a later question of an operator hears so"
        one.serve()
        assert not one.broker_asks().by_itself
        one.until_asleep()


def test_a_request_that_comes_before_the_decision_is_seen(lender: Slept) -> None:
    """The engine was at rest when the thread looked, and is not any more when it decides."""
    with scene(lender) as one:
        one.cache.rest()
        request = SleepRequest(False, False, time.monotonic() + 30)
        one.cache.wake()
        with one.sleeper._changed:
            assert not one.sleeper._begin(request)
        assert one.sleeper.state == "awake"
        one.serve()
        one.until_asleep()


def test_a_request_ends_a_sleep_that_has_only_begun(lender: Slept) -> None:
    """The cache waits for a fence. The request gets its blocks back at once, and nothing is borrowed for it."""
    with scene(lender) as one:
        one.engine.make_fence = lambda: Fence(passed=False)
        one.serve()
        assert one.ask().state == "busy"
        until(lambda: one.sleeper.state == "falling_asleep" and one.cache.stats().going_bytes)
        borrowed = lender.lent_bytes
        one.cache.wake()
        one.sleeper.wake()
        assert one.sleeper.state == "awake", "the scheduler would wait"
        one.engine.add(Request(10))
        steps(one.cache, one.engine, lambda: one.engine.finished == 2)
        assert lender.lent_bytes == borrowed
        for fence in one.engine.fences:
            fence.passed = True
        one.engine.make_fence = Fence


def test_a_request_waits_while_the_weights_go(lender: Slept) -> None:
    """It comes in the middle of the copy, which stops. It computes when all weights are back."""
    stop, stopped = threading.Event(), threading.Event()

    def slow() -> None:
        stopped.set()
        assert stop.wait(DEADLINE_SECONDS)

    with scene(lender) as one:
        one.cache.rest()
        lender.driver.before_synchronize = slow
        one.ask()
        assert stopped.wait(DEADLINE_SECONDS)
        one.cache.wake()
        one.sleeper.wake()
        one.engine.add(Request(1))
        for _ in range(100):
            step(one.cache, one.engine)
        assert one.engine.finished == 0
        lender.driver.before_synchronize = lambda: None
        stop.set()
        steps(one.cache, one.engine, lambda: one.engine.finished)
        one.until_awake()


def test_it_wakes_when_there_is_memory(lender: Slept) -> None:
    """While the broker refuses, it says what it waits for. The scheduler's thread goes on."""
    with asleep(lender) as one:
        lender.capacity = PAGE
        assert one.ask(wake=True).state in ("asleep", "waking")
        until(lambda: "waits for memory: " in one.ask(wake=True).detail)
        step(one.cache, one.engine)
        one.cache.rest()
        lender.capacity = 1 << 40
        until(lambda: one.ask(wake=True).state == "awake")
        one.serve()


def test_a_sleeping_engine_ends_whose_session_is_unknown(lender: Slept) -> None:
    """The daemon's state was lost in its sleep. A request would wait forever: what waits for blocks ends."""

    def unknown() -> None:
        raise SessionLost("the broker does not know this session")

    with asleep(lender) as one:
        lender.before_borrow = unknown
        one.cache.wake()
        one.sleeper.wake()
        one.engine.add(Request(10))
        with pytest.raises(ClosedError):
            one.cache.wait(DEADLINE_SECONDS)
        until(lambda: "the broker does not know this session" in one.ask(wake=True).detail)


def test_what_uses_weights_wakes_it_and_keeps_it_awake(lender: Slept) -> None:
    """`awake` in any thread. And it ends with the sleeper."""
    with asleep(lender) as one:
        with one.sleeper.awake():
            assert one.sleeper.state == "awake"
            assert one.ask().state == "busy"
            assert not one.sleeper._has_work(), "it would fall asleep"
        one.until_asleep()
        lender.capacity = PAGE
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lambda: one.sleeper.awake().__enter__())
            until(lambda: one.sleeper.state == "waking")
            one.sleeper.close()
            with pytest.raises(ClosedError):
                waiting.result(DEADLINE_SECONDS)
