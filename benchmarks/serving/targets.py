"""What the figures should be, beside what they are. Never a test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..harness.goals import Goal
from .figures import Run

MIB = 1 << 20
AT_REST_MIB = 64
"""How much more than before the trace may be borrowed one second after the last answer: a page."""
FASTER = {"t1": 2.0, "t3": 2.0}
"""How much smaller than with static parts the TTFT must be at p99, by trace."""
FIRST_FASTER = 10.0
"""The same for the first model of A2, which has the GPU to itself."""
FITTING = 2.0
"""Up to how many times as fast the requests of real services are all answered in time."""
MORE_GOOD = 1.2
"""When more comes than can be answered: how many times as many requests must be answered well."""


def goals(runs: Sequence[Run]) -> list[Goal]:
    """Return what was measured of all that has a target."""
    found: list[Goal] = []
    keys = dict.fromkeys((run.trace, run.load, run.seed) for run in runs)
    for key in keys:
        arms = {run.arm: run for run in runs if (run.trace, run.load, run.seed) == key}
        where = f"{key[0].upper()}" + (f" x{key[1]:g}" if key[1] != 1 else "")
        found += (replace(goal, what=f"{where}: {goal.what}") for goal in _of(arms))
    return found


def _of(arms: Mapping[str, Run]) -> Iterator[Goal]:
    ours, static = arms.get("membroker"), arms.get("static")
    if ours is not None:
        yield from _kept(ours)
    if ours is not None and static is not None:
        yield from _beside_static(ours, static)
    if ours is not None:
        for name in ("kvcached", "kvcached-layers"):
            if name in arms:
                yield from _beside_kvcached(ours, arms[name])
    if (shared := arms.get("membroker-shared")) is not None and "kvcached" in arms:
        for goal in _beside_kvcached(shared, arms["kvcached"]):
            yield replace(goal, what=f"{shared.arm}: {goal.what}")
    plain, alone = arms.get("alone"), arms.get("alone-membroker")
    if plain is not None and alone is not None:
        yield from _kept(alone)
        (one,), (other,) = alone.models, plain.models
        yield Goal("alone, tokens/s to plain vLLM's", one.tokens_per_second / other.tokens_per_second, 0.99, "x", True)
        yield Goal("alone, TPOT p50 to plain vLLM's", one.tpot[0] / other.tpot[0], 1.01, "x")
        yield Goal("alone, start to plain vLLM's", alone.start_seconds[0] / plain.start_seconds[0], 1.05, "x")


def _beside_kvcached(ours: Run, theirs: Run) -> Iterator[Goal]:
    """On the requests of real services: answers as fast while they fit, and more good ones when they do not."""
    if ours.trace != "recorded" or ours.load <= FITTING:
        yield Goal(f"TTFT p99 to {theirs.arm}'s, the worst model", _worst(ours, theirs), 1, "x")
        return
    yield Goal(f"tokens/s to {theirs.arm}'s, all models", _tokens(ours) / max(1.0, _tokens(theirs)), 1, "x", True)
    yield Goal(f"good/s to {theirs.arm}'s, all models", _good(ours) / max(0.01, _good(theirs)), MORE_GOOD, "x", True)


def _tokens(run: Run) -> float:
    return sum(one.tokens_per_second for one in run.models)


def _good(run: Run) -> float:
    return sum(one.good_per_second for one in run.models)


def _kept(run: Run) -> Iterator[Goal]:
    """What holds in every run."""
    if all(one.wrong is not None for one in run.models):
        yield Goal(f"{run.arm}: wrong answers of the sample", sum(one.wrong or 0 for one in run.models), 0, "")
    yield Goal(f"{run.arm}: requests not answered", sum(one.unfinished for one in run.models), 0, "")
    yield Goal(f"{run.arm}: waited within its guarantee", max(one.starved_seconds for one in run.models), 1, "s")
    idle = [one.idle_bytes - one.rest_bytes for one in run.models if one.idle_bytes is not None]
    if idle:
        yield Goal(f"{run.arm}: kept 1 s after the last answer", max(idle) / MIB, AT_REST_MIB, "MiB")


def _beside_static(ours: Run, static: Run) -> Iterator[Goal]:
    if ours.trace == "t5":
        yield Goal("tokens/s to static's, all models", _tokens(ours) / _tokens(static), 0.98, "x", True)
        return
    if ours.trace == "recorded" and ours.load > FITTING:
        yield Goal("good/s to static's, all models", _good(ours) / max(0.01, _good(static)), MORE_GOOD, "x", True)
        return
    for one, other in zip(ours.models, static.models, strict=True):
        for name, index in (("p50", 0), ("p99", 2)):
            target = 1.0
            if name == "p99":
                target = 1 / FASTER.get(ours.trace, 1.0)
                if ours.trace == "a2" and one.model == 0:
                    target = 1 / FIRST_FASTER
            value = _ratio(one.ttft[index], other.ttft[index])
            yield Goal(f"m{one.model}, TTFT {name} to static's", value, target, "x")


def _worst(ours: Run, theirs: Run) -> float:
    return max(_ratio(one.ttft[2], other.ttft[2]) for one, other in zip(ours.models, theirs.models, strict=True))


def _ratio(one: float, other: float) -> float:
    """Return how many times as long; never answered is as long as never answered."""
    return 1.0 if math.isinf(one) and math.isinf(other) else one / other
