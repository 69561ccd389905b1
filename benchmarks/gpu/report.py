"""What a person reads of the GPU figures: the chapters, each with its tables. Owns no figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from membroker.cli.tables import NONE, TextTable
from membroker.vmm.sizes import GIB

from ..harness.goals import Goal, gap
from ..harness.report import Chapter, goals_chapter, scaled
from .figures import OFFLOAD, WORKERS, GpuSection, Quantiles, Row

TARGETS_NOTE = (
    "Ratios are to the driver in process in the same run, at p50. A figure that misses its target fails nothing. 'two "
    "processes' is what lending takes there without any broker: see the rows of that name."
)
SHARES_NOTE = (
    "Means of both calls together. broker is from a request's arrival to its answer, by its histograms: driver, core, "
    "journal and transport are its parts. outside is the rest of the caller's time: sockets, wake-ups, frames, and "
    "what its own driver does. for stock is what the broker's driver did meanwhile to fill its stock. The core steps "
    "outside of requests too (an acknowledgement, an extent of the stock), so transport is a little more than it says. "
    "'-' is what this daemon does not tell: without the core's histogram transport has the core's share, and without a "
    "count of the stock the driver calls cannot be told apart."
)
_SHARES = ("caller", "broker", "driver", "core", "journal", "transport", "outside", "for stock")


def chapters(sections: Sequence[GpuSection], goals: Sequence[Goal]) -> Iterator[Chapter]:
    """Yield what a person reads."""
    yield from goals_chapter(goals, TARGETS_NOTE)
    for section in sections:
        yield Chapter(section.title, section.about, [_rows(section)] if section.rows else [])
        shares = [
            [*_name(row), *(scaled(getattr(row.share, name.replace(" ", "_")), 1e3, 1) for name in _SHARES)]
            for row in section.rows
            if row.share
        ]
        if shares:
            columns = ("work", ">gap", "by", *(f">{name} us" for name in _SHARES))
            yield Chapter(f"{section.title}: the broker's own share", SHARES_NOTE, [TextTable(columns, shares)])


def _rows(section: GpuSection) -> TextTable:
    """Return the rows of a scene: with rates for many processes, speeds for copies, and else the stock's part."""
    crowd, copies = section.key == WORKERS, section.key == OFFLOAD
    speed = [">GiB/s"] * copies
    times = [[f">{call} p50 {'ms' if copies else 'us'}", f">p99 {'ms' if copies else 'us'}"] for call in section.calls]

    def cells(call: Quantiles, ratio: float | None) -> list[str]:
        found = [scaled(time, 1e6 if copies else 1e3, 1 + copies) for time in (call.p50_ns, call.p99_ns)]
        speeds = [scaled(section.moved_bytes / call.p50_ns * 1e9, GIB, 1)] if copies else []
        return [*found, *speeds, scaled(ratio)]

    rows = [
        [
            *((row.work, row.by) if crowd else _name(row)),
            f"{row.count:,}",
            *((scaled(row.per_second, digits=0), scaled(row.rate_ratio)) if crowd else ()),
            *cells(row.take, row.take_ratio),
            *cells(row.give, row.give_ratio),
            *([] if crowd or copies else [NONE if row.hit_percent is None else f"{row.hit_percent:.0f}%"]),
        ]
        for row in section.rows
    ]
    head = ("at once", "by", ">n", ">rate", ">of bare") if crowd else ("work", ">gap", "by", ">n")
    last = [] if crowd or copies else [">from stock"]
    return TextTable([*head, *times[0], *speed, ">x", *times[1], *speed, ">x", *last], rows)


def _name(row: Row) -> list[str]:
    return [row.work, gap(row.gap_ms), row.by]
