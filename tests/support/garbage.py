"""A garbage collection that has happened, whatever the process's other threads do."""

from __future__ import annotations

import gc
import time


def collect() -> None:
    """Collect all garbage. `gc.collect()` alone returns at once, with nothing done, while another thread collects."""
    enabled = gc.isenabled()
    gc.disable()  # from here on no thread begins a collection by itself
    try:
        while not _collected():
            time.sleep(0.001)  # nothing announces that another thread's collection has ended
    finally:
        if enabled:
            gc.enable()


def _collected() -> bool:
    """Say whether a collection has found a piece of garbage that was made just before it."""
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    return gc.collect() > 0
