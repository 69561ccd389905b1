"""The memory lent to torch's allocator: a buffer for each of torch's segments, and which of them torch still uses.

Owns the function that torch calls for memory. It must never raise into torch's C++. A call from torch must never
wait for something that another such call could hold.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequest, MembrokerError, OutOfMemory
from ...memory.buffer import Buffer
from ...model import Model
from .package import torch

logger = logging.getLogger("membroker")


@dataclass(slots=True, eq=False)
class _Lent:
    """One segment of torch. `span` keeps it mapped after its client is closed; `seen`: torch was seen to use it."""

    buffer: Buffer
    span: object
    seen: bool = False


class TorchLending:
    """The two functions that torch calls for memory, and the memory lent to it. Knows nothing of pools or routing.

    `allocate_address` and `free_address` are C functions, `void*(size_t, int, void*)` and `void(void*, size_t, int,
    void*)`. The first borrows, in Python, and torch calls it without holding a lock. torch calls the second under its
    lock, where no Python may run, so it is a function that does nothing; `collect` finds what torch has freed. `alive`
    returns the addresses of torch's segments.
    """

    def __init__(self, model: Model, device: int, alive: Callable[[], set[int]]) -> None:
        self.last_denial: MembrokerError | None = None
        self._alive = alive
        self._model = model
        self._device = device
        self._lent: dict[int, _Lent] = {}
        self._collecting = threading.Lock()
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

    def owns(self, address: int, size: int) -> bool:
        """Return whether [address, address + size) lies in one lent buffer."""
        return any(
            start <= address and address + size <= start + lent.buffer.size for start, lent in list(self._lent.items())
        )

    def collect(self) -> int:
        """Release the buffers that torch has freed, and return how many bytes that was.

        Keeps buffers that torch was never seen to use: an allocation may be in progress.
        """
        with self._collecting:
            return self._collect()

    def _collect(self) -> int:
        # In this order: memory lent after the first line is not touched, even if it reuses an address.
        lent = list(self._lent.items())
        there = self._alive()
        given_back = 0
        for address, one in lent:
            if address in there:
                one.seen = True
            elif one.seen:
                del self._lent[address]
                given_back += one.buffer.size
                one.span = None
                one.buffer.close()
        return given_back

    def _allocate(self, size: int, device: int, _stream: int | None) -> int:
        """Borrow for torch, and never raise: the caller is C++."""
        try:
            return self._borrow(size, device)
        except KeyboardInterrupt:
            _thread.interrupt_main()
        except MembrokerError as error:
            self.last_denial = error
        except BaseException as error:
            logger.exception("an allocation for torch failed")
            self.last_denial = MembrokerError(f"an allocation for torch failed: {error!r}")
        return 0

    def _borrow(self, size: int, device: int) -> int:
        if device != self._device:
            raise InvalidRequest(f"torch requests memory of GPU {device}, and the broker lends GPU {self._device}")
        try:
            buffer = self._model.allocate(size)
        except OutOfMemory:
            if not self._collect_at_once():
                raise
            buffer = self._model.allocate(size)
        address = buffer.address
        self._lent[address] = _Lent(buffer, buffer.span(0, size))
        return address

    def _collect_at_once(self) -> int:
        """Collect, unless a thread (perhaps this one) is collecting, or a graph capture forbids waiting."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return 0
        if not self._collecting.acquire(blocking=False):
            return 0
        try:
            return self._collect()
        finally:
            self._collecting.release()


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
