"""The traces of `benchmarks.serving`: equal seeds give equal ones, and less load is fewer requests."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from benchmarks.serving.traces import MODELS, TRACES, Scale, Trace

OPEN = ("a2", "t1", "t2", "t4")
SEEDS = range(1, 13)
FULL = Scale()


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
            assert all(before.at <= after.at for before, after in pairwise(work.requests))
            for one in work.requests:
                assert 0 <= one.at < trace.seconds
                assert one.prompt >= 1 <= one.answer
                assert one.prompt + one.answer < scale.longest
            for turn in work.turns:
                assert 0 <= turn.start < turn.end <= trace.seconds + 1e-9
                assert turn.callers >= 1
                assert turn.prompt + turn.answer < scale.longest


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
