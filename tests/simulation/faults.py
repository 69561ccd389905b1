"""How a fault that was put into the core is found out by the worlds around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from tests.simulation.shrink import Failed, run
from tests.simulation.world import World

Fault = Callable[[pytest.MonkeyPatch], None]


def notice(fault: Fault, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Play 10,000 steps of a few worlds: one of them fails. For faults that show only after a long story."""
    fault(monkeypatch)
    for seed in seeds:
        try:
            World(seed).play_steps(10_000)
        except (AssertionError, KeyError) as error:
            print(f"seed {seed}: {error}")
            return
    pytest.fail("nobody noticed")


def find_out(fault: Fault, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Play 10,000 steps of a few worlds: one of them fails, and the story of it is short."""
    fault(monkeypatch)
    stories = []
    for seed in seeds:
        try:
            run(seed, 10_000)
        except Failed as failed:
            stories.append(str(failed))
            if failed.args[0].count("\n----") < 80:
                break
    assert stories, "nobody noticed"
    print(stories[-1])
    assert stories[-1].count("\n----") < 80, "the story is not short"
