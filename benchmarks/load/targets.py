"""What some of the figures should be, on a machine that does nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from ..harness.goals import Goal
from .figures import LoadSection

P50_MS = {"recalled.spare": 5.0, "core.schedule": 1.0}
P99_MS = {"refused.among": 3.0, "recalled.guaranteed": 100.0, "recalled.share": 100.0}
FIGURES = {"core.divisions": 0.0, "beside.ratio": 1.03}
"""The ratio is to the tree that was given with --before."""


def goals(sections: Sequence[LoadSection]) -> list[Goal]:
    """Return what was measured of all that has a target."""
    found = []
    for section in sections:
        for row in section.timings:
            if row.key in P50_MS:
                found.append(Goal(f"{row.name}: p50", row.p50_ns / 1e6, P50_MS[row.key], "ms"))
            if row.key in P99_MS:
                found.append(Goal(f"{row.name}: p99", row.p99_ns / 1e6, P99_MS[row.key], "ms"))
        found += [
            Goal(row.name, row.value, FIGURES[row.key], row.unit) for row in section.figures if row.key in FIGURES
        ]
    return found
