"""What a figure should be, beside what it is. Never a test: a machine with others at work misses targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from membroker.cli.tables import TextTable


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure, and the most that it should be, or the least."""

    what: str
    value: float
    target: float
    unit: str
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """Whether it is what it should be."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def table(goals: Iterable[Goal]) -> TextTable:
    """Return the goals as a table."""
    rows = [
        [
            goal.what,
            f"{goal.value:,.2f} {goal.unit}",
            f"{'at least' if goal.at_least else 'at most'} {goal.target:g} {goal.unit}",
            "yes" if goal.reached else "NO",
        ]
        for goal in goals
    ]
    return TextTable(("what has a target", ">measured", ">target", "reached"), rows)
