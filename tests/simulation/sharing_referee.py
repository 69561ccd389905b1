"""What every step must keep of segments, by books of the referee's own: who holds what, who waits, what is charged.

These books are kept from the questions, the answers and the outcomes alone. The core's facts are held to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.parts import Counting
from tests.simulation.sharing import blocks_of

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.ledger import SegmentRow
from membrokerd.core.names import ANY_MODEL, Location, ModelName, SegmentName

if TYPE_CHECKING:
    from tests.simulation.world import World

_ATTACHABLE = ("writing", "sealing", "sealed")
_AFTER_SEAL = ("deleted", "lost", "last session left", "dropped after a death")


@dataclass(slots=True)
class Segment:
    """A segment as it was asked for, and what has become of it."""

    name: SegmentName
    location: Location
    size: int
    charged: int
    extents: set[int]
    writer: int
    sealed: bool = False
    over: bool = False
    dropped: bool = False
    widowed: bool = False
    """A session died that held it, and had been sent at least a packet of it."""


@dataclass(slots=True)
class Flight:
    """A create or an attach without an answer. `sent` are the parts that are queued for its session, or beyond."""

    call: int
    session: int
    request_id: int
    segment: int
    attaches: bool
    deadline: int | None = None
    """Of an attach that waits."""
    sent: set[int] = field(default_factory=set)
    lost: bool = False
    """Its session is gone."""


class SharingReferee(Counting):
    """Judges what a step did to segments."""

    COUNTED = ("attached", "ended", "waits")

    def __init__(self, world: World) -> None:
        self.world = world
        self.segments: dict[int, Segment] = {}
        self.names: dict[SegmentName, int] = {}
        self.holds: dict[int, dict[int, list[int]]] = {}
        """By session and segment: the requests by which it holds it."""
        self.flights: dict[tuple[int, int], Flight] = {}
        self.calls: dict[int, Flight] = {}
        self.waiting: dict[int, Flight] = {}
        self.seals: dict[int, int] = {}
        self.attached = 0
        self.ended: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        """How attaches ended that waited; and how often a create met a full device and waited again."""
        self.touched: set[int] = set()

    # --- one step ---

    def judge(self, event: ev.Event, decided: Iterable[ev.Event], step: Step) -> None:
        """Hold one step to all that is known of segments; `decided` are requests that waited until then."""
        self.touched.clear()
        self._take_down(event, step)
        for one in decided:
            self._take_down(one, step)
        answers = [effect for effect in step.effects if isinstance(effect, fx.Answer)]
        refused: list[tuple[Flight, Denied]] = []
        sealed = {fact.segment for fact in step.facts if isinstance(fact, ft.SegmentMoved) and fact.cause == "sealed"}
        for answer in answers:
            flight = self.calls.pop(answer.call, None)
            if flight is not None:
                if isinstance(answer.result, Denied):
                    refused.append((flight, answer.result))
                self._answered(flight, answer.result)
        for call in self.calls.keys() & self.world.broker.waiting._waiters.keys():  # its create has met a full device
            flight = self.calls.pop(call)
            assert not flight.sent, "a create waits again of which something was sent"
            del self.flights[flight.session, flight.request_id]
            self.waits["full device"] += 1
        for fact in step.facts:
            self._judge_fact(fact, event)
        for segment in sealed:
            for flight in [one for one in self.waiting.values() if one.segment == segment]:
                self._begins(flight)
        for flight, denied in refused:
            self._judge_refusal(flight, denied, event)
        for answer in answers:
            segment = self.seals.pop(answer.call, 0)
            if segment and not isinstance(answer.result, Denied):
                assert self.segments[segment].sealed, "a seal is answered before the segment is sealed"
        for effect in step.effects:
            self._judge_effect(effect)
        for segment in self.touched:
            self._compare(segment)
        if self.waiting or self.world.broker.segments.attaches.deadline is not None:
            self._judge_waiting(event)

    def _take_down(self, event: ev.Event, step: Step) -> None:
        """Note what the event itself says."""
        match event:
            case ev.Made(session, request_id, part):
                flight = self.flights.get((session, request_id))
                if flight is not None:
                    flight.sent.add(part)
            case ev.NotDelivered(session, request_id, part):
                flight = self.flights.get((session, request_id))
                if flight is not None:
                    flight.sent.discard(part)
            case ev.CreateSegment():
                self._take_down_create(event, step)
            case ev.AttachSegment():
                self._take_down_attach(event, step)
            case ev.SealSegment(call, _, _, segment):
                if isinstance(self._result(call, step), fx.SegmentView):
                    assert self.segments[segment].sealed, "a seal is answered before the segment is sealed"
                result = self._result(call, step)
                if isinstance(result, Denied) and result.reason == Reason.WRITER_DIED:
                    assert not self.segments[segment].sealed, "a writer is told that it has not sealed what it has"
                if result is None:
                    assert self._holds(event.session, segment), "a session seals what it does not hold"
                    assert self.segments[segment].writer == event.session, "a session seals what is another's"
                    self.seals[call] = segment
            case ev.DetachSegment():
                self._take_down_detach(event, step)
            case ev.DeleteSegment():
                result = self._result(event.call, step)
                if isinstance(result, fx.SegmentView):
                    assert result.name.label == event.name.label
                    assert event.name.model in (ANY_MODEL, result.name.model)
                    assert event.generation in (0, result.segment), "another segment is deleted"

    def _take_down_create(self, event: ev.CreateSegment, step: Step) -> None:
        result = self._result(event.call, step)
        if isinstance(result, Denied):
            if result.reason == Reason.SEGMENT_EXISTS:
                assert event.name in self.names, "a name is refused that is free"
            return
        began = next((one for one in step.facts if isinstance(one, ft.SegmentBegan) and self._is(one, event)), None)
        if began is None or fx.DrainInputs(event.call) in step.effects:
            return  # it waits, or its session is gone; what began is an older one of the same name
        free = {
            one.segment for one in step.facts if isinstance(one, ft.SegmentEnded)
        }  # a name can go and come in a step
        assert self.names.get(event.name) in {None, *free}, "a name is given twice"
        size = began.extent_bytes * (began.count - 1) + began.last_bytes
        assert size == event.size, "a segment is not as large as it was asked to be"
        extents = set(range(began.first, began.first + began.count))
        self.segments[began.segment] = Segment(event.name, event.location, size, size, extents, event.session)
        self.names[event.name] = began.segment
        self._fly(Flight(event.call, event.session, event.request_id, began.segment, attaches=False))

    @staticmethod
    def _is(began: ft.SegmentBegan, event: ev.CreateSegment) -> bool:
        return (*began.name, began.label, began.writer) == (*event.name, event.session)

    def _take_down_attach(self, event: ev.AttachSegment, step: Step) -> None:
        if self._result(event.call, step) is not None:
            return  # refused: nobody is served before a packet is sent
        named = [one for name, one in self.names.items() if _fits(event.name, name) and not self.segments[one].over]
        (segment,) = named
        flight = Flight(event.call, event.session, event.request_id, segment, attaches=True)
        if not self.segments[segment].sealed:
            flight.deadline = self.world.now + event.wait_ns
            self.waiting[event.call] = flight
            self.calls[event.call] = flight
            return
        self._begins(flight)

    def _take_down_detach(self, event: ev.DetachSegment, step: Step) -> None:
        result = self._result(event.call, step)
        held = self.holds.get(event.session, {}).get(event.segment, [])
        if isinstance(result, Denied):
            assert not held or result.reason != Reason.SEGMENT_NOT_FOUND, "a hold cannot be given up"
            return
        assert held, "a session let go of what it did not hold"
        self.touched.add(event.segment)
        held.pop()
        self._tidy(event.session, event.segment)

    @staticmethod
    def _result(call: int, step: Step) -> fx.Result | Denied | None:
        results = [one.result for one in step.effects if isinstance(one, fx.Answer) and one.call == call]
        return results[0] if results else None

    # --- calls in flight, and holds ---

    def _begins(self, flight: Flight) -> None:
        """Packets are sent from now on: the session holds the segment."""
        row = self.segments[flight.segment]
        assert row.sealed, "a segment is attached that is not sealed"
        assert not row.over, "a segment is attached that was ended"
        if self.waiting.pop(flight.call, None):
            self.waits["sealed"] += 1
        self._fly(flight)

    def _fly(self, flight: Flight) -> None:
        self.flights[flight.session, flight.request_id] = self.calls[flight.call] = flight
        self.touched.add(flight.segment)

    def _answered(self, flight: Flight, result: fx.Result | Denied) -> None:
        """A session holds what it was given, and what it was sent a packet of before the call failed."""
        row = self.segments.get(flight.segment)
        self.flights.pop((flight.session, flight.request_id), None)
        self.touched.add(flight.segment)
        if isinstance(result, Denied):
            if self.waiting.pop(flight.call, None):
                self.waits[result.reason] += 1
            if not flight.sent:
                return
        else:
            assert isinstance(result, fx.SegmentView)
            assert row is not None, "a segment was given that is not there"
            assert result.segment == flight.segment, "another segment was given"
            assert flight.call not in self.waiting, "a waiting attach was answered with nothing sent"
            if flight.attaches:
                assert row.sealed, "a segment was attached that is not sealed"
                self.attached += 1
            assert row.charged == row.size, "a segment was given of which not all was made"
        if not flight.lost:
            self.holds.setdefault(flight.session, {}).setdefault(flight.segment, []).append(flight.request_id)

    def _judge_refusal(self, flight: Flight, denied: Denied, event: ev.Event) -> None:
        row = self.segments.get(flight.segment)
        if denied.reason == Reason.WRITER_DIED:
            assert row is None or (row.over and not row.sealed), "a writer is said to be gone that is not"
        if denied.reason == Reason.SEGMENT_NOT_SEALED:
            assert isinstance(event, ev.Elapsed), "an attach ended before its time"
            assert flight.deadline is not None
            assert flight.deadline <= self.world.now, "an attach ended before its time"

    def _holds(self, session: int, segment: int) -> bool:
        return bool(self.holds.get(session, {}).get(segment))

    def _tidy(self, session: int, segment: int) -> None:
        held = self.holds[session]
        if not held[segment]:
            del held[segment]
        if not held:
            del self.holds[session]

    def _left(self, session: int, *, died: bool) -> None:
        """A session is gone: it holds nothing any more, but if it died, nobody knows who has what it was sent."""
        for segment in self.holds.pop(session, {}):
            self.segments[segment].widowed |= died
            self.touched.add(segment)
        for flight in self.flights.values():
            if flight.session == session:
                flight.lost = True
                self.segments[flight.segment].widowed |= died and bool(flight.sent)
                self.touched.add(flight.segment)

    def _resumed(self, session: int, stated: dict[int, list[int]]) -> None:
        """A session holds what its worker stated, as far as it was booked."""
        for segment, held in list(self.holds.get(session, {}).items()):
            numbers = stated.get(segment, [])
            times = self.world.workers[session].stated.segments.get(segment, 0)
            known = [one for one in held if one in numbers] + [one for one in held if one not in numbers]
            self.holds[session][segment] = known[:times]
            self.touched.add(segment)
            self._tidy(session, segment)

    # --- a successor ---

    def inherit(self, last: Iterable[ft.Fact]) -> None:
        """A daemon begins with the books on file: calls in flight are nobody's, and what they booked is held."""
        ledger = self.world.broker.ledger
        for flight in self.flights.values():
            if not flight.lost:
                self.holds.setdefault(flight.session, {}).setdefault(flight.segment, []).append(flight.request_id)
        before, self.holds = self.holds, {}
        for row in ledger.sessions.values():
            for segment, times in row.segments.items():
                known = before.get(row.session, {}).get(segment, [])
                self.holds.setdefault(row.session, {})[segment] = (known + [0] * times)[:times]
        for mapping in (self.flights, self.calls, self.waiting, self.seals):
            mapping.clear()
        self.segments = {row.segment: self._inherit_segment(row) for row in ledger.segments.values()}
        self.names = {row.full_name(): row.segment for row in ledger.segments.values()}
        for fact in last:
            if isinstance(fact, ft.SegmentCredited) and fact.segment in self.segments:
                self.segments[fact.segment].extents.difference_update(fact.ids)

    def _inherit_segment(self, row: SegmentRow) -> Segment:
        known = self.segments.get(row.segment)
        return Segment(
            row.full_name(),
            row.location,
            row.size_of(row.ids),
            row.bytes,
            known.extents if known else set(row.ids),
            row.writer,
            sealed=row.state == "sealed" or (known is not None and known.sealed),
            over=row.state not in _ATTACHABLE,
            dropped=row.state == "releasing",
            widowed=row.uncertain,
        )

    # --- facts and effects ---

    def _judge_fact(self, fact: ft.Fact, event: ev.Event) -> None:
        match fact:
            case ft.SessionMoved(session, cause):
                if cause in ("process died", "last packet", "forgotten"):
                    self._left(session, died=cause == "process died")
                elif cause == "resumed":
                    self._resumed(session, self.world.workers[session].stated_requests)
                return
            case ft.SegmentLeft(segment, session, cause="holder died" | "forgotten" as cause) if isinstance(
                event, ev.Restarted
            ):
                self._left(session, died=cause == "holder died")  # the step of its end is not on file to its own end
            case ft.SegmentMoved(segment, cause):
                self._moved(self.segments[segment], cause, event)
            case ft.SegmentCredited(segment, ids):
                row = self.segments[segment]
                assert not row.sealed, "a part of a sealed segment is credited"
                row.charged -= sum(self.size_of(row, extent) for extent in ids)
                row.extents.difference_update(ids)
            case ft.SegmentEnded(segment, proven):
                self._ended(segment, proven, event)
                name = self.segments.pop(segment).name
                if self.names[name] == segment:
                    del self.names[name]
            case ft.SegmentBegan(segment) | ft.SegmentHeld(segment) | ft.SegmentLeft(segment):
                pass
            case _:
                return
        self.touched.add(segment)

    def size_of(self, row: Segment, extent: int) -> int:
        """Return what an extent of a segment has, which is not credited yet."""
        assert extent in row.extents, "an extent is credited twice"
        whole = min(self.world.broker.books.rules.segment_extent_bytes, row.size)
        count = -(-row.size // whole)
        first = self.names[row.name] + 1
        return row.size - whole * (count - 1) if extent == first + count - 1 else whole

    def _moved(self, row: Segment, cause: str, event: ev.Event) -> None:
        assert not row.sealed or cause in _AFTER_SEAL, f"a sealed segment went back: {cause}"
        if cause == "sealed":
            assert isinstance(event, ev.Sealed), "a segment is sealed that the driver has not sealed"
            row.sealed = True
        row.over |= cause in ("writer ended", "deleted", "not made", "lost", "last session left")

    def _ended(self, segment: int, proven: bool | None, event: ev.Event) -> None:
        """Nobody who is honest has it mapped; where a holder died, the device was asked."""
        world, row = self.world, self.segments[segment]
        self.ended["certain" if proven is None else "proven" if proven else "in time"] += 1
        assert row.dropped, "a segment ended that the broker keeps"
        assert segment not in world.sharing.store, "a segment ended that the broker keeps"
        assert segment not in world.sharing.dropping, "a segment ended before the broker closed it"
        assert not any(self._holds(session, segment) for session in self.holds), "a segment ended that is held"
        for worker in world.workers.values():
            if world.state(worker) in ("open", "detached") and segment not in worker.lied:
                mapped = any(one == segment for one, _ in worker.maps)
                assert not mapped, f"session {worker.session} has a segment mapped that ended"
        if proven is not None:
            return
        assert not row.widowed, "a segment ended whose holder died, and nobody asked the device"
        left = [extent for extent in row.extents if extent in world.exists]
        assert not left or segment in world.sharing.haunted, "a segment ended and its memory is there"

    def _judge_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Make(segment=segment) if segment:
                row = self.segments[segment]
                assert not row.sealed, "a segment grows after its seal"
                assert not row.dropped, "a segment grows that is dropped"
                assert row.extents.issuperset(effect.ids), "a packet is made of what is not charged"
            case fx.Send(segment=segment):
                assert self.segments[segment].sealed, "a segment is sent that is not sealed"
                assert not self.segments[segment].dropped, "a segment is sent that is dropped"
                kept = self.world.sharing.store.get(segment, ())
                assert set(blocks_of(effect)) <= set(kept), "a segment is sent of which the store has not all"
            case fx.Seal(segment):
                assert segment in self.seals.values(), "a segment is sealed that nobody wants sealed"
            case fx.Drop(segment):
                self._judge_drop(segment)

    def _judge_drop(self, segment: int) -> None:
        row = self.segments[segment]
        assert not row.dropped, "a segment is dropped twice"
        assert row.over, "a segment is dropped that nobody ended"
        row.dropped = True
        assert not any(self._holds(session, segment) for session in self.holds), "a segment is dropped that is held"
        flying = [one for one in self.flights.values() if one.segment == segment and not one.lost]
        assert not flying, "a segment is dropped that is on its way"
        assert not self._is_made(segment), "a segment is dropped that is being made"

    def _is_made(self, segment: int) -> bool:
        packets = [packet for worker in self.world.workers.values() for packet in worker.makes]
        return any(isinstance(packet, fx.Make) and packet.segment == segment for packet in packets)

    def _compare(self, segment: int) -> None:
        """The core's books of a segment are the referee's."""
        ledger = self.world.broker.ledger
        row, mine = ledger.segments.get(segment), self.segments.get(segment)
        if row is None or mine is None:
            assert row is mine, f"segment {segment} is in one book and not in the other"
            return
        assert row.bytes == mine.charged, f"segment {segment} is charged {row.bytes}, not {mine.charged}"
        assert row.extents == len(mine.extents)
        assert ledger.labels[mine.name] == segment
        holders = {session: len(held[segment]) for session, held in self.holds.items() if segment in held}
        for flight in self.flights.values():
            if flight.segment == segment and not flight.lost:
                holders[flight.session] = holders.get(flight.session, 0) + 1
        left = row.state in ("ending", "retired") and not holders and not self._is_made(segment)
        assert not left, "a segment is not dropped that nobody holds"
        assert row.holders == holders, f"segment {segment} is held by {row.holders}, not by {holders}"
        where, model = mine.location, ModelName(mine.name.tenant, mine.name.model)
        of_model = [
            one.charged
            for one in self.segments.values()
            if (one.location, one.name.tenant, one.name.model) == (where, model.tenant, model.model)
        ]
        assert ledger.models[model].charges[where].segments == sum(of_model), f"{model} is charged too much or little"

    def _judge_waiting(self, event: ev.Event) -> None:
        """Who waits can still be served, and is told when its time is over."""
        broker = self.world.broker
        deadlines = []
        for flight in self.waiting.values():
            row, session = broker.ledger.segments.get(flight.segment), broker.ledger.sessions.get(flight.session)
            assert row is not None, "an attach waits for a segment that ended"
            assert row.state in ("writing", "sealing"), f"an attach waits for a segment that is {row.state}"
            assert session is not None, "an attach waits whose session ended"
            assert session.state == "open", f"an attach waits whose session is {session.state}"
            assert flight.deadline is not None
            late = isinstance(event, ev.Elapsed) and flight.deadline <= self.world.now
            assert not late, "an attach waits longer than it wants to"
            deadlines.append(flight.deadline)
        first = min(deadlines, default=None)
        assert broker.segments.attaches.deadline == first, "nobody will tell that an attach's time is over"

    # --- the end ---

    def at_the_end(self) -> None:
        """Nothing is left of any segment, in the books and in the world."""
        ledger, sharing = self.world.broker.ledger, self.world.sharing
        left = (ledger.segments, ledger.labels, self.segments, self.names, self.holds, self.flights, self.calls)
        assert not any(left), f"segments are left: {left}"
        assert not self.waiting
        assert not self.seals
        assert self.world.broker.segments.attaches.deadline is None
        assert not sharing.store
        assert not sharing.dropping
        assert not sharing.more


def _fits(asked: SegmentName, name: SegmentName) -> bool:
    models = (ANY_MODEL, name.model)
    return (asked.tenant, asked.label) == (name.tenant, name.label) and asked.model in models
