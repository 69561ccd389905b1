"""When something of many is due: waits, recalls, what is kept. The first of them is asked for after every change.

A heap. What ends before its time is not searched for in it: the entry is dropped when it is the first one, or when
half of the entries may be such. So a caller that waits and cancels, over and over behind an early deadline, leaves no
more entries than there are deadlines, twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key", bound=Any)

LEAST = 64
"""So many entries are kept without a look at them."""


class Deadlines(Generic[_Key]):
    """Times, and what is due then. `is_in_force` says whether an entry is still in force."""

    def __init__(self, is_in_force: Callable[[int, _Key], bool]) -> None:
        self._is_in_force = is_in_force
        self._heap: list[tuple[int, _Key]] = []
        self._most = LEAST

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: int, key: _Key) -> None:
        """Note that something is due at a time. Several may be of one key."""
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > self._most:
            self._heap = sorted({entry for entry in self._heap if self._is_in_force(*entry)})
            self._most = 2 * len(self._heap) + LEAST

    def first(self) -> tuple[int, _Key] | None:
        """Return what is due first, and when; None: nothing."""
        while self._heap and not self._is_in_force(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def take(self, now: int) -> _Key | None:
        """Remove the first entry and return what it is of, if its time has come."""
        return heapq.heappop(self._heap)[1] if self._heap and self._heap[0][0] <= now else None
