"""What may follow what, as tables: the documentation's diagrams are drawn from these, and every move is checked here.

`TABLE[state][cause]` is the next state. An illegal move is a bug of the core, never an answer to a caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Lifecycle = Mapping[str, Mapping[str, str]]

SESSION: Final[Lifecycle] = {
    "open": {
        "connection lost": "detached",
        "goodbye": "leaving",
        "process died": "releasing",
    },
    # Goodbye was said while packets of a call were still being made; it ends when they are.
    "leaving": {
        "last packet": "ended",
        "connection lost": "leaving",
        "process died": "releasing",
    },
    # The process lives and keeps its mappings: it stays charged.
    "detached": {
        "resumed": "open",
        "forgotten": "ended",
        "process died": "releasing",
    },
    # Charged until the device shows the bytes free.
    "releasing": {
        "settled": "ended",
    },
    "ended": {},
}

EXTENT: Final[Lifecycle] = {
    "lent": {
        "released": "credited",
        "not made": "credited",
        "not delivered": "credited",
        "goodbye": "credited",
        # By what its process says that it has, when it takes its session up again.
        "not held": "credited",
        "forgotten": "credited",
        "holder died": "releasing",
    },
    "releasing": {
        "not made": "credited",
        "not delivered": "credited",
        "settled": "credited",
    },
    "credited": {},
}

PACKET: Final[Lifecycle] = {
    "waiting": {
        "issued": "making",
        "given up": "credited",
    },
    "making": {
        "made": "unacknowledged",
        "not made": "credited",
    },
    "unacknowledged": {
        "acknowledged": "delivered",
        "not delivered": "credited",
    },
    "delivered": {},
    "credited": {},
}

SEGMENT: Final[Lifecycle] = {
    "writing": {
        "seal asked": "sealing",
        "writer ended": "ending",
        "deleted": "ending",
        "not made": "ending",
        "lost": "ending",
    },
    # The writer is done: from here on its own end does not matter.
    "sealing": {
        "sealed": "sealed",
        "not sealed": "writing",
        "deleted": "ending",
        "lost": "ending",
    },
    "sealed": {
        "deleted": "ending",
        # The broker's own descriptors are gone: who has it mapped keeps it, and nobody else can.
        "lost": "ending",
    },
    # Attached no more; charged while sessions have it mapped.
    "ending": {
        "last session left": "dropping",
    },
    # The broker closes its own descriptors.
    "dropping": {
        "dropped": "ended",
        "dropped after a death": "releasing",
    },
    "releasing": {
        "settled": "ended",
    },
    "ended": {},
}

ALL: Final[Mapping[str, Lifecycle]] = {"session": SESSION, "extent": EXTENT, "packet": PACKET, "segment": SEGMENT}


class IllegalMove(AssertionError):
    """The core tried a move that its table does not have. Nothing happened."""


def move(table: Lifecycle, state: str, cause: str) -> str:
    """Return the state that follows `state` on `cause`; raises `IllegalMove` when the table has none."""
    following = table.get(state, {}).get(cause)
    if following is None:
        raise IllegalMove(f"no {cause!r} from {state!r}")
    return following
