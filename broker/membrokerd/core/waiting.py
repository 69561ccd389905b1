"""Requests that wait for room: those that said how long they wait, and those that are about to be refused.

A release has no answer, so a worker can tell another that memory is free before the daemon has read the release. A
request that does not wait and has no room is therefore deferred: the daemon reads everything that had been sent until
then, and the request is decided once more, for good.

A request that waits is granted as soon as there is room for it and its turn has come: `schedule` decides. A wait also
ends at its deadline, when the model is left, the session ends or its connection is lost, when the call is cancelled,
and with a drain, a stop or a full journal. A limit of the model or the tenant refuses at once, because no other model's
release changes it, and so does a request above the guarantee of a model whose session is itself asked for memory of the
model. A declaration waits only if it says so.

One step grants a few requests, and the others at once in the next: a turn may divide all memory again.
Until then a request that does not wait gets only what is free beside what these want, unless it is guaranteed. A
request whose grant meets a full device keeps its place: the oldest at a location is tried again after each audit.

Nothing of a wait is in the journal: after a restart the library asks again, with the time that is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import effects as fx
from . import events as ev
from . import policy
from .admission import over
from .books import Books
from .deadlines import Deadlines
from .denied import Denied, Reason, deny
from .names import Location, ModelName
from .recallable import too_many
from .request_lines import RequestLines, call_of
from .requests import GRANT, DebitRequest, Decision, Grant, Refuse, Wait
from .schedule import Schedule
from .sums import add
from .traffic import CallInFlight

MOST_AT_ONCE = 16
"""How many requests are granted or time out in one step. The others follow in the next: see `deadline`."""
MOST_LOOKS = 2_000
"""How many models with requests one step may look at to decide those: in one look at all, at least.

A look is at the tenants, and at those models of which something has changed. It may divide the memory of all tenants
again, and again when it has recalled some: that is up to 10 us of CPU for each model that has a share. What a look that
has recalled memory or granted a request leaves to look at is left to the next step, if these are many.
"""


class Waiting:
    """The requests for bytes, and those of them that wait, in the order of their arrival."""

    def __init__(self, books: Books, schedule: Schedule, lines: RequestLines) -> None:
        self._books = books
        self._schedule = schedule
        self._lines = lines
        self._waiters: dict[int, DebitRequest] = {}
        """By call."""
        self._ids: set[tuple[int, int]] = set()
        """The sessions and request ids of those that wait."""
        self._full: set[int] = set()
        """The calls of those that have met a full device."""
        self.ends: Deadlines[int] = Deadlines(self._is_end)
        """When each request with a deadline waits no more, by call."""
        self._of_tenant: Counter[str] = Counter()
        """How many requests of a tenant wait with a deadline. No entry is zero."""
        self.sessions: Counter[int] = Counter()
        """How many requests of a session wait. Sessions without any have no entry."""
        self._timed: Counter[Location] = Counter()
        """How many of them have a deadline at a location. A location without any has no entry."""
        self._sums: dict[tuple[ModelName, Location], tuple[int, int]] = {}
        """The bytes that requests with a deadline want, and how many such requests there are. No entry is zero."""
        self._totals: dict[tuple[str | None, Location], tuple[int, int]] = {}
        """The same of all models of a tenant; None: of all tenants."""
        self.busy = False
        """Whether `next` has something to do: a request waits with a deadline, or a hold lasts."""
        self._looked_at: object = None
        """The `_state` at the last look at all requests that found no request to decide."""
        self.deferred: list[int] = []
        """The requests of this step that wait until pending inputs are read. `drain` asks the daemon to read them."""
        self.deadline: int | None = None
        """When the first wait ends, in nanoseconds."""
        self.left_over = False
        """Whether a step ended before every request had its turn. The others have theirs at `Elapsed`, at once."""
        self._is_sure = False
        """Whether a look has found a request that is left over. Else there may be none, and the next step looks."""
        self._turns = 0
        """How many requests were decided since `begin_step`."""
        self._looks = 0
        """How many looks that took, and further ones at what had changed."""

    def has(self, session: int, request_id: int) -> bool:
        """Say whether a request with this id waits."""
        return (session, request_id) in self._ids

    # --- a request is decided ---

    def settle(self, request: DebitRequest, now: int) -> None:
        """Decide a request, and do what follows: grant it, refuse it, or let it wait."""
        decision = self.decide(request)
        if isinstance(decision, Grant):
            request.waited = now - request.since
            request.move("granted")
            request.kind.grant(request, now)
        elif isinstance(decision, Wait):
            request.move("must wait")
            request.guaranteed, request.why = decision.guaranteed, decision.why
            if decision.wait_ns:
                request.deadline = now + decision.wait_ns
            else:
                self.deferred.append(request.event.call)
            self._add(request)
        else:
            self._refuse(request, decision.denied, now)

    def decide(self, request: DebitRequest) -> Decision:
        """Return what becomes of a request now: one that is new, or one that has waited and is decided for good."""
        denied = request.kind.refusal(request)
        if request.state == "deciding":
            if self._books.stopping:
                return Refuse(deny(Reason.STOPPING))
            if denied is not None:
                return Refuse(denied)
            left = request.size if request.has_turn else self._leaves(request)
            return GRANT if request.size <= left else Refuse(self._yielding(request, left))
        if denied is None and not (self.busy and self._is_behind(request)):
            return GRANT
        if request.is_ahead:
            return Refuse(denied or self._yielding(request, 0))
        return self._wait(request, denied)

    def _is_behind(self, request: DebitRequest) -> bool:
        """Say whether a new request that has room must wait, or be refused, because others come first."""
        if request.location not in self._timed and not self._schedule.holds:
            return False
        if request.is_ahead:
            return not self._schedule.may_go_ahead(request)
        return request.size > 0  # less of a declaration takes nothing from others

    def _wait(self, request: DebitRequest, denied: Denied | None) -> Decision:
        """Let a new request wait, or refuse it. `denied` None: it has room, and waits for its turn."""
        if denied is not None and denied.reason not in policy.WANTS_OF_ROOM:
            return Refuse(denied)
        limited = denied is not None and denied.reason is not Reason.CAPACITY
        guaranteed = self._books.admission.is_guaranteed(request.name, request.location, request.size)
        is_open = self._books.ledger.sessions[request.event.session].state == "open"  # to declare needs no connection
        hopeless = not is_open or limited or request.size > self._books.rules.capacities[request.location]
        wait = 0 if hopeless else self._wait_ns(request, guaranteed)
        full = self._refuse_one_more(request, wait)
        if full is not None:
            return Refuse(full if wait or denied is None else denied)
        return Wait(wait, guaranteed, denied)

    def _leaves(self, request: DebitRequest) -> int:
        """Return how many free bytes the others leave to a request that is decided although its turn has not come.

        While requests are left over from the last step, what is theirs before it is kept for them.
        """
        left = self._schedule.leaves(request)
        if self.left_over and not request.guaranteed:
            free = self._books.ledger.totals[request.location].free
            left = max(0, min(left, free - self._schedule.due(request)))
        return left

    def _yielding(self, request: DebitRequest, left: int) -> Denied:
        """Return the refusal of a request that has room, but leaves all but `left` bytes to others that come first."""
        total = self._books.ledger.totals[request.location]
        level = Reason.CAPACITY, "capacity", total.charged, total.capacity, left
        return over(level, request.name, request.location, request.size)

    def _refuse(self, request: DebitRequest, denied: Denied, now: int) -> None:
        """Refuse a request: one that waited with the time that it waited, one for want of room with the share."""
        event, has_waited = request.event, request.state == "deciding"
        if request.is_ahead:  # nobody needs it yet, so its refusal is not counted
            request.move("refused")
            self._books.answer(event.call, denied)
            return
        numbers = dict(denied.numbers)
        if denied.reason is Reason.CAPACITY:
            session = request.borrower if has_waited else None
            numbers["share_bytes"], numbers["obtainable_bytes"] = self.share(request.name, event.location, session)
            asked = self._books.recallable.asked_of(event.session, request.name, event.location)
            if asked:
                numbers["recalled_bytes"] = asked
            if has_waited and request.deadline is None and not isinstance(event, ev.Declare):
                self._schedule.refused(request, now)
                self.busy = self.busy or bool(self._schedule.holds)
        if request.deadline is not None and denied.reason is not Reason.STOPPING:
            numbers["waited_ms"] = (now - request.since) // 1_000_000
        request.move("refused")
        self._books.refuse(event.call, Denied(denied.reason, numbers), event.session, request.name)
        if has_waited:
            request.waited = now - request.since
            self._report(request, "refused")
            self._schedule.divide_again()

    def _wait_ns(self, request: DebitRequest, guaranteed: bool) -> int:
        """Return how long a request waits for room: as it says; else by the rules, if it is guaranteed."""
        event = request.event
        if event.wait_ns is not None:
            return event.wait_ns
        if isinstance(event, ev.Declare):
            return 0
        return self._books.rules.guarantee_wait_ns if guaranteed else 0

    def _refuse_one_more(self, request: DebitRequest, wait: int) -> Denied | None:
        """Return why one more request of the session, or of the tenant, may not wait, or None."""
        rules = self._books.rules
        if self.sessions.get(request.event.session, 0) >= rules.max_calls_per_session:
            return deny(Reason.TOO_MANY_REQUESTS, limit=rules.max_calls_per_session)
        limit = rules.max_waiting_per_tenant
        if wait and self._of_tenant[request.name.tenant] >= limit:
            return deny(Reason.TOO_MANY_REQUESTS, limit=limit, whose="tenant", calls="requests that wait for memory")
        if wait and request.is_guest:
            guests = [group for group in self._lines.at(request.location) if group.key.is_guest]
            return too_many([group.key.tenant for group in guests for _ in range(len(group))], request.name.tenant)
        return None

    # --- the device is full ---

    def put_back(self, call: CallInFlight) -> bool:
        """Let a request wait again whose debit was credited because the device is full; return False to refuse it."""
        request, now = call.request, call.failed_at
        full = call.failure is not None and call.failure.reason is Reason.DEVICE_FULL and not call.any_sent
        if request is None or not full or request.is_ahead:
            return False
        guaranteed = self._books.admission.is_guaranteed(request.name, request.location, request.size)
        wait = self._wait_ns(request, guaranteed)
        deadline = request.since + wait
        is_open = self._books.ledger.sessions[request.event.session].state == "open"
        is_asked = self._books.recallable.asked_of(request.event.session, request.name, request.location) > 0
        if not is_open or deadline <= now or (is_asked and not guaranteed):
            return False
        if self._books.stopping or self._books.refuse_debit() or self._refuse_one_more(request, wait):
            return False
        request.move("device full")
        request.deadline, request.guaranteed, request.why = deadline, guaranteed, call.failure
        request.met_full_device = True
        self._full.add(request.event.call)
        self._add(request)
        if guaranteed:
            self._schedule.recall_for_device(request, now)
        return True

    def try_again(self) -> None:
        """Let the oldest request at each location that has met a full device be tried again. Called after an audit."""
        tried = set()
        for call in sorted(self._full):
            request = self._waiters[call]
            if request.location not in tried and not self._is_dropping(request):
                tried.add(request.location)
                request.met_full_device = False
                self._full.remove(call)
                self._lines.place_again(request)
                self._looked_at = None

    def _is_dropping(self, request: DebitRequest) -> bool:
        """Say whether the broker is still closing what it had made of a segment, so that its name is not free yet."""
        event = request.event
        segment = self._books.ledger.labels.get(event.name) if isinstance(event, ev.CreateSegment) else None
        return segment is not None and self._books.ledger.segments[segment].state == "dropping"

    def drain(self) -> None:
        """Ask the daemon to read pending inputs for the deferred requests that were not granted meanwhile."""
        for call in self.deferred:
            if call in self._waiters:
                self._books.emit(fx.DrainInputs(call))
        self.deferred.clear()

    def tenant_of(self, call: int) -> str:
        """Return the tenant of a call that waits; "" if it waits no more."""
        request = self._waiters.get(call)
        return request.name.tenant if request is not None else ""

    # --- a wait ends ---

    def inputs_drained(self, call: int, now: int) -> None:
        """Decide a request for good, if it still waits: all that had been sent until now is read."""
        request = self._waiters.get(call)
        if request is not None:
            self._remove(request, "wait ends")
            self._make_sure(now)
            self.settle(request, now)

    def settle_older(self, event: ev.Declare, now: int) -> None:
        """Decide the deferred declaration that `event` replaces: it must be decided before the newer one."""
        what = (event.session, event.name, event.location)
        for request in self._lines.of_session(event.session):
            older = request.event
            if isinstance(older, ev.Declare) and (older.session, older.name, older.location) == what:
                self._remove(request, "wait ends")
                self._make_sure(now)
                self.settle(request, now)

    def give_up(self, session: int, now: int) -> None:
        """Answer all requests of a session that wait: its connection is lost, or it has ended."""
        for request in self._lines.of_session(session):
            self._end(request, now)

    def cancel(self, event: ev.CancelWait, now: int) -> None:
        """End the wait of a call, if it waits."""
        waiter = self._waiters.get(event.call)
        if waiter is not None:
            self._end(waiter, now)

    def _end(self, waiter: DebitRequest, now: int) -> None:
        self._remove(waiter, "given up")
        self._books.answer(waiter.event.call, deny(Reason.DELIVERY_FAILED))
        waiter.waited = now - waiter.since
        self._report(waiter, "cancelled")

    def answered(self, call: CallInFlight) -> None:
        """Tell how the wait of a call ended, unless it has met a full device and waits on."""
        request = call.request
        if request is None or request.state == "waiting":
            return
        request.move("answered")
        if request.deadline is None:
            return
        if call.failure is None:
            self._report(request, "granted")
        else:
            self._report(request, "cancelled" if call.failure.reason is Reason.DELIVERY_FAILED else "refused")

    def declared(self, request: DebitRequest) -> None:
        """Tell how the wait of a declaration ended: it is granted, and answered at once."""
        request.move("answered")
        self._report(request, "granted")

    def _report(self, waiter: DebitRequest, result: fx.WaitResult) -> None:
        event, waited = waiter.event, waiter.waited
        if waiter.deadline is not None and (waited or result != "granted"):  # its turn may have come at once
            self._books.emit(
                fx.Waited(
                    call=event.call,
                    session=event.session,
                    request_id=event.request_id,
                    name=waiter.name,
                    location=event.location,
                    size=waiter.size,
                    waited_ns=waited,
                    result=result,
                    guaranteed=waiter.guaranteed,
                    why=waiter.why,
                )
            )

    def _add(self, waiter: DebitRequest) -> None:
        self._looked_at = None
        event = waiter.event
        self._waiters[event.call] = waiter
        self._ids.add((event.session, event.request_id))
        self.sessions[event.session] += 1
        self._lines.add(waiter)
        if waiter.deadline is not None:
            self.busy = True
            self._timed[event.location] += 1
            self._of_tenant[waiter.name.tenant] += 1
            self._count(waiter, 1)
            self.ends.add(waiter.deadline, event.call)
            self._set_deadline()

    def _remove(self, waiter: DebitRequest, cause: str) -> None:
        event = waiter.event
        waiter.move(cause)
        self._looked_at = None
        self._lines.remove(waiter)
        del self._waiters[event.call]
        self._ids.remove((event.session, event.request_id))
        self._full.discard(event.call)
        add(self.sessions, -1, event.session)
        if waiter.deadline is not None:
            add(self._timed, -1, event.location)
            add(self._of_tenant, -1, waiter.name.tenant)
            self._count(waiter, -1)
            self._set_deadline()

    def _set_deadline(self) -> None:
        first = self.ends.first()
        self.deadline = first[0] if first is not None else None

    def _is_end(self, deadline: int, call: int) -> bool:
        """Say whether the request of a call waits until then."""
        waiter = self._waiters.get(call)
        return waiter is not None and waiter.deadline == deadline

    def _count(self, waiter: DebitRequest, sign: int) -> None:
        name, location = waiter.name, waiter.event.location
        _sum(self._sums, (name, location), sign * waiter.size, sign)
        _sum(self._totals, (name.tenant, location), sign * waiter.size, sign)
        _sum(self._totals, (None, location), sign * waiter.size, sign)

    # --- whose turn it is ---

    def begin_step(self, event: ev.Event) -> None:
        """Begin to count the requests that this step decides. At `Elapsed`, those that are left over have their turn.

        The outcome of a packet may come inside the step that granted the packet. It does not begin a new count, else
        grants would nest in grants until nobody waits.
        """
        if type(event) is ev.Elapsed:
            self.left_over = False
        if not isinstance(event, ev.Made | ev.NotMade):
            self._turns = self._looks = 0

    def next(self, now: int) -> DebitRequest | None:
        """Return the request to settle next, because its turn has come or its wait ends; None: no request."""
        if self.left_over:
            return None
        found = self._next(now) if self._timed or self._schedule.holds else None
        self.busy = bool(self._timed or self._schedule.holds)
        if not self.busy:
            self._turns = self._looks = 0
        if found is not None and self._turns >= MOST_AT_ONCE and not self._books.stopping:
            self.left_over = self._is_sure = True
        if found is None or self.left_over:
            self._schedule.divide_again()
            return None
        self._turns += 1
        request, has_turn = found
        request.has_turn = has_turn
        self._remove(request, "its turn" if has_turn else "wait ends")
        return request

    def _make_sure(self, now: int) -> None:
        """Look whether a request is left over, if the step before had no time to."""
        if self.left_over and not self._is_sure:
            self._looks, self.left_over = 0, False
            self.left_over = self._next(now) is not None or self.left_over
            self._is_sure = self.left_over

    def _next(self, now: int) -> tuple[DebitRequest, bool] | None:
        books = self._books
        ending = books.stopping or bool(books.refuse_debit())
        if ending:
            over = next((request for request in self._waiters.values() if request.deadline), None)
            return (over, False) if over else None
        most = max(1, MOST_LOOKS // max(1, len(self._sums)))
        is_due = self.deadline is not None and self.deadline <= now
        while is_due or self._looked_at != self._state():  # again after a recall: its sessions may wait for more
            if self._looks >= most:
                self.left_over, self._is_sure = True, is_due
                return None
            self._looks += 1
            if is_due and (first := self.ends.first()) is not None:
                return self._waiters[first[1]], False
            state = self._state()
            self._lines.follow()
            self._schedule.follow()
            if self._lines.to_end:
                return next(iter(self._lines.to_end.values())), False
            for location in books.rules.capacities:
                found = self._schedule.next(location, now)
                if found is not None:
                    return found
            self._looked_at = state
        return None

    def _state(self) -> object:
        """Return a value that changes with everything that can give a request its turn, except the time."""
        books, schedule = self._books, self._schedule
        revisions = books.ledger.revision, books.admission, books.recallable.revision
        return *revisions, schedule.holds.deadline, schedule.is_left_over

    def share(self, name: ModelName, location: Location, session: int | None = None) -> tuple[int, int]:
        """Return what a model could have if it wanted as much as there is, and how much more than now that is.

        `session` is the one that borrows extents; None: the bytes cannot be recalled.
        """
        books = self._books
        lent = books.admission.lent(name, location)
        more = books.admission.available(name, location, None, session)
        if location in self._timed or books.recallable.is_possible:
            share = self._schedule.divide(location, greedy=name).get(name, 0)
            is_trusted = books.recallable.is_trusted(session, name, location)
            bounds = books.admission.bound(name, location, is_trusted), books.admission.not_firm(location)
            more = max(more, min(share - lent, *bounds))
        more -= more % books.rules.granularity
        return lent + more, more

    # --- what is shown ---

    def shares(self, location: Location) -> Mapping[ModelName, int]:
        """Return the share of each model while requests wait; nothing otherwise, since everybody may have what is free.

        A model without memory and without a request has no share.
        """
        return self._schedule.divide(location) if location in self._timed else {}

    def waiters(self) -> list[DebitRequest]:
        """Return the requests that wait with a deadline, the oldest first."""
        return sorted([request for request in self._waiters.values() if request.deadline is not None], key=call_of)

    def of_model(self, name: ModelName, location: Location) -> tuple[int, int]:
        """Return the bytes that a model's requests wait for, and how many wait."""
        return self._sums.get((name, location), (0, 0))

    def of_location(self, location: Location, tenant: str | None = None) -> tuple[int, int]:
        """Return the bytes that all requests at a location, or those of a tenant, wait for, and how many wait."""
        return self._totals.get((tenant, location), (0, 0))


def _sum(sums: dict[Any, tuple[int, int]], key: object, more: int, sign: int) -> None:
    size, count = sums.pop(key, (0, 0))
    if count + sign:
        sums[key] = size + more, count + sign
