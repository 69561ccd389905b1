"""The rows of the load figures: times with their ratio to a bare echo, and numbers. Times in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from membroker.cli.tables import TextTable
from membroker.vmm.sizes import MIB

from ..harness.daemon import Daemon
from ..harness.goals import Goal
from ..harness.report import Chapter, goals_chapter, scaled
from ..harness.samples import WHOLE, Samples, quantile
from ..harness.stage import Section


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
class LoadSection(Section):
    """The rows of a scene."""

    timings: list[Timing] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def figure(self, key: str, name: str, value: float, unit: str) -> None:
        """Add a number."""
        self.figures.append(Figure(key, name, value, unit))

    def note_memory(self, key: str, daemon: Daemon, name: str) -> None:
        """Add what a daemon occupies."""
        for kind, size in zip(("RSS", "PSS"), daemon.memory(), strict=True):
            self.figure(f"{key}.{kind.lower()}", f"{name}: {kind}", size / MIB, "MiB")


def timing(key: str, name: str, samples: Samples, part: str = WHOLE, beside: Timing | None = None) -> Timing:
    """Return the row of one part of a job, with its ratio to the row `beside` it."""
    ordered = samples.ordered(part)
    p50, p99 = int(quantile(ordered, 0.50)), int(quantile(ordered, 0.99))
    rate = samples.per_second if part == WHOLE else None
    return Timing(key, name, len(ordered), p50, p99, rate, *((beside.name, p50 / beside.p50_ns) if beside else ()))


def compared(key: str, taken: Mapping[str, Samples], alone_name: str, among_name: str) -> list[Timing]:
    """Return the rows of a worker that has the daemon to itself, and of one that has not, beside it."""
    alone = timing(f"{key}.alone", alone_name, taken["alone"])
    return [alone, timing(f"{key}.among", among_name, taken["among"], WHOLE, alone)]


def chapters(sections: Sequence[LoadSection], goals: Sequence[Goal]) -> Iterator[Chapter]:
    """Yield what a person reads."""
    for section in sections:
        times = [
            [
                *(row.name, f"{row.count:,}", scaled(row.p50_ns, 1e3, 1), scaled(row.p99_ns, 1e3, 1)),
                *(scaled(row.per_second, digits=0), scaled(row.ratio), row.beside or ""),
            ]
            for row in section.timings
        ]
        numbers = [[row.name, scaled(row.value, digits=2 * (row.value % 1 != 0)), row.unit] for row in section.figures]
        tables = [TextTable(("what", ">n", ">p50 us", ">p99 us", ">calls/s", ">x", "beside"), times)] * bool(times)
        tables += [TextTable(("what", ">figure", ""), numbers)] * bool(numbers)
        yield Chapter(section.title, section.about, tables)
    yield from goals_chapter(goals)
