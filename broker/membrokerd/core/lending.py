"""Lending: debits, packets in flight, the window, releases and declarations.

Segments' extents travel in the same packets, through the same window: made once, for their writer, and then sent.

Debit first, credit last: the books are charged for a whole Allocate before the first create, and credited for what
was not made. A call goes out in packets of 64 extents, at most 128 extents of a session unacknowledged.
"""

from __future__ import annotations

from operator import attrgetter

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .books import Books
from .denied import Denied, Reason, deny
from .names import ModelName
from .recallable import Borrower
from .recalls import Recalls
from .requests import DebitRequest, Kind
from .rows import SessionRow
from .stock import WarmPool
from .traffic import CallInFlight, Traffic
from .waiting import Waiting

_extent_bytes = attrgetter("extent_bytes")
_NOT_SENT = "it acknowledged a packet that it was not sent"


class Lending:
    """The calls of all sessions."""

    def __init__(self, books: Books, stock: WarmPool, recalls: Recalls, waiting: Waiting) -> None:
        self._books = books
        self._recalls = recalls
        self._stock = stock
        self._waiting = waiting
        self._traffic: dict[int, Traffic] = {}
        self._allocation = Kind(self._refuse_allocate, self._lend)
        self._declaration = Kind(self._refuse_declare, self._set_declaration)

    def begin(self, session: int) -> None:
        """Begin with nothing in flight for a session."""
        self._traffic[session] = Traffic()

    def forget(self, session: int, now: int) -> None:
        """Drop what a session has in flight: it ended, or is resumed."""
        self._waiting.give_up(session, now)
        del self._traffic[session]

    def in_flight(self, session: int, request_id: int) -> bool:
        """Say whether a request of this id waits or is unanswered, or its packets are still unacknowledged."""
        traffic = self._traffic[session]
        return (
            request_id in traffic.calls
            or request_id in traffic.unanswered
            or (session in self._waiting.sessions and self._waiting.has(session, request_id))
        )

    def making_of(self, session: int) -> bool:
        """Say whether packets of the session are being made."""
        return any("making" in call.states for call in self._traffic[session].calls.values())

    def making_segment(self, session: int, segment: int) -> bool:
        """Say whether packets of a segment are being made for its writer."""
        traffic = self._traffic.get(session)
        calls = traffic.calls.values() if traffic else ()
        return any(call.segment == segment and not call.sends and "making" in call.states for call in calls)

    def unanswered_of(self, session: int, segment: int) -> int:
        """Return how many calls of the session about this segment have no answer yet."""
        traffic = self._traffic[session]
        calls = [traffic.calls[number] for number in traffic.unanswered if number in traffic.calls]
        return sum(1 for call in calls if call.segment == segment)

    # --- calls that bring descriptors ---

    def refuse_call(self, session: int) -> Denied | None:
        """Return why the session cannot have one more call that brings descriptors, or None."""
        books = self._books
        if books.ledger.sessions[session].state != "open":
            return deny(Reason.DELIVERY_FAILED)
        if len(self._traffic[session].unanswered) >= books.rules.max_calls_per_session:
            return deny(Reason.TOO_MANY_REQUESTS, limit=books.rules.max_calls_per_session)
        return None

    def wait(self, session: int, request_id: int) -> None:
        """Count a call that cannot begin yet among those in flight."""
        self._traffic[session].unanswered.add(request_id)

    def wait_no_more(self, session: int, request_id: int) -> None:
        """Stop counting a call that was waiting: it is answered, or begins."""
        traffic = self._traffic.get(session)
        if traffic is not None:  # a seal can outlast its session
            traffic.unanswered.discard(request_id)

    def begin_call(self, session: int, call: CallInFlight) -> None:
        """Send a call out in packets; what it makes is debited already."""
        traffic = self._traffic[session]
        if not call.sends:
            self._books.making[call.location] += call.extent_bytes * (len(call.ids) - 1) + call.last_bytes
        traffic.calls[call.request_id] = call
        traffic.unanswered.add(call.request_id)
        traffic.queue.append(call)
        self._issue(session)
        if traffic.queue:  # packets of it wait: the stock must not have their room meanwhile
            self._stock.make_room(call.location)

    # --- allocate ---

    def allocate(self, event: ev.Allocate, now: int) -> None:
        """Lend a whole call, or nothing of it."""
        size = event.extent_bytes * event.count
        self._waiting.settle(DebitRequest(event, event.name, size, now, self._allocation), now)

    def _lend(self, request: DebitRequest, now: int) -> None:
        """Debit the whole call, then send it out in packets."""
        event = request.event
        assert isinstance(event, ev.Allocate)
        ids = self._books.take_ids(event.count)
        fact = ft.Debited(event.session, event.name, event.location, event.extent_bytes, ids.start, event.count)
        self._books.record(fact)
        size = event.extent_bytes
        call = CallInFlight(
            call=event.call,
            request_id=event.request_id,
            name=event.name,
            location=event.location,
            extent_bytes=size,
            last_bytes=size,
            ids=ids,
            on_done=self._allocated,
            result=fx.Allocated(event.count, size),
            request=request,
        )
        self._stock.asked(event.location, size, event.count, now)
        self.begin_call(event.session, call)

    def _allocated(self, session: int, call: CallInFlight) -> None:
        """Answer an Allocate of which every packet is decided, or let it wait for room on the device."""
        if call.failure:
            if not self._waiting.put_back(call):
                self._books.refuse(call.call, call.failure, session, call.name)
        else:
            assert call.result is not None
            self._books.emit(fx.Answer(call.call, call.result))

    def _refuse_allocate(self, request: DebitRequest) -> Denied | None:
        event = request.event
        assert isinstance(event, ev.Allocate)
        books, wanted_fits = self._books, 0 <= event.wanted_bytes <= policy.MAX_BYTES
        return (
            self.refuse_borrower(event.session, event.name)
            or self.refuse_call(event.session)
            or books.refuse_debit()
            or policy.check_extents(books.rules, event.location, event.extent_bytes, event.count, event.wait_ns)
            or (None if wanted_fits else deny(Reason.INVALID_ARGUMENT, what="wanted_bytes is negative"))
            or books.admission.admit(event.name, event.location, event.extent_bytes * event.count, event.session)
        )

    def refuse_borrower(self, session: int, name: ModelName) -> Denied | None:
        """Return why this session may not be charged under a model, or None: an observer has no models."""
        row = self._books.ledger.sessions[session]
        if name in row.models:
            return None
        return deny(Reason.OBSERVER) if row.observer else deny(Reason.MODEL_NOT_FOUND, model=str(name))

    def _issue(self, session: int) -> None:
        """Send packets out while the session's window has room for the next one, call by call."""
        traffic = self._traffic[session]
        while traffic.queue:
            call = traffic.queue[0]
            part = call.issued
            ids, extent_bytes = call.packet(part)
            if traffic.window + len(ids) > policy.WINDOW:
                break
            call.move(part, "issued")
            call.issued += 1
            traffic.window += len(ids)
            if call.issued == len(call.states):
                traffic.queue.popleft()
            self._emit(session, call, part, ids, extent_bytes)

    def _emit(self, session: int, call: CallInFlight, part: int, ids: range, extent_bytes: int) -> None:
        """Have a packet sent, if its segment exists; else have it made, from the stock if that can serve all of it."""
        request_id, parts = call.request_id, len(call.states)
        if call.sends:
            self._books.emit(fx.Send(session, request_id, part, parts, ids, extent_bytes, call.segment))
            return
        stocked = not call.segment and self._stock.take(call.location, extent_bytes, len(ids))
        if stocked:
            self._books.making[call.location] -= extent_bytes * len(ids)  # it exists
            call.stocked.add(part)
        else:
            self._stock.make_room(call.location)
        answer = call.result if parts == 1 else None
        tenant, location, segment = call.name.tenant, call.location, call.segment
        # By position, with the names of the fields: keywords take 0.3 of the 21 us of an extent.
        packet = fx.Make(
            tenant, session, request_id, part, parts, ids, extent_bytes, location, segment, stocked, answer
        )
        self._books.emit(packet)

    # --- outcomes ---

    def made(self, event: ev.Made) -> None:
        """Note that a packet is queued to its session."""
        traffic = self._traffic[event.session]
        call = traffic.calls[event.request_id]
        ids = self._made_or_not(call, event.part, "made")
        traffic.sent += 1
        traffic.unacknowledged[event.request_id, event.part] = traffic.sent, len(ids)
        self._conclude(event.session, call)

    def not_made(self, event: ev.NotMade, now: int) -> None:
        """Credit a packet that could not be made, give up those after it, and fail the call with the reason."""
        traffic = self._traffic[event.session]
        call = traffic.calls[event.request_id]
        if event.reason == Reason.DEVICE_FULL and self._stock.drop_all(call.location):
            self._emit(event.session, call, event.part, *call.packet(event.part))  # again: the stock was using memory
            return
        ids = self._made_or_not(call, event.part, "not made")
        traffic.window -= len(ids)
        call.failed_at = now
        call.failure = call.failure or Denied(Reason(event.reason), {"model": str(call.name), **event.numbers})
        self._credit_unmade(event.session, call, ids)
        self._abandon(event.session, call)
        self._conclude(event.session, call)

    def not_delivered(self, event: ev.NotDelivered) -> None:
        """Credit a packet that was never sent because its connection broke."""
        traffic = self._traffic.get(event.session)
        call = traffic.calls.get(event.request_id) if traffic else None
        if traffic is None or call is None:
            return
        traffic.take_off(event.request_id, event.part, "not delivered")
        row = self._books.ledger.sessions[event.session]
        ids = tuple(extent for extent in call.packet(event.part)[0] if extent in row.extents)
        if ids:  # a segment's are kept by the broker
            self._books.record(ft.Credited(event.session, ids, "not delivered"))
        call.failure = call.failure or deny(Reason.DELIVERY_FAILED, model=str(call.name))
        self._abandon(event.session, call)
        self._conclude(event.session, call)

    def acknowledge(self, event: ev.Acknowledge, _: int) -> None:
        """Open the window by the extents of a packet; an acknowledgement of nothing ends the connection."""
        traffic = self._traffic.get(event.session)
        if traffic is None or (event.request_id, event.part) not in traffic.unacknowledged:
            self._books.emit(fx.Disconnect(event.session, _NOT_SENT))
            return
        traffic.take_off(event.request_id, event.part, "acknowledged")
        self._issue(event.session)

    def acknowledge_up_to(self, event: ev.AcknowledgeUpTo, _: int) -> None:
        """Open the window by every packet up to this number that is not acknowledged yet; there may be none."""
        traffic = self._traffic.get(event.session)
        if traffic is None or event.count > traffic.sent:
            self._books.emit(fx.Disconnect(event.session, _NOT_SENT))
            return
        unacknowledged = traffic.unacknowledged
        while unacknowledged and unacknowledged[packet := next(iter(unacknowledged))][0] <= event.count:
            traffic.take_off(*packet, "acknowledged")
        if traffic.queue:
            self._issue(event.session)

    def give_up(self, row: SessionRow, now: int) -> None:
        """Give up the calls of a session that is disconnected, leaving or dead; credit packets not yet begun."""
        traffic = self._traffic[row.session]
        for call in list(traffic.calls.values()):
            if call.request_id in traffic.unanswered:
                call.failure = call.failure or deny(Reason.DELIVERY_FAILED, model=str(call.name))
                self._abandon(row.session, call)
                if call.done:
                    self._answer(traffic, row.session, call)
        self._waiting.give_up(row.session, now)

    def _abandon(self, session: int, call: CallInFlight) -> None:
        """Give up the packets of a call that still wait."""
        waiting = range(call.issued, len(call.states))
        for part in waiting:
            self._made_or_not(call, part, "given up")
        call.issued = len(call.states)
        traffic = self._traffic[session]
        if call in traffic.queue:
            traffic.queue.remove(call)
        if waiting:
            self._credit_unmade(session, call, range(call.packet(waiting.start)[0].start, call.ids.stop))

    def _made_or_not(self, call: CallInFlight, part: int, cause: str) -> range:
        """Note that a packet is made, or never will be, and return its ids."""
        call.move(part, cause)
        ids, size = call.packet(part)
        if not call.sends and part not in call.stocked:
            self._books.making[call.location] -= size * len(ids)
        return ids

    def _credit_unmade(self, session: int, call: CallInFlight, ids: range) -> None:
        """Credit extents that will never exist."""
        if call.sends:
            return
        fact = ft.SegmentCredited(call.segment, ids) if call.segment else ft.Credited(session, ids, "not made")
        self._books.record(fact)

    def _conclude(self, session: int, call: CallInFlight) -> None:
        """Answer a call if all its packets are decided, and send the next packets."""
        traffic = self._traffic[session]
        if call.done:
            self._answer(traffic, session, call)
            if "unacknowledged" not in call.states:
                traffic.calls.pop(call.request_id, None)
        if traffic.queue and self._books.ledger.sessions[session].state in ("open", "detached"):
            self._issue(session)

    def _answer(self, traffic: Traffic, session: int, call: CallInFlight) -> None:
        """Answer a call that is done, unless it was answered before."""
        if call.request_id in traffic.unanswered:
            traffic.unanswered.discard(call.request_id)
            call.on_done(session, call)
            self._waiting.answered(call)

    # --- release and declare ---

    def release(self, event: ev.Release, now: int) -> None:
        """Credit extents that the session says it has unmapped: all of them, or none."""
        denied = self._refuse_release(event)
        if denied:
            self._books.answer(event.call, denied)
            return
        extents = self._books.ledger.sessions[event.session].extents
        loans = list(map(extents.__getitem__, event.ids))  # a release may have thousands
        size = sum(map(_extent_bytes, loans))
        self._books.record(ft.Credited(event.session, event.ids, "released"))
        if self._books.recallable.recalls:
            self._recalls.released(event.session, loans, now)
        self._books.answer(event.call, fx.Released(size))

    def _refuse_release(self, event: ev.Release) -> Denied | None:
        if not 0 < len(event.ids) <= policy.MAX_RELEASE:
            return deny(Reason.INVALID_COUNT, count=len(event.ids), max_count=policy.MAX_RELEASE)
        if len(set(event.ids)) != len(event.ids):
            return deny(Reason.INVALID_ARGUMENT, what="an extent id stands twice in the release")
        extents = self._books.ledger.sessions[event.session].extents
        traffic = self._traffic[event.session]
        unmade = traffic.unanswered and [call for call in traffic.calls.values() if not call.done]
        for extent in event.ids:
            if extent not in extents or (
                unmade and any(extent in call.ids and not call.is_made(extent) for call in unmade)
            ):
                return deny(Reason.EXTENT_NOT_FOUND, extent=extent)
        return None

    def declare(self, event: ev.Declare, now: int) -> None:
        """Set a declaration: more is admitted like a debit, and less is credited because the session says so."""
        self._waiting.settle_older(event, now)
        self._waiting.settle(DebitRequest(event, event.name, 0, now, self._declaration), now)

    def _set_declaration(self, request: DebitRequest, now: int) -> None:
        event = request.event
        assert isinstance(event, ev.Declare)
        borrower = Borrower(event.session, event.name, event.location)
        is_guest, less = event.recallable or borrower in self._books.recallable.guests, -self._more_declared(event)
        fact = ft.DeclarationSet(event.session, event.name, event.location, event.declared_bytes)
        self._books.record(fact)
        if is_guest:
            self._recalls.declared(borrower, less, now, recallable=event.recallable)
        self._stock.make_room(event.location)
        self._books.answer(event.call, fx.Declared(event.declared_bytes))
        self._waiting.declared(request)

    def _refuse_declare(self, request: DebitRequest) -> Denied | None:
        event, books = request.event, self._books
        assert isinstance(event, ev.Declare)
        denied = self.refuse_borrower(event.session, event.name)
        if denied:
            return denied
        if not books.rules.capacities.get(event.location):
            return deny(Reason.LOCATION_UNAVAILABLE, location=event.location)
        if not 0 <= event.declared_bytes <= policy.MAX_BYTES:
            return deny(Reason.INVALID_SIZE, size_bytes=event.declared_bytes, least_bytes=0, granularity_bytes=1)
        if event.wait_ns is not None and (too_long := policy.check_wait(event.wait_ns)):
            return too_long
        request.size = self._more_declared(event)
        is_guest = event.recallable and event.declared_bytes
        if is_guest and Borrower(event.session, event.name, event.location) not in books.recallable.guests:
            denied = books.recallable.refuse_guest(event.name.tenant, event.location)
            if denied:
                return denied
        if request.size <= 0:
            return None
        return books.refuse_debit() or books.admission.admit(event.name, event.location, request.size)

    def _more_declared(self, event: ev.Declare) -> int:
        charge = self._books.ledger.sessions[event.session].charges.get((event.name, event.location))
        return event.declared_bytes - (charge.declared if charge else 0)
