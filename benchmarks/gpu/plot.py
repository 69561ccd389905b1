"""The figures as a picture: ratios beside their targets, times by size, and rates. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from membroker.vmm import format_size

from ..harness.goals import Goal
from ..harness.plotting import load, without_frame
from .figures import ATTACH, EXTENTS, IN_PROCESS, WORKERS, GpuSection, brokered
from .scenes import PAIR, SEGMENTS, SIZES

BARE, TIGHT, GAP, MISSED = "#555555", "#0072b2", "#56b4e9", "#d55e00"
COLOURS = {
    IN_PROCESS: BARE,
    PAIR: "#cc79a7",
    brokered("handoff", stock=False): "#0072b2",
    brokered("handoff", stock=True): "#009e73",
    brokered("grpc", stock=False): "#d55e00",
    brokered("grpc", stock=True): "#e69f00",
}
BAR = 0.38


def draw(facts: Mapping[str, str], sections: Sequence[GpuSection], goals: Sequence[Goal], path: Path) -> None:
    """Write the picture."""
    pyplot = load()
    by_key = {section.key: section for section in sections}
    ratios = [goal for goal in goals if goal.unit == "x"]
    names = list(dict.fromkeys(goal.what for goal in ratios))
    figure = pyplot.figure(figsize=(15, max(9.0, 2.2 + 0.34 * len(names))), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    _ratios(left.subplots(), ratios, names)
    above, middle, below = right.subplots(3, 1)
    lines = [above.plot([], [], color=colour, marker="o", markersize=4, label=by)[0] for by, colour in COLOURS.items()]
    right.legend(handles=lines, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    _times(above, by_key.get(EXTENTS), "One extent: allocate and map", [format_size(size) for size in SIZES])
    _times(middle, by_key.get(ATTACH), "A segment: attach", [format_size(size) for size in SEGMENTS])
    _rates(below, by_key.get(WORKERS))
    what = [facts.get("device", ""), *(f"{key} {facts[key]}" for key in ("driver", "CUDA") if key in facts)]
    figure.suptitle(f"membroker beside the driver in process: {', '.join(what)}, {facts.get('date', '')}", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _ratios(axes: Any, goals: Sequence[Goal], names: Sequence[str]) -> None:
    """Bars to the right, in the order of the table, with a mark at each target."""
    axes.set_title("At p50, beside the target (|) and two processes without a broker (o)", loc="left", fontsize=10)
    most = 1.18 * max([goal.value for goal in goals] + [goal.target for goal in goals], default=1)
    for goal in goals:
        place = names.index(goal.what) + (BAR / 2 if goal.gap_ms else -BAR / 2)
        colour = GAP if goal.gap_ms else TIGHT
        axes.barh(place, goal.value, BAR, color=colour)
        axes.plot([goal.target] * 2, [place - BAR / 2, place + BAR / 2], color="black", linewidth=2)
        if goal.pair is not None:
            axes.plot(goal.pair, place, marker="o", markersize=5, color=COLOURS[PAIR], markeredgecolor="white")
        text = f"{goal.value:.2f}"
        near = 0 < goal.target - goal.value < most / 10  # the mark would stand in the text
        at = goal.target if near else goal.value
        axes.annotate(
            text if goal.reached else f"{text} missed",
            (at, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="black" if goal.reached else MISSED,
        )
    rising = {goal.what for goal in goals if goal.at_least}
    axes.set_yticks(range(len(names)), [f"{name} (at least)" if name in rising else name for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, most)
    axes.set_xlabel("times the driver in process")
    if goals:
        names_of = {"no gap": TIGHT, "a gap before each call": GAP}
        handles = [axes.bar([0], [0], color=colour, label=name) for name, colour in names_of.items()]
        axes.legend(handles=handles, fontsize=8, frameon=False, loc="lower right")
    _plain(axes)


def _times(axes: Any, section: GpuSection | None, title: str, works: Sequence[str]) -> None:
    """Lines by size at p50, in a tight loop, and up to p99 a shade."""
    axes.set_title(f"{title}: p50, shaded up to p99", loc="left", fontsize=10)
    for by, colour in COLOURS.items():
        rows = [row for work in works if section and (row := section.find(work, 0.0, by))]
        if rows:
            places = [works.index(row.work) for row in rows]
            low = [row.take.p50_ns / 1e3 for row in rows]
            axes.plot(places, low, color=colour, marker="o", markersize=4, linewidth=1.5)
            axes.fill_between(places, low, [row.take.p99_ns / 1e3 for row in rows], color=colour, alpha=0.12, lw=0)
    axes.set_xticks(range(len(works)), works)
    _log(axes, section, "us")


def _rates(axes: Any, section: GpuSection | None) -> None:
    axes.set_title("Processes at once: allocate and free, all together", loc="left", fontsize=10)
    rows = section.rows if section else []
    works = list(dict.fromkeys(row.work for row in rows))
    for by, colour in COLOURS.items():
        mine = [row for row in rows if row.by == by and row.per_second]
        if mine:
            rates = [row.per_second for row in mine]
            places = [works.index(row.work) for row in mine]
            axes.plot(places, rates, color=colour, marker="o", markersize=4, linewidth=1.5)
    axes.set_xticks(range(len(works)), [work.partition(" ")[0] for work in works])
    axes.set_xlabel("processes")
    _log(axes, section, "a second")


def _log(axes: Any, section: GpuSection | None, unit: str) -> None:
    axes.set_ylabel(unit)
    if section and section.rows:
        axes.set_yscale("log")
    _plain(axes)


def _plain(axes: Any) -> None:
    without_frame(axes)
    axes.grid(axis="both" if axes.get_yscale() == "log" else "x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
