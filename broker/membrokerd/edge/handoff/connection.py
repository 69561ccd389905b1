"""One handoff connection: how it gets its session, frames in, frames and descriptors out.

Owns the socket, and the pidfd until there is a session. A Hello opens a session, or resumes one, and then the process
states its Holds. While packets wait to be sent nothing is read, so a peer that does not read cannot make the broker
work or grow. Must never decide anything about memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any

from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff
from membroker.wire.names import MAX_CLIENT_CHARACTERS, PROTOCOL_REVISION, PROTOCOL_VERSION, session_name

from ... import __version__
from ...core import effects as fx
from ...core import events as ev
from ...core.denied import Denied, Reason, deny
from ...core.rows import SessionRow
from ...runtime.connections import SessionConnection
from ...system import logs
from ...system.failpoints import reach
from ...system.process import call_failed
from ..convert import LONG_BYTES, Refused, from_recall, known_of
from ..dispatch import new_token
from ..errors import to_status
from ..listings import READS
from ..messages import LOCATION_NUMBERS
from .endpoint import HandoffEndpoint
from .holds import Holds
from .outbox import Outbox
from .peer import Peer

LINGER_SECONDS = 5.0
"""How long the last answer of a connection may wait for a peer that does not read."""
_METHODS: Mapping[str, str] = {
    name: field.message_type.name.removesuffix("Request")
    for name, field in pb.Frame.DESCRIPTOR.fields_by_name.items()
    if field.message_type is not None and field.message_type.name.endswith("Request")
}
"""By field of a frame: the method of BrokerService that the request in it belongs to."""
_MAY_WAIT = frozenset(("allocate", "create_segment", "attach_segment", "declare"))
"""Requests that may wait, for memory or for a seal."""
_QUIET = frozenset(("release", "detach_segment"))
"""Requests that may be sent without asking for an answer (`no_reply`)."""
HOLDS_SECONDS = 10.0
"""How long a process that resumes may take from its Welcome to its last Holds."""

_Pair = tuple[socket.socket, socket.socket]


class HandoffConnection:
    """A connection, from its accept to its end. It has a session from the answer to its Hello on."""

    def __init__(
        self,
        endpoint: HandoffEndpoint,
        sock: socket.socket,
        peer: Peer,
        hang_up: Callable[[socket.socket], None],
        on_greeted: Callable[[HandoffConnection], None],
        on_ended: Callable[[HandoffConnection], None],
    ) -> None:
        self._endpoint = endpoint
        self._hang_up = hang_up
        self._on_greeted = on_greeted
        self._on_ended = on_ended
        self._dispatcher = endpoint.dispatcher
        self._loop = endpoint.dispatcher.loop
        self._io = asyncio.get_running_loop()
        self._sock = sock
        self._peer = peer
        self._notices: socket.socket | None = None
        self.session: int | None = None
        """The session of this connection, if it has one yet."""
        self._tenant = ""
        self._outbox = Outbox(sock, self._readable, endpoint.traffic, self.close)
        self._outgoing = self._outbox.packets
        self.flush = self._outbox.flush
        """Send what is queued, unless the socket is full."""
        self._asked: dict[int, int | None] = {}
        """The calls of unanswered requests on this connection that may wait. Other requests are answered by gRPC."""
        self._sent_answer: int | None = None
        """An allocation whose answer was sent with its delivery, before the core has answered."""
        self._closed = False
        self.heard = 0
        """The bytes of all frames that were read."""
        self._pidfd: int | None = peer.pidfd
        self._handshake = Handshake(self, endpoint, peer)
        self._acknowledged = 0
        """How many deliveries the client has acknowledged by their count."""
        self._waiting = False
        self._aside: pb.Frame | None = None
        """A read whose answer was too long to be kept while the socket has no room. It is done again."""
        self._turns = self._loop.turns
        self.peers_tenant: str = endpoint.tenant_of(peer.uid)
        self._io.add_reader(sock, self._readable)

    # --- in ---

    def _readable(self) -> None:
        """Read when it is the tenant's turn."""
        self._turns.put(self.peers_tenant, self.read)

    def read(self) -> bool:
        """Read and handle the next frame. Return False when no frame has come, or while nothing is read."""
        # As in `queued`, but without a call: this is on the way of every page.
        if self._closed or self._waiting or self._outgoing or self._outbox.retry.is_pending:
            return False
        try:
            if (aside := self._aside) is not None:
                frame, size, self._aside = aside, 0, None
            else:
                frame, size = handoff.receive_without_descriptors(self._sock, self._endpoint.buffer)
            self.heard += size
        except BlockingIOError:
            return False
        except handoff.EndOfConnection:
            self.close("the peer closed it")
            return False
        except handoff.BrokenPacket as error:
            self.violated(0, str(error))
            return False
        except OSError as error:
            self.close(error.strerror or "broken")
            return False
        try:
            self._take(frame, size)
        except Exception as error:  # noqa: BLE001 - the edge of the daemon: no frame may end it, or hang its sender
            logs.fault(error, endpoint=self._endpoint.name, pid=self._peer.pid)
            self.refuse(frame.request_id, deny(Reason.INTERNAL))
        return True

    def queued(self) -> int:
        """Return the bytes that have arrived and are not read yet; 0 while this connection reads nothing."""
        if self._closed or self._waiting or self._outbox.is_full:
            return 0
        return int.from_bytes(fcntl.ioctl(self._sock, termios.FIONREAD, bytes(4)), sys.byteorder)

    def _take(self, frame: pb.Frame, size: int) -> None:
        kind: str = frame.WhichOneof("kind") or ""
        session = self.session
        if kind == "hello":
            self._handshake.hello(frame)
        elif session is None:
            self.violated(frame.request_id, f"the first frame must be a Hello, not {kind}")
        elif self._handshake.holds is not None or kind == "holds":
            self._handshake.hold(frame, session)
        else:
            count = frame.acknowledged
            if count > self._acknowledged:
                reach("acknowledge")
                self._acknowledged = count
                self._loop.tell(ev.AcknowledgeUpTo(session, count))
            elif kind == "ack" and not count:  # from an older client: one delivery, by its request and part
                reach("acknowledge")
                self._loop.tell(ev.Acknowledge(session, frame.request_id, frame.ack.part))
            if self._outbox.is_ending or kind == "ack":
                return
            if kind in _METHODS:
                message = getattr(frame, kind)
                if size > LONG_BYTES and kind != "release":
                    message = known_of(message)
                if kind in READS:
                    self._read_books(frame.request_id, kind, message, session)
                else:
                    self._request(frame.request_id, kind, message, session)
            else:
                self._say(frame, kind, session)

    def _say(self, frame: pb.Frame, kind: str, session: int) -> None:
        """Handle a frame that is not a request of BrokerService."""
        if kind == "goodbye":
            self._goodbye(frame.request_id, session)
        elif kind == "recall_answer":
            answer = frame.recall_answer
            self._loop.tell(ev.AnswerRecall(session, answer.recall_id, max(0, answer.bytes)))
        elif kind == "cancel":
            if (call := self._asked.get(frame.request_id)) is not None:
                self._loop.tell(ev.CancelWait(call))
        elif kind == "sleep_answer" and not frame.sleep_answer.sleep_id:
            self._loop.guests.said(session, frame.sleep_answer, time.monotonic_ns())
        elif kind == "sleep_answer":
            self._loop.sleeping.answered(session, frame.sleep_answer)
        else:
            self.violated(frame.request_id, f"a client does not send {kind}")

    def _request(self, request_id: int, kind: str, message: Any, session: int) -> None:
        began = time.perf_counter()
        method = _METHODS[kind]
        quiet = kind in _QUIET and message.no_reply
        is_asked = kind in _MAY_WAIT and request_id not in self._asked  # one of the same id is refused
        if is_asked:
            self._asked[request_id] = None

        def respond(result: fx.Result | Denied) -> None:
            self._dispatcher.times_of(method, "handoff")(time.perf_counter() - began)
            if is_asked:
                self._asked.pop(request_id, None)
            denied = result if isinstance(result, Denied) else None
            if denied is not None:
                self._dispatcher.refused(session, request_id, method, message, denied)
            if self._sent_answer == request_id:
                self._sent_answer = None
            elif not quiet:
                self.answer(request_id, result)
            elif denied is not None:
                self.notify(pb.Frame(request_id=request_id, notice=pb.Notice(release_refused=to_status(denied))))

        call = self._dispatcher.request(session, self._tenant, request_id, message, respond)
        if is_asked and request_id in self._asked:  # it has no answer yet
            self._asked[request_id] = call

    def _read_books(self, request_id: int, kind: str, message: Any, session: int) -> None:
        """Answer a read. A long answer that the socket does not take is not kept: the read is, and is done again."""
        began = time.perf_counter()
        frame = pb.Frame(request_id=request_id)
        try:
            answer = self._endpoint.views.read(message, self._tenant, session)
            getattr(frame.reply, READS[kind]).CopyFrom(answer)
        except Refused as refused:
            frame = _refusal(request_id, refused.denied)
        self._dispatcher.times_of(_METHODS[kind], "handoff")(time.perf_counter() - began)
        self._send(frame)
        if self._outgoing and frame.ByteSize() > LONG_BYTES:
            self._outbox.take_back()
            self._aside = pb.Frame(request_id=request_id)
            getattr(self._aside, kind).CopyFrom(message)

    # --- the handshake ---

    def begin(self, session: int, tenant: str) -> None:
        """Take the session that the handshake has opened or resumed. Its process is watched from now on."""
        self.session, self._tenant = session, tenant
        self._on_greeted(self)
        assert self._pidfd is not None
        pidfd, self._pidfd = self._pidfd, None
        self._endpoint.watch.add(session, pidfd, self._peer.pid)

    def welcome(self, frame: pb.Frame, pair: _Pair) -> None:
        """Send the Welcome with one end of the socket of notices, and keep the other."""
        self._notices, theirs = pair
        self._notices.setblocking(False)
        self._notices.shutdown(socket.SHUT_RD)  # what the peer sent there would be let go of here at the end
        self._send(frame, [theirs.detach()])

    def pause(self) -> None:
        """Read nothing before the next turn of the event loop."""
        self._waiting = True
        self._io.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._waiting = False
        self._readable()

    # --- the last answers ---

    def _goodbye(self, request_id: int, session: int) -> None:
        def respond(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._send(_refusal(request_id, result))
            else:
                self._last(pb.Frame(request_id=request_id, reply=pb.Reply(goodbye=pb.GoodbyeResponse())))

        self._loop.ask(lambda call: ev.Goodbye(call, session, request_id), respond)

    def refuse(self, request_id: int, denied: Denied) -> None:
        """Answer with a refusal and end the connection once it is sent."""
        self._endpoint.refusals.note(denied.reason, pid=self._peer.pid)
        self._last(_refusal(request_id, denied))

    def _last(self, frame: pb.Frame) -> None:
        """End the connection after this frame, even if the peer never reads it."""
        self._outbox.is_ending = True
        self._send(frame)
        if not self._closed:
            self._io.call_later(LINGER_SECONDS, self.close, "it did not take the last answer")

    def violated(self, request_id: int, what: str) -> None:
        """End the connection because its peer broke the protocol."""
        self.refuse(request_id, deny(Reason.PROTOCOL_VIOLATION, what=what))

    # --- out ---

    def deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        """Queue one packet of a call for the next `flush`; its descriptors are closed here, sent or not.

        The call's answer is sent in the same frame: at once if it is known already, or if it comes before the flush.
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
            self._sent_answer = packet.request_id
        self._outbox.put(frame, descriptors)
        if self._closed:
            self._drop_all()

    def _describe_segment(self, packet: fx.Make | fx.Send, delivery: pb.Delivery) -> None:
        delivery.segment = packet.segment
        row = self._loop.broker.ledger.segments.get(packet.segment)
        if row is not None and not packet.part:
            delivery.segment_bytes, delivery.segment_extents = row.size_of(row.ids), len(row.ids)

    def answer(self, request_id: int, result: fx.Result | Denied) -> None:
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
            self._endpoint.traffic.notices_dropped += 1

    def recall(self, recall: fx.SendRecall) -> None:
        """Ask for memory. The core asks again if the notice is dropped."""
        self.notify(from_recall(recall))

    def disconnect(self, why: str) -> None:
        """End the connection because its peer broke the protocol."""
        self.violated(0, why)

    def _send(self, frame: pb.Frame, descriptors: list[int] | None = None) -> None:
        self._outbox.put(frame, descriptors or [])
        if self._closed:
            self._drop_all()
        elif len(self._outgoing) == 1:
            self._outbox.flush()

    def _drop_all(self) -> None:
        """Close what is queued and will never be sent; the core credits the extents in it."""
        for frame in self._outbox.drop_all():
            if frame.HasField("delivery") and self.session is not None:
                event = ev.NotDelivered(self.session, frame.request_id, frame.delivery.part)
                self._io.call_soon(self._loop.tell, event)

    # --- the end ---

    def close(self, why: str) -> None:
        """End the connection. Its session stays charged, because its process may be alive."""
        if self._closed:
            return
        self._closed = True
        self._handshake.end()
        self._io.remove_reader(self._sock)
        self._outbox.stop()
        self._hang_up(self._sock)
        if self._notices is not None:
            self._notices.close()
        self._drop_all()
        self._on_ended(self)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        del self._handshake  # the last object that refers to this one: see `spare_collections`
        if self.session is None:
            return
        logs.debug("connection ended", session=session_name(self.session), why=why)
        for connections in (self._loop.connections, self._loop.resuming):
            if connections.get(self.session) is self:
                del connections[self.session]
                self._loop.tell(ev.ConnectionLost(self.session))
                self._endpoint.watch.look(self.session)


def _refusal(request_id: int, denied: Denied) -> pb.Frame:
    return pb.Frame(request_id=request_id, reply=pb.Reply(error=to_status(denied)))


class Handshake:
    """The handshake of one connection, whose process is `peer`."""

    def __init__(self, connection: HandoffConnection, endpoint: HandoffEndpoint, peer: Peer) -> None:
        self.holds: Holds | None = None
        """What the process has stated so far, while it resumes; no other frame is allowed then."""
        self._connection = connection
        self._endpoint = endpoint
        self._peer = peer
        self._dispatcher = endpoint.dispatcher
        self._loop = endpoint.dispatcher.loop
        self._io = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def hello(self, frame: pb.Frame) -> None:
        """Take a Hello."""
        hello, request_id = frame.hello, frame.request_id
        if self._connection.session is not None:
            self._connection.violated(request_id, "Hello was said already")
            return
        if hello.protocol_version != PROTOCOL_VERSION:
            versions = {"version": hello.protocol_version, "supported": PROTOCOL_VERSION}
            self._connection.refuse(request_id, deny(Reason.UNSUPPORTED_VERSION, **versions))
            return
        try:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:  # before there is a session, which would outlive this connection
            self._connection.refuse(request_id, call_failed("socketpair", error))
            return
        if hello.resume_token:
            self._resume(request_id, hello.resume_token, pair)
        elif self._endpoint.closed is not None:
            self._turn_away(request_id, pair, self._endpoint.closed)
        else:
            self._open(request_id, hello, pair)

    def _open(self, request_id: int, hello: pb.Hello, pair: _Pair) -> None:
        peer, endpoint, tenant = self._peer, self._endpoint.name, self._endpoint.tenant_of(self._peer.uid)
        client = "".join(letter for letter in hello.client[:MAX_CLIENT_CHARACTERS] if letter.isprintable())
        token, token_hash = new_token()
        observer = hello.observer

        def opened(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._turn_away(request_id, pair, result)
                return
            assert isinstance(result, fx.SessionOpened)
            row = self._loop.broker.ledger.sessions[result.session]

            def begin() -> None:
                self._dispatcher.admit(row)
                self._begin(row, self._loop.connections)
                self._welcome(request_id, row, token, pair, resumed=False)

            def undo() -> None:
                self._loop.ask(lambda call: ev.Goodbye(call, row.session, request_id), lambda _: None)

            self._begin_or_undo(request_id, row, pair, begin, undo)

        self._loop.ask(
            lambda call: ev.OpenSession(
                call=call,
                tenant=tenant,
                pid=peer.pid,
                uid=peer.uid,
                process=peer.identity,
                observer=observer,
                client=client,
                endpoint=endpoint,
                token_hash=token_hash,
            ),
            opened,
        )

    def _resume(self, request_id: int, token: str, pair: _Pair) -> None:
        try:
            row = self._dispatcher.find(token, self._endpoint.name)
        except Refused as refused:
            self._turn_away(request_id, pair, refused.denied)
            return

        def resumed(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._turn_away(request_id, pair, result)
                return
            assert isinstance(result, fx.SessionResumed)

            def begin() -> None:
                for connections in (self._loop.connections, self._loop.resuming):
                    before = connections.pop(row.session, None)
                    if before is not None:  # it is not registered any more, so its end does not detach the session
                        before.close("its process opened another connection")
                self._begin(row, self._loop.resuming)
                self.holds = Holds(row)
                self._timer = self._io.call_later(HOLDS_SECONDS, self._no_holds)
                # The core must learn what the old connection did not deliver before anything is read from this one.
                self._connection.pause()
                reach("resume")
                self._welcome(request_id, row, token, pair, resumed=True)

            def undo() -> None:
                self._loop.tell(ev.ConnectionLost(row.session))

            self._begin_or_undo(request_id, row, pair, begin, undo)

        self._loop.ask(lambda call: ev.ResumeSession(call, row.session, self._peer.identity), resumed)

    def _turn_away(self, request_id: int, pair: _Pair, denied: Denied) -> None:
        for end in pair:
            end.close()
        self._connection.refuse(request_id, denied)

    def _begin_or_undo(
        self, request_id: int, row: SessionRow, pair: _Pair, begin: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Do what follows once the books have a session. After a fault there, undo that in the books, and turn away.

        Else they would have a session without a connection, whose process perhaps nobody watches.
        """
        try:
            begin()
        except Exception as error:  # noqa: BLE001 - whatever it is, no session may be left half begun
            logs.fault(error, endpoint=self._endpoint.name, pid=self._peer.pid)
            self.end()
            for connections in (self._loop.connections, self._loop.resuming):
                if connections.get(row.session) is self._connection:
                    del connections[row.session]
            self._connection.session = None
            undo()
            self._turn_away(request_id, pair, deny(Reason.INTERNAL))

    def _begin(self, row: SessionRow, connections: dict[int, SessionConnection]) -> None:
        connections[row.session] = self._connection
        self._connection.begin(row.session, row.tenant)

    def _welcome(self, request_id: int, row: SessionRow, token: str, pair: _Pair, *, resumed: bool) -> None:
        device = self._endpoint.device
        welcome = pb.Welcome(
            session=session_name(row.session),
            token=token,
            tenant=f"tenants/{row.tenant}",
            device_uuid=device.uuid,
            driver=device.driver,
            granularity_bytes=device.granularity,
            protocol_version=PROTOCOL_VERSION,
            protocol_revision=PROTOCOL_REVISION,
            resumed=resumed,
            version=__version__,
        )
        for location, capacity in self._loop.broker.books.rules.capacities.items():
            welcome.capacities.add(location=LOCATION_NUMBERS[location], limit_bytes=capacity)
        self._connection.welcome(pb.Frame(request_id=request_id, welcome=welcome), pair)
        if self._loop.drain is not None:
            self._connection.notify(pb.Frame(notice=self._loop.drain))
        elif self._endpoint.closed is not None:
            self._connection.notify(pb.Frame(notice=pb.Notice(draining=pb.Draining())))

    # --- the Holds of a session that is resumed ---

    def hold(self, frame: pb.Frame, session: int) -> None:
        """Take one frame of Holds of a session that resumes; until the last one, no other frame is allowed."""
        request_id, kind = frame.request_id, frame.WhichOneof("kind")
        if kind != "holds" or self.holds is None:
            what = "Holds come once, after a resumed Welcome" if self.holds is None else f"first the Holds, not {kind}"
            self._connection.violated(request_id, what)
            return
        try:
            self.holds.take(frame.holds)
        except Refused as refused:
            self.end()
            self._connection.refuse(request_id, refused.denied)
            return
        if frame.holds.last:
            holds = self.holds
            self.end()
            reach("reconcile")
            self._loop.ask(holds.to_event, lambda result: self._reconciled(request_id, session, result))

    def _no_holds(self) -> None:
        self.end()
        self._connection.violated(0, f"the last Holds did not come within {HOLDS_SECONDS:.0f} seconds")

    def _reconciled(self, request_id: int, session: int, result: fx.Result | Denied) -> None:
        reach("reconciled")
        if self._loop.resuming.get(session) is self._connection and not isinstance(result, Denied):
            self._loop.connections[session] = self._loop.resuming.pop(session)
        self._connection.answer(request_id, result)

    def end(self) -> None:
        """Expect no more Holds."""
        self.holds = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
