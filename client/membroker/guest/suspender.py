"""What is asked of a device to suspend processes. This module owns names and types only; it must never make a call.

`CudaSuspender` calls CUDA's driver. `StandInSuspender` does the same to programs that hold a `StandInMemory`, on a
machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

ProcessState = Literal["running", "locked", "suspended", "failed"]
"""`failed`: its restore has failed, and it can only be killed."""


class Suspender(Protocol):
    """The calls, each of one process. All of them raise `DriverError`.

    A process that has ever mapped memory of a broker dies of `suspend`, and one of another user is refused.
    """

    def usage(self, pids: Collection[int]) -> Mapping[int, int]:
        """Return the bytes that each of these processes uses of the device; those that use none may be left out."""

    def free_bytes(self) -> int | None:
        """Return what the device itself has free, or None if it does not say."""

    def state(self, pid: int) -> ProcessState:
        """Return the state of a process."""

    def lock(self, pid: int, seconds: float) -> None:
        """Let the calls of a running process wait from now on. After a time-out it still runs."""

    def suspend(self, pid: int) -> None:
        """Take the memory of a locked process off the device, to its own host memory."""

    def restore(self, pid: int) -> None:
        """Put the memory of a suspended process back. It is locked then. If the device is full, it is failed."""

    def unlock(self, pid: int) -> None:
        """Let the calls of a locked process go on."""

    def close(self) -> None:
        """End the use of the device."""
