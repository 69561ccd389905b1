"""Segments: named memory that one session writes and seals, that many attach, and that its model is charged for once.

The broker keeps a segment's descriptors, so a segment outlives its writer: its bytes are free again when it is
deleted and the last session has left it. A session holds a segment as soon as its create or attach is admitted. If
the call fails before anything was sent, the hold ends with the call; otherwise it ends when the session detaches, says
Goodbye or dies.
"""

from __future__ import annotations

from collections.abc import Iterable

from membroker.wire.names import valid_segment

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .attaches import Attaches
from .books import Books
from .denied import Denied, Reason, deny
from .lending import Lending
from .names import ANY_MODEL, ModelName, SegmentName
from .requests import DebitRequest, Kind
from .rows import SegmentRow, SessionRow
from .traffic import CallInFlight
from .waiting import Waiting

_WRITING = ("writing", "sealing")
_LEAVING = ("ending", "retired")
_TOLD = {"sealing": "writing", "retired": "ending", "dropping": "ending"}
"""Internal states, and the public state that each is shown as."""


class Segments:
    """The calls about segments. `attaches` are those of them that wait for a seal."""

    def __init__(self, books: Books, waiting: Waiting, lending: Lending) -> None:
        self._books = books
        self._waiting = waiting
        self._lending = lending
        self.attaches = Attaches(books, lending)
        self._creation = Kind(self._refuse_create, self._make)
        self._sealing: dict[int, list[ev.SealSegment]] = {}
        """By segment: the requests to seal it that are to be answered."""

    # --- create and seal ---

    def create(self, event: ev.CreateSegment, now: int) -> None:
        """Create a whole segment, or nothing of it."""
        name = ModelName(event.name.tenant, event.name.model)
        self._waiting.settle(DebitRequest(event, name, event.size, now, self._creation), now)

    def _make(self, request: DebitRequest, now: int) -> None:
        """Debit the whole segment, then make it for its writer packet by packet."""
        event, name, books = request.event, request.name, self._books
        assert isinstance(event, ev.CreateSegment)
        extent, last, count = policy.shape_of_segment(books.rules, event.size)
        segment, ids = books.take_ids(1)[0], books.take_ids(count)
        location, label = event.location, event.name.label
        books.record(
            ft.SegmentBegan(
                segment=segment,
                name=name,
                label=label,
                location=location,
                extent_bytes=extent,
                last_bytes=last,
                first=ids.start,
                count=count,
                writer=event.session,
                at=now,
            )
        )
        if event.delete_when_left:
            books.record(ft.SegmentBound(segment))
        books.record(ft.SegmentHeld(segment, event.session))
        call = CallInFlight(
            call=event.call,
            request_id=event.request_id,
            name=name,
            location=location,
            extent_bytes=extent,
            last_bytes=last,
            ids=ids,
            on_done=self._call_done,
            segment=segment,
            request=request,
        )
        self._lending.begin_call(event.session, call)

    def _refuse_create(self, request: DebitRequest) -> Denied | None:
        event, name, books = request.event, request.name, self._books
        assert isinstance(event, ev.CreateSegment)
        denied = self._lending.refuse_borrower(event.session, name)
        if denied:
            return denied
        if not valid_segment(event.name.label):
            return deny(Reason.INVALID_NAME, kind="segment", name=event.name.label)
        there = books.ledger.labels.get(event.name)
        if there is not None:
            return _exists(books.ledger.segments[there])
        return (
            self._lending.refuse_call(event.session)
            or books.refuse_debit()
            or policy.check_extents(books.rules, event.location, event.size, 1, event.wait_ns)
            or self._refuse_one_more(event)
            or books.admission.admit(name, event.location, event.size)
        )

    def _refuse_one_more(self, event: ev.CreateSegment) -> Denied | None:
        """Return why the tenant, or the broker, can have no more segments, or None.

        The broker keeps a descriptor of each extent of a segment.
        """
        rules, ledger = self._books.rules, self._books.ledger
        limit = rules.max_segments_per_tenant
        if ledger.segments_of[event.name.tenant] >= limit:
            return deny(Reason.TOO_MANY_SEGMENTS, limit=limit, of="tenant", what="segments")
        _, _, count = policy.shape_of_segment(rules, event.size)
        limit = rules.max_segment_extents
        if ledger.segment_extents + count > limit:
            return deny(Reason.TOO_MANY_SEGMENTS, limit=limit, of="broker", what="extents of segments")
        return None

    def seal(self, event: ev.SealSegment) -> None:
        """Seal a segment. The writer may ask again, because it may have missed the answer, also one that came before
        the segment was deleted. What asks before it is sealed is answered together.
        """
        denied = self._refuse_seal(event)
        if denied:
            self._books.answer(event.call, denied)
            return
        row = self._books.ledger.segments[event.segment]
        if row.state in ("sealed", "retired"):
            self._books.answer(event.call, self.view(row))
            return
        self._lending.wait(event.session, event.request_id)
        self._sealing.setdefault(event.segment, []).append(event)
        if row.state == "writing":
            self._books.record(ft.SegmentMoved(event.segment, "seal asked"))
            self._books.emit(fx.Seal(event.segment))

    def _refuse_seal(self, event: ev.SealSegment) -> Denied | None:
        row = self._find_held(event.session, event.segment)
        if row is None:
            return deny(Reason.SEGMENT_NOT_FOUND, segment=event.segment)
        if row.writer != event.session:
            return deny(
                Reason.SEGMENT_NOT_WRITABLE, segment=str(row.full_name()), state=_TOLD.get(row.state, row.state)
            )
        if row.state == "ending":
            return deny(Reason.WRITER_DIED, segment=str(row.full_name()))
        most = self._books.rules.max_calls_per_session
        if len(self._sealing.get(row.segment, ())) >= most:
            return deny(Reason.TOO_MANY_REQUESTS, limit=most, whose="session", calls="unanswered seals of a segment")
        return None

    def sealed(self, event: ev.Sealed) -> None:
        """Let sessions attach the segment, those that waited for it first, in the order of their requests."""
        row = self._asked_to_seal(event.segment)
        if row is None:
            return
        self._books.record(ft.SegmentMoved(row.segment, "sealed"))
        self._answer_seal(row, self.view(row))
        for attach in self.attaches.take_for(row.segment):
            denied = self._lending.refuse_call(attach.session) or self._books.refuse_debit()
            if denied:
                self._books.answer(attach.call, denied)
            else:
                self._begin_attach(attach, row)
        self.drop_if_left(row)

    def not_sealed(self, event: ev.NotSealed) -> None:
        """Take the segment back to `writing`, or end it if its writer is gone."""
        row = self._asked_to_seal(event.segment)
        if row is None:
            return
        self._books.record(ft.SegmentMoved(row.segment, "not sealed"))
        self._answer_seal(row, Denied(Reason(event.reason), event.numbers))
        if row.writer not in row.holders:
            self._end_writing(row, "writer ended")
            self.drop_if_left(row)

    def _answer_seal(self, row: SegmentRow, result: fx.Result | Denied) -> None:
        for asked in self._sealing.pop(row.segment, ()):
            self._lending.wait_no_more(asked.session, asked.request_id)
            self._books.answer(asked.call, result)

    def give_up_seals(self, session: int) -> None:
        """Fail the pending seals of a session that resumes. The seals go on; the session asks for them again."""
        for segment in [segment for segment, asked in self._sealing.items() if asked[0].session == session]:
            self._answer_seal(self._books.ledger.segments[segment], deny(Reason.DELIVERY_FAILED))

    def _asked_to_seal(self, segment: int) -> SegmentRow | None:
        row = self._books.ledger.segments.get(segment)
        return row if row is not None and row.state == "sealing" else None

    # --- attach and detach ---

    def attach(self, event: ev.AttachSegment, now: int) -> None:
        """Send a sealed segment's descriptors; let the call wait for one that is being written."""
        row = self._refuse_attach(event) or self._find_named(event.name)
        if isinstance(row, Denied):
            self._books.answer(event.call, row)
        elif row.state == "sealed":
            self._begin_attach(event, row)
        elif not event.wait_ns:
            self._books.answer(event.call, deny(Reason.SEGMENT_NOT_SEALED, segment=str(row.full_name())))
        elif full := self.attaches.refuse_one_more(event.name.tenant):
            self._books.answer(event.call, full)
        else:
            self.attaches.wait(event, row.segment, now)

    def _refuse_attach(self, event: ev.AttachSegment) -> Denied | None:
        return (
            self._refuse_stranger(event.session, event.name)
            or policy.check_wait(event.wait_ns)
            or self._lending.refuse_call(event.session)
            or self._books.refuse_debit()
        )

    def _refuse_stranger(self, session: int, name: SegmentName) -> Denied | None:
        """Return why a session may not name this segment, or None: an observer, or of another tenant."""
        row = self._books.ledger.sessions[session]
        if row.observer:
            return deny(Reason.OBSERVER)
        return deny(Reason.SEGMENT_NOT_FOUND, segment=str(name)) if name.tenant != row.tenant else None

    def _begin_attach(self, event: ev.AttachSegment, row: SegmentRow) -> None:
        self._books.record(ft.SegmentHeld(row.segment, event.session))
        call = CallInFlight(
            call=event.call,
            request_id=event.request_id,
            name=row.name,
            location=row.location,
            extent_bytes=row.extent_bytes,
            last_bytes=row.last_bytes,
            ids=row.ids,
            on_done=self._call_done,
            segment=row.segment,
            sends=True,
        )
        self._lending.begin_call(event.session, call)

    def _call_done(self, session: int, call: CallInFlight) -> None:
        """Answer a create or an attach once its packets are decided, or let a create wait for room on the device."""
        row = self._books.ledger.segments.get(call.segment)
        if row is None:  # its last session died while the packet was in flight
            self._books.refuse(call.call, call.failure or deny(Reason.DELIVERY_FAILED), session, call.name)
            return
        if not call.failure and not call.sends and row.state not in policy.ATTACHABLE:
            call.failure = deny(Reason.SEGMENT_NOT_FOUND, segment=str(row.full_name()))
        if not call.failure:
            self._books.answer(call.call, self.view(row))
            return
        writing = not call.sends and row.state == "writing"
        if not (writing and self._waiting.put_back(call)):
            self._books.refuse(call.call, call.failure, session, call.name)
        if writing:
            self._end_writing(row, "not made")
        if not call.any_sent and session in row.holders:
            self._books.record(ft.SegmentLeft(row.segment, session, 1, "not made"))
        self.drop_if_left(row)

    def detach(self, event: ev.DetachSegment) -> None:
        """End a hold of a session that says it has unmapped a segment. A writer that leaves before the seal ends it."""
        row = self._find_held(event.session, event.segment)
        if row is None:
            self._books.answer(event.call, deny(Reason.SEGMENT_NOT_FOUND, segment=event.segment))
            return
        self.leave(event.session, event.segment, 1, "detached")
        self._books.answer(event.call, fx.Detached())

    def _find_held(self, session: int, segment: int) -> SegmentRow | None:
        """Return a segment that the session holds by a call that was answered."""
        row = self._books.ledger.segments.get(segment)
        holds = row.holders.get(session, 0) if row else 0
        return row if holds > self._lending.unanswered_of(session, segment) else None

    # --- the ends ---

    def delete(self, event: ev.DeleteSegment) -> None:
        """End a segment by its name."""
        denied = None if event.session is None else self._refuse_stranger(event.session, event.name)
        row = denied or self._find_named(event.name)
        if isinstance(row, SegmentRow) and event.generation not in (0, row.segment):
            row = deny(Reason.SEGMENT_NOT_FOUND, segment=str(event.name))
        if isinstance(row, SegmentRow) and event.only_if_left and not self._is_left(row, event.session):
            row = _exists(row)
        if isinstance(row, Denied):
            self._books.answer(event.call, row)
            return
        if row.state in _WRITING:
            self._end_writing(row, "deleted")
        else:
            self._books.record(ft.SegmentMoved(row.segment, "deleted"))
        self._books.answer(event.call, self.view(row))
        self.drop_if_left(row)

    def _is_left(self, row: SegmentRow, session: int | None) -> bool:
        """Say whether a segment is left: no session holds it, and its writer has ended or is this session."""
        writer = self._books.ledger.sessions.get(row.writer)
        is_alive = writer is not None and writer.state in ("open", "detached")
        return row.state == "sealed" and not row.holders and (row.writer == session or not is_alive)

    def writer_leaves(self, row: SessionRow) -> None:
        """End the unsealed segments of a writer that says Goodbye: no other session can seal them."""
        for segment in list(row.segments):
            self._without_writer(self._books.ledger.segments[segment], row.session)

    def leave_all(self, row: SessionRow, cause: str) -> None:
        """Drop all holds of a session that is ending or has died."""
        for segment, times in list(row.segments.items()):
            self.leave(row.session, segment, times, cause)

    def dropped(self, event: ev.Dropped) -> SegmentRow:
        """Return the segment whose descriptors the broker has closed, and end it unless a holder of it died."""
        row = self._books.ledger.segments[event.segment]
        if not row.uncertain:
            self._books.record(ft.SegmentEnded(row.segment, None))
        return row

    def leave(self, session: int, segment: int, times: int, cause: str) -> None:
        """Drop `times` of the session's holds."""
        row = self._books.ledger.segments[segment]
        self._books.record(ft.SegmentLeft(row.segment, session, times, cause))
        if session not in row.holders:
            self._without_writer(row, session)
        self.drop_if_left(row)

    def _without_writer(self, row: SegmentRow, session: int) -> None:
        if row.writer == session and row.state == "writing":
            self._end_writing(row, "writer ended")

    def _end_writing(self, row: SegmentRow, cause: str) -> None:
        """End a segment that will never be sealed, and fail the calls that wait for the seal."""
        self._books.record(ft.SegmentMoved(row.segment, cause))
        denied = deny(Reason.WRITER_DIED, segment=str(row.full_name()))
        self._answer_seal(row, denied)
        self.attaches.segment_ended(row.segment, denied)

    def drop_if_left(self, row: SegmentRow) -> None:
        """Close the broker's own descriptors of a segment that is ending, once no session holds it."""
        if row.delete_when_left and row.state == "sealed" and not row.holders:
            self._books.record(ft.SegmentMoved(row.segment, "deleted"))
        busy = row.holders or self._lending.making_segment(row.writer, row.segment)
        if row.state in _LEAVING and not busy:
            self._books.record(ft.SegmentMoved(row.segment, "last session left"))
            self._books.emit(fx.Drop(row.segment))

    # --- looking ---

    def view(self, row: SegmentRow) -> fx.SegmentView:
        """Return the current state of a segment."""
        size = row.size_of(row.ids)
        return fx.SegmentView(
            segment=row.segment,
            name=row.full_name(),
            state=row.state,
            location=row.location,
            size=size,
            extents=len(row.ids),
            sessions=len(row.holders),
            writer=row.writer,
            began_at=row.began_at,
        )

    def _find_named(self, name: SegmentName) -> SegmentRow | Denied:
        """Return the segment of this name that is not ending; without a model, by its label alone."""
        found = [row for row in self._candidates(name) if row.state in policy.ATTACHABLE]
        if not found:
            return deny(Reason.SEGMENT_NOT_FOUND, segment=str(name))
        if len(found) > 1:
            models = ", ".join(sorted(row.name.model for row in found)[:8])
            return deny(Reason.SEGMENT_AMBIGUOUS, segment=str(name), models=models)
        return found[0]

    def _candidates(self, name: SegmentName) -> Iterable[SegmentRow]:
        ledger = self._books.ledger
        if name.model == ANY_MODEL:
            rows = ledger.segments.values()
            return [row for row in rows if (row.name.tenant, row.label) == (name.tenant, name.label)]
        segment = ledger.labels.get(name)
        return [] if segment is None else [ledger.segments[segment]]


def _exists(row: SegmentRow) -> Denied:
    """Return the refusal of a call that would need the segment's name, or to be the last that knows it."""
    state, sessions = _TOLD.get(row.state, row.state), len(row.holders)
    return deny(Reason.SEGMENT_EXISTS, segment=str(row.full_name()), state=state, sessions=sessions)
