"""Copies between the device and the host: the contract of a copier, and what both drivers' copiers share.

Owns the table of a driver's pinned memory, and the twin's copier. It must never be kinder than a card: the twin moves
no byte before `wait`, so what is unmapped or written too early shows on any machine.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from membroker.vmm.driver import AccessFlags


class Copier(Protocol):
    """A queue of copies: one after another, beside its caller and beside other work on the device.

    For one thread at a time. Every failure is a `DriverError`.
    """

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses, each in pinned memory or in mapped extents.

        It waits for no other work: `synchronize` first. Refused where one end does not allow it.
        """
        ...

    def mark(self) -> int:
        """Return a number that stands for all that was queued until now."""
        ...

    def wait(self, mark: int) -> None:
        """Return when all that the mark stands for has arrived. Each mark is waited for once, in order."""
        ...

    def close(self) -> None:
        """Wait for what is queued, and end."""
        ...


class PinnedBlocks:
    """The pinned memory of one driver, as (address, size). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        """Enter a block."""
        with self._lock:
            self._sizes[address] = size

    def take(self, address: int) -> int | None:
        """Strike the block that begins at `address`, and return its size; None where there is none."""
        with self._lock:
            return self._sizes.pop(address, None)

    def take_all(self) -> list[tuple[int, int]]:
        """Strike and return every block. Takes no lock: who ends a driver, or forked from it, is alone."""
        blocks, self._sizes = list(self._sizes.items()), {}
        return blocks

    def hold(self, address: int, size: int) -> bool:
        """Say whether [address, address + size) lies inside one block."""
        with self._lock:
            blocks = list(self._sizes.items())
        return any(start <= address and 0 < size <= start + length - address for start, length in blocks)


class HostCopier:
    """The twin's queue. `check(address, size, needed)` raises unless those bytes allow it."""

    def __init__(self, check: Callable[[int, int, AccessFlags], None]) -> None:
        self._check = check
        self._queue: deque[tuple[int, int, int]] = deque()
        self._numbers = itertools.count(1)
        self._marks: dict[int, int] = {}
        self._queued = self._moved = 0

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy."""
        self._check(target, size, AccessFlags.READ_WRITE)
        self._check(source, size, AccessFlags.READ)
        self._queue.append((target, source, size))
        self._queued += 1

    def mark(self) -> int:
        """Remember how much is queued."""
        number = next(self._numbers)
        self._marks[number] = self._queued
        return number

    def wait(self, mark: int) -> None:
        """Make the copies, if nothing has changed under them."""
        until = self._marks.pop(mark)
        while self._moved < until:
            target, source, size = self._queue.popleft()
            self._moved += 1
            self._check(target, size, AccessFlags.READ_WRITE)
            self._check(source, size, AccessFlags.READ)
            ctypes.memmove(target, source, size)

    def close(self) -> None:
        """Make what copies are left."""
        self.wait(self.mark())
