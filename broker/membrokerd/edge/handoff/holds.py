"""Holds: what a process states that it still has of the session that it resumes. Several frames make one event."""

from __future__ import annotations

from membroker.v1 import handoff_pb2 as pb
from membroker.wire.names import DESCRIPTORS_IN_FLIGHT, MAX_IDS_PER_FRAME

from ...core import events as ev
from ...core.denied import Denied, Reason, deny
from ...core.names import Location, ModelName
from ...core.rows import SessionRow
from ..convert import Refused, parse_location, parse_model

UNBOOKED = DESCRIPTORS_IN_FLIGHT
"""How many entries a process may state beyond the books: as many as one window of deliveries can hold."""


class Holds:
    """The frames so far. Their total size is bounded by what the books have of the session.

    Each frame but the last must state something, and nothing may be stated twice, so their number is bounded, too.
    """

    def __init__(self, row: SessionRow) -> None:
        self._session = row.session
        self._room = len(row.extents) + len(row.segments) + len(row.charges) + len(row.models) + UNBOOKED
        self._extents: set[int] = set()
        self._segments: dict[int, int] = {}
        self._declarations: dict[tuple[ModelName, Location], int] = {}
        self._answering: set[ModelName] = set()
        self._guests: set[tuple[ModelName, Location]] = set()

    def take(self, frame: pb.Holds) -> None:
        """Take one frame; raises `Refused`."""
        count = len(frame.extent_ids) + len(frame.segments) + len(frame.declarations)
        count += len(frame.answering_models)
        if count > MAX_IDS_PER_FRAME:
            raise Refused(deny(Reason.INVALID_COUNT, count=count, max_count=MAX_IDS_PER_FRAME))
        if not count and not frame.last:
            raise Refused(_violation("Holds that state nothing must be the last"))
        stated = self._count() + count
        if stated > self._room:
            raise Refused(_violation("it states more than the books have of it and a delivery window can have brought"))
        self._extents.update(frame.extent_ids)
        self._segments.update((segment.generation, segment.times) for segment in frame.segments)
        for declaration in frame.declarations:
            place = parse_model(declaration.model), parse_location(declaration.location)
            self._declarations[place] = declaration.declared_bytes
            if declaration.recallable:
                self._guests.add(place)
        self._answering.update(map(parse_model, frame.answering_models))
        if self._count() < stated:
            raise Refused(_violation("it states an extent, a segment, a declaration or a model twice"))

    def _count(self) -> int:
        return len(self._extents) + len(self._segments) + len(self._declarations) + len(self._answering)

    def to_event(self, call: int) -> ev.StateHolds:
        """Return the event for the core."""
        return ev.StateHolds(
            call=call,
            session=self._session,
            extents=frozenset(self._extents),
            segments=self._segments,
            declarations=self._declarations,
            answering=frozenset(self._answering),
            guests=frozenset(self._guests),
        )


def _violation(what: str) -> Denied:
    return deny(Reason.PROTOCOL_VIOLATION, what=what)
