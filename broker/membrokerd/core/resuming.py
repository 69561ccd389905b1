"""Resuming: a session is taken up again by its process, forgotten by an operator, or inherited by a new daemon.

A process that comes back states all that it has, and the books are made to agree: what is booked and not held is
credited. So whatever was on its way when the connection broke happened once, or not at all. What a session had on its
way is gone before that, and what it asks for again is asked anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .books import Books
from .denied import Denied, Reason, deny
from .ledger import SegmentRow, SessionRow
from .lending import Lending
from .segments import Segments
from .sessions import Sessions

MAX_TOLD = 2_048
"""How many ids of extents, and of segments, that the books do not know are told to who holds them."""
MAX_MODELS_TOLD = 192
"""How many of its models are told to who resumes. All three together fit into a frame, however long they are."""
_NOT_FORGOTTEN = {
    "open": "is open, its process is connected",
    "leaving": "ends by itself, at its process's word",
    "detached": "has memory on its way in this moment",
    "releasing": "is of a dead process, and ends by itself when the device shows its bytes free",
}
"""By state: why an operator cannot have a session forgotten."""


@dataclass(slots=True)
class Answer:
    """A resume that is done but for segments that end by it: their names must be free when it is answered."""

    call: int
    session: int
    result: fx.Reconciled
    ending: set[int]


class Resuming:
    """The resumes under way."""

    def __init__(self, books: Books, lending: Lending, segments: Segments, sessions: Sessions) -> None:
        self._books = books
        self._lending = lending
        self._segments = segments
        self._sessions = sessions
        self._stated: dict[int, ev.StateHolds] = {}
        """By session: what waits until nothing of the session is being made any more."""
        self._expected: set[int] = set()
        """Sessions that said Hello again, and whose Holds are to come."""
        self._answers: list[Answer] = []

    # --- taking up ---

    def resume(self, event: ev.ResumeSession, now: int) -> None:
        """Let a process take its session up again, in the place of a connection that it may still have."""
        row = self._books.ledger.sessions.get(event.session)
        if row is None or row.state not in ("open", "detached") or row.process != event.process:
            self._books.answer(event.call, deny(Reason.TOKEN_REJECTED))
            return
        if self._books.stopping:
            self._books.answer(event.call, deny(Reason.STOPPING))
            return
        self.give_up(row.session)
        self._sessions.detach(row, now)
        self._expected.add(row.session)
        self._books.answer(event.call, fx.SessionResumed(row.session, row.tenant, row.observer))

    def state_holds(self, event: ev.StateHolds, now: int) -> None:
        """Take what the process has; reconcile now, or when the last of its packets is made."""
        if event.session not in self._expected:
            self._books.answer(event.call, deny(Reason.PROTOCOL_VIOLATION, what="it did not resume, and states Holds"))
            return
        self._expected.discard(event.session)
        self._stated[event.session] = event
        self.proceed(event.session, now)

    def proceed(self, session: int, now: int) -> None:
        """Reconcile a session that has stated what it has, once nothing of it is being made."""
        event = self._stated.get(session)
        if event is None or self._lending.making_of(session):
            return
        del self._stated[session]
        row = self._books.ledger.sessions[session]
        self._segments.give_up_seals(session)
        self._lending.forget(session)
        self._lending.begin(session)
        self._reconcile(row, event)
        self._books.record(ft.SessionMoved(session, "resumed", now))
        unknown_segments = [segment for segment in event.segments if segment not in row.segments]
        result = fx.Reconciled(
            tuple(sorted(event.extents - row.extents.keys())[:MAX_TOLD]),
            tuple(sorted(unknown_segments)[:MAX_TOLD]),
            tuple(sorted(row.models)[:MAX_MODELS_TOLD]),
        )
        self._answers.append(Answer(event.call, session, result, self._ending_of(session)))
        self._answer_ready()

    def under_way(self, session: int) -> bool:
        """Say whether a session is being taken up: what it asks meanwhile would not be in what it states."""
        if session in self._expected or session in self._stated:
            return True
        return bool(self._answers) and any(one.session == session for one in self._answers)

    def give_up(self, session: int) -> None:
        """The connection on which a session was to be resumed is gone as well."""
        self._expected.discard(session)
        stated = self._stated.pop(session, None)
        if stated is not None:
            self._books.answer(stated.call, deny(Reason.DELIVERY_FAILED))
        for one in [one for one in self._answers if one.session == session]:
            self._answers.remove(one)
            self._books.answer(one.call, deny(Reason.DELIVERY_FAILED))

    def segment_ended(self, segment: int) -> None:
        """A segment's name is free."""
        for one in self._answers:
            one.ending.discard(segment)
        self._answer_ready()

    def _answer_ready(self) -> None:
        for one in [one for one in self._answers if not one.ending]:
            self._answers.remove(one)
            self._books.answer(one.call, one.result)

    def _reconcile(self, row: SessionRow, event: ev.StateHolds) -> None:
        """Make the books of a session what its process has; what it states beyond them is not believed."""
        gone = tuple(sorted(row.extents.keys() - event.extents))
        if gone:
            self._books.record(ft.Credited(row.session, gone, "not held"))
        for (name, location), charge in list(row.charges.items()):
            declared = max(0, event.declarations.get((name, location), 0))
            if declared < charge.declared:
                self._books.record(ft.DeclarationSet(row.session, name, location, declared))
        for segment, times in list(row.segments.items()):
            held = max(0, event.segments.get(segment, 0))
            if held < times:
                self._segments.leave(row.session, segment, times - held, "not held")

    def _ending_of(self, session: int) -> set[int]:
        """Return the segments of this writer whose names are free soon: it may want to make one of them anew."""
        rows = self._books.ledger.segments.values()
        return {row.segment for row in rows if row.writer == session and row.state == "dropping" and not row.uncertain}

    # --- forgetting ---

    def forget(self, event: ev.ForgetSession, now: int) -> None:
        """Credit all that a detached session is charged, and end it."""
        denied = self._refuse_forget(event.session)
        if denied:
            self._books.answer(event.call, denied)
            return
        row = self._books.ledger.sessions[event.session]
        self.give_up(row.session)
        # First, for a story that breaks off behind it: who is half credited must not come back for the other half.
        self._books.record(ft.SessionMoved(row.session, "forgotten", now))
        self._sessions.credit_all(row, "forgotten")
        self._sessions.end(row, now)
        self._books.answer(event.call, fx.Done())

    def _refuse_forget(self, session: int) -> Denied | None:
        row = self._books.ledger.sessions.get(session)
        if row is not None and row.state == "detached" and not self._lending.making_of(session):
            return None
        what = _NOT_FORGOTTEN[row.state] if row is not None else "is not known, or has ended"
        return deny(Reason.SESSION_NOT_DETACHED, session=f"sessions/{session:x}", what=what)

    # --- a new daemon ---

    def restarted(self, event: ev.Restarted, now: int) -> None:
        """Go on with the books of a daemon that is dead: nobody is connected, and nothing is on its way.

        Its story may break off in the middle of a step. What is missing there is what the rows say is to follow.
        """
        ledger = self._books.ledger
        for session in ledger.sessions:
            self._lending.begin(session)
        for segment in list(ledger.segments.values()):
            self._take_over_segment(segment, lost=segment.segment in event.lost)
        for row in list(ledger.sessions.values()):
            self._take_over_session(row, now)
        for segment in list(ledger.segments.values()):
            self._segments.drop_if_left(segment)

    def _take_over_session(self, row: SessionRow, now: int) -> None:
        state = row.state
        self._sessions.detach(row, now)
        if state == "leaving":
            self._sessions.finish_leaving(row, now)
        elif state == "releasing":
            self._segments.leave_all(row, "holder died")
        elif state == "ended":
            self._sessions.credit_all(row, "forgotten")  # nothing, where it ended in another way
            self._sessions.end(row, now)

    def _take_over_segment(self, row: SegmentRow, *, lost: bool) -> None:
        """Nobody waits for its seal or attach any more; what the store has lost is attached no more."""
        if row.state == "sealing":
            self._books.record(ft.SegmentMoved(row.segment, "not sealed"))
        if lost and row.state in policy.ATTACHABLE:
            self._books.record(ft.SegmentMoved(row.segment, "lost"))
        if row.state == "writing" and row.writer not in row.holders:
            self._books.record(ft.SegmentMoved(row.segment, "writer ended"))
        if row.state == "dropping":
            self._books.emit(fx.Drop(row.segment))
