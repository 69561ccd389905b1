"""Failpoints: named points in the daemon's work at which tests end a process. Outside tests they do nothing."""

from __future__ import annotations

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


def reach(point: str) -> None:
    """Do nothing. The tests' entry points put a function of their own here before they import the daemon."""
