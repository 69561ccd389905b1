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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType, TracebackType

# What `signal` wraps: its conversions between numbers and enums cost ten times as much as the calls, and a block stands
# around each allocation and each free.
_set_handler, _get_handler = _signal.signal, _signal.getsignal
_SIGINT = int(signal.SIGINT)


class _State:
    """Touched by the main thread only, but for `main`, its identifier."""

    __slots__ = ("depth", "main", "pending", "waiting")

    def __init__(self) -> None:
        self.depth = 0
        self.waiting = False
        self.pending = False
        self.main = threading.main_thread().ident


# An instance: each change of a class throws away what the interpreter has cached of it.
_state = _State()


def _handle(_number: int, _frame: FrameType | None) -> None:
    # Outside of a block it is Python's own: a function of the program's found this in one, and set it again later.
    if _state.waiting or not _state.depth:
        _state.waiting = False
        raise KeyboardInterrupt
    _state.pending = True


_OURS = (signal.default_int_handler, _handle)


class HeldOff:
    """A block in which an interrupt is raised only inside `Waiting`, or at the end of the outermost such block."""

    __slots__ = ("_active",)

    def __enter__(self) -> None:
        self._active = get_ident() == _state.main and (_state.depth > 0 or _get_handler(_SIGINT) in _OURS)
        if self._active:
            if not _state.depth:
                _state.pending = False
                _set_handler(_SIGINT, _handle)
            _state.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        _state.depth -= 1
        if _state.depth:
            return
        _give_handler_back()
        pending, _state.pending = _state.pending, False
        if pending and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt


def _give_handler_back() -> None:
    """Let the next interrupt be Python's again. One that comes meanwhile is pending."""
    if _get_handler(_SIGINT) is not _handle:  # a function of the program's, called in the block, has set its own
        return
    try:
        _set_handler(_SIGINT, signal.default_int_handler)
    except BaseException:
        # Before it sets anything it runs the handlers of signals that wait, and one of the program's own has raised.
        _set_handler(_SIGINT, signal.default_int_handler)
        raise


class Waiting:
    """A block of a `HeldOff` that only waits: an interrupt is raised at once. Nothing to lose may happen in it."""

    __slots__ = ()

    # `is_held_off`, written out: each call waits twice.
    def __enter__(self) -> None:
        if _state.depth > 0 and get_ident() == _state.main:
            _state.waiting = True
            if _state.pending:
                _state.waiting = _state.pending = False
                raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _state.depth > 0 and get_ident() == _state.main:
            _state.waiting = False


def let_through() -> None:
    """Raise the interrupt that is held off, if there is one: between two steps, where nothing is lost by it."""
    if is_held_off() and _state.pending:
        _state.pending = False
        raise KeyboardInterrupt


def is_held_off() -> bool:
    """Say whether this thread holds off interrupts now."""
    return _state.depth > 0 and get_ident() == _state.main


def _restore() -> None:
    """In a forked child, whose main thread is this one: the block may have been another's, which did not come along."""
    _state.main = get_ident()
    if _state.depth:
        _state.depth, _state.waiting, _state.pending = 0, False, False
        _give_handler_back()


os.register_at_fork(after_in_child=_restore)


class Condition:
    """A `lock`, held in a `with` block of its own: in it, `wait` lets it go until `tell_all`."""

    __slots__ = ("_waiting", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._waiting: list[threading.Lock] = []

    def wait(self, seconds: float | None = None) -> None:
        """Wait for a change, at most so long; an interrupt that is held off is raised here. The lock is held."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiting.append(waiter)
        self.lock.release()
        try:
            with Waiting():
                waiter.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            self.lock.acquire()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def tell_all(self) -> None:
        """Wake every thread that waits. The lock is held."""
        while self._waiting:
            self._waiting.pop().release()


class Turns:
    """Things are numbers. In a forked child it is of no use: its lock may have been another thread's."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._given_up = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, things: Collection[int]) -> Iterator[None]:
        """Keep all others off `things` during a block; wait first, until nobody has any of them.

        Ctrl-C ends the wait; from then on it is the caller who holds it off (`HeldOff`).
        """
        while (given_up := self._take(things)) is not None:
            with Waiting():
                given_up.wait()
        try:
            yield
        finally:
            self._give_up(things)

    def _take(self, things: Collection[int]) -> threading.Event | None:
        """Take them all, or return what tells that some were given up."""
        with self._lock:
            if not self._taken.isdisjoint(things):
                return self._given_up
            self._taken.update(things)
            return None

    def _give_up(self, things: Collection[int]) -> None:
        with self._lock:
            self._taken.difference_update(things)
            self._given_up.set()
            self._given_up = threading.Event()
