"""The traces of `benchmarks.serving`: equal seeds give equal ones, and each has the load that its description says."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from benchmarks.serving.traces import MODELS, TRACES, Request, Scale, Trace

OPEN = ("a2", "t1", "t2", "t4")
CLOSED = ("t3", "t5")
SEEDS = range(1, 13)
FULL = Scale()


def _gaps(requests: tuple[Request, ...]) -> list[float]:
    return [after.at - before.at for before, after in pairwise(requests)]


def _made(name: str, scale: Scale = FULL) -> list[Trace]:
    return [TRACES[name](seed, scale) for seed in SEEDS]


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_says_all(name: str) -> None:
    """Two programs with one seed ask the same; open-loop traces of two seeds differ."""
    assert TRACES[name](7, Scale()) == TRACES[name](7, Scale())
    assert (TRACES[name](7, Scale()) != TRACES[name](8, Scale())) == (name in OPEN)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("scale", [Scale(), Scale(time=0.2, load=0.5, tokens=0.1, longest=512)], ids=["full", "small"])
def test_requests_come_in_order_within_the_trace_and_fit(name: str, scale: Scale) -> None:
    for trace in _made(name, scale):
        assert len(trace.works) == MODELS
        for work in trace.works:
            assert bool(work.requests) != bool(work.turns) or name == "t2"
            assert all(gap >= 0 for gap in _gaps(work.requests))
            for one in work.requests:
                assert 0 <= one.at < trace.seconds
                assert one.prompt >= 1 <= one.answer
                assert one.prompt + one.answer < scale.longest
            for turn in work.turns:
                assert 0 <= turn.start < turn.end <= trace.seconds + 1e-9
                assert turn.callers >= 1
                assert turn.prompt + turn.answer < scale.longest


def test_a2_is_three_ramps_to_36_a_second() -> None:
    """Half of 36 on average, 36 in the middle and few at the ends; model i begins 20 i seconds later."""
    for model in range(MODELS):
        counts = []
        for trace in _made("a2"):
            times = [one.at - 20 * model for one in trace.works[model].requests]
            assert min(times) >= 0
            assert max(times) < 28
            counts.append((len(times), sum(12 <= time < 16 for time in times), sum(time < 2 for time in times)))
        total, middle, start = map(statistics.mean, zip(*counts, strict=True))
        assert total == pytest.approx(18 * 28, rel=0.05)
        assert middle == pytest.approx(4 * 36 * 13 / 14, rel=0.08)
        assert start == pytest.approx(2 * 36 / 14, rel=0.25)


SCALES = (FULL, Scale(load=0.5), Scale(time=0.5))


@pytest.mark.parametrize("name", OPEN)
def test_less_load_is_fewer_requests_in_the_same_time(name: str) -> None:
    """And a shorter trace has the same rates."""
    counts = []
    for scale in SCALES:
        made = _made(name, scale)
        assert {trace.seconds for trace in made} == {TRACES[name](1, FULL).seconds * scale.time}
        counts.append(statistics.mean(sum(len(work.requests) for work in trace.works) for trace in made))
    assert counts[1:] == pytest.approx([counts[0] / 2] * 2, rel=0.2)


@pytest.mark.parametrize("name", CLOSED)
def test_less_load_is_fewer_callers(name: str) -> None:
    """And a shorter trace has as many."""
    assert [TRACES[name](1, scale).works[0].turns[0].callers for scale in SCALES] == [128, 64, 128]
