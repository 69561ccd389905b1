"""`Turns`: one call at a time at each thing, while nobody holds a lock.

Owns which things are taken. Who wants several takes them all at once, so that nobody waits who has one. It must never
be waited for by a call that another one needs in order to end: a finalizer, a driver's call, a broker's.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from .interrupts import Waiting


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
