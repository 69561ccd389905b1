"""Code of the user that runs amid a call of the library, in its thread: a finalizer (`__del__`), or a signal handler.

The garbage collector, and Python's signal handlers, run at almost any point of a thread, also where the thread holds a
lock of the library. What released memory there would wait for that lock forever, so another thread does it instead.
This must never take a lock.
"""

from __future__ import annotations

import gc
import sys
import threading
from threading import get_ident
from types import FrameType

_PARTS = tuple(f"membroker.{part}" for part in ("session.", "memory.", "pool.", "segment", "vmm.", "interrupts"))
"""What holds locks. An engine runs under frames of `kv`, which may close a client at its end."""
_interrupted: dict[int, FrameType] = {}
"""The frame that a collection has interrupted, by the thread that collects."""


def amid_a_call() -> bool:
    """Return whether the garbage collector has called the caller, through a finalizer, amid a call of the library."""
    return _is_in_a_call(_interrupted.get(get_ident()))


def in_a_handler() -> bool:
    """Return whether the caller was called amid another call in the main thread, as a signal handler is."""
    if get_ident() != threading.main_thread().ident:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module_of(frame).startswith("membroker."):  # the present call
        frame = frame.f_back
    return _is_in_a_call(frame)


def _is_in_a_call(frame: FrameType | None) -> bool:
    while frame is not None:
        if _module_of(frame).startswith(_PARTS):
            return True
        frame = frame.f_back
    return False


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _note(phase: str, _figures: object) -> None:
    frame = sys._getframe().f_back  # None as the interpreter exits
    if phase == "start" and frame is not None:
        _interrupted[get_ident()] = frame
    else:
        _interrupted.pop(get_ident(), None)


gc.callbacks.append(_note)
