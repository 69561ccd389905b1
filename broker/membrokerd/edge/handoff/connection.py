"""One handoff connection: frames in, frames and descriptors out.

Owns the socket, and the pidfd until there is a session. While packets wait to be sent nothing is read, so a peer that
does not read cannot make the broker work or grow. Must never decide anything about memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff
from membroker.wire.names import MAX_CLIENT_CHARACTERS, PROTOCOL_REVISION, PROTOCOL_VERSION, session_name

from ...core import effects as fx
from ...core import events as ev
from ...core.denied import Denied, Reason, deny
from ...failpoints import reach
from ...observe import logs
from ..convert import LOCATION_NUMBERS, Refused, from_recall
from ..dispatch import Ticket, new_token
from ..errors import to_status
from .holds import Holds
from .outbox import Outbox
from .peer import Peer, hang_up

if TYPE_CHECKING:
    from ...link import Link
    from .listener import Listener

FRAMES_PER_TURN = 8
"""Frames that are read from one connection before the others are served."""
LINGER_SECONDS = 5.0
"""How long the last answer of a connection may wait for a peer that does not read."""
HOLDS_SECONDS = 10.0
"""How long a process that resumes may take from its Welcome to its last Holds."""
_METHODS: Mapping[str, str] = {
    name: field.message_type.name.removesuffix("Request")
    for name, field in pb.Frame.DESCRIPTOR.fields_by_name.items()
    if field.message_type is not None and field.message_type.name.endswith("Request")
}
"""The requests that a frame may carry, and the methods of BrokerService that they are."""
_QUIET = frozenset(("release", "detach_segment"))
"""Requests that may be sent without asking for an answer (`no_reply`)."""


_Pair = tuple[socket.socket, socket.socket]


class Connection:
    """A connection, from its accept to its end. It has a session from the answer to its Hello on."""

    def __init__(self, listener: Listener, sock: socket.socket, peer: Peer) -> None:
        self._listener = listener
        self._dispatcher = listener.dispatcher
        self._loop = listener.dispatcher.loop
        self._io = asyncio.get_running_loop()
        self._sock = sock
        self._peer = peer
        self._notices: socket.socket | None = None
        self._session: int | None = None
        self._tenant = ""
        self._outbox = Outbox(sock, self.read, listener.traffic, self.close)
        self._outgoing = self._outbox.packets
        self.flush = self._outbox.flush
        """Send what is queued, unless the socket is full."""
        self._asked: set[int] = set()
        """Unanswered allocations that were requested on this connection; others are answered by gRPC."""
        self._told: int | None = None
        """An allocation whose answer was sent with its delivery, before the core has answered."""
        self._closed = False
        self.heard = 0
        """The bytes of all frames that were read."""
        self._pidfd: int | None = peer.pidfd
        self._holds: Holds | None = None
        self._holds_timer: asyncio.TimerHandle | None = None
        self._acknowledged = 0
        """How many deliveries the client has acknowledged by their count."""
        self._waiting = False
        self._turns = self._loop.turns
        self._whose = listener.tenant_of(peer)
        self._descriptor = sock.fileno()
        self._io.add_reader(sock, self.read)

    @property
    def session(self) -> int | None:
        """The session of this connection, if it has one yet."""
        return self._session

    # --- in ---

    def read(self) -> None:
        """Read frames, as many as this connection and its tenant may send in one turn."""
        for _ in range(FRAMES_PER_TURN):
            if self._closed or self._outgoing or self._waiting:
                return
            if not self._turns.may(self._whose, self._descriptor):
                return  # the socket stays readable in the next turn
            began = time.perf_counter()
            went_on = self._read()
            self._turns.charge(self._whose, time.perf_counter() - began)
            if not went_on:
                return

    def _read(self) -> bool:
        """Read and handle one frame. Return False when nothing is queued, or the connection has ended."""
        try:
            frame, size = handoff.receive_without_descriptors(self._sock, self._listener.buffer)
            self.heard += size
        except BlockingIOError:
            return False
        except handoff.EndOfConnection:
            self.close("the peer closed it")
            return False
        except handoff.BrokenPacket as error:
            self._violated(0, str(error))
            return False
        except OSError as error:
            self.close(error.strerror or "broken")
            return False
        try:
            self._take(frame)
        except Exception as error:  # noqa: BLE001 - the edge of the daemon: no frame may end it, or hang its sender
            logs.fault(error, endpoint=self._listener.endpoint, pid=self._peer.pid)
            self._refuse(frame.request_id, deny(Reason.INTERNAL))
        return True

    def queued(self) -> int:
        """Return the bytes that have arrived and were not read; 0 while nothing is read."""
        if self._closed or self._outgoing or self._waiting:
            return 0
        return int.from_bytes(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4)), sys.byteorder)

    def hear(self) -> None:
        """Read the next frame if it has arrived, even if this tenant has used up its turn."""
        if not (self._closed or self._outgoing or self._waiting):
            self._read()

    def _take(self, frame: pb.Frame) -> None:
        kind: str = frame.WhichOneof("kind") or ""
        if kind == "hello":
            self._hello(frame)
        elif self._session is None:
            self._violated(frame.request_id, f"the first frame must be a Hello, not {kind}")
        elif self._holds is not None or kind == "holds":
            self._hold(frame, self._session)
        else:
            if kind == "ack" or frame.acknowledged > self._acknowledged:
                self._acknowledge(frame, self._session)
            if kind != "ack" and not self._outbox.is_ending:
                self._request(frame, kind, self._session)

    def _acknowledge(self, frame: pb.Frame, session: int) -> None:
        """Acknowledge what a frame says: deliveries by their count, or one by its request and part."""
        count = frame.acknowledged
        if count > self._acknowledged:
            reach("acknowledge")
            self._acknowledged = count
            self._loop.tell(ev.AcknowledgeUpTo(session, count))
        elif not count:
            reach("acknowledge")
            self._loop.tell(ev.Acknowledge(session, frame.request_id, frame.ack.part))

    def _request(self, frame: pb.Frame, kind: str, session: int) -> None:
        request_id, method = frame.request_id, _METHODS.get(kind)
        if method is None:
            if kind == "goodbye":
                self._goodbye(request_id, session)
            elif kind == "recall_answer":
                self._loop.tell(ev.AnswerRecall(session, frame.recall_answer.recall_id))
            else:
                self._violated(request_id, f"a client does not send {kind}")
            return
        began = time.perf_counter()
        message = getattr(frame, kind)
        quiet = kind in _QUIET and message.no_reply
        if kind == "allocate":
            self._asked.add(request_id)

        def respond(result: fx.Result | Denied) -> None:
            self._dispatcher.times_of(method, "handoff").observe(time.perf_counter() - began)
            if isinstance(result, Denied):
                logs.log_denied(session, method, result)
            self._asked.discard(request_id)
            if self._told == request_id:
                self._told = None
            elif not quiet:
                self._answer(request_id, result)
            elif isinstance(result, Denied):
                self.notify(pb.Frame(request_id=request_id, notice=pb.Notice(release_refused=to_status(result))))

        self._dispatcher.request(session, self._tenant, request_id, message, respond)

    def _hello(self, frame: pb.Frame) -> None:
        hello, request_id = frame.hello, frame.request_id
        if self._session is not None:
            self._violated(request_id, "Hello was said already")
            return
        if hello.protocol_version != PROTOCOL_VERSION:
            versions = {"version": hello.protocol_version, "supported": PROTOCOL_VERSION}
            self._refuse(request_id, deny(Reason.UNSUPPORTED_VERSION, **versions))
            return
        try:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # now, because a session would outlive this connection
            self._refuse(request_id, deny(Reason.DESCRIPTORS_EXHAUSTED, driver_says=f"socketpair: {error.strerror}"))
            return
        if hello.resume_token:
            self._resume(request_id, hello.resume_token, pair)
        else:
            self._open(request_id, hello, pair)

    def _open(self, request_id: int, hello: pb.Hello, pair: _Pair) -> None:
        peer, endpoint, tenant = self._peer, self._listener.endpoint, self._listener.tenant_of(self._peer)
        client = "".join(letter for letter in hello.client[:MAX_CLIENT_CHARACTERS] if letter.isprintable())
        token, token_hash = new_token()
        observer = hello.observer

        def opened(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._turn_away(request_id, pair, result)
                return
            assert isinstance(result, fx.SessionOpened)
            self._dispatcher.admit(token_hash, Ticket(result.session, tenant, endpoint))
            self._begin(result.session, tenant, self._loop.links)
            self._welcome(request_id, token, pair)

        self._loop.ask(
            lambda call: ev.OpenSession(
                call, tenant, peer.pid, peer.uid, peer.identity, observer, client, endpoint, token_hash
            ),
            opened,
        )

    def _resume(self, request_id: int, token: str, pair: _Pair) -> None:
        try:
            ticket = self._dispatcher.find(token, self._listener.endpoint)
        except Refused as refused:
            self._turn_away(request_id, pair, refused.denied)
            return

        def resumed(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._turn_away(request_id, pair, result)
                return
            assert isinstance(result, fx.SessionResumed)
            for connections in (self._loop.links, self._loop.resuming):
                before = connections.pop(ticket.session, None)
                if before is not None:  # it is no longer registered, so its end detaches nothing
                    before.close("its process opened another connection")
            self._begin(ticket.session, ticket.tenant, self._loop.resuming)
            self._holds = Holds(self._loop.broker.ledger.sessions[ticket.session])
            self._holds_timer = self._io.call_later(HOLDS_SECONDS, self._no_holds)
            # The core must learn what the old connection did not deliver before anything is read from this one.
            self._waiting = True
            self._io.call_soon(self._go_on)
            reach("resume")
            self._welcome(request_id, token, pair, resumed=True)

        self._loop.ask(lambda call: ev.ResumeSession(call, ticket.session, self._peer.identity), resumed)

    def _go_on(self) -> None:
        self._waiting = False
        if not self._closed:
            self.read()

    def _turn_away(self, request_id: int, pair: _Pair, denied: Denied) -> None:
        for end in pair:
            end.close()
        self._refuse(request_id, denied)

    def _begin(self, session: int, tenant: str, connections: dict[int, Link]) -> None:
        """Register this connection for a session, whose process is watched from now on."""
        self._session, self._tenant = session, tenant
        connections[session] = self
        self._listener.greeted(self)
        assert self._pidfd is not None
        pidfd, self._pidfd = self._pidfd, None
        self._listener.watch.add(session, pidfd, self._peer.pid)

    def _hold(self, frame: pb.Frame, session: int) -> None:
        """Take one frame of Holds of a session that resumes; until the last one, no other frame is allowed."""
        request_id, kind = frame.request_id, frame.WhichOneof("kind")
        if kind != "holds" or self._holds is None:
            what = "Holds come once, after a resumed Welcome" if self._holds is None else f"first the Holds, not {kind}"
            self._violated(request_id, what)
            return
        try:
            self._holds.take(frame.holds)
        except Refused as refused:
            self._end_holds()
            self._refuse(request_id, refused.denied)
            return
        if frame.holds.last:
            holds = self._holds
            self._end_holds()
            reach("reconcile")
            self._loop.ask(
                lambda call: holds.to_event(call), lambda result: self._reconciled(request_id, session, result)
            )

    def _end_holds(self) -> None:
        self._holds = None
        if self._holds_timer is not None:
            self._holds_timer.cancel()
            self._holds_timer = None

    def _no_holds(self) -> None:
        self._end_holds()
        if not self._closed:
            self._violated(0, f"the last Holds did not come within {HOLDS_SECONDS:.0f} seconds")

    def _reconciled(self, request_id: int, session: int, result: fx.Result | Denied) -> None:
        reach("reconciled")
        if self._loop.resuming.get(session) is self and not isinstance(result, Denied):
            self._loop.links[session] = self._loop.resuming.pop(session)
        self._answer(request_id, result)

    def _welcome(self, request_id: int, token: str, pair: _Pair, *, resumed: bool = False) -> None:
        assert self._session is not None
        self._notices, theirs = pair
        self._notices.setblocking(False)
        device = self._listener.device
        capacities = self._loop.broker.rules.capacities
        welcome = pb.Welcome(
            session=session_name(self._session),
            token=token,
            tenant=f"tenants/{self._tenant}",
            device_uuid=device.uuid,
            driver=device.driver,
            granularity_bytes=device.granularity,
            protocol_version=PROTOCOL_VERSION,
            protocol_revision=PROTOCOL_REVISION,
            resumed=resumed,
        )
        for location, capacity in capacities.items():
            welcome.capacities.add(location=LOCATION_NUMBERS[location], limit_bytes=capacity)
        self._send(pb.Frame(request_id=request_id, welcome=welcome), [theirs.detach()])
        if self._loop.drain is not None:
            self.notify(pb.Frame(notice=self._loop.drain))

    def _goodbye(self, request_id: int, session: int) -> None:
        def respond(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._send(_refusal(request_id, result))
            else:
                self._last(pb.Frame(request_id=request_id, reply=pb.Reply(goodbye=pb.GoodbyeResponse())))

        self._loop.ask(lambda call: ev.Goodbye(call, session, request_id), respond)

    def _refuse(self, request_id: int, denied: Denied) -> None:
        """Answer with a refusal and end the connection once it is sent."""
        self._listener.refused(denied.reason, pid=self._peer.pid)
        self._last(_refusal(request_id, denied))

    def _last(self, frame: pb.Frame) -> None:
        """End the connection after this frame, even if the peer never reads it."""
        self._outbox.is_ending = True
        self._send(frame)
        if not self._closed:
            self._io.call_later(LINGER_SECONDS, self.close, "it did not take the last answer")

    def _violated(self, request_id: int, what: str) -> None:
        self._refuse(request_id, deny(Reason.PROTOCOL_VIOLATION, what=what))

    # --- out ---

    def deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        """Queue one packet of a call; its descriptors are closed here, sent or not.

        It goes with the next `flush`: until then the call's answer may join it, and one that is known already does.
        """
        frame = pb.Frame(request_id=packet.request_id)
        delivery = frame.delivery
        delivery.part, delivery.parts = packet.part, packet.parts
        delivery.extent_bytes = packet.extent_bytes
        delivery.extent_ids.extend(packet.ids)
        if packet.segment:
            self._describe_segment(packet, delivery)
        elif isinstance(packet, fx.Make) and packet.answer is not None and packet.request_id in self._asked:
            answer = delivery.reply.allocate
            answer.count, answer.extent_bytes = packet.answer.count, packet.answer.extent_bytes
            self._told = packet.request_id
        self._outbox.put(frame, descriptors)
        if self._closed:
            self._drop_all()

    def _describe_segment(self, packet: fx.Make | fx.Send, delivery: pb.Delivery) -> None:
        delivery.segment = packet.segment
        row = self._loop.broker.ledger.segments.get(packet.segment)
        if row is not None and not packet.part:
            delivery.segment_bytes, delivery.segment_extents = row.size_of(row.ids), len(row.ids)

    def _answer(self, request_id: int, result: fx.Result | Denied) -> None:
        """Answer a request, in its last delivery if that is still queued."""
        last = self._outgoing[-1][0] if self._outgoing else None
        joins = last is not None and last.request_id == request_id and last.HasField("delivery")
        if last is not None and joins and not isinstance(result, Denied):
            self._put(result, last.delivery.reply)
        elif isinstance(result, Denied):
            self._send(_refusal(request_id, result))
        else:
            frame = pb.Frame(request_id=request_id)
            self._put(result, frame.reply)
            self._send(frame)

    def _put(self, result: fx.Result, reply: pb.Reply) -> None:
        field, message = self._dispatcher.response(result)
        getattr(reply, field).CopyFrom(message)

    def notify(self, frame: pb.Frame) -> None:
        """Send a notice. If the socket is full, the notice is dropped and counted."""
        if self._notices is None:
            return
        try:
            handoff.send(self._notices, handoff.encode(frame))
        except OSError:
            self._listener.traffic.notices_dropped += 1

    def recall(self, recall: fx.Recall) -> None:
        """Ask for memory. The core asks again if the notice is dropped."""
        self.notify(from_recall(recall))

    def disconnect(self, why: str) -> None:
        """End the connection because its peer broke the protocol."""
        self._violated(0, why)

    def _send(self, frame: pb.Frame, descriptors: list[int] | None = None) -> None:
        self._outbox.put(frame, descriptors or [])
        if self._closed:
            self._drop_all()
        elif len(self._outgoing) == 1:
            self._outbox.flush()

    def _drop_all(self) -> None:
        """Close what is queued and will never be sent; the core credits the extents in it."""
        for frame in self._outbox.drop_all():
            if frame.HasField("delivery") and self._session is not None:
                event = ev.NotDelivered(self._session, frame.request_id, frame.delivery.part)
                self._io.call_soon(self._loop.tell, event)

    # --- the end ---

    def close(self, why: str) -> None:
        """End the connection. Its session stays charged, because its process may be alive."""
        if self._closed:
            return
        self._closed = True
        self._end_holds()
        self._io.remove_reader(self._sock)
        self._io.remove_writer(self._sock)
        hang_up(self._sock)
        if self._notices is not None:
            self._notices.close()
        self._drop_all()
        self._listener.ended(self)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if self._session is None:
            return
        logs.debug("connection ended", session=session_name(self._session), why=why)
        for connections in (self._loop.links, self._loop.resuming):
            if connections.get(self._session) is self:
                del connections[self._session]
                self._loop.tell(ev.ConnectionLost(self._session))
                self._listener.watch.look(self._session)


def _refusal(request_id: int, denied: Denied) -> pb.Frame:
    return pb.Frame(request_id=request_id, reply=pb.Reply(error=to_status(denied)))
