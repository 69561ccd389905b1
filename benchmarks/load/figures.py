"""Samples and what is made of them: percentiles, rates, and the ratio to a bare echo. Times in nanoseconds.

Owns the arithmetic, and the rows that are shown. It must never measure anything itself.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WHOLE = "whole"
"""The part of a job that is all of its parts together."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The times of one job by its parts, taken by one process or by many at once, and how long those worked."""

    times: dict[str, array[int]]
    elapsed: int

    @property
    def count(self) -> int:
        """How often the job was done."""
        return len(self.times[WHOLE])


@dataclass(frozen=True, slots=True)
class Timing:
    """A row of times. `per_second` is None for a part of a job, which is never done alone.

    `ratio` is this row's p50 over that of the row `beside`, measured in the same minute.
    """

    key: str
    name: str
    count: int
    p50_ns: int
    p99_ns: int
    per_second: float | None
    beside: str | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of one number."""

    key: str
    name: str
    value: float
    unit: str


@dataclass(slots=True)
class Section:
    """One scene's rows. `note` says what the rows cannot: what they stand for, or what could not be reached.

    `others_percent` is how busy the processors were just before the scene and just after, with the work of others.
    """

    title: str
    note: str
    timings: list[Timing] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    others_percent: tuple[float, float] = (0.0, 0.0)

    def figure(self, key: str, name: str, value: float, unit: str) -> None:
        """Add a number."""
        self.figures.append(Figure(key, name, value, unit))


def percentile(ordered: Sequence[int], share: float) -> int:
    """Return the smallest sample that at least `share` of all samples do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def merged(some: Iterable[Samples]) -> Samples:
    """Return the samples of processes that worked at the same time."""
    all_of_them = list(some)
    times = {part: array("Q") for part in all_of_them[0].times}
    for one in all_of_them:
        for part, taken in one.times.items():
            times[part].extend(taken)
    return Samples(times, max(one.elapsed for one in all_of_them))


def joined(rounds: Sequence[Samples]) -> Samples:
    """Return the samples of rounds that came one after the other."""
    return Samples(merged(rounds).times, sum(one.elapsed for one in rounds))


def timing(key: str, name: str, samples: Samples, part: str = WHOLE, beside: Timing | None = None) -> Timing:
    """Return the row of one part of a job, with its ratio to the row `beside` it."""
    ordered = sorted(samples.times[part])
    p50 = percentile(ordered, 0.50)
    return Timing(
        key,
        name,
        len(ordered),
        p50,
        percentile(ordered, 0.99),
        len(ordered) / samples.elapsed * 1e9 if part == WHOLE else None,
        beside.name if beside else None,
        p50 / beside.p50_ns if beside else None,
    )
