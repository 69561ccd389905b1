"""Sessions: how a process's conversation with the broker is opened, loses its connection, and ends.

Owns the moves of a session whose process is alive, and the credit of all that a session is charged. A session that is
taken up again is in `resuming`, one whose process has died in `settling`.
"""

from __future__ import annotations

from . import effects as fx
from . import events as ev
from . import facts as ft
from .books import Books
from .denied import Denied, Reason, deny
from .lending import Lending
from .recalls import Recalls
from .rows import SessionRow
from .segments import Segments


class Sessions:
    """The beginning and the end of every session."""

    def __init__(self, books: Books, recalls: Recalls, lending: Lending, segments: Segments) -> None:
        self._books = books
        self._recalls = recalls
        self._lending = lending
        self._segments = segments

    def open(self, event: ev.OpenSession, now: int) -> None:
        """Begin a session, unless a bound on the number of sessions is reached."""
        denied = self._refuse_session(event)
        if denied:
            self._books.answer(event.call, denied)
            return
        session = self._books.take_ids(1)[0]
        self._books.record(
            ft.SessionBegan(
                session,
                event.tenant,
                event.pid,
                event.uid,
                event.process,
                event.observer,
                event.client,
                now,
                event.endpoint,
                event.token_hash,
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

    def detach(self, row: SessionRow, now: int) -> None:
        """Note that the session has lost its connection, and give up what is in flight to it."""
        if row.state in ("open", "leaving"):
            self._books.record(ft.SessionMoved(row.session, "connection lost", now))
            self._lending.give_up(row, now)
            self._recalls.detached(row.session)
            self._segments.give_up(row.session)

    def goodbye(self, event: ev.Goodbye, now: int) -> None:
        """Take a process's word that it has unmapped everything; the session ends when no packet is being made."""
        row = self._books.ledger.sessions[event.session]
        if row.state != "open":
            self._books.answer(event.call, deny(Reason.TOKEN_REJECTED))
            return
        self._books.record(ft.SessionMoved(row.session, "goodbye", now))
        self._books.answer(event.call, fx.Done())
        self._lending.give_up(row, now)
        self._segments.give_up(row.session)
        self._segments.writer_leaves(row)
        self.finish_leaving(row, now)

    def finish_leaving(self, row: SessionRow, now: int) -> None:
        """End a session that said Goodbye, once none of its packets is being made."""
        if row.state != "leaving" or self._lending.making_of(row.session):
            return
        self.credit_all(row, "goodbye")
        self._books.record(ft.SessionMoved(row.session, "last packet", now))
        self.end(row, now)

    def credit_all(self, row: SessionRow, cause: str) -> None:
        """Credit all that a session is charged, by its process's or an operator's word; let it leave its segments."""
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
