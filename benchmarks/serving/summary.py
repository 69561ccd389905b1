"""All models of an arm together, over the seeds: figures against the load, and where an arm stops to win. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .figures import SLO_TPOT_SECONDS, SLO_TTFT_SECONDS, Run, tpot, ttft

RELAXED = 5.0
"""The second objective: so many times what one request alone takes."""


@dataclass(frozen=True, slots=True)
class Total:
    """One arm in one trace at one load. Each figure has a value for each seed; times are those of the worst model."""

    trace: str
    load: float
    arm: str
    ttft_p50: tuple[float, ...]
    ttft_p99: tuple[float, ...]
    tpot_p99: tuple[float, ...]
    good: tuple[float, ...]
    """Requests a second of all models that met both objectives."""
    good_relative: tuple[float, ...]
    """The same for the second objective."""
    tokens: tuple[float, ...]
    mean_bytes: tuple[float, ...]


def totals(runs: Sequence[Run]) -> Iterator[Total]:
    """Yield a row for each trace, load and arm, in the order in which they were measured."""
    for trace, load, arm in dict.fromkeys((run.trace, run.load, run.arm) for run in runs):
        mine = [run for run in runs if (run.trace, run.load, run.arm) == (trace, load, arm)]
        yield Total(
            trace,
            load,
            arm,
            ttft_p50=tuple(max(one.ttft[0] for one in run.models) for run in mine),
            ttft_p99=tuple(max(one.ttft[2] for one in run.models) for run in mine),
            tpot_p99=tuple(max(one.tpot[1] for one in run.models) for run in mine),
            good=tuple(good_per_second(run, SLO_TTFT_SECONDS, SLO_TPOT_SECONDS) for run in mine),
            good_relative=tuple(good_per_second(run, *(RELAXED * one for one in _alone(run, runs))) for run in mine),
            tokens=tuple(sum(one.tokens_per_second for one in run.models) for run in mine),
            mean_bytes=tuple(sum(one.mean_bytes for one in run.models) for run in mine),
        )


def good_per_second(run: Run, first_seconds: float, token_seconds: float) -> float:
    """Return how many requests a second of all models met both objectives."""
    answers = [answer for told in run.told for answer in told["answers"]]
    return sum(ttft(one) <= first_seconds and tpot(one) <= token_seconds for one in answers) / run.seconds


def break_even(runs: Sequence[Run], trace: str) -> str | None:
    """Return a sentence about the loads at which membroker has fewer good requests than static parts."""
    good = {(one.arm, one.load): statistics.median(one.good) for one in totals(runs) if one.trace == trace}
    loads = sorted(load for arm, load in good if arm == "membroker" and ("static", load) in good)
    if not loads:
        return None
    lost = [load for load in loads if good["membroker", load] < good["static", load]]
    measured = _several(loads)
    if not lost:
        return f"{trace.upper()}: membroker has as many good requests as static or more at every load ({measured})."
    return f"{trace.upper()}: membroker has fewer good requests than static at {_several(lost)} (of {measured})."


def _several(loads: Sequence[float]) -> str:
    return ", ".join(f"x{load:g}" for load in loads)


def _alone(run: Run, runs: Sequence[Run]) -> Sequence[float]:
    """Return what one request at a time takes, as the first arm measured it: the same objective for all arms."""
    return next((one.unloaded for one in runs if one.seed == run.seed), run.unloaded)
