"""Reentry: whether a finalizer (`__del__`) or a signal handler of the program has interrupted a call of the library.

Python runs both at almost any point of a thread, also while the thread holds a lock of the library. If the finalizer
or the handler then released memory itself, it would wait for that lock forever. So another thread does it. This module
must never take a lock.

The frames of the thread say it. `gc.callbacks` would say it too, and for less. But with such a callback in Python code,
early versions of Python 3.11 fail to parse code in two threads (SystemError, gh-106905).
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType

_PARTS = tuple(f"membroker.{part}" for part in ("session.", "memory.", "pool.", "segment", "vmm.", "interrupts"))
"""The modules that hold locks. `kv` is not among them: an engine runs under its frames, and may close a client."""


def in_a_finalizer() -> bool:
    """Return whether a finalizer that has interrupted a call of the library has called the caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals is weakref.__dict__:  # weakref.finalize
            return _is_in_a_call(frame)
        frame = frame.f_back
    return False


def in_a_handler() -> bool:
    """Return whether a signal handler that has interrupted a call of the library has called the caller."""
    if threading.current_thread() is not threading.main_thread():
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
