"""A garbage collection that has happened, whatever the process's other threads do; and a part of a test without one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def without_collections() -> Iterator[None]:
    """Free nothing by garbage collection: only with the last reference to it.

    What counts calls needs that, too: finalizers of what an earlier test has left would be counted.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
