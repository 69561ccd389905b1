"""The pictures of the status page, as SVG without script: memory as a bar, and the last minutes as a chart.

Owns sizes, colours and the geometry. Every text is escaped here or is a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from membroker.vmm import format_size

from .history import Sample

WIDTH, BAR_HEIGHT, CHART_HEIGHT = 960, 34, 220
COLOURS = ("#3b76b5", "#e08a2c", "#4a9a5b", "#b5486f", "#7a62b0", "#2a9aa5", "#9a7b3f", "#c25a45")
OTHERS, UNACCOUNTED, FREE, NOT_LENT = "#8a8f98", "#3a3a3a", "var(--free)", "var(--rest)"
_LEFT, _BOTTOM = 74, 18

DEFINITIONS = (
    '<svg width="0" height="0" style="position:absolute"><defs>'
    '<pattern id="releasing" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="6" fill="#fff" fill-opacity=".65"/></pattern></defs></svg>'
)


class BarPart(NamedTuple):
    """A part of a bar: what it is, its bytes and its colour. `releasing`: hatched. `opacity` tells models apart."""

    title: str
    size: int
    colour: str
    opacity: float = 1.0
    releasing: bool = False


def bar(parts: Iterable[BarPart], scale: int, marks: Mapping[str, int] | None = None, label: str = "") -> str:
    """Return a bar of parts side by side, `scale` bytes wide; `marks` are lines with a title, at so many bytes."""
    scale, at, shapes = max(1, scale), 0.0, []
    for part in parts:
        width = part.size / scale * WIDTH
        if width <= 0:
            continue
        title = f"<title>{escape(part.title)}: {format_size(part.size)}</title>"
        place = f'x="{at:.1f}" width="{width:.1f}" height="{BAR_HEIGHT}"'
        shapes.append(f'<rect {place} fill="{part.colour}" fill-opacity="{part.opacity:.2f}">{title}</rect>')
        if part.releasing:
            shapes.append(f'<rect {place} fill="url(#releasing)" pointer-events="none"/>')
        at += width
    for title, size in (marks or {}).items():
        x = min(max(size / scale * WIDTH, 1.0), WIDTH - 1.0)
        shapes.append(
            f'<line class="{escape(title)}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{BAR_HEIGHT}">'
            f"<title>{escape(title)}: {format_size(size)}</title></line>"
        )
    return (
        f'<svg class="bar" viewBox="0 0 {WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )


def chart(samples: Sequence[Sample], scale: int, colours: Mapping[str, str]) -> str:
    """Return the samples as a stacked chart over time, by tenant, with what is unaccounted on top."""
    if len(samples) < 2:
        return "<p>The chart begins a few seconds after the daemon.</p>"
    scale = max(1, scale, max(sample.capacity for sample in samples))
    across = _across(samples)
    names = sorted({tenant for sample in samples for tenant in sample.tenants})
    layers = [(name, [sample.tenants.get(name, 0) for sample in samples], colours.get(name, OTHERS)) for name in names]
    layers.append(("other tenants", [sample.others for sample in samples], OTHERS))
    layers.append(("unaccounted", [sample.unaccounted for sample in samples], UNACCOUNTED))
    below, shapes = [0] * len(samples), []
    for name, sizes, colour in layers:
        if not any(sizes):
            continue
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        points = [*zip(across, above, strict=True), *reversed(list(zip(across, below, strict=True)))]
        drawn = " ".join(f"{x:.1f},{_down(size, scale):.1f}" for x, size in points)
        shapes.append(f'<polygon points="{drawn}" fill="{colour}"><title>{escape(name)}</title></polygon>')
        below = above
    line = " ".join(f"{x:.1f},{_down(sample.capacity, scale):.1f}" for x, sample in zip(across, samples, strict=True))
    shapes.append(f'<polyline class="capacity" points="{line}"><title>capacity</title></polyline>')
    return _framed(shapes, scale, samples[-1].at - samples[0].at, "bytes by tenant over the last minutes")


def refusals(samples: Sequence[Sample]) -> str:
    """Return how many requests were refused between each two samples, as columns, and what waited, as a line."""
    if len(samples) < 2:
        return ""
    # A model that ends takes its refusals with it: such a step down is no refusal.
    steps = [max(0, after.refusals - before.refusals) for before, after in itertools.pairwise(samples)]
    most, most_waiting = max(*steps, 1), max(1, *(sample.waiting for sample in samples))
    across, shapes, height = _across(samples), [], 80
    for step, (left, right) in zip(steps, itertools.pairwise(across), strict=True):
        if step:
            width, tall = max(1.0, right - left - 1), step / most * height
            place = f'x="{left:.1f}" y="{height - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"'
            shapes.append(f'<rect class="refused" {place}><title>{step} refused</title></rect>')
    waits = (f"{height - sample.waiting / most_waiting * height:.1f}" for sample in samples)
    points = " ".join(f"{x:.1f},{y}" for x, y in zip(across, waits, strict=True))
    shapes.append(f'<polyline class="waiting" points="{points}"><title>bytes waited for</title></polyline>')
    if any(sample.waiting for sample in samples):
        shapes.append(f'<text x="0" y="28">{format_size(most_waiting)}</text>')
    shapes.append(f'<text x="0" y="12">{most if any(steps) else 0} refused</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height + 2}" role="img" '
        f'aria-label="refusals and waits">{"".join(shapes)}</svg>'
    )


def _across(samples: Sequence[Sample]) -> list[float]:
    begin, span = samples[0].at, max(0.001, samples[-1].at - samples[0].at)
    return [_LEFT + (sample.at - begin) / span * (WIDTH - _LEFT) for sample in samples]


def _down(size: float, scale: int) -> float:
    return (CHART_HEIGHT - _BOTTOM) * (1 - min(1.0, size / scale))


def _framed(shapes: Sequence[str], scale: int, span: float, label: str) -> str:
    """Return a chart with its axes: bytes to the left, time below."""
    lines = []
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = _down(part * scale, scale)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(
            f'<text x="0" y="{min(CHART_HEIGHT - _BOTTOM, y + 12):.1f}">{format_size(int(part * scale))}</text>'
        )
    lines.append(f'<text x="{_LEFT}" y="{CHART_HEIGHT - 3}">{span:.0f} s ago</text>')
    lines.append(f'<text x="{WIDTH}" y="{CHART_HEIGHT - 3}" text-anchor="end">now</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {CHART_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}{''.join(lines)}</svg>"
    )
