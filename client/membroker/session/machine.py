"""The calls of one connection, pure: what callers do and what the broker sends go in, and what follows comes out.

Owns the calls, which of them may be at the broker, what was delivered for each and acknowledged, what goes back, and
what ended the connection. An event is a method, and returns what follows from it: the frames to send, in their order,
and the calls whose threads go on. It never sends, reads a clock, takes a lock, or closes a descriptor: that is for its
shell, which holds a lock around each event (`connection`). The simulation joins many of these to one real core.

The broker lets a session have 16 calls that bring descriptors or wait for memory, and refuses the next one. So when
many threads call, the others wait in front, in the order in which they came. A call belongs to the line of what it may
wait for: the memory of a model at a location, or the seal of a segment. One that does not wait belongs to no line. Some
places are kept for these, and for lines that have no call at the broker: otherwise calls that wait for minutes would
hold up one that could be answered at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Final

from ..arguments import parts_of
from ..errors import BrokerUnavailable, ClosedError, DescriptorLimit, MembrokerError, ProtocolError, from_status
from ..memory.lender import Placement
from ..v1 import broker_pb2
from ..v1 import handoff_pb2 as pb
from ..v1.resources_pb2 import Segment
from ..wire.frames import Packet
from ..wire.names import MAX_CALLS_PER_SESSION, MAX_DESCRIPTORS, MAX_IDS_PER_FRAME
from .endpoint import DESCRIPTORS_CUT
from .inventory import HeldResources, Inventory
from .rpc import READS, Outcome

LIFECYCLE: Final[Mapping[str, Mapping[str, str]]] = {
    "new": {"has a place": "asked", "no place": "waiting", "given up": "unwanted", "over": "ended"},
    # The broker has as many calls of this session as it takes.
    "waiting": {"has a place": "asked", "given up": "unwanted", "over": "ended"},
    "asked": {"answered": "answered", "given up": "unwanted", "over": "ended"},
    # What comes for it is closed unused. It goes back after the answer, which a Cancel may hasten.
    "unwanted": {"over": "ended"},
    # Its deliveries are being taken.
    "answered": {"given up": "unwanted", "over": "ended"},
    "ended": {},
}
"""`LIFECYCLE[state][cause]` is the next state of a call. A cause that has no entry changes nothing."""

MOST_PATIENT = MAX_CALLS_PER_SESSION - 4
"""The places that calls of lines share. Of the others one is kept for calls of no line, and a new line gets one."""
CANCEL_REVISION = 3
"""The first revision of a broker that knows Cancel."""
EXTENTS_REVISION = 4
"""The first revision of a broker whose delivery window counts extents. That of an older one counts packets."""
_ANSWERS = {
    **dict.fromkeys(("create_segment", "attach_segment", "seal_segment", "delete_segment"), "segment"),
    "register_model": "model",
    **{kind: kind.partition("_")[2] for kind in READS},
}
"""The kind of a call's answer, where it is not that of the call."""
_BRINGING = frozenset(("allocate", "create_segment", "attach_segment"))
"""The kinds of calls that bring descriptors. The broker bounds these, and all that wait for memory."""
_LATE = ("goodbye", "declare", "detach_segment", "release", *(_ANSWERS[kind] for kind in READS))
"""Answers that come late when their caller ran out of time: not worth a warning."""


class Call:
    """One call. `note` records what it did, and `placement` is None for a call that brings no descriptors.

    `request` says what it borrows, and is empty for a call that borrows no extents. `answer` is the kind of its answer.
    `deadline` is when the answer is due, on the shell's clock. `patient` says whether the broker may let it wait for
    memory; None: as its rules say.
    """

    state: str = "new"
    by_grpc: bool = False
    cancel_by_grpc: Callable[[], object] | None = None
    extent_bytes: int = 0
    """Of all extents together."""
    segment: int = 0
    outcome: Outcome | None = None
    expected: int = 0
    """How many extents must arrive before it is over. Only an answer by gRPC sets it: on the handoff socket every
    delivery precedes the answer."""
    keep: bool = False
    """The placement could not unmap what it took, so that is still held."""
    sent: bool = False
    """Whether the broker may have heard of it, and has to answer."""
    line: Hashable = None

    def __init__(
        self,
        frame: pb.Frame,
        placement: Placement | None = None,
        *,
        deadline: float | None = None,
        patient: bool | None = None,
        note: Callable[[], None] | None = None,
    ) -> None:
        self.kind: str = str(frame.WhichOneof("kind"))
        self.request_id: int = frame.request_id
        self.request: broker_pb2.AllocateExtentsRequest = frame.allocate
        self.answer: str = _ANSWERS.get(self.kind, self.kind)
        self.placement: Placement | None = placement
        self.deadline: float | None = deadline
        self.note: Callable[[], None] | None = note
        self.inbox: deque[Packet] = deque()
        self.extent_ids: list[int] = []
        self.needs_place: bool = patient is not None or self.kind in _BRINGING
        # What is borrowed ahead of need never waits.
        if self.needs_place and (not self.request.ahead if patient is None else patient):
            asked = getattr(frame, self.kind)
            self.line = asked.name if self.kind == "attach_segment" else (asked.model, asked.location)


class Calls:
    """The calls of one connection, whose broker has this revision. What they bring is recorded in `inventory`."""

    def __init__(self, inventory: Inventory, name: str, revision: int = 0) -> None:
        self.inventory = inventory
        self.at_broker: dict[int, Call] = {}
        """Those that the broker has to answer, by number."""
        self.end: tuple[type[MembrokerError], str] | None = None
        """What ended the connection."""
        self.is_interrupted: bool = False
        """Whether this side ended it, because an interrupt left a call half done."""
        self.is_closing: bool = False
        """Whether the client is closing: no call may ask for memory or a seal any more."""
        self.counts: bool = revision > 0
        """Whether each frame carries the number of deliveries that were taken, which acknowledges them."""
        self._knows_cancel = revision >= CANCEL_REVISION
        self._by_extents = revision >= EXTENTS_REVISION
        self._since_ack = 0
        """How many extents were counted since the last Ack; other frames may have acknowledged them."""
        self.acknowledged: int = 0
        """How many deliveries were taken, counted from the first one without a gap."""
        self._name = name
        self._arrived: dict[tuple[int, int], int | None] = {}
        """Deliveries that are not counted yet, in the order of arrival, each with its extents once it was taken."""
        self._places: dict[int, Hashable] = {}
        """The line of each call that has a place at the broker; None for a call of no line."""
        self._front: dict[int, Call] = {}
        """The calls in front, in the order in which they came."""

    # What callers do. Every event may come twice, because an interrupt can end the first run.

    def begin(self, call: Call) -> bool:
        """A call begins, or looks again for a place: say whether it is sent now. Raises what ended the connection."""
        if call.needs_place and call.request_id not in self._places:
            line, front = call.line, self._front
            if call.request_id in front or (
                (front or len(self._places) >= MOST_PATIENT)
                and (any(line == other.line for other in front.values()) or not self._has_room(line))
            ):
                self.check_open()
                front[call.request_id] = call
                call.state = LIFECYCLE[call.state].get("no place", call.state)
                return False
            self._places[call.request_id] = line
        # In the table first: when the connection is lost, the resume waits for every call in the table, and a close
        # that does not find the call there has said so before.
        self.at_broker[call.request_id] = call
        if self.end is not None:
            self.check_open()
        if self.is_closing and call.needs_place:
            raise ClosedError("this client is closed")
        call.state = LIFECYCLE[call.state].get("has a place", call.state)
        return True

    def hurry(self, call: Call) -> Collection[int]:
        """The time of a call in front is over, so it does not wait at the broker; return the calls that go on."""
        call.line = None
        return self._fill()

    def give_up(self, call: Call) -> bool:
        """The caller wants nothing of a call any more; say whether the broker has to hear of it."""
        call.state = LIFECYCLE[call.state].get("given up", call.state)
        return call.sent and call.outcome is None and self.end is None

    def cancels(self, call: Call) -> pb.Frame | None:
        """Return what lets the broker answer a call that waits there; None for an older one, which is left instead."""
        return pb.Frame(request_id=call.request_id, cancel=pb.Cancel()) if self._knows_cancel else None

    def take(self, call: Call) -> bool:
        """A call takes its oldest delivery; say whether its placement gets that. `taken` follows in any case."""
        packet = call.inbox[0]
        delivery = packet.frame.delivery
        call.extent_ids.extend(delivery.extent_ids)
        call.extent_bytes += delivery.extent_bytes * len(delivery.extent_ids)
        call.segment = delivery.segment
        if call.state == "unwanted":
            return False
        if packet.truncated or len(delivery.extent_ids) != len(packet.descriptors):
            raise _incomplete(packet)
        if call.request.count and delivery.extent_bytes != call.request.extent_bytes:
            wanted = call.request.extent_bytes
            raise ProtocolError(f"extents of {delivery.extent_bytes} bytes came for extents of {wanted}")
        if call.placement is None:
            there = len(packet.descriptors)
            raise ProtocolError(f"{there} descriptors came with an answer that should have none")
        return True

    def taken(self, packet: Packet) -> pb.Frame | None:
        """A delivery was taken, and its descriptors are closed; return what acknowledges it at once, if that must be.

        After the last delivery of a call another one may wait for the delivery window, but no packet needs more than
        half of it. So it is enough that the next frame carries the count, as long as less than half is taken. If it was
        the only call, none waits at all. One that begins meanwhile is either seen here, or its own frame carries the
        count: it is in the table before its frame reads the count.
        """
        frame = packet.frame
        if self.counts:
            arrived, before = self._arrived, self.acknowledged
            arrived[frame.request_id, frame.delivery.part] = len(frame.delivery.extent_ids)
            while arrived and (extents := arrived[first := next(iter(arrived))]) is not None:
                del arrived[first]
                self.acknowledged += 1
                self._since_ack += extents
            has_room = self._by_extents and self._since_ack < MAX_DESCRIPTORS
            is_alone = len(self.at_broker) == 1 and frame.request_id in self.at_broker
            if self.acknowledged == before or (frame.delivery.HasField("reply") and (has_room or is_alone)):
                return None  # if an earlier delivery is not taken yet, the thread that takes it acknowledges both
            self._since_ack = 0
        ack = pb.Frame(request_id=frame.request_id)
        ack.ack.part = frame.delivery.part
        return ack

    def record(self, call: Call, *, is_whole: bool = True) -> None:
        """Record what a call has brought before the call is forgotten, so that no resume can miss it.

        With `is_whole`, raise `ProtocolError` first unless that is what was asked for, or what the answer names: the
        user gets addresses for all of it, and an address without memory ends the program (SIGSEGV).
        """
        if is_whole:
            request, answer, ids = call.request, call.outcome, call.extent_ids
            count, size, segment = request.count, request.count * request.extent_bytes, 0
            if call.placement is not None and isinstance(answer, Segment):
                count, size, segment = answer.extents, answer.size_bytes, answer.generation
            if (len(ids), len(set(ids)), call.extent_bytes, call.segment) != (count, count, size, segment):
                raise ProtocolError(
                    f"{len(ids)} extents with {call.extent_bytes} bytes came for a call about {count} with {size}: the "
                    "broker is defective"
                )
        if call.segment:
            self.inventory.attached(call.request_id, call.segment)
        elif call.extent_ids:
            request = call.request
            self.inventory.borrowed(call.extent_ids, (request.model, request.location, request.extent_bytes))
        if call.note is not None:
            call.note()

    def goes_back(self, call: Call) -> Iterator[pb.Frame]:
        """A call that has failed is answered; yield what releases all that came for it."""
        if call.segment and not call.keep:
            yield detach(call.segment)
        elif not call.keep:
            yield from releases(call.extent_ids)

    def interrupted(self, call: Call) -> None:
        """An interrupt has ended a call. The resume tells the broker what is not held."""
        if call.keep:
            self.record(call, is_whole=False)
        else:
            self.inventory.strike_call(call.request_id, call.extent_ids)

    def over(self, call: Call) -> Collection[int]:
        """A call is over, whatever became of it; return the calls in front that go on."""
        call.state = "ended"
        self.at_broker.pop(call.request_id, None)
        self._places.pop(call.request_id, None)
        if not self._front:
            return ()
        self._front.pop(call.request_id, None)
        return self._fill()

    # What the broker does

    def arrived(self, packet: Packet) -> Call | None:
        """A packet has arrived; return its call, or None if no call waits for it, for `stray`.

        A violation that the broker tells of ends the connection here, before any thread can read the end behind it:
        what was wrong would be wrong again, so the session must not resume.
        """
        frame = packet.frame
        kind = frame.WhichOneof("kind")
        if kind == "delivery":
            self._arrived[frame.request_id, frame.delivery.part] = None
            reply = frame.delivery.reply if frame.delivery.HasField("reply") else None
        else:
            reply = frame.reply
        call = self.at_broker.get(frame.request_id)
        if call is None or kind not in ("delivery", "reply"):
            if kind == "reply" and frame.reply.HasField("error"):
                error = from_status(frame.reply.error)
                if error.reason == "PROTOCOL_VIOLATION":
                    self.end_with(ProtocolError, f"the broker at {self._name} ended the connection: {error}")
            return None
        if kind == "delivery":
            call.inbox.append(packet)
        if reply is not None:
            is_right = reply.WhichOneof("result") == call.answer
            call.outcome = getattr(reply, call.answer) if is_right else _failure_in(reply, call.answer)
            call.state = LIFECYCLE[call.state].get("answered", call.state)
        return call

    def answered(self, call: Call, outcome: Outcome, extents: int = 0) -> None:
        """A call has its answer: by gRPC with the number of extents that come for it on the handoff socket."""
        if call.request.count and extents not in (0, call.request.count):
            outcome, extents = ProtocolError(f"{extents} extents are the answer to {call.request.count}"), 0
        call.outcome, call.expected = outcome, extents
        call.state = LIFECYCLE[call.state].get("answered", call.state)

    def stray(self, packet: Packet) -> Iterator[pb.Frame]:
        """No call waits for a packet, and its descriptors are closed; yield what acknowledges and releases it."""
        frame = packet.frame
        if frame.WhichOneof("kind") == "delivery":
            if (ack := self.taken(packet)) is not None:
                yield ack
            delivery = frame.delivery
            if not delivery.segment:
                yield from releases(delivery.extent_ids)
            elif delivery.part == delivery.parts - 1:
                yield detach(delivery.segment)

    def is_odd(self, frame: pb.Frame) -> bool:
        """Say whether a frame for no call is worth a warning.

        Once the connection has ended its calls have gone, and their answers may still be on the way here.
        """
        kind = frame.WhichOneof("kind")
        if self.end is not None or kind == "delivery":
            return False
        return kind != "reply" or frame.reply.WhichOneof("result") not in _LATE

    def end_with(self, kind: type[MembrokerError], why: str, *, interrupted: bool = False) -> None:
        """The connection ends: calls raise this error from now on. Nothing changes if it has ended."""
        if self.end is None:
            self.is_interrupted, self.end = interrupted, (kind, why)

    @property
    def is_lost(self) -> bool:
        """Whether the connection ended without `close`."""
        return self.end is not None and self.end[0] is BrokerUnavailable

    def check_open(self) -> None:
        """Raise what ended the connection, if it has ended."""
        if self.end is not None:
            kind, why = self.end
            raise kind(why)

    # The places

    def _has_room(self, line: Hashable) -> bool:
        places = self._places
        if len(places) < MOST_PATIENT:
            return True
        if line is None:
            return len(places) < MAX_CALLS_PER_SESSION
        return len(places) < MAX_CALLS_PER_SESSION - 1 and line not in places.values()

    def _fill(self) -> Collection[int]:
        """Give free places to the calls that came first, of those that may have one."""
        admitted, full = [], set[Hashable]()
        for call in self._front.values():
            if len(self._places) >= MAX_CALLS_PER_SESSION:
                break
            if call.line in full:
                continue
            if self._has_room(call.line):
                self._places[call.request_id] = call.line
                admitted.append(call)
            else:
                full.add(call.line)
        for call in admitted:
            self._front.pop(call.request_id, None)
        return [call.request_id for call in admitted]


def releases(extent_ids: Iterable[int], *, no_reply: bool = True) -> list[pb.Frame]:
    """Return the frames that say that extents are released. With `no_reply`, a refusal comes as a notice."""
    ids, frames = list(dict.fromkeys(extent_ids)), []
    while ids:
        # Filled in place: a request that is put into a frame is copied, which takes as long as all the rest.
        frame = pb.Frame()
        frame.release.extent_ids.extend(ids[:MAX_IDS_PER_FRAME])
        frame.release.no_reply = no_reply
        frames.append(frame)
        del ids[:MAX_IDS_PER_FRAME]
    return frames


def detach(generation: int, *, no_reply: bool = True) -> pb.Frame:
    """Return the frame that tells the broker that one hold of a segment has ended."""
    return pb.Frame(detach_segment=broker_pb2.DetachSegmentRequest(generation=generation, no_reply=no_reply))


def catch_up(stated: HeldResources, now: HeldResources) -> Iterator[pb.Frame]:
    """Yield what tells the broker what is not held any more of what was `stated` at a resume.

    Nothing has been added since, because every call that could bring something has ended.
    """
    gone = stated.minus(now)
    yield from releases(gone.extents)
    yield from map(detach, gone.segments.elements())
    for (model, location), less in stated.lowered_to(now).items():
        declare = broker_pb2.DeclareMemoryRequest(model=model, location=location, declared_bytes=less)
        yield pb.Frame(declare=declare)
    for name in stated.answering - now.answering:
        quiet = broker_pb2.RegisterModelRequest(model_id=parts_of(name)[1], answers_recalls=False)
        yield pb.Frame(register_model=quiet)


def _failure_in(reply: pb.Reply, kind: str) -> MembrokerError:
    """Return the error for an answer that is not of the kind that a call wants."""
    result = reply.WhichOneof("result")
    if result == "error":
        return from_status(reply.error)
    if result is None:
        return ProtocolError("the broker's answer is empty, or of a kind that this version does not know")
    return ProtocolError(f"the broker's answer is of the kind {result}, and not {kind}")


def _incomplete(packet: Packet) -> MembrokerError:
    """Return the error for a delivery with more or fewer descriptors than extents."""
    there, ids = len(packet.descriptors), len(packet.frame.delivery.extent_ids)
    if packet.truncated:
        return DescriptorLimit(f"{there} of {ids} descriptors arrived: {DESCRIPTORS_CUT}")
    return ProtocolError(f"{there} descriptors came for {ids} extents")
