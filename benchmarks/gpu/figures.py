"""The rows of the GPU figures: percentiles, ratios, the broker's share. Times in nanoseconds.

Owns the arithmetic, and the rows that are shown. It must never measure anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..harness.samples import Samples, Series, quantile
from ..harness.stage import Section

EXTENTS, PAGES, POOL, ATTACH, OFFLOAD, WORKERS = "extents", "pages", "pool", "attach", "offload", "workers"
"""The scenes."""
IN_PROCESS = "driver in process"
"""The process that does the same work without a broker: every ratio is to it."""


def brokered(transport: str, stock: bool) -> str:
    """Return what rows call the borrower."""
    return f"{transport}, stock {'on' if stock else 'off'}"


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


@dataclass(slots=True)
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
class GpuSection(Section):
    """The rows of a scene. `calls` names the two calls, and `moved_bytes` is how much each copies, if it does."""

    key: str = ""
    calls: tuple[str, str] = ("take", "give")
    moved_bytes: int = 0
    rows: list[Row] = field(default_factory=list)

    def find(self, work: str, gap_ms: float, by: str) -> Row | None:
        """Return a row, if it is there."""
        return next((row for row in self.rows if (row.work, row.gap_ms, row.by) == (work, gap_ms, by)), None)


def row(work: str, gap_ms: float, by: str, samples: Samples, base: Row | None = None, *, rate: bool = False) -> Row:
    """Return the row of some times beside that of the driver in process; with `rate`, of works a second too."""
    take, give = (_quantiles(samples.times[call]) for call in ("take", "give"))
    found = Row(work, gap_ms, by, samples.count, take, give, per_second=samples.per_second if rate else None)
    if base is not None:
        found.take_ratio, found.give_ratio = take.p50_ns / base.take.p50_ns, give.p50_ns / base.give.p50_ns
        found.rate_ratio = found.per_second / base.per_second if found.per_second and base.per_second else None
    return found


def _quantiles(times: Sequence[int]) -> Quantiles:
    return Quantiles(int(quantile(times, 0.50)), int(quantile(times, 0.99)), sum(times) / len(times))


# --- the broker's own figures ---

REQUESTS, DRIVER, STEPS = "membroker_request_seconds", "membroker_driver_call_seconds", "membroker_core_step_seconds"
JOURNAL = "membroker_journal_append_seconds"
STOCK = "membroker_stock_extents_total"
"""The last three are used where the daemon has them."""


def total(counts: Series, name: str, **labels: str) -> float | None:
    """Return the sum of the series that have these labels; None if there are no such series."""
    found = [value for (called, has), value in counts.items() if called == name and labels.items() <= dict(has).items()]
    return sum(found) if found else None


def hits(counts: Series, extents: int) -> float | None:
    """Return the percentage of `extents` that came from the stock."""
    used = total(counts, STOCK, change="used")
    return None if used is None else 100 * used / extents


def share(samples: Samples, transport: str, *, extents: int, stock: bool) -> Share:
    """Return where a work's time goes; `extents` is how many were asked for in all.

    Driver calls for requests and for the stock have one histogram: they are told apart by how many extents each made.
    """
    counts, number = samples.counts, samples.count

    def mean(name: str, **labels: str) -> float | None:
        found = total(counts, f"{name}_sum", **labels)
        return None if found is None else found * 1e9 / number

    broker, every_driver_call = mean(REQUESTS, transport=transport) or 0.0, mean(DRIVER) or 0.0
    core, journal = mean(STEPS), mean(JOURNAL)
    driver: float | None = every_driver_call
    if stock:
        used, made = total(counts, STOCK, change="used"), total(counts, STOCK, change="made") or 0.0
        asked = None if used is None else max(0.0, extents - used)
        driver = None if asked is None else every_driver_call * asked / ((asked + made) or 1.0)
    return Share(
        caller=sum(map(sum, samples.times.values())) / number,
        broker=broker,
        driver=driver,
        core=core,
        journal=journal,
        transport=None if driver is None else broker - driver - (core or 0.0) - (journal or 0.0),
        for_stock=None if driver is None else every_driver_call - driver,
    )
