"""A part of a test in which nothing is freed by garbage collection: only with the last reference to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage until the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
