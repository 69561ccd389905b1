"""One handoff connection of a session: calls, and the descriptors that come with their answers.

Owns the call socket. The thread that calls reads the socket itself, one thread at a time, and hands the others
what is theirs: a thread for reading would double the round trip. It must never map anything or know what an
extent is for, never keep a descriptor when a delivery has been handled, and never be shared with a forked child.
When it is lost, its calls undo what they did and raise; that a session gets another one is its line's work.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from google.protobuf.message import Message

from ..errors import BrokerUnavailable, ClosedError, MembrokerError, ProtocolError, from_status
from ..interrupts import Condition, uninterrupted
from ..v1 import broker_pb2
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from .call import Call, DeliveryHandler, Nothing, Outcome, Taken, check_whole, close_packet, close_packets, outcome_of
from .inventory import Registry

logger = logging.getLogger("membroker")

_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_TOLD = ("goodbye", "declare", "detach_segment")
"""Answers without which a caller goes on."""


class Connection:
    """A connected handoff socket, after the Welcome, or after the last Holds.

    What each call brings is entered in `registry`. `revision` is the Welcome's. `request_ids` are the session's, 1 was
    the Hello; `models` are those that it had registered when it was taken up again here. `on_lost` is called when the
    broker is gone, by any thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        registry: Registry,
        *,
        revision: int = 0,
        request_ids: Iterator[int] | None = None,
        models: Collection[str] = (),
        on_lost: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        self.models = frozenset(models)
        self.revision = revision
        self._socket = connection
        self._name = name
        self._registry = registry
        self._request_ids = request_ids or itertools.count(2)
        self._on_lost = on_lost
        self._calls: dict[int, Call] = {}
        self._taken = Taken()
        self._refused_beside: set[Call] = set()
        """Refused elsewhere, while deliveries that precede the answer may still be here."""
        self._changed = Condition()
        self._reader: int | None = None
        self.dropped = False
        """Whether an interrupt has ended it, and not the broker."""
        self._landing: list[handoff.Received] = []
        """What the reading thread has received, until its call has it: after Ctrl-C its descriptors are closed."""
        self._end: tuple[type[MembrokerError], str] | None = None
        self._stopping = ""
        self._nudged, self._nudge = socket.socketpair()
        self._nudged.setblocking(False)
        self._nudge.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._poller.register(self._nudged, select.POLLIN)

    # Calls

    def new_request_id(self) -> int:
        """Return an id that no other call of this session has."""
        return next(self._request_ids)

    def call(
        self,
        frame: pb.Frame,
        handler: DeliveryHandler | None = None,
        *,
        timeout: float | None = None,
        note: Callable[[], None] | None = None,
    ) -> Message:
        """Send `frame` and return its response, after `handler` has taken every delivery, and `note` was called.

        When this raises, `handler` has undone all it took, and all extents of the call are released, at the
        latest when the broker answers. Raises the broker's refusal, `BrokerUnavailable`, `DescriptorLimit`, and
        what `handler` raises.
        """
        call = Call(self.new_request_id(), deadline=timeout and time.monotonic() + timeout, note=note)
        frame.request_id = call.request_id

        def begin() -> None:
            call.sent.append(1)
            self._post(frame)

        return self._conduct(call, handler or Nothing(), begin)

    def tell(self, frame: pb.Frame, timeout: float) -> None:
        """As `call`, of what is given back already: no interrupt keeps it from being sent. `timeout` is in seconds."""
        call = Call(self.new_request_id(), deadline=time.monotonic() + timeout)
        frame.request_id = call.request_id

        def begin() -> None:
            self._post(frame)
            call.sent.append(1)

        self._conduct(call, Nothing(), begin)

    def call_beside(self, start: Callable[[int, Callable[[Outcome], None]], None], handler: DeliveryHandler) -> Message:
        """As `call`, for a call that is made elsewhere and whose descriptors come here.

        `start(request_id, finish)` begins it; `finish(outcome)` is called once, by any thread.
        """
        call = Call(self.new_request_id(), beside=True)

        def begin() -> None:
            start(call.request_id, lambda outcome: self._finish(call, outcome))
            call.sent.append(1)

        return self._conduct(call, handler, begin)

    @contextmanager
    def busy(self) -> Iterator[int]:
        """Yield an id for a call that is made elsewhere: this session is not taken up again before the block has ended.

        A generator, so that an interrupt between its beginning and the block still ends it. Raises as `call`.
        """
        call = Call(self.new_request_id(), beside=True)
        try:
            self._begin(call)
            yield call.request_id
        finally:
            self._forget(call)

    def release(self, extent_ids: Iterable[int]) -> None:
        """Say that extents are given back, without waiting for an answer; a refusal comes as a notice."""
        ids = list(dict.fromkeys(extent_ids))
        while ids:
            # Filled in place: a request that is put into a frame is copied, which takes as long as all the rest.
            frame = pb.Frame(request_id=self.new_request_id())
            request = frame.release
            request.extent_ids.extend(ids[: handoff.MAX_IDS_PER_FRAME])
            request.no_reply = True
            self._post(frame)
            del ids[: handoff.MAX_IDS_PER_FRAME]

    def detach(self, generation: int) -> None:
        """Say that this session lets go of a segment, without waiting for an answer; a refusal comes as a notice."""
        request = broker_pb2.DetachSegmentRequest(generation=generation, no_reply=True)
        self._post(pb.Frame(request_id=self.new_request_id(), detach_segment=request))

    # The end

    def heard_stopping(self) -> None:
        """Note that the broker said that it stops: the error of its end says so too."""
        self._stopping = " (it had said that it stops)"

    @property
    def lost(self) -> bool:
        """Whether the broker is gone from the other end."""
        return self._end is not None and self._end[0] is BrokerUnavailable

    def read_to_the_end(self) -> None:
        """The broker has closed: read what it still said, after whoever reads already, and note that it is gone."""
        while True:
            with self._changed.lock:
                while self._reader is not None and self._end is None:
                    self._changed.wait()
                if self._end is not None:
                    return
                self._reader = threading.get_ident()
            packet = None
            try:
                poller = select.poll()
                poller.register(self._socket, select.POLLIN)
                if not poller.poll(0):
                    raise handoff.EndOfConnection
                packet = handoff.receive(self._socket, self._landing)
            except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
                self._landing = []
                self._lose(error)
            finally:
                self._resign(packet)

    def wait_until_idle(self) -> None:
        """Wait until every call has ended: once the connection is lost, what it had mapped is unmapped then."""
        with self._changed.lock:
            while self._calls:
                self._changed.wait()

    def say_goodbye(self, timeout: float) -> None:
        """End the session at the broker, when it still listens; wait `timeout` seconds for its word."""
        with suppress(MembrokerError):
            self.tell(pb.Frame(goodbye=pb.Goodbye()), timeout)

    def close(self) -> None:
        """Close the socket. Calls in flight, and later ones, raise `ClosedError`."""
        self._break(ClosedError, "the client is closed")
        with self._changed.lock:
            # A descriptor's number can be reused the moment it is closed: nobody may be reading from it.
            deadline = time.monotonic() + 5
            while self._reader is not None and (seconds := deadline - time.monotonic()) > 0:
                self._changed.wait(seconds)
        self._close_sockets()

    def abandon(self) -> None:
        """In a forked child: close the inherited sockets. Takes no lock; never a shutdown, which the parent feels."""
        self._end = (ClosedError, "this client belongs to the process that this one was forked from")
        self._changed = Condition()
        self._reader = None
        for call in self._calls.values():
            close_packets(call.inbox)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in (self._socket, self._nudged, self._nudge):
            connection.close()

    def _break(self, kind: type[MembrokerError], why: str) -> None:
        with self._changed.lock:
            if self._end is None:
                self._end = (kind, why)
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._changed.tell_all()

    def _check_open(self) -> None:
        if self._end is not None:
            kind, why = self._end
            raise kind(why)

    # One call, from its begin to its end

    def _begin(self, call: Call) -> None:
        # In this order: whoever takes the session up again waits for what is entered when the connection is lost.
        self._calls[call.request_id] = call
        self._check_open()

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.request_id, None)
        if self._end is not None:
            with self._changed.lock:
                self._changed.tell_all()

    def _conduct(self, call: Call, handler: DeliveryHandler, start: Callable[[], None]) -> Message:
        try:
            try:
                self._begin(call)
                start()
                while self._wait(call):
                    self._take(call, handler)
                if isinstance(call.outcome, MembrokerError):
                    raise call.outcome
                self._note(call)
                self._forget(call)
            except Exception:
                try:
                    self._undo(call, handler)
                finally:
                    self._abandon(call)
                raise
        except Exception:
            raise
        except BaseException:
            # An interrupt left the call half done. What it mapped is unmapped before the session states what it holds.
            handler.undo()
            self.interrupted()
            raise
        assert call.outcome is not None
        return call.outcome

    def interrupted(self) -> None:
        """Forget this thread's calls, and drop the connection: the session's next one agrees on what is held."""
        me = threading.get_ident()
        uninterrupted(lambda: self._drop(me))

    def _drop(self, thread: int) -> None:
        with self._changed.lock:
            mine = [call for call in self._calls.values() if call.thread == thread]
            for call in mine:
                del self._calls[call.request_id]
            if self._reader == thread:
                self._drop_landed()
            self.dropped = True
        for call in mine:
            close_packets(call.inbox)
        self._lose(InterruptedError("a call was interrupted"))
        with self._changed.lock:
            if self._reader == thread:
                self._reader = None
            self._changed.tell_all()

    def _drop_landed(self) -> None:
        """Close what came for a reader that an interrupt ended."""
        landed, self._landing = self._landing, []
        for _, control, _, _ in landed:
            handoff.close_all(handoff.descriptors_in(control))

    def _note(self, call: Call) -> None:
        """Enter what a call has brought, before it is forgotten: no Holds can miss it."""
        if call.segment:
            self._registry.attached(call.segment)
        elif call.extent_ids:
            self._registry.borrowed(call.extent_ids)
        if call.note is not None:
            call.note()

    def _undo(self, call: Call, handler: DeliveryHandler) -> None:
        """Let the handler unmap; what it could not unmap is not given back either, but held."""
        call.keep = True
        handler.undo()
        call.keep = False

    def _abandon(self, call: Call) -> None:
        """Close and acknowledge what still comes for a call that was given up, and release all of it at its end."""
        try:
            with suppress(MembrokerError):
                while call.sent and self._wait(call):
                    self._take(call, None)
                if call.keep:
                    return
                if call.segment:
                    self.detach(call.segment)
                else:
                    self.release(call.extent_ids)
        finally:
            if call.keep:
                self._note(call)
            close_packets(call.inbox)
            self._forget(call)

    def _take(self, call: Call, handler: DeliveryHandler | None) -> None:
        """Handle the oldest delivery of a call; without a handler, close it unused. Acknowledge it in any case."""
        packet = call.inbox[0]
        delivery = packet.frame.delivery
        call.extent_ids.extend(delivery.extent_ids)
        call.segment = delivery.segment
        try:
            if handler is not None:
                check_whole(packet)
                handler.receive(delivery, packet.descriptors)
        finally:
            close_packet(packet)
            call.inbox.popleft()
            self._acknowledge(call, packet)

    def _acknowledge(self, call: Call | None, packet: handoff.Packet) -> None:
        """Let the broker send more in the place of a delivery that was taken, where a call may wait for that.

        When no other call is in flight, none waits, and the next frame says it. A call that begins meanwhile is
        either seen here, or its own frame has the count already: it is entered before that is read.
        """
        delivery = packet.frame.delivery
        if self.revision:
            if not self._taken.take(packet.frame):
                return  # the thread that takes the one before it says so
            if delivery.HasField("reply") and call is not None and len(self._calls) == 1:
                return
        frame = pb.Frame(request_id=packet.frame.request_id)
        frame.ack.part = delivery.part
        self._post(frame)

    def _encode(self, frame: pb.Frame) -> bytes:
        frame.acknowledged = self._taken.count if self.revision else 0
        return handoff.encode(frame)

    def _finish(self, call: Call, outcome: Outcome) -> None:
        """Take the outcome of a call that was made beside; any thread."""
        with self._changed.lock:
            call.outcome = outcome
            if isinstance(outcome, MembrokerError):
                self._refused_beside.add(call)
            self._changed.tell_all()
        # Its thread may be the one that waits for the socket. Full or closed: it is awake, or gone.
        with suppress(OSError):
            self._nudge.send(b"\0")

    def _post(self, frame: pb.Frame) -> None:
        """Send a frame that no interrupt may come to: the broker counts on acknowledgements and releases."""
        try:
            self._socket.send(self._encode(frame), _NOSIGNAL)
        except OSError as error:
            self._lose(error)
            self._check_open()

    # Reading: one thread at a time, for all

    def _wait(self, call: Call) -> bool:
        """Return True when `call` has a delivery to take, False when it is over."""
        # Looked at without the lock: whoever hands on a delivery with the answer in it hands on the delivery first.
        while call.is_waiting():
            with self._changed.lock:
                reading = self._take_turn(call)
            if reading:
                self._read(call)
        return bool(call.inbox)

    def _take_turn(self, call: Call) -> bool:
        """Be the reader, when nobody else is; False when another reader has brought what `call` waits for.

        Raises when there is nothing to wait for. The lock is held.
        """
        while call.is_waiting():
            self._check_open()
            if call.deadline is not None and time.monotonic() >= call.deadline:
                raise BrokerUnavailable(f"the broker at {self._name} did not answer in time")
            if self._reader is None:
                self._reader = threading.get_ident()
                return True
            self._changed.wait(call.seconds_left())
        return False

    def _read(self, call: Call) -> None:
        """Read one packet and hand it to its call. A call that waits for more than the socket polls first."""
        packet = None
        try:
            if not (call.beside or call.deadline) or self._readable(call):
                packet = handoff.receive(self._socket, self._landing)
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._landing = []
            self._lose(error)
        finally:
            self._resign(packet)

    def _readable(self, call: Call) -> bool:
        # Every one, not this call only: a reader that waits for long may never let another thread read.
        refused = tuple(self._refused_beside)
        ready = dict(self._poller.poll(0 if refused else call.patience()))
        if self._nudged.fileno() in ready:
            self._nudged.recv(4096)
        if self._socket.fileno() in ready:
            return True
        # The deliveries of a call were sent before its answer: with that known and nothing here, none is missing.
        for one in refused:
            one.dry = True
            self._refused_beside.discard(one)
        return False

    def _resign(self, packet: handoff.Packet | None) -> None:
        """Stop being the reader, if this thread is, after handing on what it has read."""
        stray = None
        with self._changed.lock:
            if self._reader != threading.get_ident():
                return
            if packet is None:
                self._drop_landed()
            if packet is not None:
                if packet.frame.HasField("delivery"):
                    self._taken.arrived(packet.frame)
                if not self._route(packet):
                    self._landing = []
                    stray = packet
            self._reader = None
            self._changed.tell_all()
        if stray is not None:
            self._refuse(stray)

    def _route(self, packet: handoff.Packet) -> bool:
        """Hand a packet to its call; False when no call waits for it. The lock is held."""
        frame = packet.frame
        call = self._calls.get(frame.request_id)
        kind = frame.WhichOneof("kind")
        if call is None or kind not in ("delivery", "reply"):
            return False
        if kind == "delivery":
            # The packet is in the landing or in the inbox: an interrupt comes before both statements, or after them.
            self._landing = []
            call.inbox.append(packet)
            # Last, because a thread that waits looks without the lock.
            if frame.delivery.HasField("reply"):
                call.outcome = outcome_of(frame.delivery.reply)
        else:
            self._landing = []
            call.outcome = outcome_of(frame.reply)
        return True

    def _refuse(self, packet: handoff.Packet) -> None:
        """Drop what no call waits for; extents in it are given back."""
        close_packet(packet)
        kind = packet.frame.WhichOneof("kind")
        if kind == "reply" and packet.frame.reply.HasField("error"):
            error = from_status(packet.frame.reply.error)
            if error.reason == "PROTOCOL_VIOLATION":
                # It closes now, and what was wrong would be wrong again.
                self._break(ProtocolError, f"the broker at {self._name} ended the connection: {error}")
                return
        if kind == "reply" and packet.frame.reply.WhichOneof("result") in _TOLD:
            return  # later than anybody waited for it
        if kind != "delivery":
            logger.warning("the broker sent a frame that nobody waits for: %s", kind)
            return
        delivery = packet.frame.delivery
        with suppress(MembrokerError):
            self._acknowledge(None, packet)
            if not delivery.segment:
                self.release(delivery.extent_ids)
            elif delivery.part == delivery.parts - 1:
                self.detach(delivery.segment)

    def _lose(self, error: Exception) -> None:
        """Note that the connection is lost, and why."""
        if isinstance(error, handoff.BrokenPacket):
            self._break(ProtocolError, f"the broker at {self._name} sent what is no frame: {error}")
        self._break(
            BrokerUnavailable,
            f"the broker at {self._name} is gone{self._stopping}: what is mapped stays valid; "
            "start it again (`membrokerd`), and the session goes on",
        )
        if self.lost:
            self._on_lost(self)
