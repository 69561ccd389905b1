"""Garbage collection: whether it has interrupted a call of the library, and now runs a finalizer (`__del__`) there.

The collector runs at almost any point of a thread, also where the thread holds a lock of the library. A finalizer that
released memory there would wait for that lock forever, so another thread does it instead. This must never take a lock.
"""

from __future__ import annotations

import gc
import sys
from threading import get_ident
from types import FrameType

_interrupted: dict[int, FrameType] = {}
"""The frame that a collection has interrupted, by the thread that collects."""


def amid_a_call() -> bool:
    """Return whether the garbage collector has called the caller, through a finalizer, amid a call of the library."""
    frame = _interrupted.get(get_ident())
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("membroker."):
            return True
        frame = frame.f_back
    return False


def _note(phase: str, _figures: object) -> None:
    frame = sys._getframe().f_back  # None as the interpreter exits
    if phase == "start" and frame is not None:
        _interrupted[get_ident()] = frame
    else:
        _interrupted.pop(get_ident(), None)


gc.callbacks.append(_note)
