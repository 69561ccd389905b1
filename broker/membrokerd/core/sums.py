"""Sums by key that have no entry of zero: what is gone leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from typing import Any


def add(sums: Counter[Any], change: int, *keys: object) -> None:
    """Add to the sum of each key."""
    for key in keys:
        sums[key] += change
        if not sums[key]:
            del sums[key]
