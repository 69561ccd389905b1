"""Allocations for a framework that takes its memory from a pair of functions, malloc and free.

Owns buffers of one model, cut into blocks, and the table of blocks by address. A granule is 2 MiB, and a round trip to
the broker costs as much as many small cudaMallocs, so small blocks share a buffer. `free` must never take a lock or
call other code: frameworks call it from the garbage collector, in any thread, while they hold their own locks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress

from .. import Model
from ..errors import DeviceFailure, OutOfMemory
from ..ext import Span, arguments, device_failures, uninterrupted
from ..vmm.sizes import MIB, Size, joined, round_up

logger: logging.Logger = logging.getLogger("membroker")

CHUNK_BYTES = 32 * MIB
"""The size of a buffer that small blocks share; a larger block gets its own buffer."""

ALIGNMENT = 512
"""The alignment of every address, in bytes. cudaMalloc promises 256."""


class BlockLending:
    """Memory of `model` for one framework, by address. Thread-safe.

    Blocks that the framework has not freed stay mapped after the client is closed, as live views do.
    """

    def __init__(self, model: Model, chunk_bytes: Size = CHUNK_BYTES) -> None:
        self._model = model
        self._chunk_bytes = arguments.bytes_of("a chunk", chunk_bytes, at_least=1)
        self._chunks: list[_Chunk] = []
        self._blocks: dict[int, tuple[_Chunk, int]] = {}
        self._freed: deque[int] = deque()
        # Guards the three above; never held while waiting for the broker or the device.
        self._lock = threading.Lock()
        # Held while memory is released: a thread that was refused waits for it, and asks once more.
        self._returning = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are allocated, each rounded up to the alignment."""
        with self._lock:
            return sum(size for _, size in self._blocks.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that are charged to the model: the buffers that contain the blocks."""
        with self._lock:
            return sum(chunk.span.size for chunk in self._chunks)

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes, or 0 if `size` is 0. Raises what `Model.allocate` raises.

        If the broker refuses, this releases freed memory and asks once more.
        """
        if not size:
            return 0
        given: list[int] = []
        try:
            return self._allocate(round_up(size, ALIGNMENT), given)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the caller does not get the address
            for address in given:
                self.free(address)
            raise

    def _allocate(self, size: int, given: list[int]) -> int:
        if self._freed:
            # During a graph capture CUDA forbids waiting for the device: keep the freed blocks, and use other memory.
            with suppress(DeviceFailure):
                self.take_back()
        address = self._carve(size, given)
        if address is None:
            address = self._add(self._borrow(size), size, given)
        return address

    def free(self, address: int) -> None:
        """Release a block later, when the work that this process has submitted to the device is done."""
        if address:
            self._freed.append(address)
            self._model.source.later(self.take_back)

    def take_back(self) -> None:
        """Wait for the device, make freed blocks allocatable, and release empty buffers to the broker.

        Raises `DeviceFailure` if waiting for the device fails; the freed blocks are then kept for the next call.
        """
        uninterrupted(self._take_back)

    def _take_back(self) -> None:
        with self._returning:
            # Blocks that are freed after this line may be used by work that this call does not wait for.
            count = len(self._freed)
            if count:
                with device_failures():
                    self._model.driver.synchronize()
                for chunk in self._release(count):
                    chunk.close()

    def _release(self, count: int) -> list[_Chunk]:
        """Put the first `count` freed blocks back into their buffers, and return the buffers that are now empty."""
        with self._lock:
            for _ in range(count):
                address = self._freed.popleft()
                if address not in self._blocks:
                    logger.error(
                        "a framework freed %#x, which is not allocated: a double free, or memory from elsewhere",
                        address,
                    )
                    continue
                chunk, size = self._blocks.pop(address)
                chunk.release(address, size)
            empty = [chunk for chunk in self._chunks if chunk.is_empty]
            self._chunks = [chunk for chunk in self._chunks if not chunk.is_empty]
            return empty

    def _carve(self, size: int, given: list[int]) -> int | None:
        with self._lock:
            for chunk in self._chunks:
                address = self._carve_from(chunk, size, given)
                if address is not None:
                    return address
            return None

    def _carve_from(self, chunk: _Chunk, size: int, given: list[int]) -> int | None:
        """Take `size` bytes from the first run that is large enough, and note the address in `given`."""
        for place, (address, length) in enumerate(chunk.runs):
            if length >= size:
                rest = [(address + size, length - size)] if length > size else []
                # No call stands between these: Ctrl-C finds all of them done, or none.
                chunk.runs[place : place + 1] = rest
                self._blocks[address] = chunk, size
                given += (address,)
                return address
        return None

    def _borrow(self, size: int) -> _Chunk:
        if size < self._chunk_bytes // 2:
            try:
                return _Chunk(self._model, self._chunk_bytes)
            except OutOfMemory:
                pass  # A chunk only saves calls: the requested size itself may still fit.
        try:
            return _Chunk(self._model, size)
        except OutOfMemory:
            self.take_back()
            return _Chunk(self._model, size)

    def _add(self, chunk: _Chunk, size: int, given: list[int]) -> int:
        with self._lock:
            self._chunks.append(chunk)
            address = self._carve_from(chunk, size, given)
            assert address is not None
            return address


class _Chunk:
    """One buffer, and its free runs as (address, size), in order of address."""

    def __init__(self, model: Model, size: int) -> None:
        # A whole extent is charged, so request all of it.
        self._buffer = model.allocate(round_up(size, model.driver.device.granularity))
        self.span: Span = self._buffer.span(0, self._buffer.size)
        self.runs = [(self.span.address, self._buffer.size)]

    @property
    def is_empty(self) -> bool:
        return self.runs == [(self.span.address, self.span.size)]

    def release(self, address: int, size: int) -> None:
        """Put a block back, and join adjacent runs."""
        self.runs = joined(sorted([*self.runs, (address, size)]))

    def close(self) -> None:
        """Unmap and release the buffer, in this thread."""
        del self.span
        self._buffer.close()
