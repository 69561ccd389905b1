"""What is counted, of a recording and of its replay alike: requests by model and location, and what became of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from ..ext import Location, ModelName, Reason
from ..ext import effects as fx

GIVEN_UP = Reason.DELIVERY_FAILED.value
"""The reason of a request whose program did not wait for the answer, or has ended."""


@dataclass(slots=True)
class Figures:
    """The figures of one model at one location. `waits` are in nanoseconds."""

    granted: int = 0
    given_up: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=list)
    recalls: int = 0
    late: int = 0
    recalled_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the figures under the names that the command prints."""
        waits = sorted(self.waits)
        p99 = waits[-(-99 * len(waits) // 100) - 1] if waits else 0
        return {
            "requests": self.granted + self.given_up + self.refused.total(),
            "granted": self.granted,
            "refused": dict(sorted(self.refused.items())),
            "given_up": self.given_up,
            "waited": len(waits),
            "waited_ms": sum(waits) // 1_000_000,
            "waited_p99_ms": p99 // 1_000_000,
            "recalls": self.recalls,
            "late_recalls": self.late,
            "recalled_bytes": self.recalled_bytes,
        }


class Tally:
    """The figures of all models."""

    def __init__(self) -> None:
        self.rows: defaultdict[tuple[ModelName, Location], Figures] = defaultdict(Figures)
        self.granted_now = 0
        """Of a replay: requests that were refused in the trace."""
        self.unfit_bytes = 0
        """Of a replay: bytes that were lent when a part began, and do not fit."""

    def answered(self, name: ModelName, location: Location, reason: str, waited_ns: int | None) -> None:
        """Count a request; `reason` is that of a refusal, or empty. `waited_ns` None: it did not wait."""
        row = self.rows[name, location]
        if not reason:
            row.granted += 1
        elif reason == GIVEN_UP:
            row.given_up += 1
        else:
            row.refused[reason] += 1
        if waited_ns is not None:
            row.waits.append(waited_ns)

    def recalled(self, recalled: fx.Recalled) -> None:
        """Count a recall that has ended, or is late."""
        row = self.rows[recalled.name, recalled.location]
        row.recalls += 1
        row.late += recalled.result == "late"
        row.recalled_bytes += recalled.returned
