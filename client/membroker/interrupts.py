"""Ctrl-C, held off while memory changes hands, and let through wherever a call only waits.

Python raises KeyboardInterrupt between any two instructions of the main thread: between an extent's arrival and
its note in the books, too. Owns SIGINT's handler for the moments of a borrow or a give-back, and only where it is
Python's own; a program's own handler is left alone, and so is every other thread. It must never swallow an
interrupt: one that was held off is raised at the end.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import os
import signal
import threading
from types import FrameType, TracebackType

# What `signal` wraps: its conversions between numbers and enums cost ten times as much as the calls, and a block stands
# around each allocation and each free.
_set_handler, _get_handler = _signal.signal, _signal.getsignal
_SIGINT = int(signal.SIGINT)


class _State:
    """Touched by the main thread only."""

    depth = 0
    waiting = False
    pending = False


def _handle(_number: int, _frame: FrameType | None) -> None:
    if _State.waiting:
        _State.waiting = False
        raise KeyboardInterrupt
    _State.pending = True


class HeldOff:
    """A block in which an interrupt is raised only inside `Waiting`, or at the end of the outermost such block."""

    __slots__ = ("_active",)

    def __enter__(self) -> None:
        self._active = threading.current_thread() is threading.main_thread() and (
            _State.depth > 0 or _get_handler(_SIGINT) is signal.default_int_handler
        )
        if self._active:
            if not _State.depth:
                _State.pending = False
                _set_handler(_SIGINT, _handle)
            _State.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        _State.depth -= 1
        if _State.depth:
            return
        _give_handler_back()
        pending, _State.pending = _State.pending, False
        if pending and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt


def _give_handler_back() -> None:
    """Let the next interrupt be Python's again. One that comes meanwhile is pending."""
    try:
        _set_handler(_SIGINT, signal.default_int_handler)
    except BaseException:
        # Before it sets anything it runs the handlers of signals that wait, and one of the program's own has raised.
        _set_handler(_SIGINT, signal.default_int_handler)
        raise


class Waiting:
    """A block of a `HeldOff` that only waits: an interrupt is raised at once. Nothing to lose may happen in it."""

    __slots__ = ()

    def __enter__(self) -> None:
        if is_held_off():
            _State.waiting = True
            if _State.pending:
                _State.waiting = _State.pending = False
                raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_held_off():
            _State.waiting = False


def let_through() -> None:
    """Raise the interrupt that is held off, if there is one: between two steps, where nothing is lost by it."""
    with Waiting():
        pass


def is_held_off() -> bool:
    """Say whether this thread holds off interrupts now."""
    return _State.depth > 0 and threading.current_thread() is threading.main_thread()


def _restore() -> None:
    """In a forked child: the block may have been another thread's, which did not come along."""
    if _State.depth:
        _State.depth, _State.waiting, _State.pending = 0, False, False
        _set_handler(_SIGINT, signal.default_int_handler)


os.register_at_fork(after_in_child=_restore)
