"""Matplotlib, for the pictures of the benchmarks; it is imported when one is drawn."""

from __future__ import annotations

import importlib
from typing import Any


class NoMatplotlib(Exception):
    """It is not installed."""


def load() -> Any:
    """Return pyplot, for pictures in files. Raises `NoMatplotlib`."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise NoMatplotlib(f"--plot needs matplotlib ({error}): pip install matplotlib") from error


def without_frame(axes: Any) -> None:
    """Draw no line above, and none at the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
