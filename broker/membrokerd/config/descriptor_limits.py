"""The process's own limits: descriptors, and how many sessions they are enough for."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from membroker.wire.names import DESCRIPTORS_IN_FLIGHT

OPEN_PER_SESSION = 5
"""A session's connection and notices, its pidfd and the copy for the descriptor store, and a gRPC connection."""
OPEN_BESIDE = 64
"""The daemon's own: listeners, gRPC, the lock, the anchor and logs."""
IN_FLIGHT_PER_SESSION = DESCRIPTORS_IN_FLIGHT + 1
"""The kernel counts descriptors in flight per user of the sender, against the same limit (unix(7), ETOOMANYREFS)."""
_EXEMPT = 1 << 21 | 1 << 24
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: a process with one of them, in the first user namespace, may have more."""


MAX_SEGMENT_EXTENTS = 4_096
"""Each is a descriptor that the daemon keeps open: 4 TiB of segments in extents of 1 GiB."""


def raise_descriptor_limit() -> int:
    """Raise RLIMIT_NOFILE as far as this process may, and return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard
    if os.geteuid() == 0:
        wanted = max(hard, int(Path("/proc/sys/fs/nr_open").read_text()))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def in_flight_is_bounded() -> bool:
    """Return whether the kernel bounds this process's descriptors in flight: two capabilities exempt it."""
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return True  # capabilities of another user namespace do not count
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return not int(effective, 16) & _EXEMPT


def sessions_for(descriptors: int, *, bounded: bool = True) -> int:
    """Return how many sessions this many descriptors allow; `bounded`: those in flight are limited too."""
    kept_open = max(0, (descriptors - OPEN_BESIDE - 1) // OPEN_PER_SESSION)
    return min(kept_open, (descriptors - 1) // IN_FLIGHT_PER_SESSION) if bounded else kept_open


def descriptors_for(sessions: int, *, bounded: bool = True) -> int:
    """Return how many descriptors this many sessions need."""
    kept_open = OPEN_BESIDE + OPEN_PER_SESSION * sessions + 1
    return max(kept_open, sessions * IN_FLIGHT_PER_SESSION + 1) if bounded else kept_open


def trouble(sessions: int, descriptors: int, *, bounded: bool) -> str:
    """Return why this process cannot have this many sessions, and what to do about it; "" if it can."""
    possible = sessions_for(descriptors, bounded=bounded)
    if sessions <= possible:
        return ""
    return (
        f"max_sessions = {sessions} needs a limit of {descriptors_for(sessions, bounded=bounded)} descriptors and this "
        f"process may have {descriptors}: raise it (LimitNOFILE=, ulimit -n), or set max_sessions = {possible}"
    )


def segment_extents_for(descriptors: int, sessions: int, stock: int) -> int:
    """Return how many extents of segments may be kept open, with this many sessions and a stock of this size.

    It is half of the descriptors that are left: the rest is for packets that wait for a full socket, and stay open
    until the socket takes them.
    """
    left = descriptors - OPEN_BESIDE - OPEN_PER_SESSION * sessions - stock - 1
    return max(0, min(MAX_SEGMENT_EXTENTS, left // 2))
