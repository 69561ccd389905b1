"""Which lent bytes can be recalled: those in extents of a session that answers recalls of their model, and guests.

A guest is a borrower whose declaration can be recalled: all of it or nothing, with all else that it has. It is firm
while its slice lasts, while it keeps anything, and if its model or its tenant would fall below a guarantee without it.

Owns what each session answers for, the recall that it has not answered, what it keeps, the debts of tenants, the marks
of models, the guests, and the sums of all that. Must never ask for anything itself: `recalls` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from .denied import Denied, Reason, deny
from .ledger import Ledger
from .names import Location, ModelName
from .rows import SessionRow, TenantCharge
from .sums import add


class Borrower(NamedTuple):
    """One session, in its part of one model at one location."""

    session: int
    name: ModelName
    location: Location


@dataclass(slots=True)
class PendingRecall:
    """A question that a borrower has not answered. `left` of its `size` bytes are not released yet.

    The first notice asked for `first` bytes; raises have added the others. `wanted_by` is the model whose request
    lacked the first bytes; None: a limit was lowered. `is_guaranteed`: some were for a request within a guarantee. The
    answer is due at `deadline`, which a raise does not move. Once the recall is late, `deadline` is when to ask again.
    """

    number: int
    first: int
    size: int
    left: int
    since: int
    deadline: int
    wanted_by: ModelName | None
    is_guaranteed: bool = False
    late: bool = False


class Debt(NamedTuple):
    """What the sessions of a tenant have kept of one recall after the other: `size` bytes.

    The first of these recalls was due at `due`. A recall that is sent after `until` is for another debt.
    """

    due: int
    until: int
    size: int


class Mark(NamedTuple):
    """A model that did not release what it was asked for: how often in a row, and until when it is in force.

    The last time it kept `size` bytes. The mark belongs to the model, so a new session inherits it. It is
    remembered until a recall of the model brings as much, or the model ends.
    """

    times: int
    until: int
    size: int
    in_force: bool = True


@dataclass(slots=True)
class GuestSlice:
    """A borrower that can be recalled as a whole only. It declared something last at `used`.

    From its first declaration until `slice_until` it is not recalled; None: that is over.
    """

    used: int
    slice_until: int | None


class Counted(NamedTuple):
    """What one borrower adds to the sums: the bytes that can be recalled, and its recall."""

    size: int = 0
    left: int = 0
    late: bool = False
    wanted_by: ModelName | None = None
    is_urgent: bool = False
    """Whether the borrower does not put off what it is asked for: for a guarantee, or a guest, which never does."""


_NOTHING = Counted()
MOST_GUESTS, MOST_GUESTS_OF_A_TENANT = 256, 64
"""How many guests there are at a location, and how many a tenant has there. As many requests of guests wait.

A change of what a tenant has looks at all its guests, one of what is recalled at those of all tenants.
"""


class Recallable:
    """What can be recalled of one ledger.

    A tenant may have thousands of borrowers, so they are never added up for a question. Instead, `count` brings the
    sums up to date after each change of what a borrower has, is asked for or keeps.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._answering: dict[ModelName, set[int]] = {}
        """The sessions that answer recalls of each model. No entry is empty."""
        self.is_possible = False
        """Whether any session answers recalls."""
        self.recalls: dict[Borrower, PendingRecall] = {}
        self.away: dict[int, dict[Borrower, PendingRecall]] = {}
        """By session: recalls that are not late, while its connection is lost. Nothing is expected of them. No entry is
        empty."""
        self.kept: dict[Borrower, tuple[int, int]] = {}
        """What a borrower did not release when it answered: bytes, and until when it is not asked for them."""
        self.debts: dict[tuple[str, Location], Debt] = {}
        """By tenant. What is over is forgotten when another one begins."""
        self.marks: dict[tuple[ModelName, Location], Mark] = {}
        self.guests: dict[Borrower, GuestSlice] = {}
        """Those that are charged for anything."""
        self._counts_later = False
        """Whether `guests_counted_once` will count the guests."""
        self._charges: dict[tuple[str, Location], TenantCharge | None] = {}
        """What each tenant with guests was charged when they were counted last."""
        self.hold_without: Callable[[ModelName, Location, int, int], bool] = lambda *_: True
        """Says whether the guarantees of a model and its tenant hold if these lose so many bytes: `Admission`'s."""
        self.moved: set[Borrower] = set()
        """The borrowers that are asked since the last look, or not any more, or answer now, or have left the model."""
        self.revision = 0
        """Changes with everything that can change what is recallable, except debits and credits."""
        self._counted: dict[int, dict[Borrower, Counted]] = {}
        """By session: its borrowers that are in a sum, have a recall or keep something. No entry is empty."""
        self._bytes: Counter[object] = Counter()
        """What can be recalled: by model and location, by tenant and location, by location."""
        self._coming: Counter[object] = Counter()
        """What recalls that are not late will bring: by model and location, by tenant and location, by location."""
        self._coming_for: Counter[ModelName | None] = Counter()
        """The same by the model that wants it."""
        self._urgent: Counter[Location] = Counter()
        """The same by location, but only of urgent recalls."""
        self._late: Counter[tuple[ModelName, Location]] = Counter()
        """What late recalls have not brought: by model and location."""

    def changed(self) -> None:
        """Note that a recall, what is kept, or the state of a session has changed."""
        self.revision += 1
        self.count_guests()

    @contextmanager
    def guests_counted_once(self) -> Iterator[None]:
        """Count the guests when this ends, and not with each change before; inside another one, when that ends."""
        if self._counts_later:
            yield
            return
        self._counts_later = True
        try:
            yield
        finally:
            self._counts_later = False
            self.count_guests()

    # --- which sessions answer ---

    def set_answers(self, session: int, name: ModelName, answers: bool) -> None:
        """Note whether a session answers recalls of a model from now on."""
        sessions = self._answering.setdefault(name, set())
        if answers:
            sessions.add(session)
        else:
            sessions.discard(session)
        if not sessions:
            del self._answering[name]
        self.is_possible = bool(self._answering)
        for location in self._ledger.totals:
            self.count(Borrower(session, name, location))
            self.moved.add(Borrower(session, name, location))
        self.changed()

    def leave(self, session: int, name: ModelName) -> None:
        """Forget a session's part of a model: it has left the model, or ends."""
        if session in self._answering.get(name, ()):
            self.set_answers(session, name, answers=False)
        self.moved |= {Borrower(session, name, location) for location in self._ledger.totals}
        away = self.away.pop(session, {})
        if staying := {borrower: recall for borrower, recall in away.items() if borrower.name != name}:
            self.away[session] = staying
        for borrower in {*self.of_session(session), *self.guests_of(session)}:
            if borrower.name == name:
                self._forget(borrower)

    def session_moved(self, row: SessionRow) -> None:
        """Note that a session has lost its connection, is resumed, or ends."""
        with self.guests_counted_once():
            if row.state not in ("open", "detached"):
                for name in [name for name, sessions in self._answering.items() if row.session in sessions]:
                    self.set_answers(row.session, name, answers=False)
                self.away.pop(row.session, None)
                for borrower in {*self.of_session(row.session), *self.guests_of(row.session)}:
                    self._forget(borrower)
            elif self.is_possible:
                for borrower in {
                    *self.of_session(row.session),
                    *(Borrower(row.session, name, location) for name, location in row.charges),
                }:
                    self.count(borrower)
        self.revision += 1

    def _forget(self, borrower: Borrower) -> None:
        self.recalls.pop(borrower, None)
        self.kept.pop(borrower, None)
        self.guests.pop(borrower, None)
        self.count(borrower)

    def answers(self, session: int | None, name: ModelName) -> bool:
        """Say whether a session that is connected answers recalls of a model."""
        if session is None or session not in self._answering.get(name, ()):
            return False
        return self._ledger.sessions[session].state == "open"

    def is_trusted(self, session: int | None, name: ModelName, location: Location) -> bool:
        """Say whether what a session borrows now can be recalled: it answers, and no recall of it is late."""
        recall = self.recalls.get(Borrower(session, name, location)) if session is not None else None
        return self.answers(session, name) and not (recall is not None and recall.late)

    def answering(self) -> dict[ModelName, set[int]]:
        """Return the sessions that answer recalls of each model, or will when they are connected again: a copy."""
        return {name: set(sessions) for name, sessions in self._answering.items()}

    def model_ended(self, name: ModelName) -> None:
        """Forget the marks of a model: it has no memory and no session."""
        for location in self._ledger.totals:
            self.set_mark(name, location, None)

    def set_mark(self, name: ModelName, location: Location, mark: Mark | None) -> None:
        """Mark a model, or forget its mark."""
        self._ledger.touched.add((name, location))
        if mark is None:
            self.marks.pop((name, location), None)
        else:
            self.marks[name, location] = mark

    def bound_kept(self, session: int) -> None:
        """Let a session keep no more than it has."""
        for borrower in self._counted.get(session, ()):
            if borrower in self.kept:
                size, until = self.kept[borrower]
                self.kept[borrower] = min(size, self.extents_of(borrower)), until

    def credited(self, session: int) -> None:
        """Note that extents of a session were credited."""
        if session in self._counted:
            self.bound_kept(session)
            for borrower, counted in list(self._counted[session].items()):
                if borrower in self.kept or self.extents_of(borrower) != counted.size:
                    self.count(borrower)

    # --- guests ---

    def guests_of(self, session: int) -> list[Borrower]:
        """Return the guests of a session."""
        return [guest for guest in self.guests if guest.session == session]

    def idlest(self, location: Location, tenant: str | None = None) -> list[Borrower]:
        """Return the guests at a location, of all tenants or of one: the longest without a declaration first."""
        found = [
            (guest.used, borrower)
            for borrower, guest in self.guests.items()
            if borrower.location == location and tenant in (None, borrower.name.tenant)
        ]
        return [borrower for _, borrower in sorted(found)]

    def refuse_guest(self, tenant: str, location: Location) -> Denied | None:
        """Return why a tenant may not have one more guest at a location, or None."""
        return too_many([borrower.name.tenant for borrower in self.guests if borrower.location == location], tenant)

    def count_guests(self, *, all_again: bool = True) -> None:
        """Bring the sums up to date for the guests of all tenants; `all_again` False: of those whose charge changed.

        A guest without a charge ends.
        """
        if self._counts_later:
            return
        tenants: dict[tuple[str, Location], list[Borrower]] = {}
        for borrower in self.guests:
            tenants.setdefault((borrower.name.tenant, borrower.location), []).append(borrower)
        for key, own in tenants.items():
            charge = self._ledger.tenants.get(key)  # a new record with each change
            if not all_again and charge is self._charges.get(key):
                continue
            for borrower in own:
                if not self.extents_of(borrower):
                    del self.guests[borrower]
            can_go = self.that_can_go(key[1], key[0])
            for borrower in own:
                self.count(borrower, can_go)
        self._charges = {key: self._ledger.tenants.get(key) for key in tenants}

    def that_can_go(
        self,
        location: Location,
        tenant: str | None = None,
        *,
        wanted_by: str | None = None,
        after_slices: bool = False,
    ) -> set[Borrower]:
        """Return which guests, of all tenants or of one, can be asked for what they have.

        Those that are asked already go first, then the idlest, as long as the guarantees hold; for the tenant
        `wanted_by` its own, whatever is guaranteed to that. `after_slices`: as if all slices were over.
        """
        found, of_models, of_tenants = set[Borrower](), Counter[ModelName](), Counter[str]()
        for guest in sorted(self.idlest(location, tenant), key=lambda guest: guest not in self.recalls):
            name, owner = guest.name, guest.name.tenant
            is_over = after_slices or self.guests[guest].slice_until is None
            if not is_over or guest in self.kept:
                continue
            size = self.extents_of(guest)
            lost = 0 if wanted_by == owner else of_tenants[owner] + size
            if self.hold_without(name, location, of_models[name] + size, lost):
                of_models[name] += size
                of_tenants[owner] += size
                found.add(guest)
        return found

    def begins_turn(self, tenant: str, location: Location, now: int, slice_ns: int) -> bool:
        """Say whether a tenant's turn begins at most a quarter of a slice ago: more of its guests may join."""
        began = self._ledger.turns.get((tenant, location))
        return began is not None and now - began <= slice_ns // 4

    # --- the sums ---

    def of_session(self, session: int) -> list[Borrower]:
        """Return the borrowers of a session that have something to recall, a recall, or something that they keep."""
        return sorted(self._counted.get(session, ()))

    def count(self, borrower: Borrower, can_go: Collection[Borrower] | None = None) -> None:
        """Bring the sums up to date: what a borrower has, is asked for or keeps has changed, or whether it answers.

        `can_go` are the guests of its tenant that can be asked, if they are known.
        """
        if self._counts_later and borrower in self.guests:
            return
        counted = self._counted.setdefault(borrower.session, {})
        before, after = counted.pop(borrower, _NOTHING), self._count(borrower, can_go)
        if after != _NOTHING or borrower in self.recalls or borrower in self.kept:
            counted[borrower] = after
        elif not counted:
            del self._counted[borrower.session]
        if (before.left > 0, before.late) != (after.left > 0, after.late):
            self.moved.add(borrower)
        if before != after:
            self._sum(borrower, before, -1)
            self._sum(borrower, after, 1)

    def _count(self, borrower: Borrower, can_go: Collection[Borrower] | None) -> Counted:
        size = self.bytes_of(borrower, can_go) if self.answers(borrower.session, borrower.name) else 0
        recall = self.recalls.get(borrower)
        if recall is None:
            return Counted(size)
        is_urgent = recall.is_guaranteed or borrower in self.guests
        return Counted(size, recall.left, recall.late, recall.wanted_by, is_urgent)

    def _sum(self, borrower: Borrower, counted: Counted, sign: int) -> None:
        _, name, location = borrower
        self._ledger.touched.add((name, location))
        if counted.size:
            add(self._bytes, sign * counted.size, (name, location), (name.tenant, location), location)
        if counted.late:
            add(self._late, sign * counted.left, (name, location))
        elif counted.left:
            add(self._coming, sign * counted.left, (name, location), (name.tenant, location), location)
            add(self._coming_for, sign * counted.left, counted.wanted_by)
            if counted.is_urgent:
                add(self._urgent, sign * counted.left, location)

    # --- how much ---

    def extents_of(self, borrower: Borrower) -> int:
        """Return the bytes that a borrower has in extents; of a guest, all that it has."""
        charge = self._ledger.sessions[borrower.session].charges.get((borrower.name, borrower.location))
        if charge is None:
            return 0
        return charge.bytes if borrower in self.guests else charge.bytes - charge.declared

    def charged(self, borrower: Borrower) -> bool:
        """Say whether a borrower is charged for anything."""
        return (borrower.name, borrower.location) in self._ledger.sessions[borrower.session].charges

    def borrowers(self, name: ModelName, location: Location) -> Iterator[Borrower]:
        """Yield the sessions that answer recalls of a model."""
        for session in self._answering.get(name, ()):
            if self._ledger.sessions[session].state == "open":
                yield Borrower(session, name, location)

    def bytes_of(self, borrower: Borrower, can_go: Collection[Borrower] | None = None) -> int:
        """Return the bytes that a borrower can be asked for: its extents, without what it keeps; 0 if it is late.

        `can_go` are the guests of its tenant that can be asked, if they are known.
        """
        recall = self.recalls.get(borrower)
        if recall is not None and recall.late:
            return 0
        if borrower in self.guests:
            if not self.answers(*borrower[:2]):
                return 0
            if can_go is None:
                can_go = self.that_can_go(borrower.location, borrower.name.tenant)
            if borrower not in can_go:
                return 0
        return max(0, self.extents_of(borrower) - self.kept.get(borrower, (0, 0))[0])

    def more_of(self, borrower: Borrower, now: int, can_go: Collection[Borrower] | None = None) -> int:
        """Return the bytes that a borrower can be asked for now, besides what it has been asked for already.

        A recall is raised only in the first half of its time, so that the other half is left for what a raise adds.
        """
        recall = self.recalls.get(borrower)
        if recall is None:
            return self.bytes_of(borrower, can_go)
        if borrower in self.guests:  # it has been asked for everything
            return 0
        is_early = now - recall.since <= recall.deadline - now
        return max(0, self.bytes_of(borrower) - recall.left) if is_early else 0

    def in_pieces(self, name: ModelName, location: Location, now: int) -> int:
        """Return the bytes that the sessions of a model can be asked for now in pieces: without its guests."""
        found = [
            self.more_of(borrower, now) for borrower in self.borrowers(name, location) if borrower not in self.guests
        ]
        return sum(found)

    def is_able(
        self, name: ModelName, location: Location, now: int, can_go: Collection[Borrower] | None = None
    ) -> bool:
        """Say whether a session of a model can be asked for something now."""
        return any(self.more_of(borrower, now, can_go) for borrower in self.borrowers(name, location))

    def models(self, location: Location) -> list[ModelName]:
        """Return the models of which something can be recalled."""
        return [name for name in self._answering if (name, location) in self._bytes]

    def of_model(self, name: ModelName, location: Location) -> int:
        """Return the bytes of a model that can be recalled."""
        return self._bytes.get((name, location), 0)

    def of_tenant(self, tenant: str, location: Location) -> int:
        """Return the bytes of a tenant's models that can be recalled."""
        return self._bytes.get((tenant, location), 0)

    def total(self, location: Location) -> int:
        """Return the bytes at a location that can be recalled."""
        return self._bytes.get(location, 0)

    def asked_of(self, session: int, name: ModelName, location: Location) -> int:
        """Return the bytes that a session is asked for, and has neither released nor refused in an answer."""
        recall = self.recalls.get(Borrower(session, name, location))
        return recall.left if recall is not None else 0

    def is_marked(self, name: ModelName, location: Location) -> bool:
        """Say whether a session of a model owes bytes after the deadline of a recall, or lately kept all of them."""
        if (name, location) in self._late:
            return True
        mark = self.marks.get((name, location))
        return mark is not None and mark.in_force

    def keeping(self, location: Location) -> set[str]:
        """Return the tenants of which a session keeps bytes that it was asked for."""
        return {borrower.name.tenant for borrower in self.kept if borrower.location == location}

    def keepers(self, location: Location) -> set[ModelName]:
        """Return the models of all tenants of which one is marked: they do not release what they are asked for."""
        marked = {name for name, where in (*self.marks, *self._late) if where == location}
        tenants = {name.tenant for name in marked if self.is_marked(name, location)}
        return {name for name in self._ledger.models if name.tenant in tenants} if tenants else set()

    def asked_of_model(self, name: ModelName, location: Location, *, late: bool = False) -> int:
        """Return what the sessions of a model are asked for and have not released: by recalls in time, or `late`."""
        return self._late.get((name, location), 0) if late else self._coming.get((name, location), 0)

    def owed(self, name: ModelName, location: Location) -> int:
        """Return what the sessions of a model did not release in time, and what they keep while it is marked."""
        mark, coming = self.marks.get((name, location)), self.asked_of_model(name, location)
        kept = mark.size if mark is not None and (mark.in_force or coming) else 0
        return self.asked_of_model(name, location, late=True) + kept

    def asked_of_tenant(self, tenant: str, location: Location) -> int:
        """Return what the sessions of a tenant are asked for by recalls in time, and have not released."""
        return self._coming.get((tenant, location), 0)

    def coming(self, location: Location) -> int:
        """Return what the recalls at a location that are not late will bring."""
        return self._coming.get(location, 0)

    def urgent(self, location: Location) -> int:
        """Return what the urgent ones of these recalls will bring."""
        return self._urgent.get(location, 0)

    def is_coming_for(self, name: ModelName) -> bool:
        """Say whether a recall that is not late will bring something that a model wants."""
        return name in self._coming_for


def too_many(owners: Sequence[str], tenant: str) -> Denied | None:
    """Return why a tenant may not have one more guest, or one more that waits, besides those of these tenants."""
    if owners.count(tenant) >= MOST_GUESTS_OF_A_TENANT:
        return deny(Reason.TOO_MANY_REQUESTS, limit=MOST_GUESTS_OF_A_TENANT, whose="tenant", calls="guests")
    if len(owners) >= MOST_GUESTS:
        return deny(Reason.TOO_MANY_REQUESTS, limit=MOST_GUESTS, whose="broker", calls="guests")
    return None
