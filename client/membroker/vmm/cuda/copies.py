"""CUDA's copier and pinned memory: streams, events, `cuMemHostRegister` and `cuMemcpyAsync`.

Owns a copier's stream and the events that are its marks. It must never decide what may be copied, nor make a context
current: the driver passes in functions that do both.

Every GPU with virtual memory management has unified addressing, so one call copies in every direction, including
extents on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .. import libc as _libc
from ..driver import AccessFlags
from ..errno import driver_call

_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process."""
_BESIDE_OTHER_STREAMS = 1
"""CU_STREAM_NON_BLOCKING: does not synchronize with the default stream."""
_SLEEP_WITHOUT_TIMING = 3
"""CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: a waiting thread sleeps instead of spinning."""

Call = Callable[..., Any]
"""Calls a driver function by name, in the driver's context, and raises its error."""


def pin(call: Call, size: int) -> int:
    """Allocate page-locked memory of huge pages: 7.5 GiB/s on an H200's host, where `cuMemHostAlloc` reaches 3.

    It is still slow, because the kernel clears every page. The size is rounded up to whole pages.
    """
    with ExitStack() as undo:
        with driver_call("mmap"):
            address = _libc.mmap_memory(size)
        undo.callback(_libc.munmap, address, size)
        call("cuMemHostRegister", address, size, _PORTABLE)
        undo.pop_all()
    return address


def unpin(call: Call, address: int, size: int) -> None:
    """Free page-locked memory. The caller has waited for the GPU's work."""
    call("cuMemHostUnregister", address)
    _libc.munmap(address, size)


class CudaCopier:
    """A separate stream. `check(address, size, needed)` raises unless those bytes allow the access."""

    def __init__(self, call: Call, check: Callable[[int, int, AccessFlags], None]) -> None:
        self._call = call
        self._check = check
        self._numbers = itertools.count(1)
        self._events: dict[int, Any] = {}
        self._stream = call("cuStreamCreate", _BESIDE_OTHER_STREAMS)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy on the stream."""
        self._check(target, size, AccessFlags.READ_WRITE)
        self._check(source, size, AccessFlags.READ)
        self._call("cuMemcpyAsync", target, source, size, self._stream)

    def mark(self) -> int:
        """Record an event."""
        event = self._call("cuEventCreate", _SLEEP_WITHOUT_TIMING)
        with ExitStack() as undo:
            undo.callback(self._call, "cuEventDestroy", event)
            self._call("cuEventRecord", event, self._stream)
            undo.pop_all()
        number = next(self._numbers)
        self._events[number] = event
        return number

    def wait(self, mark: int) -> None:
        """Sleep until the event has happened."""
        self._call("cuEventSynchronize", self._events[mark])
        self._call("cuEventDestroy", self._events.pop(mark))

    def close(self) -> None:
        """Wait for the stream, and destroy it and the remaining events."""
        with ExitStack() as ends:
            ends.callback(self._call, "cuStreamDestroy", self._stream)
            while self._events:
                ends.callback(self._call, "cuEventDestroy", self._events.popitem()[1])
            self._call("cuStreamSynchronize", self._stream)
