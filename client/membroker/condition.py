"""`Condition`: a lock, and a wait for a change under it, which an interrupt leaves as they were.

As `threading.Condition`, whose wait is Python: an interrupt between two of its lines would leave the lock open where
it must be held. Here it is raised only where nothing is lost by it. It must never decide what a change is.
"""

from __future__ import annotations

import threading

from .interrupts import Waiting


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
