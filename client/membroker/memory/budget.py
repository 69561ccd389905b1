"""`Budget`: how many bytes may be held at a time, for lenders inside of this process.

Owns one sum and its limit. A debit comes before memory is made, and the credit after it is gone, so the sum is never
below what is held. It must never know whose bytes they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import OutOfMemory
from ..vmm.sizes import format_size


class Budget:
    """At most `limit` bytes, or any number where that is None. Thread-safe. `level` is for `OutOfMemory`."""

    def __init__(self, limit: int | None, level: str) -> None:
        self.limit = limit
        self._level = level
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes that are debited."""
        return self._used

    def debit(self, size: int) -> None:
        """Take `size` bytes. Raises `OutOfMemory`, and has taken nothing then."""
        with self._lock:
            if self.limit is not None and size > self.limit - self._used:
                raise out_of_memory(self._level, size, max(0, self.limit - self._used), self.limit)
            self._used += size

    def credit(self, size: int) -> None:
        """Give `size` bytes back."""
        with self._lock:
            self._used -= size


def out_of_memory(level: str, requested: int, available: int, limit: int | None = None) -> OutOfMemory:
    """Return the error of a lender in this process, with the numbers that a broker's has."""
    numbers = {"level": level, "requested_bytes": str(requested), "available_bytes": str(available)}
    if limit is not None:
        numbers["limit_bytes"] = str(limit)
    of = f" of {format_size(limit)}" if limit is not None else ""
    message = f"the {level}{of} has {format_size(available)} left: {format_size(requested)} more do not fit"
    return OutOfMemory(message, "DEVICE_FULL" if level == "device" else "CAPACITY", numbers)


@contextmanager
def asked_for(size: int, rounding: str) -> Iterator[None]:
    """Let an `OutOfMemory` speak of the `size` bytes that a user asked for, and of how they were rounded."""
    try:
        yield
    except OutOfMemory as error:
        if error.requested and error.requested != size:
            error.metadata["asked_bytes"] = str(size)
            left = ""
            if "available_bytes" in error.metadata:
                left = f", {format_size(error.available)} are available"
            asked = f"{format_size(size)} ({format_size(error.requested)} {rounding}) were asked for{left}"
            error.args = (f"{asked}: {error}",)
        raise
