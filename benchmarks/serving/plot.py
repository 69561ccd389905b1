"""The runs as a picture: bytes by model over time, when first tokens came, and figures against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from membroker.vmm.sizes import GIB

from ..harness.plotting import load, without_frame
from .figures import Run, ttft

COLOURS = "#0072b2", "#009e73", "#d55e00"


def draw(facts: Mapping[str, str], runs: Sequence[Run], path: Path) -> None:
    """Write a picture of the first trace, with a column for each arm; if there are several loads, also of these.

    The columns are of load 1, if it was run.
    """
    pyplot = load()
    first = next((run for run in runs if run.trace == runs[0].trace and run.load == 1), runs[0])
    shown = [run for run in runs if (run.trace, run.load, run.seed) == (first.trace, first.load, first.seed)]
    by_load = sorted({run.load for run in runs if run.trace == first.trace})
    figure = pyplot.figure(figsize=(max(8, 5 * len(shown)), 7 + 3.5 * (len(by_load) > 1)), layout="constrained")
    parts = figure.subfigures(
        2 if len(by_load) > 1 else 1, 1, squeeze=False, height_ratios=[2, 1][: 1 + (len(by_load) > 1)]
    )
    axes = parts[0][0].subplots(2, len(shown), squeeze=False, sharex=True, sharey="row")
    for column, run in enumerate(shown):
        _memory(axes[0][column], run)
        _first_tokens(axes[1][column], run)
    axes[0][0].set_ylabel("KV cache, GiB, stacked")
    axes[1][0].set_ylabel("seconds to the first token")
    axes[0][0].legend(loc="upper left", fontsize=9, framealpha=1)
    if len(by_load) > 1:
        _against_load(parts[1][0], [run for run in runs if run.trace == first.trace], by_load)
    figure.suptitle(
        f"{first.trace.upper()}: {facts['models']}; KV cache in all {facts['KV cache in all']}", fontsize=11
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _memory(axes: Any, run: Run) -> None:
    samples = [one for one in run.samples if one.moment >= 0]
    if any(one.borrowed for one in samples):
        sizes = [[one.borrowed.get(f"m{each.model}", 0) / GIB for one in samples] for each in run.models]
    else:
        sizes = [[each.peak_bytes / GIB] * len(samples) for each in run.models]
    names = [f"m{each.model}" for each in run.models]
    colours = [COLOURS[each.model] for each in run.models]
    if not any(map(any, sizes)):
        axes.text(0.5, 0.5, "not told", transform=axes.transAxes, ha="center")
    axes.stackplot([one.moment for one in samples], sizes, labels=names, colors=colours, step="post", linewidth=0)
    axes.set_title(run.arm, loc="left", fontweight="bold")
    without_frame(axes)


def _first_tokens(axes: Any, run: Run) -> None:
    for each, told in zip(run.models, run.told, strict=True):
        answers = [one for one in told["answers"] if one["is_finished"]]
        colour = COLOURS[each.model]
        axes.scatter([one["due"] for one in answers], [max(1e-3, ttft(one)) for one in answers], s=4, color=colour)
        failed = [one["due"] for one in told["answers"] if not one["is_finished"]]
        axes.scatter(failed, [100.0] * len(failed), s=14, marker="x", color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=(0, (5, 3)))
    axes.set_yscale("log")
    axes.set_xlabel("seconds; a cross was never answered")
    without_frame(axes)


def _against_load(part: Any, runs: Sequence[Run], loads: Sequence[float]) -> None:
    """Draw TTFT and goodput of the worst model, and of all models, against the load."""
    axes = part.subplots(1, 3)
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [next((run for run in runs if (run.arm, run.load) == (arm, one)), None) for one in loads]
        for panel, index in ((axes[0], 0), (axes[1], 2)):
            worst = [max(each.ttft[index] for each in run.models) if run else float("nan") for run in mine]
            panel.plot(loads, worst, marker="o", label=arm)
        good = [sum(each.good_per_second for each in run.models) if run else float("nan") for run in mine]
        axes[2].plot(loads, good, marker="o", label=arm)
    for panel, title in zip(
        axes, ("TTFT p50, worst model, s", "TTFT p99, worst model, s", "good requests/s"), strict=True
    ):
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("load")
        without_frame(panel)
    for panel in axes[:2]:
        panel.set_yscale("log")
    axes[2].legend(fontsize=9, frameon=False)
