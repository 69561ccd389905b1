"""One handoff connection of a session: its calls, and the descriptors that come with their answers.

Owns the socket and its end, the calls in flight, which packet belongs to which, and every packet until its descriptors
are closed. Many threads share the socket: each sends, and one at a time reads packets for all. A thread that waits for
an answer reads itself, because a thread for reading would double the round trip. Only a session by gRPC has one, since
a thread cannot wait for gRPC and the socket at once. A connection must never map anything or know what an extent is
for, and never be shared with a forked child. When it ends, its calls undo what they did and raise; `reconnecting` gives
the session another one.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from google.protobuf.message import Message

from ..arguments import parts_of
from ..cancellation import innermost
from ..errors import BrokerUnavailable, ClosedError, DescriptorLimit, MembrokerError, ProtocolError, from_status
from ..interrupts import STOPPING_SECONDS, Condition, uninterrupted
from ..memory.lender import Placement
from ..threads import start_thread
from ..v1 import broker_pb2
from ..v1 import handoff_pb2 as pb
from ..v1.resources_pb2 import Segment, SleepStatus
from ..wire import frames as handoff
from ..wire.descriptors import close_each
from ..wire.names import MAX_IDS_PER_FRAME, MAX_WAIT_SECONDS
from .endpoint import DESCRIPTORS_CUT
from .inventory import HeldResources, Inventory
from .places import Places
from .rpc import READS, GrpcCalls, Outcome

logger: logging.Logger = logging.getLogger("membroker")

_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_PATIENCE = struct.pack("@ll", int(STOPPING_SECONDS), 0)
"""How long a send waits for a broker that reads nothing, as a `timeval`. Then the connection is lost."""
_ANSWERS = {
    **dict.fromkeys(("create_segment", "attach_segment", "seal_segment", "delete_segment"), "segment"),
    "register_model": "model",
    **{kind: kind.partition("_")[2] for kind in READS},
}
"""The kind of a call's answer, where it is not that of the call."""
_BRINGING = frozenset(("allocate", "create_segment", "attach_segment"))
"""The kinds of calls that bring descriptors. The broker bounds these, and all that wait for memory."""
_CANCEL_REVISION = 3
"""The first revision of a broker that knows Cancel."""
_LATE = ("goodbye", "declare", "detach_segment", "release", *(_ANSWERS[kind] for kind in READS))
"""Answers that come late when their caller ran out of time: not worth a warning."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call in flight: `deadline` is on the monotonic clock, and `note` records what the call did.

    `request` says what it borrows, and is empty for a call that borrows no extents. `answer` is the kind of its answer.
    `placement` is None for a call that brings no descriptors.
    `expected` is how many extents must arrive before it is over. Only an answer by gRPC sets it: on the handoff socket
    every delivery precedes the answer.
    """

    request_id: int
    request: broker_pb2.AllocateExtentsRequest
    answer: str
    placement: Placement | None
    deadline: float | None
    note: Callable[[], None] | None
    inbox: deque[handoff.Packet] = field(default_factory=deque)
    extent_ids: list[int] = field(default_factory=list)
    extent_bytes: int = 0
    """Of all extents together."""
    segment: int = 0
    outcome: Outcome | None = None
    cancelled: bool = False
    """The caller has given it up."""
    cancel_by_grpc: Callable[[], object] | None = None
    expected: int = 0
    by_grpc: bool = False
    sent: bool = False
    keep: bool = False
    """The placement could not unmap what it took, so that is still held."""

    def seconds_left(self) -> float | None:
        """Return how long the answer may still take; None for any time."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


class Taken:
    """`count` is how many deliveries of one connection were taken, counted from the first one without a gap.

    Every frame to the broker carries the count, which acknowledges these deliveries. The connection's lock is held.
    """

    __slots__ = ("_arrived", "count")

    def __init__(self) -> None:
        self.count: int = 0
        self._arrived: dict[tuple[int, int], bool] = {}

    def arrived(self, frame: pb.Frame) -> None:
        """Note that a delivery has arrived. Called in the order of arrival."""
        self._arrived[frame.request_id, frame.delivery.part] = False

    def take(self, frame: pb.Frame) -> bool:
        """Note that a delivery was taken; say whether the count rose. It does not while an earlier one is missing."""
        self._arrived[frame.request_id, frame.delivery.part] = True
        before = self.count
        while self._arrived and self._arrived[first := next(iter(self._arrived))]:
            del self._arrived[first]
            self.count += 1
        return self.count > before


class Connection:
    """A connected handoff socket of the broker at `name`, after the Welcome, or after a resume.

    What each call brings is recorded in `inventory`. `revision` and `session` are the Welcome's. `request_ids` go on
    over all connections of a session; 1 was the Hello's. `models` are those that the broker listed at the resume.
    Frames of the kinds `by_grpc` are sent through `grpc`. `on_lost` is called when the connection ends without `close`,
    by any thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        inventory: Inventory,
        *,
        revision: int = 0,
        session: str = "",
        request_ids: Iterator[int] | None = None,
        models: Collection[str] = (),
        grpc: GrpcCalls | None = None,
        by_grpc: Collection[str] = (),
        on_lost: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        self.models: frozenset[str] = frozenset(models)
        self.revision = revision
        self.closing = False
        """Whether the client is closing: no call may ask for memory or a seal any more."""
        self.interrupted: bool = False
        """Whether this side ended it, because an interrupt left a call half done."""
        self._socket = connection
        self._name = name
        self._session = session
        self._inventory = inventory
        self._request_ids = request_ids or itertools.count(2)
        self._grpc = grpc
        self._by_grpc = by_grpc
        self._calls: dict[int, PendingCall] = {}
        self._on_lost = on_lost
        self._changed = Condition()
        self._places = Places()
        self._admitted = Condition(self._changed.lock)
        """Tells a call in front of the places that it has one."""
        self._taken = Taken()
        self._counts = revision > 0
        """Whether each frame carries the number of deliveries that were taken."""
        self._unclosed: list[handoff.Packet] = []
        self._reader: int | None = None
        """The thread that reads; 0 for one that only reads, None while no thread does."""
        self._reader_thread: threading.Thread | None = None
        self._end: tuple[type[MembrokerError], str] | None = None
        self._stopping = ""

    # Calls

    def call(
        self,
        frame: pb.Frame,
        placement: Placement | None = None,
        *,
        timeout: float | None = None,
        note: Callable[[], None] | None = None,
        until: float | None = None,
    ) -> Message:
        """Send `frame`, let `placement` take every delivery, call `note`, and return the response.

        The broker lets the request wait for memory `until` that time on the monotonic clock; None: as its rules say. If
        the session has as many such calls at the broker as it may have, the call waits here first, and the time runs.

        When this raises, `placement` has undone all it took, and all extents of the call are released, at the latest
        when the broker answers. An interrupt ends the connection instead, and the resume settles what became of the
        call. Raises the broker's refusal, `BrokerUnavailable`, `DescriptorLimit`, and what `placement` raises.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        kind = str(frame.WhichOneof("kind"))
        answer = _ANSWERS.get(kind, kind)
        call = PendingCall(next(self._request_ids), frame.allocate, answer, placement, deadline, note)
        frame.request_id = call.request_id
        needs_place = kind in _BRINGING or until is not None
        scope = innermost.get() if needs_place else None
        try:
            try:
                if scope is not None:
                    scope.watch(call, partial(self._cancel, call))
                    scope.check()
                if needs_place:
                    request, line = getattr(frame, kind), None
                    # What is borrowed ahead of need never waits.
                    if not call.request.ahead if until is None else time.monotonic() < until:
                        line = request.name if kind == "attach_segment" else (request.model, request.location)
                    with self._changed.lock:
                        has_place = self._places.enter(call.request_id, line)
                    if not has_place:
                        self._wait_for_place(call, until)
                        if scope is not None:
                            scope.check()
                # In the table first: when the connection is lost, the resume waits for every call in the table, and a
                # close that does not find the call there has said so before.
                self._calls[call.request_id] = call
                if self._end is not None:
                    self._check_open()
                if self.closing and needs_place:
                    raise ClosedError("this client is closed")
                if until is not None:
                    _let_wait(request, until)
                if self._by_grpc and kind in self._by_grpc:
                    self._start_by_grpc(call, frame)
                else:
                    self._send(frame)
                call.sent = True
                if call.cancelled:
                    self._give_up_at_the_broker(call)
                while self._wait(call):
                    self._take(call, use=not call.cancelled)
                    if call.outcome is not None and not call.by_grpc and not call.inbox:
                        break
                if scope is not None:
                    scope.check()
                if isinstance(call.outcome, MembrokerError):
                    if call.outcome.reason and self._session:
                        call.outcome.request = f"{self._session}/requests/{call.request_id}"
                    raise call.outcome
                self._note(call, is_whole=True)
            except Exception:
                self._give_up(call)
                raise
        except BaseException as error:
            if not isinstance(error, Exception):
                self._leave(call)
            raise
        finally:
            self._calls.pop(call.request_id, None)
            if scope is not None:
                scope.unwatch(call)
            if needs_place:
                with self._changed.lock:
                    if admitted := self._places.leave(call.request_id):
                        self._admit(admitted)
            if self._end is not None:
                with self._changed.lock:
                    self._changed.tell_all()
        assert call.outcome is not None
        return call.outcome

    def release(self, extent_ids: Iterable[int], *, answer_within: float | None = None) -> None:
        """Tell the broker that extents are released.

        With `answer_within`, wait for the answer, at most that many seconds. Without, a refusal comes as a notice.
        """
        ids = list(dict.fromkeys(extent_ids))
        while ids:
            # Filled in place: a request that is put into a frame is copied, which takes as long as all the rest.
            frame = pb.Frame()
            request = frame.release
            request.extent_ids.extend(ids[:MAX_IDS_PER_FRAME])
            request.no_reply = answer_within is None
            if answer_within is None:
                frame.request_id = next(self._request_ids)
                self._send(frame)
            else:
                self.call(frame, timeout=answer_within)
            del ids[:MAX_IDS_PER_FRAME]

    def detach(self, generation: int, *, answer_within: float | None = None) -> None:
        """Tell the broker that one hold of a segment has ended; `answer_within` is that of `release`."""
        request = broker_pb2.DetachSegmentRequest(generation=generation, no_reply=answer_within is None)
        frame = pb.Frame(detach_segment=request)
        if answer_within is None:
            frame.request_id = next(self._request_ids)
            self._send(frame)
        else:
            self.call(frame, timeout=answer_within)

    def catch_up(self, stated: HeldResources, timeout: float) -> HeldResources:
        """Tell the broker what is not held any more of what was `stated` at a resume, and return what is held now.

        Nothing has been added since, because every call that could bring something has ended.
        """
        now = self._inventory.held()
        gone = stated.minus(now)
        self.release(gone.extents)
        for generation in gone.segments.elements():
            self.detach(generation)
        for (model, location), less in stated.lowered_to(now).items():
            request = broker_pb2.DeclareMemoryRequest(model=model, location=location, declared_bytes=less)
            self.call(pb.Frame(declare=request), timeout=timeout)
        for name in stated.answering - now.answering:
            quiet = broker_pb2.RegisterModelRequest(model_id=parts_of(name)[1], answers_recalls=False)
            self.call(pb.Frame(register_model=quiet), timeout=timeout)
        return now

    def answer_recall(self, recall_id: int, size: int) -> None:
        """Answer a recall, after all releases so far. `size` is the largest size of it that the program has heard of.

        Does nothing if the connection has ended: the broker asks again.
        """
        frame = pb.Frame()
        frame.recall_answer.recall_id = recall_id
        frame.recall_answer.bytes = size
        with suppress(BrokerUnavailable, ClosedError):
            self._send(frame)

    def answer_sleep(self, sleep_id: int, status: SleepStatus, model: str = "") -> None:
        """Answer an operator's question, or with the id 0 say how a guest of this model is.

        Does nothing if the connection has ended: the operator asks again, and the guest says it again.
        """
        frame = pb.Frame()
        frame.sleep_answer.sleep_id = sleep_id
        frame.sleep_answer.model = model
        frame.sleep_answer.status.CopyFrom(status)
        with suppress(BrokerUnavailable, ClosedError):
            self._send(frame)

    # One call, from its start to its end

    def _wait_for_place(self, call: PendingCall, until: float | None) -> None:
        """Wait until a call has a place at the broker. Raises what ended the connection, and at the call's deadline."""
        with self._changed.lock:
            while not self._places.has(call.request_id):
                self._check_open()
                if call.cancelled:
                    return  # the broker does not hear of it
                now = time.monotonic()
                if call.deadline is not None and call.deadline <= now:
                    raise BrokerUnavailable(f"the broker at {self._name} did not answer the calls before this in time")
                if until is not None and until <= now:
                    # The broker says with its numbers why there was no memory.
                    self._admit(self._places.hurry(call.request_id))
                    until = None
                    continue
                ends = [end - now for end in (call.deadline, until) if end is not None]
                self._admitted.wait(min(ends, default=None), call.request_id)

    def _cancel(self, call: PendingCall) -> None:
        """End the wait of a call that its caller has given up, here or at the broker. Any thread; waits for nothing."""
        call.cancelled = True
        with self._changed.lock:
            self._admitted.tell(call.request_id)
        if call.sent:
            self._give_up_at_the_broker(call)

    def _give_up_at_the_broker(self, call: PendingCall) -> None:
        """Let the broker answer a call that waits there. To an older broker, end the connection instead."""
        if call.outcome is not None or self._end is not None:
            return
        if call.cancel_by_grpc is not None:
            call.cancel_by_grpc()
        elif self.revision < _CANCEL_REVISION:
            self.interrupt()
        else:
            frame = pb.Frame(request_id=call.request_id, cancel=pb.Cancel(), acknowledged=self._taken.count)
            try:
                self._socket.send(handoff.encode(frame), _NOSIGNAL | socket.MSG_DONTWAIT)
            except BlockingIOError:
                start_thread(self._send, "membroker-cancel", frame)
            except OSError:
                return  # the thread that reads finds the end

    def _admit(self, admitted: Iterable[int]) -> None:
        """Wake the calls that have got a place. The lock is held."""
        for request_id in admitted:
            self._admitted.tell(request_id)

    def _send(self, frame: pb.Frame) -> None:
        """Send a frame. Raises what ended the connection, after 5 seconds in which the broker makes no room."""
        frame.acknowledged = self._taken.count if self._counts else 0
        try:
            self._socket.send(handoff.encode(frame), _NOSIGNAL)
        except OSError as error:
            self._lose(error)
            self._check_open()

    def _start_by_grpc(self, call: PendingCall, frame: pb.Frame) -> None:
        assert self._grpc is not None
        call.by_grpc = True
        call.cancel_by_grpc = self._grpc.start(frame, partial(self._finish, call), call.seconds_left())

    def _finish(self, call: PendingCall, outcome: Outcome, extents: int) -> None:
        """Take the answer of a call by gRPC, with its number of extents; any thread.

        What the broker delivered before a refusal is in the socket by now.
        """
        if self._reader_thread is not None:
            self._drain()
        if call.request.count and extents not in (0, call.request.count):
            outcome, extents = ProtocolError(f"{extents} extents are the answer to {call.request.count}"), 0
        with self._changed.lock:
            if self._end is None:
                call.outcome, call.expected = outcome, extents
            self._changed.tell_all()

    def _note(self, call: PendingCall, *, is_whole: bool = False) -> None:
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
            self._inventory.attached(call.request_id, call.segment)
        elif call.extent_ids:
            request = call.request
            self._inventory.borrowed(call.extent_ids, (request.model, request.location, request.extent_bytes))
        if call.note is not None:
            call.note()

    def _undo(self, call: PendingCall) -> None:
        """Let the placement unmap what it took. What it could not unmap is not released either, but held."""
        if call.placement is not None:
            call.keep = True
            call.placement.undo()
            call.keep = False

    def _give_up(self, call: PendingCall) -> None:
        """Undo a call that failed, and release all that came for it, when the broker has answered."""
        try:
            self._undo(call)
        finally:
            with suppress(MembrokerError):
                while call.sent and self._wait(call):
                    self._take(call, use=False)
                if call.segment and not call.keep:
                    self.detach(call.segment)
                elif not call.keep:
                    self.release(call.extent_ids)
            if call.keep:
                self._note(call)

    def _leave(self, call: PendingCall) -> None:
        """Undo a call that an interrupt ended. The resume tells the broker what is not held."""
        with self._changed.lock:
            if self._reader == threading.get_ident():
                self._reader = None
        self.interrupt()
        try:
            self._undo(call)
        finally:
            if call.keep:
                self._note(call)
            else:
                self._inventory.strike_call(call.request_id, call.extent_ids)

    def _take(self, call: PendingCall, *, use: bool = True) -> None:
        """Hand the oldest delivery of a call to its placement, or close it unused. Acknowledge it in any case."""
        packet = call.inbox[0]
        delivery = packet.frame.delivery
        call.extent_ids.extend(delivery.extent_ids)
        call.extent_bytes += delivery.extent_bytes * len(delivery.extent_ids)
        call.segment = delivery.segment
        try:
            if use:
                if packet.truncated or len(delivery.extent_ids) != len(packet.descriptors):
                    raise _incomplete(packet)
                if call.request.count and delivery.extent_bytes != call.request.extent_bytes:
                    wanted = call.request.extent_bytes
                    raise ProtocolError(f"extents of {delivery.extent_bytes} bytes came for extents of {wanted}")
                if call.placement is None:
                    there = len(packet.descriptors)
                    raise ProtocolError(f"{there} descriptors came with an answer that should have none")
                call.placement.place(delivery.extent_ids, packet.descriptors, delivery.extent_bytes)
        finally:
            call.inbox.popleft()
            self._close_and_acknowledge(packet, last=delivery.HasField("reply"))

    def _close_and_acknowledge(self, packet: handoff.Packet, *, last: bool) -> None:
        """Close the descriptors of a delivery, and acknowledge it now if a call may wait for the delivery window.

        After the last delivery of the only call in flight no call waits, so it is enough that the next frame carries
        the count. A call that begins meanwhile is either seen here, or its own frame carries the count: it is in the
        table before its frame reads the count.
        """
        with self._changed.lock:
            close_each(packet.descriptors)
            self._unclosed.remove(packet)
            if self._counts and (not self._taken.take(packet.frame) or (last and len(self._calls) == 1)):
                return  # if an earlier delivery is not taken yet, the thread that takes it acknowledges both
        frame = pb.Frame(request_id=packet.frame.request_id)
        frame.ack.part = packet.frame.delivery.part
        self._send(frame)

    # Reading: one thread at a time, for all

    def start_reader(self) -> None:
        """Let a thread read for all callers until the connection ends: for a session by gRPC. Raises `ThreadLimit`."""
        self._reader = 0  # no caller reads
        self._reader_thread = start_thread(self._read_for_all, "membroker-reader")

    def _wait(self, call: PendingCall) -> bool:
        """Return True when `call` has a delivery to take, False when it is over."""
        me = threading.get_ident()
        while True:
            with self._changed.lock:
                is_over = call.outcome is not None and len(call.extent_ids) >= call.expected
                is_late = call.deadline is not None and time.monotonic() >= call.deadline
                if call.inbox or is_over or is_late or self._end is not None:
                    if self._reader == me:
                        self._reader = None
                    if self._reader is None and self._changed.waiting:
                        self._changed.tell_next()  # it reads now
                    if call.inbox or is_over:
                        return bool(call.inbox)
                    self._check_open()
                    raise BrokerUnavailable(f"the broker at {self._name} did not answer in time")
                if call.by_grpc:
                    self._changed.wait(call.seconds_left())
                    continue
                if self._reader not in (None, me):
                    self._changed.wait(call.seconds_left(), call)
                    continue
                self._reader = me
            if call.deadline is None or self._readable(call.deadline - time.monotonic()):
                self._read(call)

    def _read_for_all(self) -> None:
        """Read until the connection ends. No other thread reads."""
        while self._end is None:
            self._readable(None)
            self._drain()
        self._stop_reading()

    def _drain(self) -> None:
        """Route every packet that is in the socket.

        Called by the thread that only reads, and by a thread that has the answer of a call by gRPC.
        """
        strays = []
        try:
            with self._changed.lock:
                while self._end is None and self._readable(0):
                    packet = handoff.receive(self._socket)
                    self._unclosed.append(packet)
                    if self._route(packet) is None:
                        strays.append(packet)
                self._changed.tell_all()
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        for packet in strays:
            self._refuse(packet)

    def read_to_the_end(self) -> None:
        """Read what the broker sent before it closed, once no other thread reads, and note that it is gone."""
        while True:
            with self._changed.lock:
                while self._reader is not None and self._end is None:
                    self._changed.wait()
                if self._end is not None:
                    return
                self._reader = threading.get_ident()
            if not self._readable(0):
                self._lose(handoff.EndOfConnection())
                self._stop_reading()
                return
            self._read(None)

    def _readable(self, seconds: float | None) -> bool:
        """Say whether a packet, or the end, arrives within `seconds`; None for any time."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else max(0.0, seconds * 1000)))

    def _read(self, mine: PendingCall | None) -> None:
        """As the reader, read one packet and route it, and wake the thread of its call.

        A packet for `mine`, the call of this thread, ends its reading; see `_wait`.
        """
        packet = call = None
        try:
            packet = handoff.receive(self._socket)
            self._unclosed.append(packet)
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        finally:
            with self._changed.lock:
                call = None if packet is None else self._route(packet)
                if call is None or mine is None:
                    self._reader = None
                    self._changed.tell_all()
                elif call is not mine and self._changed.waiting:
                    self._changed.tell(call)
            if packet is not None and call is None:
                self._refuse(packet)

    def _stop_reading(self) -> None:
        """Let another thread read."""
        with self._changed.lock:
            self._reader = None
            self._changed.tell_all()

    def _close_packet(self, packet: handoff.Packet) -> None:
        """Close the descriptors of a packet, and forget it. The lock is held."""
        close_each(packet.descriptors)
        self._unclosed.remove(packet)

    def _route(self, packet: handoff.Packet) -> PendingCall | None:
        """Give a packet to its call, and return that; None when no call waits for it. The lock is held.

        A violation that the broker tells of ends the connection here, before any thread can read the end behind it:
        what was wrong would be wrong again, so the session must not resume.
        """
        frame = packet.frame
        kind = frame.WhichOneof("kind")
        if kind == "delivery":
            self._taken.arrived(frame)
            reply = frame.delivery.reply if frame.delivery.HasField("reply") else None
        else:
            reply = frame.reply
        call = self._calls.get(frame.request_id)
        if call is None or kind not in ("delivery", "reply"):
            if kind == "reply" and frame.reply.HasField("error"):
                error = from_status(frame.reply.error)
                if error.reason == "PROTOCOL_VIOLATION":
                    self._end_with(ProtocolError, f"the broker at {self._name} ended the connection: {error}")
            return None
        if kind == "delivery":
            call.inbox.append(packet)
        else:
            self._close_packet(packet)
        if reply is not None:
            call.outcome = _outcome_of(reply, call.answer)
        return call

    def _refuse(self, packet: handoff.Packet) -> None:
        """Drop a packet that no call waits for; its extents are released."""
        frame = packet.frame
        kind = frame.WhichOneof("kind")
        if kind == "delivery":
            delivery = frame.delivery
            with suppress(MembrokerError):
                self._close_and_acknowledge(packet, last=False)
                if not delivery.segment:
                    self.release(delivery.extent_ids)
                elif delivery.part == delivery.parts - 1:
                    self.detach(delivery.segment)
            return
        with self._changed.lock:
            self._close_packet(packet)
        # Once the connection has ended its calls have gone, and their answers may still be on the way here.
        if self._end is None and (kind != "reply" or frame.reply.WhichOneof("result") not in _LATE):
            logger.warning("the broker sent a frame that no call waits for: %s", kind)

    # The end

    @property
    def has_calls(self) -> bool:
        """Whether a call has not ended."""
        return bool(self._calls)

    def wait_until_idle(self) -> None:
        """Wait until every call has ended. Once the connection is lost, they have then unmapped what they got."""
        with self._changed.lock:
            while self._calls:
                self._changed.wait()

    def say_goodbye(self, timeout: float) -> None:
        """End the session at the broker, if it still listens; wait at most `timeout` seconds for its answer."""
        with suppress(MembrokerError):
            self.call(pb.Frame(goodbye=pb.Goodbye()), timeout=timeout)

    def heard_stopping(self) -> None:
        """Note that the broker announced its stop: the error of its end says so too."""
        self._stopping = " (it had said that it stops)"

    @property
    def lost(self) -> bool:
        """Whether the connection ended without `close`."""
        return self._end is not None and self._end[0] is BrokerUnavailable

    def _check_open(self) -> None:
        """Raise what ended the connection, if it has ended."""
        if self._end is not None:
            kind, why = self._end
            raise kind(why)

    def interrupt(self) -> None:
        """End the connection, because an interrupt left a call half done: the resume agrees on what is held.

        A second interrupt must not stop this half way: calls would wait for a resume that no thread makes.
        """
        uninterrupted(self._interrupt)

    def _interrupt(self) -> None:
        self._break_off(
            BrokerUnavailable,
            f"an interrupt ended the connection to the broker at {self._name} in the middle of a call: mapped memory "
            "stays valid, and the session goes on",
            interrupted=True,
        )
        if self.lost:
            self._on_lost(self)

    def _break_off(self, kind: type[MembrokerError], why: str, *, interrupted: bool = False) -> None:
        """End the connection, unless it has ended: calls raise this error from now on."""
        with self._changed.lock:
            self._end_with(kind, why, interrupted=interrupted)

    def _end_with(self, kind: type[MembrokerError], why: str, *, interrupted: bool = False) -> None:
        """As `_break_off`. The lock is held."""
        if self._end is None:
            self._end = (kind, why)
            self.interrupted = interrupted
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._changed.tell_all()
        self._admitted.tell_all()

    def _lose(self, error: Exception) -> None:
        """Note that the connection is lost, and why."""
        if isinstance(error, handoff.BrokenPacket):
            self._break_off(ProtocolError, f"the broker at {self._name} sent an invalid frame: {error}")
        if isinstance(error, BlockingIOError):
            self._break_off(
                BrokerUnavailable,
                f"the broker at {self._name} has read nothing for {STOPPING_SECONDS:g} s: it is stopped or overloaded; "
                "mapped memory stays valid, and the session goes on when the broker reads again",
            )
        self._break_off(
            BrokerUnavailable,
            f"the broker at {self._name} is gone{self._stopping}: mapped memory stays valid; "
            "start it again (`membrokerd`), and the session goes on",
        )
        if self.lost:
            self._on_lost(self)

    def close(self) -> None:
        """Close the socket, and packets that were not taken. Calls in flight, and later ones, raise `ClosedError`."""
        self._break_off(ClosedError, "the client is closed")
        with self._changed.lock:
            # A descriptor's number can be reused as soon as it is closed, so no thread may be reading from it.
            deadline = time.monotonic() + 5
            while self._reader is not None and (seconds := deadline - time.monotonic()) > 0:
                self._changed.wait(seconds)
        self._close_all()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. Takes no lock; never a shutdown, which the parent would feel."""
        self._end = (ClosedError, "this client belongs to the process that this one was forked from")
        self._changed = Condition()
        self._admitted = Condition()
        self._reader = None
        self._close_all()

    def _close_all(self) -> None:
        self._socket.close()
        while self._unclosed:
            close_each(self._unclosed.pop().descriptors)


def _outcome_of(reply: pb.Reply, kind: str) -> Outcome:
    """Return the outcome of a call that got this answer, and wants one of this kind."""
    result = reply.WhichOneof("result")
    if result == "error":
        return from_status(reply.error)
    if result is None:
        return ProtocolError("the broker's answer is empty, or of a kind that this version does not know")
    if result != kind:
        return ProtocolError(f"the broker's answer is of the kind {result}, and not {kind}")
    response: Message = getattr(reply, result)
    return response


def _let_wait(request: Any, until: float) -> None:
    """Set the wait of a request so that it ends at `until`, on the monotonic clock."""
    left = max(0.0, until - time.monotonic())
    request.wait.FromNanoseconds(min(int(left * 1e9), MAX_WAIT_SECONDS * 10**9))


def _incomplete(packet: handoff.Packet) -> MembrokerError:
    """Return the error for a delivery with more or fewer descriptors than extents."""
    there, ids = len(packet.descriptors), len(packet.frame.delivery.extent_ids)
    if packet.truncated:
        return DescriptorLimit(f"{there} of {ids} descriptors arrived: {DESCRIPTORS_CUT}")
    return ProtocolError(f"{there} descriptors came for {ids} extents")
