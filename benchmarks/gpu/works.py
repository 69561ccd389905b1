"""What is timed: works of two calls, one that takes memory and one that gives it back, with or without a broker.

A work does the calls and nothing beside them. It must never measure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import membroker
from membroker import Buffer, Client, Model, VirtualMemoryPool
from membroker.segment import Segment

from .bare import Bare, close_all
from .figures import Times


class Work(Protocol):
    """Two calls, again and again."""

    def take(self) -> None:
        """Take memory."""
        ...

    def give(self) -> None:
        """Give it back."""
        ...


def timed(work: Work, seconds: float, gap_seconds: float = 0.0, at_least: int = 1) -> Times:
    """Do a work for some seconds, and at least so often, with a gap before each call."""
    times, clock, sleep = Times(), time.perf_counter_ns, time.sleep
    begun = clock()
    end = begun + int(seconds * 1e9)
    while True:
        if gap_seconds:
            sleep(gap_seconds)
        start = clock()
        work.take()
        taken = clock()
        if gap_seconds:
            sleep(gap_seconds)
        giving = clock()
        work.give()
        given = clock()
        times.take.append(taken - start)
        times.give.append(given - giving)
        if given >= end and len(times.take) >= at_least:
            times.elapsed = given - begun
            return times


class BareExtent:
    """One extent: addresses, memory, mapping."""

    def __init__(self, bare: Bare, size: int) -> None:
        self._bare, self._size = bare, size
        self._address = 0
        self._handles: list[Any] = []

    def take(self) -> None:
        self._address = self._bare.reserve(self._size)
        self._handles = self._bare.back(self._address, self._size)

    def give(self) -> None:
        self._bare.unback(self._address, self._size, self._handles)
        self._bare.unreserve(self._address, self._size)


class BorrowedExtent:
    """The same by the broker."""

    def __init__(self, model: Model, size: int) -> None:
        self._model, self._size = model, size
        self._buffer: Buffer | None = None

    def take(self) -> None:
        self._buffer = self._model.allocate(self._size)

    def give(self) -> None:
        assert self._buffer is not None
        self._buffer.close()


class BarePages:
    """Many extents side by side in addresses that stay reserved."""

    def __init__(self, bare: Bare, size: int, page: int, *, access_each: bool) -> None:
        self._bare, self._size, self._page, self._access_each = bare, size, page, access_each
        self._address = bare.reserve(size)
        self._handles: list[Any] = []

    def take(self) -> None:
        self._handles = self._bare.back_pages(
            self._address, self._page, self._size // self._page, access_each=self._access_each
        )

    def give(self) -> None:
        self._bare.unback(self._address, self._size, self._handles)

    def close(self) -> None:
        """Give the addresses back."""
        self._bare.unreserve(self._address, self._size)


class PoolPages:
    """The same by a pool; with spare pages, from what it holds."""

    def __init__(self, pool: VirtualMemoryPool, size: int) -> None:
        self._pool, self._size = pool, size

    def take(self) -> None:
        self._pool.allocate(0, self._size)

    def give(self) -> None:
        self._pool.deallocate(0, self._size)


class PoolGrowth:
    """Growth by one page that was prepared. A released page is spare again."""

    def __init__(self, pool: VirtualMemoryPool) -> None:
        self._pool, self._page, self._base = pool, pool.page_size, pool.base_address
        self._offset = 0

    def take(self) -> None:
        self._offset = self._pool.grow(self._page) - self._base

    def give(self) -> None:
        self._pool.deallocate(self._offset, self._page)


class BareImport:
    """Extents that exist, by their descriptors, at fresh addresses. Owns the descriptors.

    `read_only` as an attached segment is: the host driver allows a sealed one nothing else.
    """

    def __init__(self, bare: Bare, descriptors: Sequence[tuple[int, int]], *, read_only: bool) -> None:
        self._bare, self._descriptors, self._read_only = bare, descriptors, read_only
        self._size = sum(size for _, size in descriptors)
        self._address = 0
        self._handles: list[Any] = []

    def take(self) -> None:
        self._address = self._bare.reserve(self._size)
        self._handles = self._bare.back_imported(self._address, self._descriptors, read_only=self._read_only)

    def give(self) -> None:
        self._bare.unback(self._address, self._size, self._handles)
        self._bare.unreserve(self._address, self._size)

    def close(self) -> None:
        """Close the descriptors."""
        close_all(self._descriptors)


class AttachedSegment:
    """The same by the broker, under a name."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self._segment: Segment | None = None

    def take(self) -> None:
        self._segment = self._client.attach(self._name)

    def give(self) -> None:
        assert self._segment is not None
        self._segment.close()


class BareCopy:
    """A copy of all bytes to pinned memory that is there, and back, in one piece each, by the driver alone.

    `pin_each` pins that memory again for each copy to it, and frees it after the copy back.
    """

    def __init__(self, bare: Bare, size: int, *, pin_each: bool) -> None:
        self._bare, self._size, self._pin_each = bare, size, pin_each
        self._address = bare.reserve(size)
        self._handles = bare.back(self._address, size)
        self._pinned = 0 if pin_each else bare.pin(size)

    def take(self) -> None:
        if self._pin_each:
            self._pinned = self._bare.pin(self._size)
        self._bare.copy(self._pinned, self._address, self._size)

    def give(self) -> None:
        self._bare.copy(self._address, self._pinned, self._size)
        if self._pin_each:
            self._unpin()

    def _unpin(self) -> None:
        address, self._pinned = self._pinned, 0
        self._bare.unpin(address)

    def close(self) -> None:
        """Free everything."""
        if self._pinned:
            self._unpin()
        self._bare.unback(self._address, self._size, self._handles)
        self._bare.unreserve(self._address, self._size)


class PoolOffload:
    """A pool that sleeps and wakes: what is copied is also unmapped and released, borrowed and mapped."""

    def __init__(self, pool: VirtualMemoryPool, size: int, *, keep_pinned: bool) -> None:
        self._pool, self._keep_pinned = pool, keep_pinned
        pool.allocate(0, size)

    def take(self) -> None:
        self._pool.offload()

    def give(self) -> None:
        self._pool.restore(keep_pinned=self._keep_pinned)


class Keeper:
    """Keeps a copy of each descriptor that a call delivers (a `Placement`), with its size."""

    def __init__(self) -> None:
        self.descriptors: list[tuple[int, int]] = []

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Copy the next descriptors."""
        self.descriptors += [(os.dup(descriptor), extent_bytes) for descriptor in descriptors]

    def undo(self) -> None:
        """Close all."""
        close_all(self.descriptors)
        self.descriptors = []


def connect(endpoint: os.PathLike[str], transport: str) -> Client:
    """Open a session that has time to begin on a busy machine."""
    return membroker.connect(endpoint, transport=transport, client="benchmarks", timeout=60)
