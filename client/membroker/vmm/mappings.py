"""How many mappings this process may still make: `vm.max_map_count`, with a safety margin.

At that limit the kernel refuses even the mmap that would reduce the number of mappings, and the interpreter gets no
memory: a process at the limit can release nothing. Owns the count and the margin.
"""

from __future__ import annotations

import errno

from .driver import DriverLimit

MARGIN = 256
"""Mappings left for the rest of the process: the stacks of threads, libraries, the interpreter."""


class MappingBudget:
    """Counts down from a measurement, and measures again at zero. Not thread-safe: the driver locks.

    A measurement reads /proc/self/maps (20 ms at 65,000 mappings). It happens about sixteen times on the way to the
    limit, and once in 32,000 calls of a process that maps and unmaps.
    """

    def __init__(self) -> None:
        self._left = 0

    def spend(self, call: str, count: int = 1) -> None:
        """Take mappings from the budget; raise `DriverLimit` if `call` would come too close to the limit."""
        if self._left < count:
            # A mapping in the middle of a reservation splits it, which costs two kernel mappings.
            self._left = (mapping_limit() - MARGIN - mapping_count()) // 2
        if self._left < count:
            raise DriverLimit(call, "ENOMEM", errno.ENOMEM, limit_hint())
        self._left -= count


def mapping_limit() -> int:
    """Return how many mappings a process may have (`vm.max_map_count`)."""
    with open("/proc/sys/vm/max_map_count", encoding="ascii") as limit:
        return int(limit.read())


def mapping_count() -> int:
    """Return how many mappings this process has."""
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def limit_hint() -> str:
    """Return what to do about too many mappings."""
    return (
        f"raise vm.max_map_count ({mapping_limit()} now): this process has {mapping_count()} mappings. "
        "Larger extents need fewer"
    )
