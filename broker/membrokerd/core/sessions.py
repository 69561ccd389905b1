"""Sessions: how a process's conversation with the broker is opened, loses its connection, is resumed, and ends.

A process that resumes states everything it holds, and what is booked but not held is credited. So a call that was in
flight when the connection broke happened once, or not at all. Its packets are given up before the reconciliation, and
the process repeats the calls that were not answered. An operator may forget a session, and a new daemon takes over
those of an earlier one. What follows from the death of a process is in `deaths`.
"""

from __future__ import annotations

from collections import Counter

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .books import Books
from .denied import Denied, Reason, deny
from .lending import Lending
from .recallable import Borrower
from .recalls import Recalls
from .rows import Loan, SegmentRow, SessionRow
from .segments import Segments

MAX_TOLD = 2_048
"""How many unknown extents, and how many unknown segments, the answer to Holds lists at most."""
MAX_MODELS_TOLD = 128
"""How many of the session's models the answer lists at most. All three lists together fit into one frame."""
MAX_UNWRITTEN_RESUMES = 4
"""How often a session may resume while the journal cannot be written. Its last room is for releases: 1 MiB, of which a
resume takes about 112 bytes."""
_NOT_FORGOTTEN = {
    "open": "is open, its process is connected",
    "leaving": "ends by itself, at its process's word",
    "detached": "has memory on its way in this moment",
    "releasing": "is of a dead process, and ends by itself when the device shows its bytes free",
}
"""By state: why an operator cannot forget a session."""


class Sessions:
    """All sessions, and the resumes under way."""

    def __init__(self, books: Books, recalls: Recalls, lending: Lending, segments: Segments) -> None:
        self._books = books
        self._recalls = recalls
        self._lending = lending
        self._segments = segments
        self.stated: dict[int, ev.StateHolds] = {}
        """By session: Holds that wait until no packet of the session is being made."""
        self._expected: set[int] = set()
        """Sessions that said Hello again and have not stated their Holds yet."""
        self._unwritten: Counter[int] = Counter()
        """By session: resumes since the journal could not be written."""
        self._answers: dict[int, fx.Answer] = {}
        """By session: answers to resumes that are done. They wait until the names of segments that end are free."""

    # --- the beginning and the end ---

    def open(self, event: ev.OpenSession, now: int) -> None:
        """Begin a session, unless a bound on the number of sessions is reached."""
        denied = self._refuse_session(event)
        if denied:
            self._books.answer(event.call, denied)
            return
        session = self._books.take_ids(1)[0]
        self._books.record(
            ft.SessionBegan(
                session=session,
                tenant=event.tenant,
                pid=event.pid,
                uid=event.uid,
                process=event.process,
                observer=event.observer,
                client=event.client,
                at=now,
                endpoint=event.endpoint,
                token_hash=event.token_hash,
            )
        )
        self._lending.begin(session)
        self._books.answer(event.call, fx.SessionOpened(session))

    def _refuse_session(self, event: ev.OpenSession) -> Denied | None:
        books = self._books
        if books.stopping:
            return deny(Reason.STOPPING)
        if books.cannot_write:
            return deny(Reason.JOURNAL_FULL, driver_says=books.cannot_write)
        rows = books.ledger.sessions.values()
        if len(rows) >= books.rules.max_sessions:
            return deny(Reason.TOO_MANY_SESSIONS, limit=books.rules.max_sessions, of="broker")
        mine = [row for row in rows if row.process == event.process and row.state != "releasing"]
        if len(mine) >= books.rules.max_sessions_per_process:
            detached = " ".join(f"sessions/{row.session:x}" for row in mine if row.state == "detached")
            named = {"detached": detached} if detached else {}
            return deny(Reason.TOO_MANY_SESSIONS, limit=books.rules.max_sessions_per_process, of="process", **named)
        bound = books.rules.max_sessions_per_tenant
        if bound is not None and sum(1 for row in rows if row.tenant == event.tenant) >= bound:
            return deny(Reason.TOO_MANY_SESSIONS, limit=bound, of="tenant")
        return None

    def connection_lost(self, event: ev.ConnectionLost, now: int) -> None:
        """Give up a resume that is under way, and detach the session."""
        row = self._books.ledger.sessions.get(event.session)
        if row is not None:
            self.give_up(row.session)
            self.detach(row, now)

    def detach(self, row: SessionRow, now: int) -> None:
        """Note that the session has lost its connection, and give up what is in flight to it."""
        if row.state in ("open", "leaving"):
            self._books.record(ft.SessionMoved(row.session, "connection lost", now))
            self._lending.give_up(row, now)
            self._recalls.detached(row.session)
            self._segments.attaches.give_up(row.session)

    def goodbye(self, event: ev.Goodbye, now: int) -> None:
        """Begin to end a session whose process says that it has unmapped everything; it ends when no packet is being
        made."""
        row = self._books.ledger.sessions[event.session]
        if row.state != "open":
            self._books.answer(event.call, deny(Reason.TOKEN_REJECTED))
            return
        self._books.record(ft.SessionMoved(row.session, "goodbye", now))
        self._books.answer(event.call, fx.Done())
        self._lending.give_up(row, now)
        self._segments.attaches.give_up(row.session)
        self._segments.writer_leaves(row)
        self.finish_leaving(row, now)

    def packet_decided(self, session: int, now: int) -> None:
        """Go on with a Goodbye or a resume that waited for the packets of the session being made."""
        row = self._books.ledger.sessions.get(session)
        if row is not None and row.state == "leaving":
            self.finish_leaving(row, now)
        elif session in self.stated:
            self.proceed(session, now)

    def finish_leaving(self, row: SessionRow, now: int) -> None:
        """End a session that said Goodbye, once none of its packets is being made."""
        if self._lending.making_of(row.session):
            return
        self.credit_all(row, "goodbye")
        self._books.record(ft.SessionMoved(row.session, "last packet", now))
        self.end(row, now)

    def credit_all(self, row: SessionRow, cause: str) -> None:
        """Credit all that a session is charged, and let it leave its segments: its process or an operator says so."""
        with self._books.recallable.guests_counted_once():
            if row.extents:
                self._books.record(ft.Credited(row.session, tuple(row.extents), cause))
            self._segments.leave_all(row, cause)
            for name, location in list(row.charges):  # what is left is declared
                self._books.record(ft.DeclarationSet(row.session, name, location, 0))

    def end(self, row: SessionRow, now: int) -> None:
        """Remove a session whose charges are all credited."""
        self._books.record(ft.SessionEnded(row.session, now))
        self._lending.forget(row.session, now)
        self._books.emit(fx.Forget(row.session))

    # --- resume ---

    def resume(self, event: ev.ResumeSession, now: int) -> None:
        """Let a process resume its session on a new connection, which replaces one that may still be open."""
        row = self._books.ledger.sessions.get(event.session)
        if row is None or row.state not in ("open", "detached") or row.process != event.process:
            self._books.answer(event.call, deny(Reason.TOKEN_REJECTED))
            return
        if self._books.stopping:
            self._books.answer(event.call, deny(Reason.STOPPING))
            return
        if why := self._books.cannot_write:
            if self._unwritten[row.session] == MAX_UNWRITTEN_RESUMES:
                self._books.answer(event.call, deny(Reason.JOURNAL_FULL, driver_says=why))
                return
            self._unwritten[row.session] += 1
        else:
            self._unwritten.clear()
        self.give_up(row.session)
        self.detach(row, now)
        self._expected.add(row.session)
        self._books.answer(event.call, fx.SessionResumed(row.session, row.tenant, row.observer))

    def state_holds(self, event: ev.StateHolds, now: int) -> None:
        """Take what the process holds; reconcile now, or when the last of its packets is made."""
        if event.session not in self._expected:
            self._books.answer(event.call, deny(Reason.PROTOCOL_VIOLATION, what="it did not resume, and states Holds"))
            return
        self._expected.discard(event.session)
        self.stated[event.session] = event
        self.proceed(event.session, now)

    def proceed(self, session: int, now: int) -> None:
        """Reconcile a session that has stated its Holds, once none of its packets is being made."""
        if self._lending.making_of(session):
            return
        event = self.stated.pop(session)
        row = self._books.ledger.sessions[session]
        self._segments.give_up_seals(session)
        self._lending.forget(session, now)
        self._lending.begin(session)
        with self._books.recallable.guests_counted_once():
            gone = self._reconcile(row, event)
        self._books.record(ft.SessionMoved(session, "resumed", now))
        unknown_segments = [segment for segment in event.segments if segment not in row.segments]
        result = fx.Reconciled(
            tuple(sorted(event.extents - row.extents.keys())[:MAX_TOLD]),
            tuple(sorted(unknown_segments)[:MAX_TOLD]),
            tuple(sorted(row.models)[:MAX_MODELS_TOLD]),
        )
        self._answers[session] = fx.Answer(event.call, result)
        self.answer_ready()
        self._recalls.resumed(session, event.answering, event.guests, gone, now)

    def under_way(self, session: int) -> bool:
        """Say whether a resume is under way. Requests are refused then: their results would be missing in the Holds."""
        return session in self._expected or session in self.stated or session in self._answers

    def give_up(self, session: int) -> None:
        """Give up a resume that is under way: its connection is lost, too, or the session ends."""
        self._expected.discard(session)
        unanswered = self.stated.pop(session, None) or self._answers.pop(session, None)
        if unanswered is not None:
            self._books.answer(unanswered.call, deny(Reason.DELIVERY_FAILED))

    def answer_ready(self) -> None:
        """Answer the resumes of sessions that have no ending segments any more: their names can be used again."""
        if not self._answers:
            return
        segments = self._books.ledger.segments.values()
        ending = {row.writer for row in segments if row.state == "dropping" and not row.uncertain}
        for session in [session for session in self._answers if session not in ending]:
            self._books.emit(self._answers.pop(session))

    def _reconcile(self, row: SessionRow, event: ev.StateHolds) -> list[Loan]:
        """Credit what the process does not hold, and return it: extents, and what guests have declared.

        What it states beyond the books is ignored.
        """
        gone = tuple(sorted(row.extents.keys() - event.extents))
        loans = [row.extents[extent] for extent in gone]
        if gone:
            self._books.record(ft.Credited(row.session, gone, "not held"))
        for (name, location), charge in list(row.charges.items()):
            declared = max(0, event.declarations.get((name, location), 0))
            if declared < charge.declared:
                if Borrower(row.session, name, location) in self._books.recallable.guests:
                    loans.append(Loan(name, location, charge.declared - declared))
                self._books.record(ft.DeclarationSet(row.session, name, location, declared))
        for segment, times in list(row.segments.items()):
            held = max(0, event.segments.get(segment, 0))
            if held < times:
                self._segments.leave(row.session, segment, times - held, "not held")
        return loans

    # --- forgetting ---

    def forget(self, event: ev.ForgetSession, now: int) -> None:
        """Credit all that a detached session is charged, and end it."""
        denied = self._refuse_forget(event.session)
        if denied:
            self._books.answer(event.call, denied)
            return
        row = self._books.ledger.sessions[event.session]
        self.give_up(row.session)
        # Recorded first: if the journal ends here, a half-credited session must not resume.
        self._books.record(ft.SessionMoved(row.session, "forgotten", now))
        self.credit_all(row, "forgotten")
        self.end(row, now)
        self._books.answer(event.call, fx.Done())

    def _refuse_forget(self, session: int) -> Denied | None:
        row = self._books.ledger.sessions.get(session)
        if row is not None and row.state == "detached" and not self._lending.making_of(session):
            return None
        what = _NOT_FORGOTTEN[row.state] if row is not None else "is not known, or has ended"
        return deny(Reason.SESSION_NOT_DETACHED, session=f"sessions/{session:x}", what=what)

    # --- a new daemon ---

    def restarted(self, event: ev.Restarted, now: int) -> None:
        """Take over the books of an earlier daemon: no session is connected, and nothing is in flight.

        Its journal may end in the middle of a step. The rows say which facts of that step are missing.
        """
        ledger = self._books.ledger
        for session in ledger.sessions:
            self._lending.begin(session)
        for segment in list(ledger.segments.values()):
            self._take_over_segment(segment, lost=segment.segment in event.lost)
        for row in list(ledger.sessions.values()):
            self._take_over_session(row, now)
        self._recalls.restarted(now)
        for segment in list(ledger.segments.values()):
            self._segments.drop_if_left(segment)

    def _take_over_session(self, row: SessionRow, now: int) -> None:
        state = row.state
        self.detach(row, now)
        if state == "leaving":
            self.finish_leaving(row, now)
        elif state == "releasing":
            self._segments.leave_all(row, "holder died")
        elif state == "ended":
            self.credit_all(row, "forgotten")  # nothing is left, unless it was forgotten
            self.end(row, now)

    def _take_over_segment(self, row: SegmentRow, *, lost: bool) -> None:
        """Finish or undo what was under way; a segment whose descriptors are lost cannot be attached any more."""
        if row.state == "sealing":
            self._books.record(ft.SegmentMoved(row.segment, "not sealed"))
        if lost and row.state in policy.ATTACHABLE:
            self._books.record(ft.SegmentMoved(row.segment, "lost"))
        if row.state == "writing" and row.writer not in row.holders:
            self._books.record(ft.SegmentMoved(row.segment, "writer ended"))
        if row.state == "dropping":
            self._books.emit(fx.Drop(row.segment))
