"""`UnifiedBuffer`: memory that the CPU and every GPU of this process use, at one address.

Owns the end of the memory: when it is freed. It must never take a lock for that: the garbage collector may free a view
in any thread, at any point.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..errors import ClosedError, ManagedMemoryUnavailable
from ..ext import Closing, Views, arguments, device_failures
from ..vmm.cuda.driver import CudaDriver
from ..vmm.cuda.managed import CudaManaged
from ..vmm.driver import Driver
from ..vmm.sizes import Size


class UnifiedBuffer(Closing):
    """`size` bytes at `address`, which the CPU and every GPU of this process use. A context manager.

    The bytes are not cleared. They use a device's memory only while their pages are there. `driver` needs a CUDA
    context: `model.driver`, or `open_driver("cuda", context=True)`. Raises `ManagedMemoryUnavailable` on the host
    driver and on a device without managed memory, `InvalidRequest`, and `DeviceFailure` when CUDA refuses.
    """

    def __init__(self, driver: Driver, size: Size) -> None:
        self._driver = driver
        self._size = arguments.bytes_of("a managed buffer", size, at_least=1)
        with device_failures():
            calls = managed_calls(driver)
            if not calls.has_managed_memory():
                raise ManagedMemoryUnavailable(f"device {calls.ordinal} has no managed memory")
            self._allocation = _Allocation(calls, self._size)
            # At exit, the end of the process frees it: CUDA may already be shut down by then.
            weakref.finalize(self, self._allocation.end).atexit = False

    @property
    def driver(self) -> Driver:
        """The driver in whose context the memory was allocated."""
        return self._driver

    @property
    def address(self) -> int:
        """The address of the first byte, the same for the CPU and every device. Raises `ClosedError`."""
        self._allocation.check_open()
        return self._allocation.address

    @property
    def size(self) -> int:
        """The requested size, in bytes."""
        return self._size

    @property
    def closed(self) -> bool:
        """Whether the buffer was closed, or belongs to the process that this one was forked from."""
        return self._allocation.closed

    def view(self) -> memoryview:
        """Return the bytes as a writable memoryview. The buffer keeps its memory while the view lives.

        It does not wait for kernels: synchronize before you read their results. On a device without concurrent managed
        access the CPU must not touch the bytes while any kernel runs: the access would end this process. Raises
        `ClosedError`.
        """
        with self.in_use():
            return self._allocation.views.make(self, self._allocation.address, self._size)

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context manager that delays the end of the memory, as a view does. Raises `ClosedError` on entry."""
        return self._allocation.in_use()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as a CUDA array of uint8. The consumer must keep the buffer open: `close` frees the memory.

        Raises `ClosedError`.
        """
        return {"shape": (self._size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def close(self) -> None:
        """Wait for this process's work on the driver's device, then free the memory. Idempotent.

        While views live, this happens when the last of them is gone. The caller must first wait for work on these bytes
        that it has submitted to other devices. Raises `DeviceFailure`; the memory is then kept, and `close` retries.
        """
        self._allocation.end()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at {self._allocation.address:#x}"
        return f"<membroker.UnifiedBuffer of {self._size} bytes, {state}>"


class _Allocation:
    """Managed bytes, freed once: after `end`, when no call uses them and no view lives.

    It takes no lock, because the garbage collector may free a view in any thread. A use is recorded before it checks
    for the end, and the end is recorded before it checks for uses, so at least one of them always sees the other.
    """

    def __init__(self, calls: CudaManaged, size: int) -> None:
        self._calls = calls
        self.views = Views(self, _Allocation._free_if_unused)
        self._pid = os.getpid()
        self._uses: set[object] = set()
        self._ending = False
        self.address = calls.allocate(size)
        self._to_free = [self.address]

    @property
    def closed(self) -> bool:
        return self._ending or self._pid != os.getpid()

    def check_open(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("this managed buffer belongs to the process that this one was forked from")
        if self._ending:
            raise ClosedError("this managed buffer is closed")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        use = object()
        self._uses.add(use)
        try:
            self.check_open()
            yield
        finally:
            self._uses.discard(use)
            self._free_if_unused()

    def end(self) -> None:
        self._ending = True
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._ending and not self._uses and not self.views.any() and self._pid == os.getpid():
            try:
                address = self._to_free.pop()
            except IndexError:
                return
            try:
                with device_failures():
                    self._calls.free(address)
            except BaseException:
                self._to_free.append(address)  # so that another `end` retries
                raise


def managed_calls(driver: Driver) -> CudaManaged:
    """Return the managed memory calls of a GPU's driver. Raises `ManagedMemoryUnavailable` and `DriverError`."""
    if not isinstance(driver, CudaDriver):
        raise ManagedMemoryUnavailable(
            f"managed memory needs a GPU, and this is the {driver.device.driver} driver, whose memory the processor "
            'reads and writes where it is: use open_driver("cuda", context=True) on a machine with a GPU'
        )
    return CudaManaged(driver)
