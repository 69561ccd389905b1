"""Times and what is made of them: percentiles, ratios, the broker's share. Times in nanoseconds.

Owns the arithmetic, and the rows that are shown. It must never measure anything itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..load.figures import percentile

EXTENTS, PAGES, POOL, ATTACH, OFFLOAD, WORKERS = "extents", "pages", "pool", "attach", "offload", "workers"
"""The scenes."""
IN_PROCESS = "driver in process"
"""The process that does the same work without a broker: every ratio is to it."""


def brokered(transport: str, stock: bool) -> str:
    """Return what rows call the borrower."""
    return f"{transport}, stock {'on' if stock else 'off'}"


@dataclass(slots=True)
class Times:
    """The times of a work, which is two calls: one that takes and one that releases. Also how long it took in all."""

    take: array[int] = field(default_factory=lambda: array("Q"))
    give: array[int] = field(default_factory=lambda: array("Q"))
    elapsed: int = 0

    def add(self, other: Times) -> None:
        """Add those of another turn."""
        self.take.extend(other.take)
        self.give.extend(other.give)
        self.elapsed += other.elapsed


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What half and 99 of 100 calls did not exceed, and their mean."""

    p50_ns: int
    p99_ns: int
    mean_ns: float


@dataclass(frozen=True, slots=True)
class Share:
    """Where the time of one work goes, its two calls together: means in nanoseconds, None where nothing says it.

    `broker` is from a request's arrival to its answer, by the broker's histograms; `driver`, `core`, `journal` and
    `transport` are its parts. `outside` is what the caller has beyond it. `for_stock` is no part: what the broker's
    driver did for the stock meanwhile.
    """

    caller: float
    broker: float
    driver: float | None
    core: float | None
    journal: float | None
    transport: float | None
    for_stock: float | None

    @property
    def outside(self) -> float:
        """Sockets, wake-ups, frames, and what the caller's own driver does."""
        return self.caller - self.broker


@dataclass(frozen=True, slots=True)
class Row:
    """One work by one way. The ratios are to the driver's row of the same work; `rate_ratio` is of works a second.

    `hit_percent` is how many of the extents came from the stock; None where the broker does not say.
    """

    work: str
    gap_ms: float
    by: str
    count: int
    take: Quantiles
    give: Quantiles
    take_ratio: float | None = None
    give_ratio: float | None = None
    per_second: float | None = None
    rate_ratio: float | None = None
    hit_percent: float | None = None
    share: Share | None = None


@dataclass(slots=True)
class Section:
    """One scene. `calls` names the two calls; `failure` is why there is no more of it.

    `moved_bytes` is how much each call copies, where that is what it does.
    """

    key: str
    title: str
    note: str
    calls: tuple[str, str]
    moved_bytes: int = 0
    rows: list[Row] = field(default_factory=list)
    failure: str = ""
    others_percent: tuple[float, float] = (0.0, 0.0)

    def find(self, work: str, gap_ms: float, by: str) -> Row | None:
        """Return a row, if it is there."""
        return next((row for row in self.rows if (row.work, row.gap_ms, row.by) == (work, gap_ms, by)), None)


def quantiles(times: Sequence[int]) -> Quantiles:
    """Return what is shown of some times, of which there is at least one."""
    ordered = sorted(times)
    return Quantiles(percentile(ordered, 0.50), percentile(ordered, 0.99), sum(ordered) / len(ordered))


def row(
    work: str,
    gap_ms: float,
    by: str,
    times: Times,
    base: Row | None = None,
    hit_percent: float | None = None,
    share: Share | None = None,
) -> Row:
    """Return the row of one caller's times, beside that of the driver in process."""
    take, give = quantiles(times.take), quantiles(times.give)
    return Row(
        *(work, gap_ms, by, len(times.take), take, give),
        take_ratio=take.p50_ns / base.take.p50_ns if base else None,
        give_ratio=give.p50_ns / base.give.p50_ns if base else None,
        hit_percent=hit_percent,
        share=share,
    )


def crowd_row(work: str, by: str, all_times: Sequence[Times], base: Row | None = None) -> Row:
    """Return the row of many that worked at the same time, each measured for `elapsed`."""
    together = Times()
    for times in all_times:
        together.add(times)
    rate = sum(len(times.take) / times.elapsed for times in all_times) * 1e9
    rate_ratio = rate / base.per_second if base and base.per_second else None
    return replace(row(work, 0, by, together, base), per_second=rate, rate_ratio=rate_ratio)


# --- the broker's own figures ---

Labels = tuple[tuple[str, str], ...]
Counts = Mapping[tuple[str, Labels], float]
"""Sums and counts of a daemon's histograms, by name and labels."""

REQUESTS, DRIVER, STEPS = "membroker_request_seconds", "membroker_driver_call_seconds", "membroker_core_step_seconds"
JOURNAL = "membroker_journal_append_seconds"
STOCK = "membroker_stock_extents_total"
"""The last three are used where the daemon has them."""


def total(counts: Counts, name: str, **labels: str) -> float | None:
    """Return the sum of the series that have these labels; None if there are no such series."""
    found = [value for (called, has), value in counts.items() if called == name and labels.items() <= dict(has).items()]
    return sum(found) if found else None


def hits(counts: Counts, extents: int) -> float | None:
    """Return the percentage of `extents` that came from the stock."""
    used = total(counts, STOCK, change="used")
    return None if used is None else 100 * used / extents


def share(counts: Counts, times: Times, transport: str, *, extents: int, stock: bool) -> Share:
    """Return where a work's time goes; `extents` is how many were asked for in all.

    Driver calls for requests and for the stock have one histogram: they are told apart by how many extents each made.
    """
    number = len(times.take)
    caller = (sum(times.take) + sum(times.give)) / number
    broker = (total(counts, f"{REQUESTS}_sum", transport=transport) or 0.0) * 1e9 / number
    every_driver_call = (total(counts, f"{DRIVER}_sum") or 0.0) * 1e9 / number
    core = total(counts, f"{STEPS}_sum")
    core_ns = None if core is None else core * 1e9 / number
    driver: float | None = every_driver_call
    if stock:
        used, made = total(counts, STOCK, change="used"), total(counts, STOCK, change="made") or 0.0
        asked = None if used is None else max(0.0, extents - used)
        driver = None if asked is None else every_driver_call * asked / ((asked + made) or 1.0)
    journal = total(counts, f"{JOURNAL}_sum")
    journal_ns = None if journal is None else journal * 1e9 / number
    rest = None if driver is None else broker - driver - (core_ns or 0.0) - (journal_ns or 0.0)
    return Share(
        caller, broker, driver, core_ns, journal_ns, rest, None if driver is None else every_driver_call - driver
    )
