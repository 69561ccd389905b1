"""Requests that wait for room: those that said how long they wait, and those that are about to be refused.

A release has no answer, so a worker can tell another that memory is free before the daemon has read the release. A
request that does not wait and has no room is therefore deferred: the daemon reads everything that had been sent until
then, and the request is decided once more, for good.

A request that waits is granted as soon as there is room for it. Of those that fit, one within its model's guarantee
goes first, then one within its model's share, then the others, in the order of their arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import effects as fx
from . import events as ev
from . import policy
from .books import Books
from .denied import Denied, Reason, deny
from .shares import Shares

Debit = ev.Allocate | ev.Declare | ev.CreateSegment
MOST_AT_ONCE = 16
"""How many requests are granted or time out in one step. The others follow in the next: see `deadline`."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits. `deadline` None: until the inputs that were pending are read."""

    event: Debit
    name: ev.ModelName
    size: int
    since: int
    deadline: int | None
    guaranteed: bool


class Waiting:
    """The requests that wait, in the order of their arrival."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._waiters: dict[int, Waiter] = {}
        """By call."""
        self.sessions: Counter[int] = Counter()
        """How many requests of a session wait. Sessions without any have no entry."""
        self._timed: Counter[ev.Location] = Counter()
        """How many of them have a deadline at a location. A location without any has no entry."""
        self._sums: dict[tuple[ev.ModelName, ev.Location], tuple[int, int]] = {}
        """The bytes that requests with a deadline want, and how many these are. No entry is zero."""
        self._deciding: Waiter | None = None
        """The request that is decided for good."""
        self._recorded = 0
        """How many facts there were before it."""
        self._divided: dict[ev.Location, dict[ev.ModelName, int]] = {}
        """The shares that hold for all of a step's grants: what was waited for is lent then, and wanted as before."""
        self.busy = False
        """Whether `next` has something to do: a request waits with a deadline, or one is decided."""
        self._looked_at: object = None
        """The state of the books when nobody's turn had come."""
        self.deferred: list[int] = []
        """The requests of this step that wait for the inputs. `drain` asks for these."""
        self.deadline: int | None = None
        """When the first wait ends, in nanoseconds."""
        self.left_over = False
        """Whether a step ended before every request had its turn: the next one should follow at once."""
        self._turns = 0

    def has(self, session: int, request_id: int) -> bool:
        """Say whether a request with this id waits."""
        return any(
            one.event.session == session and one.event.request_id == request_id for one in self._waiters.values()
        )

    # --- a request comes ---

    def is_behind(self, event: Debit) -> bool:
        """Say whether a request must wait for its turn: others wait at its location."""
        return event.location in self._timed and not self._is_final(event)

    def refuse(self, event: Debit, denied: Denied | None, name: ev.ModelName, size: int, now: int) -> None:
        """Let a request wait for room, or refuse it. `denied` None: it has room, and waits for its turn."""
        if denied is not None and (denied.reason not in policy.WANTS_OF_ROOM or self._is_final(event)):
            self._refuse(event, denied, name, now)
            return
        limited = denied is not None and denied.reason is not Reason.CAPACITY
        guaranteed = self._books.admission.is_guaranteed(name, event.location, size)
        hopeless = limited or size > self._books.rules.capacities[event.location]
        wait = 0 if hopeless else self._wait_ns(event, guaranteed)
        full = self._refuse_one_more(event, name, wait)
        if full is not None:
            self._refuse(event, full if wait or denied is None else denied, name, now)
            return
        self._add(Waiter(event, name, size, now, now + wait if wait else None, guaranteed))
        if not wait:
            self.deferred.append(event.call)

    def _is_final(self, event: Debit) -> bool:
        return self._deciding is not None and self._deciding.event is event

    def _refuse(self, event: Debit, denied: Denied, name: ev.ModelName, now: int) -> None:
        numbers = dict(denied.numbers)
        if denied.reason is Reason.CAPACITY:
            numbers["share_bytes"], numbers["obtainable_bytes"] = self.share(name, event.location)
        waiter = self._deciding
        if waiter is not None and waiter.event is event and waiter.deadline is not None:
            numbers["waited_ms"] = (now - waiter.since) // 1_000_000
        self._books.refuse(event.call, Denied(denied.reason, numbers), event.session, name)

    def _wait_ns(self, event: Debit, guaranteed: bool) -> int:
        """Return how long a request waits for room: as it says; else by the rules, if it is guaranteed."""
        if isinstance(event, ev.Declare):
            return 0
        if event.wait_ns is not None:
            return event.wait_ns
        return self._books.rules.guarantee_wait_ns if guaranteed else 0

    def _refuse_one_more(self, event: Debit, name: ev.ModelName, wait: int) -> Denied | None:
        """Return why no more requests of the session, or of the tenant, may wait."""
        rules = self._books.rules
        if self.sessions.get(event.session, 0) >= rules.max_calls_per_session:
            return deny(Reason.TOO_MANY_REQUESTS, limit=rules.max_calls_per_session)
        limit = rules.max_waiting_per_tenant
        waiting = sum(count for (own, _), (_, count) in self._sums.items() if own.tenant == name.tenant)
        if wait and waiting >= limit:
            return deny(Reason.TOO_MANY_REQUESTS, limit=limit, whose="tenant", calls="requests that wait for memory")
        return None

    def drain(self) -> None:
        """Let the inputs be read for the requests that wait for that, unless they were granted meanwhile."""
        for call in self.deferred:
            if call in self._waiters:
                self._books.emit(fx.DrainInputs(call))
        self.deferred.clear()

    # --- a wait ends ---

    def take(self, call: int) -> Debit | None:
        """Return a request that is decided for good now; None if it was decided before. `next` follows."""
        waiter = self._waiters.get(call)
        if waiter is None:
            return None
        self._remove(waiter)
        self._deciding, self._recorded, self.busy = waiter, self._books.recorded, True
        return waiter.event

    def take_older(self, event: ev.Declare) -> Iterator[ev.Declare]:
        """Yield the deferred declarations that `event` replaces: each must be decided before the newer one."""
        what, before = (event.session, event.name, event.location), self._deciding
        for one in list(self._waiters.values()):
            older = one.event
            if isinstance(older, ev.Declare) and (older.session, older.name, older.location) == what:
                self._remove(one)
                self._deciding = one
                yield older
        self._deciding = before

    def give_up(self, session: int, now: int) -> None:
        """Answer all requests of a session that wait: its connection is lost, or it has ended."""
        if session in self.sessions:
            for waiter in [one for one in self._waiters.values() if one.event.session == session]:
                self._end(waiter, now)

    def cancel(self, event: ev.CancelWait, now: int) -> None:
        """End the wait of a call, if it waits."""
        waiter = self._waiters.get(event.call)
        if waiter is not None:
            self._end(waiter, now)

    def _end(self, waiter: Waiter, now: int) -> None:
        self._remove(waiter)
        self._books.answer(waiter.event.call, deny(Reason.DELIVERY_FAILED))
        self._report(waiter, "cancelled", now)

    def _report(self, waiter: Waiter, result: fx.WaitResult, now: int) -> None:
        event, waited = waiter.event, now - waiter.since
        if waiter.deadline is not None and (waited or result != "granted"):  # its turn may have come at once
            told = waiter.name, event.location, waiter.size, waited, result, waiter.guaranteed
            self._books.emit(fx.Waited(event.call, *told))

    def _add(self, waiter: Waiter) -> None:
        self._looked_at = None
        self._waiters[waiter.event.call] = waiter
        self.sessions[waiter.event.session] += 1
        if waiter.deadline is not None:
            self.busy = True
            self._timed[waiter.event.location] += 1
            self._count(waiter, 1)
            self.deadline = waiter.deadline if self.deadline is None else min(self.deadline, waiter.deadline)

    def _remove(self, waiter: Waiter) -> None:
        self._looked_at = None
        del self._waiters[waiter.event.call]
        _count_down(self.sessions, waiter.event.session)
        if waiter.deadline is not None:
            _count_down(self._timed, waiter.event.location)
            self._count(waiter, -1)
            if waiter.deadline == self.deadline:
                self.deadline = min((one.deadline for one in self._waiters.values() if one.deadline), default=None)

    def _count(self, waiter: Waiter, one: int) -> None:
        key = (waiter.name, waiter.event.location)
        size, count = self._sums.pop(key, (0, 0))
        if count + one:
            self._sums[key] = size + one * waiter.size, count + one

    # --- whose turn it is ---

    def next(self, now: int) -> Debit | None:
        """Return the request that is decided for good next, because its turn has come or its wait ends; or None.

        The one before it is decided by now. A refusal records nothing.
        """
        if self._deciding is not None:
            granted = self._books.recorded > self._recorded
            self._report(self._deciding, "granted" if granted else "refused", now)
            self._deciding = None
            if not granted:
                self._divided.clear()
        call = self._next_call(now) if self._timed else None
        self.busy = bool(self._timed)
        self._turns += 1
        self.left_over = call is not None and self._turns > MOST_AT_ONCE and not self._books.stopping
        if call is None or self.left_over:
            self._divided.clear()
            self._turns = 0
            return None
        return self.take(call)

    def _next_call(self, now: int) -> int | None:
        books = self._books
        if (self.deadline is not None and self.deadline <= now) or books.stopping or books.refuse_debit():
            timed = (call for call, one in self._waiters.items() if one.deadline)
            ending = books.stopping or books.refuse_debit()
            return next(call for call in timed if ending or (self._waiters[call].deadline or 0) <= now)
        state = (books.ledger.revision, books.admission)
        if state != self._looked_at:
            for location in self._timed:
                found = self._next_at(location)
                if found is not None:
                    return found.event.call
            self._looked_at = state
        return None

    def _next_at(self, location: ev.Location) -> Waiter | None:
        books = self._books
        refusals: dict[tuple[ev.ModelName, int], Denied | None] = {}
        ready = []
        for one in self._waiters.values():
            if one.event.location != location:
                continue
            if one.name not in books.ledger.sessions[one.event.session].models:
                return one
            key = (one.name, one.size)
            if key not in refusals:
                refusals[key] = books.admission.admit(one.name, location, one.size)
            denied = refusals[key]
            if denied is None:
                ready.append(one)
            elif one.deadline is not None and denied.reason is not Reason.CAPACITY:
                return one
        return self._first(ready, location) if len(ready) > 1 else next(iter(ready), None)

    def _first(self, ready: Sequence[Waiter], location: ev.Location) -> Waiter:
        """Return the request that goes first of those that have room: guaranteed, within its share, the oldest."""
        admission = self._books.admission
        if admission.has_guarantees(location):
            for one in ready:
                if admission.is_guaranteed(one.name, location, one.size):
                    return one
        if location not in self._divided:
            self._divided[location] = self._shares(location)
        shares = self._divided[location]
        for one in ready:
            if self._lent(one.name, location) + one.size <= shares[one.name]:
                return one
        self._divided.clear()  # a grant beyond a share changes the shares of the others
        return ready[0]

    def _shares(self, location: ev.Location, name: ev.ModelName | None = None) -> dict[ev.ModelName, int]:
        """Return the share of every model; `name` is one that wants as much as there is."""
        books = self._books
        wanted: Counter[ev.ModelName] = Counter()
        for one in self._waiters.values():
            if one.event.location == location:
                wanted[one.name] += one.size
        if name is not None:
            wanted[name] = books.rules.capacities[location]
        return Shares(books.ledger, books.rules, books.admission).divide(location, wanted)

    def share(self, name: ev.ModelName, location: ev.Location) -> tuple[int, int]:
        """Return what a model could have if it wanted as much as there is, and how much more than now that is."""
        books, lent = self._books, self._lent(name, location)
        more = books.admission.available(name, location, None)
        if location in self._timed:
            more = max(more, self._shares(location, name).get(name, 0) - lent)
        more -= more % books.rules.granularity
        return lent + more, more

    def _lent(self, name: ev.ModelName, location: ev.Location) -> int:
        return self._books.admission.lent(name, location)

    # --- what is shown ---

    def of_model(self, name: ev.ModelName, location: ev.Location) -> tuple[int, int]:
        """Return the bytes that a model's requests wait for, and how many wait."""
        return self._sums.get((name, location), (0, 0))

    def of_location(self, location: ev.Location, tenant: str | None = None) -> tuple[int, int]:
        """Return the bytes that all requests at a location, or those of a tenant, wait for, and how many wait."""
        found = [one for (name, at), one in self._sums.items() if at == location and tenant in (None, name.tenant)]
        return sum(size for size, _ in found), sum(count for _, count in found)


def _count_down(counts: Counter[Any], key: object) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
