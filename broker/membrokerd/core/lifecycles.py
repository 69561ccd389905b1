"""The lifecycles as tables: every move is checked here, and the diagrams in the documentation are drawn from them.

`TABLE[state][cause]` is the next state, or raises `IllegalMove`, which is a bug of the core and never an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Lifecycle = Mapping[str, Mapping[str, str]]


class IllegalMove(AssertionError):
    """The core tried a move that is not in the table. Nothing changed."""


class _Moves(dict[str, str]):
    """The moves of one state: cause -> next state. Any other cause raises `IllegalMove`."""

    def __init__(self, state: str, moves: Mapping[str, str]) -> None:
        super().__init__(moves)
        self._state = state

    def __missing__(self, cause: str) -> str:
        raise IllegalMove(f"no {cause!r} from {self._state!r}")


def _checked(table: Lifecycle) -> Lifecycle:
    return {state: _Moves(state, moves) for state, moves in table.items()}


SESSION: Final = _checked(
    {
        "open": {
            "connection lost": "detached",
            "goodbye": "leaving",
            "process died": "releasing",
        },
        # Goodbye was said while packets of a call were still being made; it ends when they are made.
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
)

EXTENT: Final = _checked(
    {
        "lent": {
            "released": "credited",
            "not made": "credited",
            "not delivered": "credited",
            "goodbye": "credited",
            # Not among what its process states when it resumes.
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
)

PACKET: Final = _checked(
    {
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
)

REQUEST: Final = _checked(
    {
        "new": {
            "granted": "granted",
            "refused": "refused",
            "must wait": "waiting",
        },
        "waiting": {
            "its turn": "deciding",
            # Its deadline has come, pending inputs are read, or a newer declaration replaces it.
            "wait ends": "deciding",
            # It is cancelled, its connection is lost, or its session ends.
            "given up": "refused",
        },
        # For good: it does not wait again.
        "deciding": {
            "granted": "granted",
            "refused": "refused",
        },
        # The books are debited.
        "granted": {
            # Nothing of it could be made, and the debit is credited.
            "device full": "waiting",
            # With its bytes, or with the reason why they could not be made.
            "answered": "ended",
        },
        "refused": {},
        "ended": {},
    }
)

SEGMENT: Final = _checked(
    {
        "writing": {
            "seal asked": "sealing",
            "writer ended": "ending",
            "deleted": "ending",
            "not made": "ending",
            "lost": "ending",
        },
        # The writer has finished: from here on its death does not matter.
        "sealing": {
            "sealed": "sealed",
            "not sealed": "writing",
            "deleted": "ending",
            "lost": "ending",
        },
        "sealed": {
            "deleted": "retired",
            # The broker's own descriptors are lost: sessions keep their mappings, and no other can attach.
            "lost": "retired",
        },
        # Never to be sealed; charged while sessions have it mapped.
        "ending": {
            "last session left": "dropping",
        },
        # Was sealed, and is no longer attachable; charged while sessions have it mapped.
        "retired": {
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
)

ALL: Final[Mapping[str, Lifecycle]] = {
    "session": SESSION,
    "request": REQUEST,
    "extent": EXTENT,
    "packet": PACKET,
    "segment": SEGMENT,
}
