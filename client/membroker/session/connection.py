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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf.message import Message

from ..cancellation import innermost
from ..errors import BrokerUnavailable, ClosedError, MembrokerError, ProtocolError
from ..interrupts import STOPPING_SECONDS, Condition, uninterrupted
from ..memory.lender import Placement
from ..threads import start_thread
from ..v1 import handoff_pb2 as pb
from ..v1.resources_pb2 import SleepStatus
from ..wire import frames as handoff
from ..wire.descriptors import close_each
from ..wire.names import MAX_WAIT_SECONDS
from .inventory import HeldResources, Inventory
from .machine import Call, Calls, catch_up
from .rpc import GrpcCalls, Outcome

logger: logging.Logger = logging.getLogger("membroker")

_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_PATIENCE = struct.pack("@ll", int(STOPPING_SECONDS), 0)
"""How long a send waits for a broker that reads nothing, as a `timeval`. Then the connection is lost."""


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
        self._socket = connection
        self._name = name
        self._session = session
        self._request_ids = request_ids or itertools.count(2)
        self._grpc = grpc
        self._by_grpc = by_grpc
        self.calls: Calls = Calls(inventory, name, revision)
        self._on_lost = on_lost
        self._changed = Condition()
        self._admitted = Condition(self._changed.lock)
        """Tells a call in front of the places that it has one."""
        self._unclosed: list[handoff.Packet] = []
        self._reader: int | None = None
        """The thread that reads; 0 for one that only reads, None while no thread does."""
        self._reader_thread: threading.Thread | None = None
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
        frame.request_id = next(self._request_ids)
        call = Call(
            frame,
            placement,
            deadline=None if timeout is None else time.monotonic() + timeout,
            patient=None if until is None else time.monotonic() < until,
            note=note,
        )
        calls = self.calls
        scope = innermost.get() if call.needs_place else None
        try:
            try:
                if scope is not None:
                    scope.watch(call, partial(self._cancel, call))
                    scope.check()
                with self._changed.lock:
                    is_there = calls.begin(call)
                if not is_there:
                    self._wait_for_place(call, until)
                    if scope is not None:
                        scope.check()
                if until is not None:
                    _let_wait(getattr(frame, call.kind), until)
                if self._by_grpc and call.kind in self._by_grpc:
                    self._start_by_grpc(call, frame)
                else:
                    self._send(frame)
                call.sent = True
                if call.state == "unwanted":
                    self._give_up_at_the_broker(call)
                while self._wait(call):
                    self._take(call)
                    if call.outcome is not None and not call.by_grpc and not call.inbox:
                        break
                if scope is not None:
                    scope.check()
                if isinstance(call.outcome, MembrokerError):
                    if call.outcome.reason and self._session:
                        call.outcome.request = f"{self._session}/requests/{call.request_id}"
                    raise call.outcome
                calls.record(call)
            except Exception:
                self._give_up(call)
                raise
        except BaseException as error:
            if not isinstance(error, Exception):
                self._leave(call)
            raise
        finally:
            # By one call of C code, or an interrupt here would leave it in the table, and no resume would ever begin.
            calls.at_broker.pop(call.request_id, None)
            with self._changed.lock:
                if admitted := calls.over(call):
                    self._admit(admitted)
                if calls.end is not None:
                    self._changed.tell_all()
            if scope is not None:
                scope.unwatch(call)
        assert call.outcome is not None
        return call.outcome

    def tell(self, frames: Iterable[pb.Frame], answer_within: float | None = None) -> None:
        """Send frames that want no answer, or wait for the answer to each, at most `answer_within` seconds."""
        for frame in frames:
            if answer_within is not None:
                self.call(frame, timeout=answer_within)
            else:
                frame.request_id = frame.request_id or next(self._request_ids)
                self._send(frame)

    def catch_up(self, stated: HeldResources, timeout: float) -> HeldResources:
        """Tell the broker what is not held any more of what was `stated` at a resume, and return what is held now."""
        now = self.calls.inventory.held()
        for frame in catch_up(stated, now):
            is_asked = frame.WhichOneof("kind") in ("declare", "register_model")
            self.tell([frame], timeout if is_asked else None)
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

    def _wait_for_place(self, call: Call, until: float | None) -> None:
        """Wait until a call has a place at the broker. Raises what ended the connection, and at the call's deadline."""
        with self._changed.lock:
            while not self.calls.begin(call):
                if call.state == "unwanted":
                    return  # the broker does not hear of it
                now = time.monotonic()
                if call.deadline is not None and call.deadline <= now:
                    raise BrokerUnavailable(f"the broker at {self._name} did not answer the calls before this in time")
                if until is not None and until <= now:
                    # The broker says with its numbers why there was no memory.
                    self._admit(self.calls.hurry(call))
                    until = None
                    continue
                ends = [end - now for end in (call.deadline, until) if end is not None]
                self._admitted.wait(min(ends, default=None), call.request_id)

    def _cancel(self, call: Call) -> None:
        """End the wait of a call that its caller has given up, here or at the broker. Any thread; waits for nothing."""
        with self._changed.lock:
            must_tell = self.calls.give_up(call)
            self._admitted.tell(call.request_id)
        if must_tell:
            self._give_up_at_the_broker(call)

    def _give_up_at_the_broker(self, call: Call) -> None:
        """Let the broker answer a call that waits there. To an older broker, end the connection instead."""
        if call.outcome is not None or self.calls.end is not None:
            return
        if call.cancel_by_grpc is not None:
            call.cancel_by_grpc()
        elif (frame := self.calls.cancels(call)) is None:
            self.interrupt()
        else:
            frame.acknowledged = self.calls.acknowledged
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
        """Send a frame. Raises what ended the connection, after 5 seconds in which the broker makes no room.

        If the broker has closed, it may have said why: that is read first.
        """
        frame.acknowledged = self.calls.acknowledged
        try:
            self._socket.send(handoff.encode(frame), _NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            self.read_to_the_end()
            self.calls.check_open()
        except OSError as error:
            self._lose(error)
            self.calls.check_open()

    def _start_by_grpc(self, call: Call, frame: pb.Frame) -> None:
        assert self._grpc is not None
        call.by_grpc = True
        call.cancel_by_grpc = self._grpc.start(frame, partial(self._finish, call), _left(call.deadline))

    def _finish(self, call: Call, outcome: Outcome, extents: int) -> None:
        """Take the answer of a call by gRPC, with its number of extents; any thread.

        What the broker delivered before a refusal is in the socket by now.
        """
        if self._reader_thread is not None:
            self._drain()
        with self._changed.lock:
            if self.calls.end is None:
                self.calls.answered(call, outcome, extents)
            self._changed.tell_all()

    def _undo(self, call: Call) -> None:
        """Let the placement unmap what it took. What it could not unmap is not released either, but held."""
        if call.placement is not None:
            call.keep = True
            call.placement.undo()
            call.keep = False

    def _give_up(self, call: Call) -> None:
        """Undo a call that failed, and release all that came for it, when the broker has answered."""
        try:
            self._undo(call)
        finally:
            with suppress(MembrokerError):
                with self._changed.lock:
                    self.calls.give_up(call)
                while call.sent and self._wait(call):
                    self._take(call)
                self.tell(self.calls.goes_back(call))
            if call.keep:
                self.calls.record(call, is_whole=False)

    def _leave(self, call: Call) -> None:
        """Undo a call that an interrupt ended. The resume tells the broker what is not held."""
        with self._changed.lock:
            if self._reader == threading.get_ident():
                self._reader = None
        self.interrupt()
        try:
            self._undo(call)
        finally:
            self.calls.interrupted(call)

    def _take(self, call: Call) -> None:
        """Hand the oldest delivery of a call to its placement, or close it unused. Acknowledge it in any case."""
        packet = call.inbox[0]
        try:
            if self.calls.take(call) and call.placement is not None:
                delivery = packet.frame.delivery
                call.placement.place(delivery.extent_ids, packet.descriptors, delivery.extent_bytes)
        finally:
            call.inbox.popleft()
            with self._changed.lock:
                close_each(packet.descriptors)
                self._unclosed.remove(packet)
                ack = self.calls.taken(packet)
            if ack is not None:
                self._send(ack)

    # Reading: one thread at a time, for all

    def start_reader(self) -> None:
        """Let a thread read for all callers until the connection ends: for a session by gRPC. Raises `ThreadLimit`."""
        self._reader = 0  # no caller reads
        self._reader_thread = start_thread(self._read_for_all, "membroker-reader")

    def _wait(self, call: Call) -> bool:
        """Return True when `call` has a delivery to take, False when it is over."""
        me = threading.get_ident()
        while True:
            with self._changed.lock:
                is_over = call.outcome is not None and len(call.extent_ids) >= call.expected
                is_late = call.deadline is not None and time.monotonic() >= call.deadline
                if call.inbox or is_over or is_late or self.calls.end is not None:
                    if self._reader == me:
                        self._reader = None
                    if self._reader is None and self._changed.waiting:
                        self._changed.tell_next()  # it reads now
                    if call.inbox or is_over:
                        return bool(call.inbox)
                    self.calls.check_open()
                    raise BrokerUnavailable(f"the broker at {self._name} did not answer in time")
                if call.by_grpc:
                    self._changed.wait(_left(call.deadline))
                    continue
                if self._reader not in (None, me):
                    self._changed.wait(_left(call.deadline), call)
                    continue
                self._reader = me
            if call.deadline is None or self._readable(call.deadline - time.monotonic()):
                self._read(call)

    def _read_for_all(self) -> None:
        """Read until the connection ends. No other thread reads."""
        while self.calls.end is None:
            self._readable(None)
            self._drain()
        self._stop_reading()

    def _drain(self) -> None:
        """Route every packet that is in the socket.

        Called by the thread that only reads, by one that reads to the end, and by one that has the answer of a call by
        gRPC.
        """
        strays = []
        try:
            with self._changed.lock:
                while self.calls.end is None and self._readable(0):
                    with suppress(ConnectionResetError):  # the broker has closed: what it sent is behind this error
                        packet = handoff.receive(self._socket)
                        self._unclosed.append(packet)
                        if self.calls.arrived(packet) is None:
                            strays.append(packet)
                        elif packet.frame.HasField("reply"):
                            self._close_packet(packet)
                self._changed.tell_all()
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        for packet in strays:
            self._refuse(packet)

    def read_to_the_end(self) -> None:
        """Read what the broker sent before it closed, once no other thread reads, and note that it is gone."""
        me = threading.get_ident()
        try:
            with self._changed.lock:
                while self._reader and self.calls.end is None:
                    self._changed.wait()
                if self.calls.end is not None:
                    return
                if self._reader_thread is None:
                    self._reader = me
            self._drain()
            self._lose(handoff.EndOfConnection())
        finally:
            if self._reader == me:
                self._stop_reading()

    def _readable(self, seconds: float | None) -> bool:
        """Say whether a packet, or the end, arrives within `seconds`; None for any time."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else max(0.0, seconds * 1000)))

    def _read(self, mine: Call) -> None:
        """As the reader, read one packet and route it, and wake the thread of its call.

        A packet for `mine`, the call of this thread, ends its reading; see `_wait`.
        """
        packet = call = None
        try:
            packet = handoff.receive(self._socket)
            self._unclosed.append(packet)
        except ConnectionResetError:
            pass  # the broker has closed: what it sent is behind this error
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            self._lose(error)
        finally:
            with self._changed.lock:
                if packet is not None:
                    call = self.calls.arrived(packet)
                    if call is not None and packet.frame.HasField("reply"):
                        self._close_packet(packet)
                if call is None:
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

    def _refuse(self, packet: handoff.Packet) -> None:
        """Drop a packet that no call waits for; its extents are released."""
        with self._changed.lock:
            self._close_packet(packet)
            if self.calls.end is not None:
                self._shut()
            is_odd, frames = self.calls.is_odd(packet.frame), list(self.calls.stray(packet))
        if is_odd:
            logger.warning("the broker sent a frame that no call waits for: %s", packet.frame.WhichOneof("kind"))
        with suppress(MembrokerError):
            self.tell(frames)

    # The end

    def wait_until_idle(self) -> None:
        """Wait until every call has ended. Once the connection is lost, they have then unmapped what they got."""
        with self._changed.lock:
            while self.calls.at_broker:
                self._changed.wait()

    def say_goodbye(self, timeout: float) -> None:
        """End the session at the broker, if it still listens; wait at most `timeout` seconds for its answer."""
        with suppress(MembrokerError):
            self.call(pb.Frame(goodbye=pb.Goodbye()), timeout=timeout)

    def heard_stopping(self) -> None:
        """Note that the broker announced its stop: the error of its end says so too."""
        self._stopping = " (it had said that it stops)"

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
        if self.calls.is_lost:
            self._on_lost(self)

    def _break_off(self, kind: type[MembrokerError], why: str, *, interrupted: bool = False) -> None:
        """End the connection, unless it has ended: calls raise this error from now on."""
        with self._changed.lock:
            self.calls.end_with(kind, why, interrupted=interrupted)
            self._shut()

    def _shut(self) -> None:
        """Let every thread see that the connection has ended. The lock is held."""
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
        if self.calls.is_lost:
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
        self.calls.end = (ClosedError, "this client belongs to the process that this one was forked from")
        self._changed = Condition()
        self._admitted = Condition()
        self._reader = None
        self._close_all()

    def _close_all(self) -> None:
        self._socket.close()
        while self._unclosed:
            close_each(self._unclosed.pop().descriptors)


def _left(deadline: float | None) -> float | None:
    """Return how long an answer may still take; None for any time."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _let_wait(request: Any, until: float) -> None:
    """Set the wait of a request so that it ends at `until`, on the monotonic clock."""
    left = max(0.0, until - time.monotonic())
    request.wait.FromNanoseconds(min(int(left * 1e9), MAX_WAIT_SECONDS * 10**9))
