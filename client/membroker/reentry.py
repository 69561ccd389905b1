"""Reentry: whether a finalizer (`__del__`) or a signal handler of the program has interrupted a call of the library.

Python runs both at almost any point of a thread, also while the thread holds a lock of the library. If the finalizer
or the handler then released memory itself, it would wait for that lock forever. So another thread does it. This module
must never take a lock.
"""

from __future__ import annotations

import gc
import sys
import threading
from threading import get_ident
from types import FrameType

_PARTS = tuple(f"membroker.{part}" for part in ("session.", "memory.", "pool.", "segment", "vmm.", "interrupts"))
"""The modules that hold locks. `kv` is not among them: an engine runs under its frames, and may close a client."""
_interrupted: dict[int, FrameType] = {}
"""By thread, while the garbage collector runs in it: the frame that it has interrupted."""


def in_a_finalizer() -> bool:
    """Return whether the caller is called by a finalizer that has interrupted a call of the library in this thread."""
    return _is_in_a_call(_interrupted.get(get_ident()))


def in_a_handler() -> bool:
    """Return whether the caller is called by a signal handler that has interrupted a call of the library."""
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
