"""The sizes of the host driver's extents, for the next daemon to read: a memfd with 8 bytes for each watch.

Owns the memfd's name and the layout of its entries, which a later version also reads. It must never say which extents
are alive: the kernel's list of watches does, and an entry without a watch has no meaning.

Entries are written with pwrite, not through a mapping. That costs 0.5 us more for each, but another process with the
descriptor could truncate the file under a mapping (SIGBUS).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from .. import libc as _libc
from ..driver import Location
from ..errno import driver_call, invalid
from ..sizes import MAX_BYTES

NAME = "membroker-table"
"""The memfd's name: /proc/PID/fd shows `/memfd:membroker-table (deleted)`."""

SWEEP_NUMBERS = 1 << 16
"""How many watches are added between two sweeps: half a MiB of entries."""

_ENTRY_BYTES, _PAGE_BYTES = 8, 4096
# A size is a multiple of the granularity, so its low bits can hold the location's index in this tuple.
_LOCATIONS = (Location.DEVICE, Location.HOST)


def create() -> int:
    """Return the descriptor of a new, empty table."""
    with driver_call("memfd_create"):
        return os.memfd_create(NAME, os.MFD_CLOEXEC)


def write(table: int, number: int, size: int, location: Location) -> None:
    """Write the entry of watch `number`. Raises `OSError`."""
    entry = size + _LOCATIONS.index(location)
    os.pwrite(table, entry.to_bytes(_ENTRY_BYTES, "little"), number * _ENTRY_BYTES)


def read(table: int, numbers: Iterable[int], granularity: int) -> dict[int, tuple[int, Location]]:
    """Return the entries of the watches `numbers`, if they have one: watch number -> (size in bytes, location)."""
    entries = {}
    for number in numbers:
        with driver_call("pread"):
            entry = int.from_bytes(os.pread(table, _ENTRY_BYTES, number * _ENTRY_BYTES), "little")
        if not entry:
            continue
        place = entry % granularity
        size = entry - place
        if place >= len(_LOCATIONS) or not 0 < size <= MAX_BYTES:
            raise invalid("pread", f"entry {number} of the table, {entry:#x}, is not a size and location")
        entries[number] = (size, _LOCATIONS[place])
    return entries


def sweep(table: int, living: Iterable[int]) -> None:
    """Free the memory of the entries before and between those of the `living` watches.

    The kernel numbers watches upwards and wraps after 2^31: without sweeps the table would grow with every extent.
    """
    free = 0
    for page in sorted({number * _ENTRY_BYTES // _PAGE_BYTES for number in living}):
        if page > free:
            with driver_call("fallocate"):
                _libc.punch_hole(table, free * _PAGE_BYTES, (page - free) * _PAGE_BYTES)
        free = page + 1
