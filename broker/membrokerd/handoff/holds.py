"""What a process states that it has of a session which it takes up again: several frames, one event."""

from __future__ import annotations

from membroker.handoff import MAX_EXTENTS_PER_CALL, MAX_IDS_PER_FRAME
from membroker.v1 import handoff_pb2 as pb

from ..core import events as ev
from ..core.denied import Reason, deny
from ..core.ledger import SessionRow
from ..rpc.convert import Refused, parse_location, parse_model


class Holds:
    """The frames so far. Bounded: nobody may state much more than the books have of him."""

    def __init__(self, row: SessionRow) -> None:
        self._session = row.session
        self._room = len(row.extents) + MAX_EXTENTS_PER_CALL
        self._extents: set[int] = set()
        self._segments: dict[int, int] = {}
        self._declarations: dict[tuple[ev.ModelName, ev.Location], int] = {}

    def take(self, frame: pb.Holds) -> None:
        """Take one frame; raises `Refused`."""
        if len(frame.extent_ids) > MAX_IDS_PER_FRAME:
            raise Refused(deny(Reason.INVALID_COUNT, count=len(frame.extent_ids), max_count=MAX_IDS_PER_FRAME))
        self._extents.update(frame.extent_ids)
        self._segments.update((one.generation, one.times) for one in frame.segments)
        for one in frame.declarations:
            self._declarations[parse_model(one.model), parse_location(one.location)] = one.declared_bytes
        if len(self._extents) + len(self._segments) + len(self._declarations) > self._room:
            raise Refused(deny(Reason.PROTOCOL_VIOLATION, what="it states far more than it was ever lent"))

    def to_event(self, call: int) -> ev.StateHolds:
        """Return all of it, as the core takes it."""
        return ev.StateHolds(call, self._session, frozenset(self._extents), self._segments, self._declarations)
