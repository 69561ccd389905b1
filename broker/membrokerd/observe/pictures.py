"""The pictures of the status page, as SVG without script: memory as a bar, and the last minutes as charts.

Owns sizes, colours, scales and the geometry. Every text is escaped here or is a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from membroker.vmm import format_size

from .history import Sample

WIDTH, BAR_HEIGHT, CHART_HEIGHT = 960, 34, 220
COLOURS = ("#2f6fb5", "#e08a2c", "#6b4bb5", "#35b5ac", "#9a7b3f", "#e59ac0", "#8fc4f0", "#e3cf4a")
"""The tenants'. No two things on the page have one colour, so a ninth tenant has that of `OTHERS`."""
OTHERS, UNACCOUNTED, FREE, NOT_LENT = "#8a8f98", "var(--unaccounted)", "var(--free)", "var(--rest)"
GUARANTEE, LIMIT, REFUSED, WAITING = "var(--guarantee)", "var(--limit)", "var(--refused)", "#c03fc0"
_MARKS = {"guarantee": GUARANTEE, "limit": LIMIT}
_LEFT, _BOTTOM, _TOP = 74, 18, 8

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
    """Return a bar of parts side by side, `scale` bytes wide; `marks` are lines at so many bytes."""
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
            f'<line stroke="{_MARKS[title]}" stroke-width="3" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{BAR_HEIGHT}">'
            f"<title>{escape(title)}: {format_size(size)}</title></line>"
        )
    return (
        f'<svg class="bar" viewBox="0 0 {WIDTH} {BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )


def bar_scale(scale: int) -> str:
    """Return the bytes below a bar that is `scale` bytes wide."""
    texts = []
    for size in round_ticks(scale, 2):
        x = size / max(1, scale) * WIDTH
        anchor = "start" if x < 40 else "end" if x > WIDTH - 40 else "middle"
        texts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="4"/>')
        texts.append(f'<text x="{x:.1f}" y="15" text-anchor="{anchor}">{_size(size)}</text>')
    return f'<svg class="chart" viewBox="0 0 {WIDTH} 18" role="img" aria-label="its scale">{"".join(texts)}</svg>'


def chart(samples: Sequence[Sample], scale: int, colours: Mapping[str, str]) -> str:
    """Return the samples as a stacked chart over time, by tenant, with what is unaccounted on top.

    Tenants without a colour are drawn as one.
    """
    if len(samples) < 2:
        return "<p>The chart begins a few seconds after the daemon.</p>"
    scale = max(1, scale, max(sample.capacity for sample in samples))
    across = _across(samples)
    names = sorted({tenant for sample in samples for tenant in sample.tenants} & set(colours))
    layers = [(name, [sample.tenants.get(name, 0) for sample in samples], colours[name]) for name in names]
    named = [sum(sample.tenants.get(name, 0) for name in names) for sample in samples]
    others = [sum(sample.tenants.values()) + sample.others for sample in samples]
    layers.append(("other tenants", [all_ - some for all_, some in zip(others, named, strict=True)], OTHERS))
    layers.append(("unaccounted", [sample.unaccounted for sample in samples], UNACCOUNTED))
    below, shapes = [0] * len(samples), []
    for name, sizes, colour in layers:
        if not any(sizes):
            continue
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        points = [*zip(across, above, strict=True), *reversed(list(zip(across, below, strict=True)))]
        drawn = " ".join(f"{x:.1f},{_down(size, scale, CHART_HEIGHT):.1f}" for x, size in points)
        shapes.append(f'<polygon points="{drawn}" fill="{colour}"><title>{escape(name)}</title></polygon>')
        below = above
    capacities = [sample.capacity for sample in samples]
    shapes.append(f'<polyline class="capacity" points="{_line(across, capacities, scale, CHART_HEIGHT)}">')
    shapes.append("<title>capacity</title></polyline>")
    ticks = {tick: _size(tick) for tick in round_ticks(scale, 2)}
    return _framed(shapes, samples, ticks, scale, CHART_HEIGHT, "bytes by tenant over the last minutes")


def refusals(samples: Sequence[Sample]) -> str:
    """Return how many requests were refused between each two samples, as columns."""
    if len(samples) < 2:
        return ""
    # A model that ends takes its refusals with it: such a step down is no refusal.
    steps = [max(0, after.refusals - before.refusals) for before, after in itertools.pairwise(samples)]
    scale, across, shapes, height = max(*steps, 1), _across(samples), [], 80
    for step, (left, right) in zip(steps, itertools.pairwise(across), strict=True):
        if step:
            width, y = max(1.0, right - left - 1), _down(step, scale, height)
            place = f'x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height - _BOTTOM - y:.1f}"'
            shapes.append(f'<rect fill="{REFUSED}" {place}><title>{step} refused</title></rect>')
    return _framed(shapes, samples, {tick: str(tick) for tick in round_ticks(scale, 10, 4)}, scale, height, "refusals")


def waits(samples: Sequence[Sample]) -> str:
    """Return how many bytes the requests that waited wanted, as a line."""
    if len(samples) < 2:
        return ""
    sizes, height = [sample.waiting for sample in samples], 80
    scale = max(1 << 20, *sizes)
    line = f'<polyline fill="none" stroke="{WAITING}" stroke-width="2" points="'
    line += f'{_line(_across(samples), sizes, scale, height)}"><title>bytes waited for</title></polyline>'
    return _framed([line], samples, {tick: _size(tick) for tick in round_ticks(scale, 2, 4)}, scale, height, "waits")


# --- Scales ---


def round_ticks(scale: int, base: int, most: int = 6) -> list[int]:
    """Return at most `most` values from 0 to `scale`, a round distance apart: a power of 2, or 1, 2 or 5 with zeros."""
    factors = (1,) if base == 2 else (1, 2, 5)
    steps = (factor * base**power for power in itertools.count() for factor in factors)
    step = next(step for step in steps if scale // step < most)
    return list(range(0, scale + 1, step))


def _size(size: int) -> str:
    """Return a size at a tick: it is round, so `8 GiB` says it."""
    return format_size(size).replace(".0 ", " ")


def _across(samples: Sequence[Sample]) -> list[float]:
    begin, span = samples[0].at, max(0.001, samples[-1].at - samples[0].at)
    return [_LEFT + (sample.at - begin) / span * (WIDTH - _LEFT) for sample in samples]


def _down(size: float, scale: int, height: int) -> float:
    return _TOP + (height - _BOTTOM - _TOP) * (1 - min(1.0, size / scale))


def _line(across: Sequence[float], sizes: Sequence[int], scale: int, height: int) -> str:
    return " ".join(f"{x:.1f},{_down(size, scale, height):.1f}" for x, size in zip(across, sizes, strict=True))


def _framed(
    shapes: Sequence[str], samples: Sequence[Sample], ticks: Mapping[int, str], scale: int, height: int, label: str
) -> str:
    """Return a chart with its axes: the ticks to the left, the time below."""
    lines = []
    for size, text in ticks.items():
        y = _down(size, scale, height)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    span = max(1, round(samples[-1].at - samples[0].at))
    step = next(step for step in (1, 2, 5, 10, 30, 60, 120, 300, span) if span // step <= 5)
    for ago in range(0, span + 1, step):
        x, text = WIDTH - ago / span * (WIDTH - _LEFT), f"{ago // 60} min ago" if step >= 60 else f"{ago} s ago"
        anchor = "end" if x > WIDTH - 40 else "start" if x < _LEFT + 40 else "middle"
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM + 4}"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - 3}" text-anchor="{anchor}">{text if ago else "now"}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}{''.join(lines)}</svg>"
    )
