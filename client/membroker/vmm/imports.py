"""The mark of a process that has imported memory of another one. It is in /proc/PID/maps until the process ends.

CUDA's driver kills such a process when it is asked to suspend it, also when the process has released everything. So a
program that suspends others looks for the mark. Owns its name, how it is made, and how it is found.
"""

from __future__ import annotations

import mmap
import os
from functools import cache
from pathlib import Path

from . import libc as _libc
from .errno import driver_call

NAME = "membroker-imports"


@cache
def mark() -> None:
    """Mark this process once, and the children that it forks, before its first import. Raises `DriverError`."""
    with driver_call("memfd_create"):
        file = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        with driver_call("mmap"):
            _libc.mmap_file(0, mmap.PAGESIZE, file)  # it outlives the descriptor, and is never read
    finally:
        os.close(file)


def is_marked(pid: int) -> bool:
    """Say whether a process has the mark; False if it is gone. Raises `OSError` if it cannot be looked at."""
    try:
        return f"/memfd:{NAME} ".encode() in Path(f"/proc/{pid}/maps").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
