"""How many sessions a daemon can have by its limit of descriptors: it keeps to that, and `membroker doctor` says it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .names import DESCRIPTORS_IN_FLIGHT

OPEN_PER_SESSION: Final = 5
"""A session's connection and notices, its pidfd and the copy for the descriptor store, and a gRPC connection."""
OPEN_BESIDE: Final = 64
"""The daemon's own: listeners, gRPC, the lock, the anchor and logs."""
IN_FLIGHT_PER_SESSION: Final = DESCRIPTORS_IN_FLIGHT + 1
"""The kernel counts descriptors in flight per user of the sender, against the same limit (unix(7), ETOOMANYREFS)."""
_EXEMPT: Final = 1 << 21 | 1 << 24
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: a process with one of them, in the first user namespace, may have more."""


def in_flight_is_bounded() -> bool:
    """Return whether the kernel bounds this process's descriptors in flight: two capabilities exempt it."""
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return True  # capabilities of another user namespace do not count
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return not int(effective, 16) & _EXEMPT


def sessions_for(descriptors: int, *, bounded: bool = True) -> int:
    """Return how many sessions this many descriptors allow; `bounded`: those in flight are limited too."""
    most = (descriptors - OPEN_BESIDE - 1) // OPEN_PER_SESSION
    return max(0, min(most, (descriptors - 1) // IN_FLIGHT_PER_SESSION) if bounded else most)


def descriptors_for(sessions: int, *, bounded: bool = True) -> int:
    """Return how many descriptors this many sessions need."""
    kept_open = OPEN_BESIDE + OPEN_PER_SESSION * sessions + 1
    return max(kept_open, sessions * IN_FLIGHT_PER_SESSION + 1) if bounded else kept_open
