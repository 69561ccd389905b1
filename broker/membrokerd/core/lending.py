"""Lending: debits, packets in flight, the window, releases and declarations.

Segments' extents travel in the same packets, through the same window: made once, for their writer, and then sent.

Debit first, credit last: the books are charged for a whole Allocate before the first create, and credited for what
was not made. A call goes out in packets of 64 extents, at most two of a session unacknowledged; what a session has
in flight is kept here, not in the ledger, because none of it outlives the daemon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import lifecycles, policy
from .books import Books
from .denied import Denied, Reason, deny
from .hearing import Hearing
from .ledger import ModelRow, SessionRow
from .stock import Stock

_NOT_SENT = "it acknowledged a packet that it was not sent"


@dataclass(slots=True)
class Call:
    """One call in flight that brings descriptors: its extents in packets, by part.

    The last extent, where it has a size of its own (`last_bytes`), is a packet of its own. `segment` is 0 for an
    Allocate; `sends` says that the segment exists, and is attached.
    """

    call: int
    request_id: int
    name: ev.ModelName
    location: ev.Location
    extent_bytes: int
    last_bytes: int
    ids: range
    segment: int = 0
    sends: bool = False
    states: list[str] = field(init=False)
    stocked: set[int] = field(default_factory=set)
    issued: int = 0
    failure: Denied | None = None
    on_done: Callable[[int, Call], None] | None = None
    """Answers the call, given its session, once every packet is decided."""
    _last_alone: bool = field(init=False)
    _alike: int = field(init=False)

    def __post_init__(self) -> None:
        self._last_alone = self.last_bytes != self.extent_bytes
        self._alike = len(self.ids) - self._last_alone
        self.states = ["waiting"] * (-(-self._alike // policy.PACKET_EXTENTS) + self._last_alone)

    def packet(self, part: int) -> range:
        """Return the ids of a part."""
        if len(self.states) == 1:
            return self.ids
        if self._last_alone and part == len(self.states) - 1:
            return self.ids[-1:]
        first = part * policy.PACKET_EXTENTS
        return self.ids[first : min(first + policy.PACKET_EXTENTS, self._alike)]

    def size_of(self, part: int) -> int:
        """Return how large each extent of a part is."""
        return self.last_bytes if self._last_alone and part == len(self.states) - 1 else self.extent_bytes

    def is_made(self, extent: int) -> bool:
        """Say whether this extent of the call, an Allocate, exists already."""
        return self.states[(extent - self.ids.start) // policy.PACKET_EXTENTS] not in ("waiting", "making")

    @property
    def any_sent(self) -> bool:
        """Whether the session may have seen a packet of it."""
        return "unacknowledged" in self.states or "delivered" in self.states

    def move(self, part: int, cause: str) -> None:
        """Take a packet one step along its lifecycle."""
        self.states[part] = lifecycles.move(lifecycles.PACKET, self.states[part], cause)

    @property
    def done(self) -> bool:
        """Every packet has been made or given up."""
        return self.issued == len(self.states) and "making" not in self.states

    @property
    def settled(self) -> bool:
        """Done, and every packet is acknowledged or credited."""
        return self.done and "unacknowledged" not in self.states


@dataclass(slots=True)
class Traffic:
    """What one session has in flight. `calls` keeps answered calls until their last packet is acknowledged.

    `sent` counts the packets that were sent on this connection. `unacknowledged` holds those of them that are not
    acknowledged yet, by their number in that order; the window bounds it.
    """

    calls: dict[int, Call] = field(default_factory=dict)
    queue: deque[Call] = field(default_factory=deque)
    window: int = 0
    unanswered: set[int] = field(default_factory=set)
    sent: int = 0
    unacknowledged: dict[int, tuple[Call, int]] = field(default_factory=dict)


class Lending:
    """The calls of all sessions."""

    def __init__(self, books: Books, stock: Stock, hearing: Hearing) -> None:
        self._books = books
        self._stock = stock
        self._hearing = hearing
        self._traffic: dict[int, Traffic] = {}

    def begin(self, session: int) -> None:
        """Begin with nothing in flight for a session."""
        self._traffic[session] = Traffic()

    def forget(self, session: int) -> None:
        """Drop what a session has in flight: it ended, or is resumed."""
        self._hearing.give_up(session)
        del self._traffic[session]

    def in_flight(self, session: int, request_id: int) -> bool:
        """Say whether a request of this id is unanswered, or its packets are still unacknowledged."""
        traffic = self._traffic[session]
        return request_id in traffic.calls or request_id in traffic.unanswered

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

    def begin_call(self, session: int, call: Call, on_done: Callable[[int, Call], None]) -> None:
        """Send a call out in packets; what it makes is debited already. `on_done` answers it."""
        traffic, call.on_done = self._traffic[session], on_done
        if not call.sends:
            self._books.making[call.location] += call.extent_bytes * (len(call.ids) - 1) + call.last_bytes
        traffic.calls[call.request_id] = call
        traffic.unanswered.add(call.request_id)
        traffic.queue.append(call)
        self._issue(session)

    # --- allocate ---

    def allocate(self, event: ev.Allocate, now: int) -> None:
        """Debit the whole call, then send it out in packets."""
        denied = self._refuse_allocate(event)
        if denied:
            self._hearing.refuse(event, denied, event.name)
            return
        ids = self._books.take_ids(event.count)
        fact = ft.Debited(event.session, event.name, event.location, event.extent_bytes, ids.start, event.count)
        self._books.record(fact)
        size = event.extent_bytes
        call = Call(event.call, event.request_id, event.name, event.location, size, size, ids)
        if not self._is_in_stock(event.session, call):
            self._stock.make_room(event.location)
        self._stock.asked(event.location, size, event.count, now)
        self.begin_call(event.session, call, self._allocated)

    def _allocated(self, session: int, call: Call) -> None:
        """Answer an Allocate of which every packet is decided."""
        if call.failure:
            self._books.refuse(call.call, call.failure, session, call.name)
        else:
            self._books.answer(call.call, fx.Allocated(len(call.ids), call.extent_bytes))

    def _is_in_stock(self, session: int, call: Call) -> bool:
        """Say whether the stock serves the whole call, so that no room has to be made."""
        traffic = self._traffic[session]
        at_once = len(call.states) == 1 and not traffic.queue and traffic.window < policy.WINDOW
        return at_once and self._stock.has(call.location, call.extent_bytes, len(call.ids))

    def _refuse_allocate(self, event: ev.Allocate) -> Denied | None:
        books = self._books
        found = self.find(event.session, event.name)
        if isinstance(found, Denied):
            return found
        return (
            self.refuse_call(event.session)
            or books.refuse_debit()
            or policy.check_extents(books.rules, event.location, event.extent_bytes, event.count)
            or policy.admit(books.ledger, books.rules, event.name, event.location, event.extent_bytes * event.count)
        )

    def find(self, session: int, name: ev.ModelName) -> ModelRow | Denied:
        """Return a model under which this session may be charged, or why it may not."""
        if self._books.ledger.sessions[session].observer:
            return deny(Reason.OBSERVER)
        return self._books.find_model(session, name)

    def _issue(self, session: int) -> None:
        """Send packets out while the session's window is open, call by call."""
        traffic = self._traffic[session]
        while traffic.queue and traffic.window < policy.WINDOW:
            call = traffic.queue[0]
            part = call.issued
            call.move(part, "issued")
            call.issued += 1
            traffic.window += 1
            if call.issued == len(call.states):
                traffic.queue.popleft()
            self._emit(session, call, part)

    def _emit(self, session: int, call: Call, part: int) -> None:
        """Ask for a packet: from the stock, if that has it, or to be made, or sent."""
        ids, size = call.packet(part), call.size_of(part)
        stocked = not call.segment and self._stock.take(call.location, size, len(ids))
        if stocked:
            self._made_or_not(call, part)  # it exists
            call.stocked.add(part)
        self._books.emit(_packet(session, call, part))

    # --- outcomes ---

    def made(self, event: ev.Made) -> None:
        """Note that a packet is queued to its session."""
        traffic = self._traffic[event.session]
        call = traffic.calls[event.request_id]
        call.move(event.part, "made")
        traffic.sent += 1
        traffic.unacknowledged[traffic.sent] = (call, event.part)
        self._made_or_not(call, event.part)
        self._conclude(event.session, call)

    def not_made(self, event: ev.NotMade) -> None:
        """Credit a packet that could not be made, give up those after it, and fail the call with the reason."""
        traffic = self._traffic[event.session]
        call = traffic.calls[event.request_id]
        if event.reason == Reason.DEVICE_FULL and self._stock.drop_all(call.location):
            self._books.emit(_packet(event.session, call, event.part))  # try again: the stock was using memory
            return
        call.move(event.part, "not made")
        traffic.window -= 1
        call.failure = call.failure or Denied(Reason(event.reason), {"model": str(call.name), **event.numbers})
        self._made_or_not(call, event.part)
        self._credit_unmade(event.session, call, call.packet(event.part))
        self._abandon(event.session, call)
        self._conclude(event.session, call)

    def not_delivered(self, event: ev.NotDelivered) -> None:
        """Credit a packet that was never sent because its connection broke."""
        traffic = self._traffic.get(event.session)
        call = traffic.calls.get(event.request_id) if traffic else None
        if traffic is None or call is None:
            return
        call.move(event.part, "not delivered")
        _take_off(traffic, call, event.part)
        row = self._books.ledger.sessions[event.session]
        ids = tuple(extent for extent in call.packet(event.part) if extent in row.extents)
        if ids:  # a segment's are kept by the broker
            self._books.record(ft.Credited(event.session, ids, "not delivered"))
        call.failure = call.failure or deny(Reason.DELIVERY_FAILED, model=str(call.name))
        self._abandon(event.session, call)
        self._conclude(event.session, call)

    def acknowledge(self, event: ev.Acknowledge) -> None:
        """Open the window by one packet; an acknowledgement of nothing ends the connection."""
        traffic = self._traffic.get(event.session)
        call = traffic.calls.get(event.request_id) if traffic else None
        if traffic is None or call is None or not self._acknowledgeable(call, event.part):
            self._books.emit(fx.Disconnect(event.session, _NOT_SENT))
            return
        call.move(event.part, "acknowledged")
        _take_off(traffic, call, event.part)
        self._drop_if_settled(traffic, call)
        self._issue(event.session)

    @staticmethod
    def _acknowledgeable(call: Call, part: int) -> bool:
        return 0 <= part < len(call.states) and call.states[part] == "unacknowledged"

    def acknowledge_up_to(self, event: ev.AcknowledgeUpTo) -> None:
        """Open the window by every packet up to this number that is not acknowledged yet; there may be none."""
        traffic = self._traffic.get(event.session)
        if traffic is None or event.count > traffic.sent:
            self._books.emit(fx.Disconnect(event.session, _NOT_SENT))
            return
        for number in [number for number in traffic.unacknowledged if number <= event.count]:
            call, part = traffic.unacknowledged.pop(number)
            call.move(part, "acknowledged")
            traffic.window -= 1
            self._drop_if_settled(traffic, call)
        self._issue(event.session)

    def give_up(self, row: SessionRow) -> None:
        """Give up the calls of a session that is disconnected, leaving or dead; credit packets not yet begun."""
        traffic = self._traffic[row.session]
        for call in list(traffic.calls.values()):
            if call.request_id in traffic.unanswered:
                call.failure = call.failure or deny(Reason.DELIVERY_FAILED, model=str(call.name))
                self._abandon(row.session, call)
                self._answer_if_done(row.session, call)
        self._hearing.give_up(row.session)

    def _abandon(self, session: int, call: Call) -> None:
        """Give up the packets of a call that still wait."""
        waiting = range(call.issued, len(call.states))
        for part in waiting:
            call.move(part, "given up")
            self._made_or_not(call, part)
        call.issued = len(call.states)
        traffic = self._traffic[session]
        if call in traffic.queue:
            traffic.queue.remove(call)
        if waiting:
            self._credit_unmade(session, call, range(call.packet(waiting.start).start, call.ids.stop))

    def _made_or_not(self, call: Call, part: int) -> None:
        if not call.sends and part not in call.stocked:
            self._books.making[call.location] -= call.size_of(part) * len(call.packet(part))

    def _credit_unmade(self, session: int, call: Call, ids: range) -> None:
        """Credit extents that will never exist."""
        if call.sends:
            return
        fact = ft.SegmentCredited(call.segment, ids) if call.segment else ft.Credited(session, ids, "not made")
        self._books.record(fact)

    def _conclude(self, session: int, call: Call) -> None:
        """Answer a call if all its packets are decided, and send the next packets."""
        traffic = self._traffic[session]
        self._answer_if_done(session, call)
        self._drop_if_settled(traffic, call)
        if self._books.ledger.sessions[session].state in ("open", "detached"):
            self._issue(session)

    def _answer_if_done(self, session: int, call: Call) -> None:
        unanswered = self._traffic[session].unanswered
        if not call.done or call.request_id not in unanswered:
            return
        unanswered.discard(call.request_id)
        assert call.on_done is not None, "a call in flight was never begun"
        call.on_done(session, call)

    @staticmethod
    def _drop_if_settled(traffic: Traffic, call: Call) -> None:
        if call.settled:
            traffic.calls.pop(call.request_id, None)

    # --- release and declare ---

    def release(self, event: ev.Release) -> None:
        """Credit extents by the session's word: all of them, or none."""
        denied = self._refuse_release(event)
        if denied:
            self._books.answer(event.call, denied)
            return
        extents = self._books.ledger.sessions[event.session].extents
        size = sum(extents[extent].extent_bytes for extent in event.ids)
        self._books.record(ft.Credited(event.session, event.ids, "released"))
        self._books.answer(event.call, fx.Released(size))

    def _refuse_release(self, event: ev.Release) -> Denied | None:
        if not 0 < len(event.ids) <= policy.MAX_RELEASE:
            return deny(Reason.INVALID_COUNT, count=len(event.ids), max_count=policy.MAX_RELEASE)
        if len(set(event.ids)) != len(event.ids):
            return deny(Reason.INVALID_ARGUMENT, what="an extent id stands twice in the release")
        extents = self._books.ledger.sessions[event.session].extents
        unmade = [call for call in self._traffic[event.session].calls.values() if not call.done]
        for extent in event.ids:
            if extent not in extents or any(extent in call.ids and not call.is_made(extent) for call in unmade):
                return deny(Reason.EXTENT_NOT_FOUND, extent=extent)
        return None

    def declare(self, event: ev.Declare) -> None:
        """Set a declaration; more is admitted like a debit, less is credited by the session's word."""
        denied = self._refuse_declare(event)
        if denied is None or denied.reason in policy.WANTS_OF_ROOM:
            for older in self._hearing.take_older(event):
                self.declare(older)
                denied = self._refuse_declare(event)
        if denied:
            self._hearing.refuse(event, denied, event.name)
            return
        fact = ft.DeclarationSet(event.session, event.name, event.location, event.declared_bytes)
        self._books.record(fact)
        self._stock.make_room(event.location)
        self._books.answer(event.call, fx.Declared(event.declared_bytes))

    def _refuse_declare(self, event: ev.Declare) -> Denied | None:
        books = self._books
        found = self.find(event.session, event.name)
        if isinstance(found, Denied):
            return found
        if not books.rules.capacities.get(event.location):
            return deny(Reason.LOCATION_UNAVAILABLE, location=event.location)
        if not 0 <= event.declared_bytes <= policy.MAX_BYTES:
            return deny(Reason.INVALID_SIZE, size_bytes=event.declared_bytes, least_bytes=0, granularity_bytes=1)
        charge = books.ledger.sessions[event.session].charges.get((event.name, event.location))
        more = event.declared_bytes - (charge.declared if charge else 0)
        if more <= 0:
            return None
        return books.refuse_debit() or policy.admit(books.ledger, books.rules, event.name, event.location, more)


def _take_off(traffic: Traffic, call: Call, part: int) -> None:
    """Remove a sent packet from the window."""
    traffic.window -= 1
    number = next(number for number, (of, at) in traffic.unacknowledged.items() if of is call and at == part)
    del traffic.unacknowledged[number]


def _packet(session: int, call: Call, part: int) -> fx.Make | fx.Send:
    number, parts, ids, size = call.request_id, len(call.states), call.packet(part), call.size_of(part)
    if call.sends:
        return fx.Send(session, number, part, parts, ids, size, call.segment)
    answer = None if call.segment or parts > 1 else fx.Allocated(len(ids), size)
    stocked = part in call.stocked
    return fx.Make(session, number, part, parts, ids, size, call.location, call.segment, stocked, answer)
