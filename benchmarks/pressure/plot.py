"""One run as a picture: what each tenant is charged over time, beside what it wants and what it is guaranteed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from membroker.vmm.sizes import MIB, format_size

from ..harness.plotting import load, without_frame
from .trace import TENANTS, Numbers, PhaseTrace

COLOURS = "#0072b2", "#009e73", "#d55e00"
STEP_SECONDS = 0.05


def draw(numbers: Numbers, used: Sequence[tuple[float, Mapping[str, int]]], path: Path) -> None:
    """Write the picture of a run: `used` has the bytes of each tenant, and the second at which they were read."""
    pyplot = load()
    used = [one for one in used if 0 <= one[0] <= numbers.seconds]
    times = [time for time, _ in used]
    charged = [[books.get(f"t{tenant}", 0) / MIB for _, books in used] for tenant in range(TENANTS)]
    ratios = (1.3, *[1] * TENANTS)
    figure, (whole, *each) = pyplot.subplots(
        TENANTS + 1, 1, figsize=(10, 8.5), sharex=True, layout="constrained", height_ratios=ratios
    )
    moments = [step * STEP_SECONDS for step in range(int(numbers.seconds / STEP_SECONDS))]
    wanted = [_wanted(numbers, tenant, moments) for tenant in range(TENANTS)]
    names = [f"tenant {'ABC'[tenant]}" for tenant in range(TENANTS)]
    whole.stackplot(times, charged, colors=COLOURS, labels=names, step="post", linewidth=0)
    whole.axhline(numbers.capacity / MIB, color="black", linewidth=1)
    whole.set_ylim(0, 1.25 * numbers.capacity / MIB)
    whole.set_title(
        f"All three together, stacked; the line is the capacity, {format_size(numbers.capacity)}", loc="left"
    )
    whole.legend(loc="upper right", ncols=TENANTS, fontsize=9, frameon=False)
    most = 1.05 * max(numbers.share / MIB, *[amount for one in (*charged, *wanted) for amount in one])
    for tenant, axes in enumerate(each):
        _tenant(axes, numbers, COLOURS[tenant], times, charged[tenant])
        axes.plot(moments, wanted[tenant], color="black", linewidth=1.2, drawstyle="steps-post", label="wants")
        axes.set_ylim(0, most)
        axes.set_title(names[tenant], loc="left", color=COLOURS[tenant], fontweight="bold")
    for axes in (whole, *each):
        axes.set_ylabel("MiB")
        axes.set_xlim(0, numbers.seconds)
        without_frame(axes)
    figure.legend(*each[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    each[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _wanted(numbers: Numbers, tenant: int, moments: Sequence[float]) -> list[float]:
    """Return how many MiB an engine wants at each moment."""
    trace = PhaseTrace(numbers.seed, tenant, numbers.seconds, numbers.capacity // numbers.page)
    return [trace.wanted(moment) * numbers.page / MIB for moment in moments]


def _tenant(axes: Any, numbers: Numbers, colour: str, times: Sequence[float], charged: Sequence[float]) -> None:
    """Draw what a tenant has: dark up to its guarantee, light what is borrowed beyond that."""
    guarantee, share = numbers.guarantee / MIB, numbers.share / MIB
    within = [min(one, guarantee) for one in charged]
    axes.fill_between(times, within, step="post", color=colour, linewidth=0, label="dark: has, within its guarantee")
    beyond = {"color": colour, "alpha": 0.35, "linewidth": 0, "label": "light: has, beyond it"}
    axes.fill_between(times, within, charged, step="post", **beyond)
    axes.axhline(guarantee, color="black", linewidth=1.2, linestyle=(0, (5, 3)), label="guarantee")
    axes.axhline(share, color="black", linewidth=1, linestyle=(0, (1, 2)), label="share while all want more")
