"""The handoff connection of one session: calls, and the descriptors that come with their answers.

Owns the call socket. The thread that calls reads the socket itself, one thread at a time, and hands the others
what is theirs: a thread for reading would double the round trip. It must never map anything or know what an
extent is for, never keep a descriptor when a delivery has been handled, and never be shared with a forked child.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from google.protobuf.message import Message

from membroker import handoff
from membroker.calls import Call, DeliveryHandler, Nothing, Outcome
from membroker.endpoint import DESCRIPTORS_SHORT
from membroker.errors import (
    BrokerUnavailable,
    ClosedError,
    DescriptorLimit,
    MembrokerError,
    ProtocolError,
    from_status,
)
from membroker.interrupts import HeldOff, Waiting, is_held_off
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb

logger = logging.getLogger("membroker")


class Connection:
    """A connected handoff socket, after the Welcome."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket = connection
        self._name = name
        self._request_ids = itertools.count(2)  # 1 was the Hello
        self._calls: dict[int, Call] = {}
        self._changed = threading.Condition(threading.Lock())
        self._pausing: list[threading.Lock] = []
        self._reader: int | None = None
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

    def call(self, frame: pb.Frame, handler: DeliveryHandler | None = None, timeout: float | None = None) -> Message:
        """Send `frame` and return its response, after `handler` has taken every delivery.

        When this raises, `handler` has undone all it took, and all extents of the call are released, at the
        latest when the broker answers. Raises the broker's refusal, `BrokerUnavailable`, `DescriptorLimit`, and
        what `handler` raises.
        """
        call = self._begin(Call(self.new_request_id(), deadline=timeout and time.monotonic() + timeout))
        frame.request_id = call.request_id
        data = handoff.encode(frame)

        def begin() -> None:
            # Acknowledgements and releases are never interrupted: the broker counts on them.
            with Waiting():
                self._send(data, call.sent)

        return self._conduct(call, handler or Nothing(), begin)

    def call_beside(self, start: Callable[[int, Callable[[Outcome], None]], None], handler: DeliveryHandler) -> Message:
        """As `call`, for a call that is made elsewhere and whose descriptors come here.

        `start(request_id, finish)` begins it; `finish(outcome)` is called once, by any thread.
        """
        call = self._begin(Call(self.new_request_id(), beside=True))

        def begin() -> None:
            start(call.request_id, lambda outcome: self._finish(call, outcome))
            call.sent.append(1)

        return self._conduct(call, handler, begin)

    def release(self, extent_ids: Iterable[int]) -> None:
        """Say that extents are given back, without waiting for an answer; a refusal comes as a notice."""
        ids = list(dict.fromkeys(extent_ids))
        for first in range(0, len(ids), handoff.MAX_IDS_PER_FRAME):
            some = ids[first : first + handoff.MAX_IDS_PER_FRAME]
            request = broker_pb2.ReleaseExtentsRequest(extent_ids=some, no_reply=True)
            self._send(handoff.encode(pb.Frame(request_id=self.new_request_id(), release=request)), [])

    def detach(self, generation: int) -> None:
        """Say that this session lets go of a segment, without waiting for an answer; a refusal comes as a notice."""
        request = broker_pb2.DetachSegmentRequest(generation=generation, no_reply=True)
        self._send(handoff.encode(pb.Frame(request_id=self.new_request_id(), detach_segment=request)), [])

    # The end

    def heard(self, notice: pb.Notice) -> None:
        """Take a notice of the broker."""
        kind = notice.WhichOneof("kind")
        if kind == "stopping":
            self._stopping = " (it had said that it stops)"
            logger.info("the broker stops; what is mapped stays valid")
        elif kind == "release_refused":
            logger.warning("the broker refused what was given back: %s", notice.release_refused.message)

    def say_goodbye(self, timeout: float) -> None:
        """End the session at the broker, when it still listens; wait `timeout` seconds for its word."""
        with suppress(MembrokerError):
            self.call(pb.Frame(goodbye=pb.Goodbye()), timeout=timeout)

    def close(self) -> None:
        """Close the socket. Calls in flight, and later ones, raise `ClosedError`."""
        self._break(ClosedError, "the client is closed")
        with self._changed:
            # A descriptor's number can be reused the moment it is closed: nobody may be reading from it.
            self._changed.wait_for(lambda: self._reader is None, timeout=5)
        self._close_sockets()

    def abandon(self) -> None:
        """In a forked child: close the inherited sockets. Takes no lock; never a shutdown, which the parent feels."""
        self._end = (ClosedError, "this client belongs to the process that this one was forked from")
        self._changed, self._pausing = threading.Condition(threading.Lock()), []
        self._reader = None
        for call in self._calls.values():
            _close_packets(call.inbox)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in (self._socket, self._nudged, self._nudge):
            connection.close()

    def _break(self, kind: type[MembrokerError], why: str) -> None:
        with self._changed:
            if self._end is None:
                self._end = (kind, why)
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._tell_all()

    def _check_open(self) -> None:
        if self._end is not None:
            kind, why = self._end
            raise kind(why)

    # One call, from its begin to its end

    def _begin(self, call: Call) -> Call:
        self._check_open()
        self._calls[call.request_id] = call
        return call

    def _conduct(self, call: Call, handler: DeliveryHandler, start: Callable[[], None]) -> Message:
        with HeldOff():
            return self._conduct_held_off(call, handler, start)

    def _conduct_held_off(self, call: Call, handler: DeliveryHandler, start: Callable[[], None]) -> Message:
        try:
            start()
            while self._wait(call):
                self._take(call, handler)
            if isinstance(call.outcome, MembrokerError):
                raise call.outcome
        except Exception:
            try:
                self._undo(call, handler)
            finally:
                self._abandon(call)
            raise
        except BaseException:
            # An interrupted caller wants to go on at once: the rest comes when the broker answers. For an attach that
            # can be a day, so it is nothing for the thread that does the finalizers' work.
            self._resign(None)
            try:
                self._undo(call, handler)
            finally:
                threading.Thread(target=self._abandon, args=(call,), name="membroker-given-up", daemon=True).start()
            raise
        del self._calls[call.request_id]
        assert call.outcome is not None
        return call.outcome

    def _undo(self, call: Call, handler: DeliveryHandler) -> None:
        """Let the handler unmap; what it could not unmap is not released either."""
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
            self._calls.pop(call.request_id, None)
            _close_packets(call.inbox)

    def _take(self, call: Call, handler: DeliveryHandler | None) -> None:
        """Handle the oldest delivery of a call; without a handler, close it unused. Acknowledge it in any case."""
        packet = call.inbox[0]
        delivery = packet.frame.delivery
        call.extent_ids.extend(delivery.extent_ids)
        call.segment = delivery.segment
        try:
            if handler is not None:
                _check_whole(packet)
                handler.receive(delivery, packet.descriptors)
        finally:
            _close(packet)
            call.inbox.popleft()
            self._acknowledge(call.request_id, delivery.part)

    def _acknowledge(self, request_id: int, part: int) -> None:
        self._send(handoff.encode(pb.Frame(request_id=request_id, ack=pb.Ack(part=part))), [])

    def _finish(self, call: Call, outcome: Outcome) -> None:
        """Take the outcome of a call that was made beside; any thread."""
        with self._changed:
            call.outcome = outcome
            self._tell_all()
        # Its thread may be the one that waits for the socket. Full or closed: it is awake, or gone.
        with suppress(OSError):
            self._nudge.send(b"\0")

    def _send(self, data: bytes, sent: list[int]) -> None:
        """Send one packet; `sent` is no longer empty once the kernel has it."""
        self._check_open()
        try:
            # In one step of the interpreter: an interrupt comes before the packet is sent, or after it is noted.
            sent.extend(map(self._socket.send, (data,), (socket.MSG_NOSIGNAL,)))
        except OSError as error:
            self._lose(error)
            self._check_open()

    # Reading: one thread at a time, for all

    def _wait(self, call: Call) -> bool:
        """Return True when `call` has a delivery to take, False when it is over."""
        while True:
            with self._changed:
                while not self._my_turn(call):
                    self._pause(call.seconds_left())
                if call.inbox or call.is_over():
                    return bool(call.inbox)
                self._reader = threading.get_ident()
            self._read(call)

    def _pause(self, seconds: float | None) -> None:
        """Wait for a change, with the lock let go, as `Condition.wait` does. The lock is held.

        That is Python: an interrupt between two of its lines would leave the lock open where it must be held.
        """
        waiter = threading.Lock()
        waiter.acquire()
        self._pausing.append(waiter)
        self._changed.release()
        try:
            with Waiting():
                waiter.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            self._changed.acquire()
            if waiter in self._pausing:
                self._pausing.remove(waiter)

    def _tell_all(self) -> None:
        """Wake every thread that waits for a change. The lock is held."""
        self._changed.notify_all()
        while self._pausing:
            self._pausing.pop().release()

    def _my_turn(self, call: Call) -> bool:
        """Say whether `call` has something, or may read the socket. Raises when there is nothing to wait for."""
        if call.inbox or call.is_over():
            return True
        self._check_open()
        if call.deadline is not None and time.monotonic() >= call.deadline:
            raise BrokerUnavailable(f"the broker at {self._name} did not answer in time")
        return self._reader is None

    def _read(self, call: Call) -> None:
        """Read one packet and hand it to its call.

        A call that waits for more than the socket polls first, and so does one that may be interrupted: a poll that
        is interrupted has lost nothing, while a packet that was just received would be.
        """
        packet = None
        try:
            if not (call.beside or call.deadline or is_held_off()) or self._readable(call):
                packet = handoff.receive(self._socket)
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        finally:
            self._resign(packet)

    def _readable(self, call: Call) -> bool:
        # Of every call, not of this one only: a reader that waits for long may never let another thread read.
        failed = [one for one in list(self._calls.values()) if one.has_failed_beside()]
        with Waiting():
            patience = 0 if failed else call.patience()
            ready = {descriptor for descriptor, _ in self._poller.poll(patience)}
        if self._nudged.fileno() in ready:
            self._nudged.recv(4096)
        if self._socket.fileno() in ready:
            return True
        # The deliveries of a call were sent before its answer: with that known and nothing here, none is missing.
        for one in failed:
            one.dry = True
        return False

    def _resign(self, packet: handoff.Packet | None) -> None:
        """Stop being the reader, if this thread is, after handing on what it has read."""
        stray = None
        with self._changed:
            if self._reader != threading.get_ident():
                return
            if packet is not None and not self._route(packet):
                stray = packet
            self._reader = None
            self._tell_all()
        if stray is not None:
            self._refuse(stray)

    def _route(self, packet: handoff.Packet) -> bool:
        """Hand a packet to its call; False when no call waits for it. The lock is held."""
        call = self._calls.get(packet.frame.request_id)
        kind = packet.frame.WhichOneof("kind")
        if call is None or kind not in ("delivery", "reply"):
            return False
        if kind == "delivery":
            call.inbox.append(packet)
            if packet.frame.delivery.HasField("reply"):
                call.outcome = _outcome(packet.frame.delivery.reply)
        else:
            call.outcome = _outcome(packet.frame.reply)
        return True

    def _refuse(self, packet: handoff.Packet) -> None:
        """Drop what no call waits for; extents in it are given back."""
        _close(packet)
        if packet.frame.WhichOneof("kind") != "delivery":
            logger.warning("the broker sent a frame that nobody waits for: %s", packet.frame.WhichOneof("kind"))
            return
        delivery = packet.frame.delivery
        with suppress(MembrokerError):
            self._acknowledge(packet.frame.request_id, delivery.part)
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
            "start it again (`membrokerd`) and connect anew",
        )


def _outcome(reply: pb.Reply) -> Outcome:
    result = reply.WhichOneof("result")
    if result == "error":
        return from_status(reply.error)
    if result is None:
        return ProtocolError("the broker answered with nothing that this version knows")
    response: Message = getattr(reply, result)
    return response


def _check_whole(packet: handoff.Packet) -> None:
    """Raise unless every extent of a delivery came with its descriptor."""
    ids = packet.frame.delivery.extent_ids
    if packet.truncated:
        raise DescriptorLimit(f"{len(packet.descriptors)} of {len(ids)} descriptors arrived: {DESCRIPTORS_SHORT}")
    if len(ids) != len(packet.descriptors):
        raise ProtocolError(f"{len(packet.descriptors)} descriptors came for {len(ids)} extents")


def _close(packet: handoff.Packet) -> None:
    """Close the descriptors of a packet; each is forgotten first, so that none is closed twice."""
    while packet.descriptors:
        handoff.close_all([packet.descriptors.pop()])


def _close_packets(packets: deque[handoff.Packet]) -> None:
    while packets:
        _close(packets.popleft())
