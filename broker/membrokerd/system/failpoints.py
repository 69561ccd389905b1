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
TENANT_POINTS = ("tenant kept", "tenant open", "deletion kept", "deletion begun", "tenant closed", "tenant forgotten")
"""The points lie behind these steps of a command that makes or deletes a tenant: it is in the file, its endpoint is
open; its deletion is in the file, it is asked for all that it has; its endpoint is closed, it is out of the file."""


def reach(point: str) -> None:
    """Do nothing. The tests' entry points put a function of their own here before they import the daemon."""
