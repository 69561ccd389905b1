"""Recalls: the broker asks a session for memory, and the session releases it, or says that it keeps the rest.

A session that does not answer in time is late: what it has cannot be recalled any more, and it borrows nothing above
its model's guarantee. An answer ends that, however late it comes. Until then the session is asked again and again. A
lost connection is not an answer: the deadline stays. What is left after an answer is kept, and not asked for again for
two seconds; what else the session has is asked for at once. An answer without a byte keeps all that the session has,
and marks the model: it is asked after all others, and none of its sessions borrows above the model's guarantee. That
lasts two seconds, and twice as long each further time: what is answered while it lasts counts once.

To release a little for each recall is late, too. What a tenant keeps of one recall after the other is its debt, due
when the first of them was. From then on an answer that keeps anything marks the model. The debt ends when recalls that
were returned have brought as much, or if it is not asked for within two seconds after it can be. It is the tenant's:
else it would have as much time again for each of its models.

A session has one open recall of a model and location. If more is wanted of it, the recall is raised: the notice comes
again with the same number and a larger size. The deadline stays, so that no raise puts off an answer for which an
earlier request waits; so a recall is raised in the first half of its time only, and never when it is late. The answer
names the largest size that the session knew. What was added since is taken back: a session keeps only what it has heard
of. It comes again with the same size, at any time before it is late, if a request within a guarantee begins to wait for
what it will bring.

A guest is asked for all that it has, in one recall that is never raised. It has a second more for each GiB, because its
memory is copied to the host meanwhile.

The journal has the slices of guests and the turns of tenants, and nothing else of this: each session that resumes says
which recalls it answers, and is firm until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from . import effects as fx
from . import events as ev
from . import facts as ft
from .books import Books
from .deadlines import Deadlines
from .names import Location, ModelName
from .recallable import Borrower, Debt, GuestSlice, Mark, PendingRecall
from .rows import Loan

KEPT_NS = 2_000_000_000
"""How long a borrower is not asked again for what it has kept."""
MOST_DOUBLINGS = 6
"""A mark lasts at most 2 s times 2 to this power. What was kept longer ago than that is forgotten."""
GUEST_NS_PER_GIB = 1_000_000_000
"""How much longer a guest has to answer for each GiB. An H100 takes about half of it."""
MOST_AT_ONCE = 256
"""How many sessions are asked in one step, and how many recalls end. The others follow in the next step, at once."""


def doubled(times: int) -> int:
    """Return how long something counts against a model or a tenant, in nanoseconds, if it was so often in a row."""
    return KEPT_NS << min(times - 1, MOST_DOUBLINGS)


class Recalls:
    """The questions to all sessions."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._state = books.recallable
        self.ends: Deadlines[Borrower] = Deadlines(self._is_end)
        """When a recall becomes late or is repeated, when what is kept can be asked for again, and when a slice or a
        mark ends."""
        self.deadline: int | None = None
        """When `elapsed` has something to do, in nanoseconds."""
        self.room = MOST_AT_ONCE
        """How many sessions may still be asked in this step. At 0, some may be left over for the next one."""

    def ask(
        self,
        name: ModelName,
        location: Location,
        size: int,
        now: int,
        wanted_by: ModelName | None = None,
        *,
        is_guaranteed: bool = False,
    ) -> int:
        """Ask the sessions of a model for `size` bytes, those with the most first. Return how many are asked for.

        A session has one recall at a time: one that has an open recall is asked by raising that. Guests are not asked.
        """
        state, left = self._state, size
        for more, borrower in sorted(
            (-state.more_of(borrower, now), borrower)
            for borrower in state.borrowers(name, location)
            if borrower not in state.guests
        ):
            part = min(left, -more)
            if part <= 0 or not self.room:
                break
            self._ask(borrower, part, now, self._books.rules.recall_ns, wanted_by, is_guaranteed=is_guaranteed)
            left -= part
        if left < size:
            self._set_deadline()
        return size - left

    def ask_guests(
        self,
        borrowers: Collection[Borrower],
        now: int,
        wanted_by: ModelName | None = None,
        *,
        is_guaranteed: bool = False,
    ) -> int:
        """Ask guests for all that they have. Return how much that is of those that this step may still ask."""
        asked = 0
        if borrowers:
            with self._state.guests_counted_once():
                for borrower in itertools.islice(borrowers, self.room):
                    size = self._state.extents_of(borrower)
                    within = self._books.rules.recall_ns + (size * GUEST_NS_PER_GIB >> 30)
                    self._ask(borrower, size, now, within, wanted_by, is_guaranteed=is_guaranteed)
                    asked += size
            self._set_deadline()
        return asked

    def _ask(
        self,
        borrower: Borrower,
        part: int,
        now: int,
        within: int,
        wanted_by: ModelName | None,
        *,
        is_guaranteed: bool,
    ) -> None:
        """Open a recall of a borrower, to be answered within so many nanoseconds, or raise the one that is open."""
        state = self._state
        self.room -= 1
        recall = state.recalls.get(borrower)
        if recall is None:
            number, deadline = self._books.take_ids(1)[0], now + within
            state.recalls[borrower] = recall = PendingRecall(
                number=number, first=part, size=part, left=part, since=now, deadline=deadline, wanted_by=wanted_by
            )
            self.ends.add(deadline, borrower)
        else:
            recall.size += part
            recall.left += part
        recall.is_guaranteed |= is_guaranteed
        state.count(borrower)
        self._say(borrower, recall, recall.size, recall.deadline - now)

    def make_urgent(self, location: Location, size: int, now: int) -> None:
        """Say of open recalls that requests within guarantees wait for them, until `size` bytes come of urgent ones.

        A recall is sent again as for a raise, with the size that it has.
        """
        state = self._state
        if min(size, state.coming(location)) <= state.urgent(location):
            return
        for borrower, recall in state.recalls.items():
            if not self.room or state.urgent(location) >= size:
                break
            is_patient = not (recall.late or recall.is_guaranteed or borrower in state.guests)
            if borrower.location == location and is_patient and recall.left:
                self.room -= 1
                recall.is_guaranteed = True
                state.count(borrower)
                self._say(borrower, recall, recall.size, recall.deadline - now)

    def is_on_its_way(self, location: Location) -> bool:
        """Say whether a recall will bring bytes, or this step has asked as many sessions as one step may."""
        return self._state.coming(location) > 0 or not self.room

    def not_asked(self, name: ModelName, location: Location) -> int:
        """Return the bytes that a model is charged and not asked for."""
        return self._books.admission.lent(name, location) - self._state.asked_of_model(name, location)

    def _say(self, borrower: Borrower, recall: PendingRecall, size: int, within: int) -> None:
        self._books.emit(
            fx.SendRecall(
                session=borrower.session,
                recall=recall.number,
                name=borrower.name,
                location=borrower.location,
                size=size,
                within_ns=within,
                is_guaranteed=recall.is_guaranteed,
            )
        )

    def _set_deadline(self) -> None:
        first = self.ends.first()
        self.deadline = first[0] if first is not None else None
        self._state.changed()

    def _is_end(self, at: int, borrower: Borrower) -> bool:
        """Say whether a borrower's recall is due, or its time to keep bytes ends, at exactly this time."""
        state = self._state
        guest = state.guests.get(borrower)
        recall = state.recalls.get(borrower) or state.away.get(borrower.session, {}).get(borrower)
        mark = state.marks.get((borrower.name, borrower.location))
        return (
            (recall is not None and recall.deadline == at)
            or state.kept.get(borrower, (0, 0))[1] == at
            or (guest is not None and guest.slice_until == at)
            or (mark is not None and mark.in_force and mark.until == at)
        )

    # --- what comes back ---

    def released(self, session: int, loans: Iterable[Loan], now: int) -> None:
        """Count extents that a session has released. A recall ends with its last byte, unless it is late."""
        recalls, changed = self._state.recalls, dict[Borrower, None]()
        for loan in loans:
            borrower = Borrower(session, loan.name, loan.location)
            recall = recalls.get(borrower)
            if recall is not None:
                changed[borrower] = None
                recall.left = max(0, recall.left - loan.extent_bytes)
                if not recall.left and not recall.late:
                    del recalls[borrower]
                    self._forgive(borrower, recall.size)
                    self._report(borrower, recall, "returned", now)
        for borrower in changed:
            self._state.count(borrower)
        self._set_deadline()

    def answer(self, event: ev.AnswerRecall, now: int) -> None:
        """End a recall: what was not released of it is kept. If no such recall is open, the answer is to an older one.

        A raise that the session had not heard of when it answered is taken back: the session did not say that it keeps
        those bytes.
        """
        recalls = self._state.recalls
        for borrower in self._state.of_session(event.session):
            if borrower in recalls and recalls[borrower].number == event.recall:
                recall = recalls.pop(borrower)
                break
        else:
            return
        if (unheard := recall.size - max(recall.first, event.size)) > 0:
            recall.size -= unheard
            recall.left = max(0, recall.left - unheard)
            self._books.limits_changed = True  # some of it may have been for a limit
        result: fx.RecallResult = "returned"
        if not recall.left:
            self._forgive(borrower, recall.size)
        else:
            before, _ = self._state.kept.get(borrower, (0, 0))
            is_overdue, result = self._owe(borrower, recall, now), "kept"
            if recall.left == recall.size:
                size, until = self._state.extents_of(borrower), self._mark(borrower, recall.left, now)
            else:
                size, until = before + recall.left, now + KEPT_NS
                if is_overdue:
                    self.ends.add(self._mark(borrower, recall.left, now), borrower)
                    result = "late"
            self._state.kept[borrower] = size, until
            self.ends.add(until, borrower)
            self._state.bound_kept(event.session)
        self._state.count(borrower)
        if not recall.late:
            self._report(borrower, recall, result, now)
        self._set_deadline()

    def _owe(self, borrower: Borrower, recall: PendingRecall, now: int) -> bool:
        """Add what a borrower keeps to its tenant's debt. Say whether the debt's first recall was due before."""
        debts, key = self._state.debts, (borrower.name.tenant, borrower.location)
        before = debts.get(key)
        if before is None or before.until < recall.since:
            before = Debt(recall.deadline, 0, 0)
            # Tenants come and go: what is over is forgotten.
            self._state.debts = debts = {other: debt for other, debt in debts.items() if debt.until >= now}
        debts[key] = Debt(before.due, now + 2 * KEPT_NS, before.size + recall.left)
        return before.due < now

    def _forgive(self, borrower: Borrower, size: int) -> None:
        """Count a recall that was returned: a debt or a mark ends that is not more than that."""
        debts, key = self._state.debts, (borrower.name.tenant, borrower.location)
        if key in debts:
            debts[key] = debts[key]._replace(size=debts[key].size - size)
            if debts[key].size <= 0:
                del debts[key]
        mark = self._state.marks.get((borrower.name, borrower.location))
        if mark is not None and size >= mark.size:
            self._state.set_mark(borrower.name, borrower.location, None)

    def _mark(self, borrower: Borrower, size: int, now: int) -> int:
        """Mark the model of a borrower that did not release what it owes. Return until when the mark is in force."""
        key = borrower.name, borrower.location
        before = self._state.marks.get(key)
        if before is not None and before.in_force:  # all answers while it is in force count once
            self._state.set_mark(*key, before._replace(size=max(size, before.size)))
            return before.until
        times = before.times + 1 if before is not None and now - before.until <= doubled(MOST_DOUBLINGS + 1) else 1
        until = now + doubled(times)
        self._state.set_mark(*key, Mark(times, until, size))
        return until

    def elapsed(self, now: int) -> None:
        """Note which recalls are late, ask those sessions again, and end what is kept: a portion of what is due."""
        if self.deadline is None or self.deadline > now:
            return
        with self._state.guests_counted_once():
            for _ in range(MOST_AT_ONCE):
                borrower = self.ends.take(now)
                if borrower is None:
                    break
                self._end(borrower, now)
        self._set_deadline()

    def _end(self, borrower: Borrower, now: int) -> None:
        """Do what is due for a borrower, if anything is."""
        state, away = self._state, self._state.away.get(borrower.session, {})
        if borrower in away and away[borrower].deadline <= now:
            state.recalls[borrower] = away.pop(borrower)
            if not away:
                del state.away[borrower.session]
        if borrower in state.kept and state.kept[borrower][1] <= now:
            del state.kept[borrower]
            self._books.limits_changed = True
        guest = state.guests.get(borrower)
        if guest is not None and guest.slice_until is not None and guest.slice_until <= now:
            guest.slice_until = None
            self._books.limits_changed = True
        key = borrower.name, borrower.location
        if key in state.marks and state.marks[key].until <= now:
            state.set_mark(*key, state.marks[key]._replace(in_force=False))
        if borrower in state.recalls and state.recalls[borrower].deadline <= now:
            recall = state.recalls[borrower]
            if not recall.late:
                self._report(borrower, recall, "late", now)
            recall.late, recall.deadline = True, now + self._books.rules.recall_ns
            self.ends.add(recall.deadline, borrower)
            self._say(borrower, recall, recall.left, self._books.rules.recall_ns)
        state.count(borrower)

    def _report(self, borrower: Borrower, recall: PendingRecall, result: fx.RecallResult, now: int) -> None:
        returned = recall.size - recall.left
        self._books.emit(
            fx.Recalled(
                session=borrower.session,
                name=borrower.name,
                location=borrower.location,
                size=recall.size,
                returned=returned,
                after_ns=now - recall.since,
                result=result,
                wanted_by=recall.wanted_by,
            )
        )

    # --- sessions ---

    def declared(self, borrower: Borrower, less: int, now: int, *, recallable: bool) -> None:
        """Note that a session has declared something, and so is a guest or is not. It was `less` bytes more before.

        A guest begins its slice when it is charged for the first time, or again.
        """
        state, before, slice_ns = self._state, self._state.guests.get(borrower), self._books.rules.slice_ns
        if not recallable or not state.charged(borrower):
            self._guest_no_more(borrower)
        elif before is not None:
            before.used = now
            times = self._books.ledger.sessions[borrower.session].guests[borrower.name, borrower.location]
            self._set_guest(borrower, now, times.slice_until)
        else:
            tenant, location = borrower.name.tenant, borrower.location
            if not state.begins_turn(tenant, location, now, slice_ns):
                self._books.record(ft.TurnBegan(tenant, location, now))
            self._set_guest(borrower, now, now + slice_ns)
            self._know_guest(borrower, now)
        state.bound_kept(borrower.session)
        state.count(borrower)
        state.count_guests()
        if less > 0:
            self.released(borrower.session, [Loan(borrower.name, borrower.location, less)], now)
        self._set_deadline()

    def _set_guest(self, borrower: Borrower, used_at: int | None, slice_until: int) -> None:
        """Record what the next daemon must know of a guest."""
        session, name, location = borrower
        self._books.record(
            ft.GuestSet(session=session, name=name, location=location, used_at=used_at, slice_until=slice_until)
        )

    def _know_guest(self, borrower: Borrower, now: int) -> None:
        """Treat a borrower as the guest that it is in the ledger."""
        times = self._books.ledger.sessions[borrower.session].guests[borrower.name, borrower.location]
        until = times.slice_until if times.slice_until > now else None
        self._state.guests[borrower] = GuestSlice(times.used_at, until)
        if until is not None:
            self.ends.add(until, borrower)

    def _guest_no_more(self, borrower: Borrower) -> None:
        self._state.guests.pop(borrower, None)
        if (borrower.name, borrower.location) in self._books.ledger.sessions[borrower.session].guests:
            self._set_guest(borrower, None, 0)

    def restarted(self, now: int) -> None:
        """Know the guests of an earlier daemon, with what is left of their slices.

        They have yet to resume, but for those of a replay. One that there is no room for is firm.
        """
        for row in self._books.ledger.sessions.values():
            if row.state in ("detached", "open"):
                for name, location in row.guests:
                    if not self._state.refuse_guest(name.tenant, location):
                        self._know_guest(Borrower(row.session, name, location), now)
        self._set_deadline()

    def set_answers(self, session: int, name: ModelName, answers: bool, now: int) -> None:
        """Note whether a session answers recalls of a model. If it stops, it keeps all that it is asked for."""
        if not answers:
            for borrower in self._state.of_session(session):
                recall = self._state.recalls.get(borrower)
                if recall is not None and borrower.name == name:
                    self.answer(ev.AnswerRecall(session, recall.number, recall.size), now)
        self._state.set_answers(session, name, answers)

    def detached(self, session: int) -> None:
        """Put aside the recalls of a session that has lost its connection, except those that are late."""
        recalls = self._state.recalls
        with self._state.guests_counted_once():
            for borrower in self._state.of_session(session):
                if borrower in recalls and not recalls[borrower].late:
                    self._state.away.setdefault(session, {})[borrower] = recalls.pop(borrower)
                    self._state.count(borrower)
        self._set_deadline()

    def resumed(
        self,
        session: int,
        answering: frozenset[ModelName],
        guests: Collection[tuple[ModelName, Location]],
        gone: Iterable[Loan],
        now: int,
    ) -> None:
        """Note for which models a resumed session answers, and ask it again for what it owes. It has released `gone`.

        A recall that is not late keeps its deadline, so reconnecting does not save a session from being late. If it no
        longer answers for a model, or is no guest any more, it keeps what it is asked for. One that is a guest by its
        own word alone has no slice. One that there is no room for is firm.
        """
        state = self._state
        before = set(state.guests)
        back = state.away.pop(session, {})
        with state.guests_counted_once():
            state.recalls |= back
            for borrower in back:
                state.count(borrower)
            self.released(session, gone, now)
            for name, location in self._books.ledger.sessions[session].charges:
                borrower = Borrower(session, name, location)
                if (name, location) not in guests:
                    self._guest_no_more(borrower)
                elif borrower not in state.guests and not state.refuse_guest(name.tenant, location):
                    self._set_guest(borrower, now, now)
                    self._know_guest(borrower, now)
                state.count(borrower)
            for name in self._books.ledger.sessions[session].models:
                state.set_answers(session, name, name in answering)
        for borrower in state.of_session(session):
            recall = state.recalls.get(borrower)
            if recall is None:
                continue
            if recall.late:
                self._say(borrower, recall, recall.left, self._books.rules.recall_ns)
                continue
            recall.first = recall.size = recall.left  # the notice that it hears now is its first
            if borrower.name in answering and (borrower in state.guests or borrower not in before):
                self._say(borrower, recall, recall.left, max(0, recall.deadline - now))
            else:
                self.answer(ev.AnswerRecall(session, recall.number, recall.size), now)
