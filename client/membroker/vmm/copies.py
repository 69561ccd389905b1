"""Copies between the device and the host: the host driver's copier, and what is pinned.

The host copier must never be more lenient than a GPU: it moves no byte before `wait`, so memory that is unmapped or
written too early shows on any machine.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Mapping

from .driver import AccessFlags


def is_pinned(blocks: Mapping[int, int], address: int, size: int) -> bool:
    """Return whether [address, address + size) lies inside one of `blocks`: the size of each, by its address."""
    # The list of keys is copied in one step, because another thread may pin or unpin meanwhile.
    return any(start <= address and 0 < size <= start + blocks.get(start, 0) - address for start in list(blocks))


class HostCopier:
    """The host driver's queue. `check(address, size, needed)` raises unless those bytes allow the access."""

    def __init__(self, check: Callable[[int, int, AccessFlags], None]) -> None:
        self._check = check
        self._queue: deque[tuple[int, int, int]] = deque()
        self._queued = self._moved = 0
        self._marks: dict[int, int] = {}
        """By number: how many copies were queued before it. Each is waited for once, as an event of CUDA."""
        self._numbers = itertools.count(1)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy."""
        self._check(target, size, AccessFlags.READ_WRITE)
        self._check(source, size, AccessFlags.READ)
        self._queue.append((target, source, size))
        self._queued += 1

    def mark(self) -> int:
        """Return a number that stands for all copies before it."""
        number = next(self._numbers)
        self._marks[number] = self._queued
        return number

    def wait(self, mark: int) -> None:
        """Make the copies. Raises if their memory was unmapped or protected in the meantime."""
        until = self._marks.pop(mark)
        while self._moved < until:
            target, source, size = self._queue.popleft()
            self._moved += 1
            self._check(target, size, AccessFlags.READ_WRITE)
            self._check(source, size, AccessFlags.READ)
            ctypes.memmove(target, source, size)

    def close(self) -> None:
        """Make the remaining copies."""
        self.wait(self.mark())
