"""Times and what is made of them, in nanoseconds. It must never measure anything itself."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WHOLE = "whole"
"""All calls of a job together."""
Labels = tuple[tuple[str, str], ...]
Series = dict[tuple[str, Labels], float]
"""What a daemon's /metrics says, by the name and the labels."""


@dataclass(slots=True)
class Samples:
    """The times of a job by its calls, how long the work took in all, and what a daemon counted meanwhile."""

    times: dict[str, array[int]]
    elapsed: float
    counts: Series = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How often the job was done."""
        return len(next(iter(self.times.values())))

    @property
    def per_second(self) -> float:
        """How often the job was done in a second."""
        return 1e9 * self.count / self.elapsed

    def ordered(self, part: str = WHOLE) -> list[int]:
        """Return the times of one call, or of all of them together, from the shortest to the longest."""
        whole = map(sum, zip(*self.times.values(), strict=True)) if part == WHOLE else self.times[part]
        return sorted(whole)


def joined(rounds: Iterable[Samples]) -> Samples:
    """Return the samples of rounds that came one after the other."""
    times: dict[str, array[int]] = {}
    counts: Series = {}
    elapsed = 0.0
    for one in rounds:
        elapsed += one.elapsed
        for name, taken in one.times.items():
            times.setdefault(name, array("Q")).extend(taken)
        for key, value in one.counts.items():
            counts[key] = counts.get(key, 0.0) + value
    return Samples(times, elapsed, counts)


def merged(some: Sequence[Samples]) -> Samples:
    """Return the samples of processes that worked at the same time: their rates add up."""
    found = joined(some)
    found.elapsed = 1e9 * found.count / sum(one.per_second for one in some)
    return found


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value that `part` of the values do not exceed; nan without values."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")
