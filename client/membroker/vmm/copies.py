"""Copies between the device and the host: the host driver's copier, and what is pinned.

The host copier must never be more lenient than a GPU: it moves no byte before `wait`, so memory that is unmapped or
written too early shows on any machine.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping

from .driver import AccessFlags


def is_pinned(blocks: Mapping[int, int], address: int, size: int) -> bool:
    """Return whether [address, address + size) lies inside one of `blocks`: the size of each, by its address."""
    # The list is copied in one step, because another thread may pin or unpin meanwhile.
    return any(start <= address and 0 < size <= start + length - address for start, length in list(blocks.items()))


class HostCopier:
    """The host driver's queue. `check(address, size, needed)` raises unless those bytes allow the access."""

    def __init__(self, check: Callable[[int, int, AccessFlags], None]) -> None:
        self._check = check
        self._queue: deque[tuple[int, int, int]] = deque()
        self._queued = self._moved = 0

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy."""
        self._check(target, size, AccessFlags.READ_WRITE)
        self._check(source, size, AccessFlags.READ)
        self._queue.append((target, source, size))
        self._queued += 1

    def mark(self) -> int:
        """Return how many copies were queued."""
        return self._queued

    def wait(self, mark: int) -> None:
        """Make the copies. Raises if their memory was unmapped or protected in the meantime."""
        while self._moved < mark:
            target, source, size = self._queue.popleft()
            self._moved += 1
            self._check(target, size, AccessFlags.READ_WRITE)
            self._check(source, size, AccessFlags.READ)
            ctypes.memmove(target, source, size)

    def close(self) -> None:
        """Make the remaining copies."""
        self.wait(self.mark())
