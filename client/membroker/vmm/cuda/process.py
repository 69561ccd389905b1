"""What belongs to this process and not to one CUDA driver: its reservations, and its open descriptors."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right, insort
from typing import ClassVar

from ..sizes import MAX_BYTES


class CudaProcess:
    """The reservations of one process, by all its drivers: CUDA's addresses belong to the process."""

    here: ClassVar[CudaProcess]
    """This process: another one in a forked child."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    @classmethod
    def begin(cls) -> None:
        """Start without reservations: at the import, and in a forked child."""
        cls.here = cls()

    def add(self, address: int, size: int) -> None:
        """Add a reservation of `size` bytes."""
        with self._lock:
            insort(self._rows, (address, size))

    def remove(self, address: int, size: int) -> None:
        """Remove one that was released."""
        with self._lock:
            self._rows.remove((address, size))

    def have(self, address: int, size: int) -> bool:
        """Return whether `size` bytes at `address` lie inside one reservation."""
        with self._lock:
            place = bisect_right(self._rows, (address, MAX_BYTES)) - 1
            start, length = self._rows[place] if place >= 0 else (0, 0)
        return size <= length and address - start <= length - size


CudaProcess.begin()
os.register_at_fork(after_in_child=CudaProcess.begin)


def close_descriptors(prefix: str) -> None:
    """Close every descriptor of this process whose file's path begins with `prefix`."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith(prefix):
                os.close(int(entry))
        # The descriptor that listed the directory is closed already.
        except FileNotFoundError:
            continue
