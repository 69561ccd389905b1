"""Allocations for a framework that takes its memory from a pair of functions, malloc and free.

Owns buffers of one model, cut into blocks, and which block is at which address. A granule is 2 MiB, and a round trip
to the broker costs as much as many small cudaMallocs, so small blocks share a buffer. `free` must never take a lock or
call anybody: frameworks call it where the garbage collector runs, in any thread, under locks of their own.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from contextlib import suppress

from membroker.convert import bytes_of
from membroker.errors import DeviceFailure, OutOfMemory
from membroker.interrupts import HeldOff
from membroker.model import Model
from membroker.region import device_failures
from membroker.views import Span
from membroker.vmm.sizes import MIB, round_up

logger = logging.getLogger("membroker")

CHUNK_BYTES = 32 * MIB
"""The size of a buffer that small blocks share; larger ones get one of their own."""

ALIGNMENT = 512
"""What every address is a multiple of, in bytes: at least what cudaMalloc promises, which is 256."""


class Lending:
    """Memory of `model` for one framework, by address. Thread-safe.

    What a framework has not freed stays mapped when the client is closed, as with living views.
    """

    def __init__(self, model: Model, chunk_bytes: int | str = CHUNK_BYTES) -> None:
        self._model = model
        self._chunk_bytes = bytes_of("a chunk", chunk_bytes, at_least=1)
        self._chunks: list[_Chunk] = []
        self._blocks: dict[int, tuple[_Chunk, int]] = {}
        self._freed: deque[int] = deque()
        # Guards the three above; nobody waits for a broker or a device under it.
        self._lock = threading.Lock()
        # Held while memory goes back: who was refused waits for it, and asks once more.
        self._returning = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are allocated, each rounded up to the alignment."""
        with self._lock:
            return sum(size for _, size in self._blocks.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that are charged to the model: the buffers behind the blocks."""
        with self._lock:
            return sum(chunk.span.size for chunk in self._chunks)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes; 0 for none. Raises what `Model.allocate` raises.

        A broker that refuses is asked again once what was freed has been given back.
        """
        if not size:
            return 0
        address = 0
        try:
            with HeldOff():
                address = self._allocate(round_up(size, ALIGNMENT))
        except KeyboardInterrupt:  # nobody gets the address
            self.free(address)
            raise
        return address

    def _allocate(self, size: int) -> int:
        if self._freed:
            # While a graph is captured nobody may wait for the device: what was freed stays so, other memory may do.
            with suppress(DeviceFailure):
                self.take_back()
        address = self._carve(size)
        if address is None:
            address = self._add(self._borrow(size), size)
        return address

    def free(self, address: int) -> None:
        """Give a block back, soon: when the work that this process has given to the device is done."""
        if address:
            self._freed.append(address)
            self._model._as_source.later(self.take_back)

    def take_back(self) -> None:
        """Wait for the device, make what was freed allocatable, and give empty buffers back to the broker.

        Raises `DeviceFailure` when the device can't be waited for; what was freed is then kept for the next time.
        """
        with HeldOff(), self._returning:
            # What is freed from here on may be used by work that is not waited for.
            count = len(self._freed)
            if count:
                with device_failures():
                    self._model.driver.synchronize()
                for chunk in self._release(count):
                    chunk.close()

    def _release(self, count: int) -> list[_Chunk]:
        """Put the blocks that were freed first back into their buffers, and return those that are empty."""
        with self._lock:
            for _ in range(count):
                address = self._freed.popleft()
                if address not in self._blocks:
                    logger.error(
                        "a framework freed %#x, which is not allocated: freed twice, or never from here", address
                    )
                    continue
                chunk, size = self._blocks.pop(address)
                chunk.release(address, size)
            empty = [chunk for chunk in self._chunks if chunk.is_empty]
            self._chunks = [chunk for chunk in self._chunks if not chunk.is_empty]
            return empty

    def _carve(self, size: int) -> int | None:
        with self._lock:
            for chunk in self._chunks:
                address = chunk.carve(size)
                if address is not None:
                    self._blocks[address] = chunk, size
                    return address
            return None

    def _borrow(self, size: int) -> _Chunk:
        if size < self._chunk_bytes // 2:
            try:
                return _Chunk(self._model, self._chunk_bytes)
            except OutOfMemory:
                pass  # A chunk is for speed: what was asked may fit all the same.
        try:
            return _Chunk(self._model, size)
        except OutOfMemory:
            self.take_back()
            return _Chunk(self._model, size)

    def _add(self, chunk: _Chunk, size: int) -> int:
        with self._lock:
            address = chunk.carve(size)
            assert address is not None
            self._chunks.append(chunk)
            self._blocks[address] = chunk, size
            return address


class _Chunk:
    """One buffer, and its free runs as (address, size) in order."""

    def __init__(self, model: Model, size: int) -> None:
        # All of an extent is charged, so all of it is asked for.
        self._buffer = model.allocate(round_up(size, model.driver.device.granularity))
        self.span: Span = self._buffer.span(0, self._buffer.size)
        self._runs = [(self.span.address, self._buffer.size)]

    @property
    def is_empty(self) -> bool:
        return self._runs == [(self.span.address, self.span.size)]

    def carve(self, size: int) -> int | None:
        """Take `size` bytes from the first run that has them."""
        for place, (address, length) in enumerate(self._runs):
            if length >= size:
                rest = [(address + size, length - size)] if length > size else []
                self._runs[place : place + 1] = rest
                return address
        return None

    def release(self, address: int, size: int) -> None:
        """Put a block back, and join the runs that now touch."""
        insort(self._runs, (address, size))
        joined: list[tuple[int, int]] = []
        for start, length in self._runs:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._runs = joined

    def close(self) -> None:
        """Unmap the buffer and give it back, in this thread."""
        del self.span
        self._buffer.close()
