"""Failpoints: named points in the daemon's work at which tests end a process. Outside tests they do nothing."""

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
"""The points lie before and after these steps: a debit is journaled, extents are created and exported, a segment's
descriptors are stored, a packet is sent, a credit is journaled, a segment is sealed, the journal is compacted, a resume
is reconciled."""


def _nothing(point: str) -> None:
    """Do nothing."""


hook: Callable[[str], None] = _nothing
"""Called at each point. The tests' entry point replaces it."""


def reach(point: str) -> None:
    """Call the hook: the daemon has reached this point."""
    hook(point)
