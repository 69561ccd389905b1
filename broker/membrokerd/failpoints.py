"""Named points in the daemon's work at which tests end a process. Outside the tests nothing happens at them."""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "debit",
    "debited",
    "create",
    "created",
    "store",
    "stored",
    "deliver",
    "delivered",
    "acknowledge",
    "credit",
    "credited",
    "seal",
    "sealed",
    "compact",
    "compacted",
    "resume",
    "reconcile",
    "reconciled",
)
"""Before and after: a debit is journaled, extents are created and exported, a segment's descriptors are stored, a
packet is sent, a credit is journaled, a segment is sealed, the journal is compacted, a resume is reconciled."""


def _nothing(point: str) -> None:
    """Do nothing: this is no test."""


hook: Callable[[str], None] = _nothing
"""What the tests' entry point replaces."""


def reach(point: str) -> None:
    """Say that a point is reached."""
    hook(point)
