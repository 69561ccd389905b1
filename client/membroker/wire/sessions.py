"""How many sessions a daemon can have by its limit of descriptors: it keeps to that, and `membroker doctor` says it."""

from __future__ import annotations

from typing import Final

from .names import DESCRIPTORS_IN_FLIGHT

OPEN_PER_SESSION: Final = 7 + DESCRIPTORS_IN_FLIGHT
"""A session's connection and notices, its pidfd and the copy for the descriptor store, a gRPC connection, its window.

The gRPC connection takes three: the peer's, and both ends of the one from the proxy to the gRPC server.

Packets of the window are open in the daemon until the peer's socket has room for them, and in flight from then on. The
kernel counts those per user of the sender, against the same limit (unix(7), ETOOMANYREFS)."""
OPEN_BESIDE: Final = 64
"""The daemon's own: listeners, gRPC, the lock, the anchor and logs."""
MAX_SEGMENT_EXTENTS: Final = 4_096
"""Each is a descriptor that the daemon keeps open: 4 TiB of segments in extents of 1 GiB."""


def sessions_for(descriptors: int) -> int:
    """Return how many sessions this many descriptors allow. A quarter of them, at most, is kept for segments."""
    left = descriptors - min(MAX_SEGMENT_EXTENTS, descriptors // 4)
    return max(0, (left - OPEN_BESIDE - 1) // OPEN_PER_SESSION)


def descriptors_for(sessions: int) -> int:
    """Return how many descriptors this many sessions need, with those for segments."""
    needed = OPEN_BESIDE + OPEN_PER_SESSION * sessions + 1
    return needed + min(MAX_SEGMENT_EXTENTS, needed // 3)
