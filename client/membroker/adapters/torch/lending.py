"""The memory lent to torch's allocator: a buffer for each of torch's segments, and which of them torch still uses.

Owns the function that torch calls for memory. It must never raise into torch's C++. A call from torch waits for
another such call only for a limited time, because that one may run finalizers that wait for a lock of the first.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import Buffer, Model
from ...errors import InvalidRequest, MembrokerError, OutOfMemory
from .package import torch

logger: logging.Logger = logging.getLogger("membroker")

_ATTEMPTS = 4
"""How often an allocation is tried. Each attempt after the first follows a release; another thread can be faster."""
_WAIT_SECONDS = 5.0
"""How long a refused call waits for another thread that is releasing memory."""


@dataclass(slots=True, eq=False)
class _Lent:
    """One segment of torch. `span` keeps it mapped after its client is closed.

    `taken`: torch has finished the allocation, so the segment is torch's until torch's list lacks it.
    """

    buffer: Buffer
    span: object
    taken: bool = False


class TorchLending:
    """The two functions that torch calls for memory, and the memory lent to it. Knows nothing of pools or routing.

    `allocate_address` and `free_address` are C functions, `void*(size_t, int, void*)` and `void(void*, size_t, int,
    void*)`. The first borrows, in Python, and torch calls it without holding a lock. torch calls the second under its
    lock, where no Python may run, so it is a function that does nothing; `collect` finds what torch has freed. `alive`
    returns the addresses of torch's segments. `empty` makes torch free the segments that it only caches, and returns
    False if it cannot.
    """

    def __init__(
        self, model: Model, device: int, alive: Callable[[], set[int]], empty: Callable[[], bool] = lambda: False
    ) -> None:
        self.last_denial: MembrokerError | None = None
        self.refusals: int = 0
        self.reclaimed_bytes: int = 0
        self.released_bytes: int = 0
        self._alive = alive
        self._empty = empty
        self._model = model
        self._device = device
        self._lent: dict[int, _Lent] = {}
        self._latest: dict[int, _Lent] = {}
        self._calls: dict[object, float] = {}
        self._collecting = threading.RLock()
        self._function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self._allocate
        )

    @property
    def allocate_address(self) -> int:
        """The address of the function that borrows; the function returns 0 on a refusal."""
        return _address_of(self._function)

    @property
    def free_address(self) -> int:
        """The address of a compiled function of the interpreter that reads a flag and has no effect."""
        return _address_of(ctypes.pythonapi.Py_IsInitialized)

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return sum(lent.buffer.size for lent in list(self._lent.values()))

    @property
    def busy_since(self) -> float | None:
        """When the oldest call that still runs began, by `time.monotonic`; None if no thread is borrowing."""
        return min(list(self._calls.values()), default=None)

    def owns(self, address: int, size: int) -> bool:
        """Return whether [address, address + size) lies in one lent buffer."""
        return any(
            start <= address and address + size <= start + lent.buffer.size for start, lent in list(self._lent.items())
        )

    def collect(self, ended: bool = False) -> int:
        """Release the buffers that torch has freed, and return how many bytes that was.

        Keeps a buffer that torch was never seen to use, if its thread has not allocated since: the allocation may be in
        progress. `ended`: no allocation is in progress.
        """
        with self._collecting:
            self._settle()
            return self._collect(ended)

    def _collect(self, ended: bool = False) -> int:
        # In this order: memory lent or taken after the first line is not touched, even if it reuses an address.
        lent = [(address, loan, loan.taken or ended) for address, loan in list(self._lent.items())]
        there = self._alive()
        released = 0
        for address, loan, taken in lent:
            if address in there:
                loan.taken = True
            elif taken and self._lent.pop(address, None) is loan:
                released += loan.buffer.size
                loan.span = None
                loan.buffer.close()
        self.released_bytes += released
        return released

    def _settle(self) -> None:
        """Note that torch has finished this thread's last allocation, because the thread runs Python again."""
        latest = self._latest.pop(threading.get_ident(), None)
        if latest is not None:
            latest.taken = True

    def _allocate(self, size: int, device: int, _stream: int | None) -> int:
        """Borrow for torch, and never raise: the caller is C++."""
        call = object()
        try:
            self._calls[call] = time.monotonic()
            return self._borrow(size, device)
        except KeyboardInterrupt:
            _thread.interrupt_main()
        except MembrokerError as error:
            self.refusals += isinstance(error, OutOfMemory)
            self.last_denial = _without_frames(error)
        except BaseException as error:
            logger.exception("an allocation for torch failed")
            self.last_denial = MembrokerError(f"an allocation for torch failed: {error!r}")
        finally:
            self._calls.pop(call, None)
        return 0

    def _borrow(self, size: int, device: int) -> int:
        self._settle()
        if device != self._device:
            raise InvalidRequest(f"torch requests memory of GPU {device}, and the broker lends GPU {self._device}")
        buffer = self._buffer(size)
        address = buffer.address
        self._lent[address] = self._latest[threading.get_ident()] = _Lent(buffer, buffer.span(0, size))
        return address

    def _buffer(self, size: int) -> Buffer:
        """Borrow `size` bytes. On a refusal, release what torch does not need, and try again.

        Only the last attempt waits as the broker says. Before it there may be something to release.
        """
        for _ in range(_ATTEMPTS - 1):
            before = self.released_bytes
            try:
                return self._model.allocate(size, timeout=0)
            except OutOfMemory as error:
                _without_frames(error)
                if not self._reclaim(before):
                    break
        return self._model.allocate(size)

    def _reclaim(self, before: int) -> bool:
        """Release what torch has freed and what it caches; return whether that, or another thread, released anything.

        Nothing is released during a graph capture: CUDA forbids the wait for the device.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        if not self._collecting.acquire(timeout=_WAIT_SECONDS):
            return False
        try:
            if self.released_bytes == before:
                released = self._collect()
                if self._empty():
                    released += self._collect()
                self.reclaimed_bytes += released
            return self.released_bytes != before
        finally:
            self._collecting.release()


def _without_frames(error: MembrokerError) -> MembrokerError:
    """Drop the tracebacks of an error: they hold the frames of the program that allocates, and so its tensors."""
    raised: BaseException | None = error
    while raised is not None and raised.__traceback__ is not None:
        raised.__traceback__ = None
        raised = raised.__cause__ or raised.__context__
    return error


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
