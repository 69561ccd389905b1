"""What a figure should be, beside what it is. Never a test: a machine with others at work misses targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from membroker.cli.tables import NONE, TextTable


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure, and the most that it should be, or the least.

    `gap_ms` is the pause before each call, where works are measured with and without one. `pair` is what two processes
    without a broker reached in the same run, where that was measured.
    """

    what: str
    value: float
    target: float
    unit: str
    at_least: bool = False
    gap_ms: float | None = None
    pair: float | None = None

    @property
    def reached(self) -> bool:
        """Whether it is what it should be."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def goals_table(goals: Sequence[Goal]) -> TextTable:
    """Return the goals as a table. Gaps and pairs have a column where there are any."""
    gaps, pairs = (any(getattr(goal, name) is not None for goal in goals) for name in ("gap_ms", "pair"))
    rows = [
        [
            goal.what,
            *([gap(goal.gap_ms or 0)] if gaps else []),
            f"{goal.value:,.2f} {goal.unit}",
            f"{'at least' if goal.at_least else 'at most'} {goal.target:g} {goal.unit}",
            *([NONE if goal.pair is None else f"{goal.pair:.2f}"] if pairs else []),
            "yes" if goal.reached else "NO",
        ]
        for goal in goals
    ]
    columns = ("what has a target", *[">gap"] * gaps, ">measured", ">target", *[">two processes"] * pairs, "reached")
    return TextTable(columns, rows)


def gap(milliseconds: float) -> str:
    """Return how a table names the pause before each call."""
    return f"{milliseconds:g} ms" if milliseconds else "none"
