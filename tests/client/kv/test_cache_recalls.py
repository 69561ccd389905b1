"""Recalls of an elastic cache's memory: what goes first, which thread steps meanwhile, and when the answer is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_lender import PAGE
from tests.support.sizes import MIB
from tests.support.toy_engine import Request, ToyEngine
from tests.support.toy_serving import Recall, Recalled, an_engine, serving, steps

from membroker.kv import ElasticCache, state


@contextmanager
def busy(lender: Recalled, engine: ToyEngine, *, requests: int = 1, blocks: int = 20) -> Iterator[ElasticCache]:
    """A cache whose engine runs these requests, which do not end by themselves."""
    with serving(lender, engine, block=MIB) as cache:
        for _ in range(requests):
            engine.add(Request(blocks, decode_left=1 << 60))
        steps(cache, engine, lambda: len(engine.running) == requests)
        yield cache


def test_free_pages_go_first(lender: Recalled) -> None:
    """Prefixes stay cached as long as free pages are enough, then the coldest goes."""
    engine = an_engine(caches=True)
    with serving(lender, engine, block=MIB, ahead=8 * PAGE) as cache:
        until(lambda: cache.stats().blocks >= 9 * PAGE // MIB)  # lent, and there for the engine
        engine.add(Request(5, prefix=1, decode_left=1))
        steps(cache, engine, lambda: engine.finished)
        lender.capacity = 0
        until(lambda: not cache._groups.asked_bytes)  # what is on its way would come after the recall
        recall = lender.recall(6 * PAGE)
        steps(cache, engine, lambda: recall.answers)
        assert (recall.remaining, len(engine.contents)) == (0, 5)
        recall = lender.recall(lender.lent_bytes - PAGE)
        steps(cache, engine, lambda: recall.answers)
        assert (recall.remaining, lender.lent_bytes) == (0, PAGE)
        assert len(engine.contents) == 1, "the block that shares a page with block 0"


def test_requests_are_preempted_and_finish_later(lender: Recalled) -> None:
    engine = an_engine()
    with busy(lender, engine, requests=4, blocks=6) as cache:
        recall = lender.recall(8 * PAGE)
        steps(cache, engine, lambda: recall.answers)
        assert recall.remaining == 0
        assert 1 <= engine.preempted < 4
        assert engine.running, "one request has its memory still"
        for request in engine.running + engine.waiting:
            request.decode_left = 2
        steps(cache, engine, lambda: engine.finished == 4)


@pytest.fixture
def in_a_second(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time of a recall that is answered within a second, so long before its end that only a hang misses that."""
    monkeypatch.setattr(state, "ANSWER_SECONDS", DEADLINE_SECONDS)
    return DEADLINE_SECONDS + 1.0


def test_without_preemption_it_is_answered_in_time(lender: Recalled, in_a_second: float) -> None:
    """The pages stay busy. The answer comes before the deadline, and the rest is kept."""
    engine = an_engine(preempts=False)
    with busy(lender, engine) as cache:
        lent = lender.lent_bytes
        recall = lender.recall(8 * PAGE, seconds=in_a_second)
        steps(cache, engine, lambda: recall.answers)
        assert recall.answered_at < recall.deadline
        assert lender.lent_bytes >= lent - PAGE
        engine.running[0].decode_left = 1
        steps(cache, engine, lambda: engine.finished)


def test_an_engine_that_makes_no_step(lender: Recalled, in_a_second: float) -> None:
    """It hangs in a step. The recall is answered before the deadline, with nothing released."""
    engine = an_engine()
    with busy(lender, engine):
        recall = lender.recall(6 * PAGE, seconds=in_a_second)
        until(lambda: recall.answers)
        assert recall.answered_at < recall.deadline
        assert recall.remaining == 6 * PAGE


def test_a_recall_that_is_raised(lender: Recalled) -> None:
    """The broker wants more before the first pages have gone. One answer, when all of it is released."""
    engine = an_engine()
    with busy(lender, engine, requests=4, blocks=6) as cache:
        recall = lender.recall(2 * PAGE)
        recall.size += 6 * PAGE
        assert lender.recall_callback is not None
        lender.recall_callback(recall)
        steps(cache, engine, lambda: recall.answers)
        assert (recall.answers, recall.remaining) == (1, 0)


@pytest.mark.parametrize("what", ["cache", "pool"])
def test_a_recall_that_is_open_at_the_end_is_answered(lender: Recalled, what: str) -> None:
    """A program passes recalls on. Without an answer the broker would lend its session nothing above the guarantee."""
    engine = an_engine(preempts=False)
    with serving(lender, engine, block=MIB) as cache:
        lender.on_recall(mine := lambda recall: cache.answer(recall))
        engine.add(Request(20, decode_left=1 << 60))
        steps(cache, engine, lambda: engine.running)
        recall = lender.recall(4 * PAGE)
        (cache if what == "cache" else cache._pages.pool).close()
        until(lambda: recall.answers)
        until(lambda: not cache._threads[1].is_alive())
        assert cache.answer(Recall(lender, PAGE)) is None, "there is no thread that would answer it"
    assert lender.recall_callback is mine, "the cache has taken the program's callback away"
    lender.on_recall(None)
