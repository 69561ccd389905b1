"""Copies between the device and the host: the contract of a copier, and what both drivers' copiers share.

Owns the table of a driver's pinned memory, and the host driver's copier. It must never be more lenient than a GPU: the
host copier moves no byte before `wait`, so memory that is unmapped or written too early shows on any machine.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable

from .driver import AccessFlags


class PinnedBlocks:
    """The pinned memory of one driver, as (address, size). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        """Add a block."""
        with self._lock:
            self._sizes[address] = size

    def take(self, address: int) -> int | None:
        """Remove the block that begins at `address`, and return its size; None if there is no such block."""
        with self._lock:
            return self._sizes.pop(address, None)

    def take_all(self) -> list[tuple[int, int]]:
        """Remove and return every block. Takes no lock: at a driver's end, or after a fork, no other thread uses it."""
        blocks, self._sizes = list(self._sizes.items()), {}
        return blocks

    def hold(self, address: int, size: int) -> bool:
        """Return whether [address, address + size) lies inside one block."""
        with self._lock:
            blocks = list(self._sizes.items())
        return any(start <= address and 0 < size <= start + length - address for start, length in blocks)


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
