"""The process's own limits: descriptors, and how many sessions they are enough for."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from membroker.wire.sessions import MAX_SEGMENT_EXTENTS, OPEN_BESIDE, OPEN_PER_SESSION, descriptors_for, sessions_for


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


def trouble(sessions: int, descriptors: int) -> str:
    """Return why this process cannot have this many sessions, and what to do about it; "" if it can."""
    possible = sessions_for(descriptors)
    if sessions <= possible:
        return ""
    return (
        f"max_sessions = {sessions} needs a limit of {descriptors_for(sessions)} descriptors and this process "
        f"may have {descriptors}: raise it (LimitNOFILE=, ulimit -n), or set max_sessions = {possible}"
    )


def segment_extents_for(descriptors: int, sessions: int, stock: int) -> int:
    """Return how many extents of segments may be kept open, with this many sessions and a stock of this size."""
    left = descriptors - OPEN_BESIDE - OPEN_PER_SESSION * sessions - stock - 1
    return max(0, min(MAX_SEGMENT_EXTENTS, left))
