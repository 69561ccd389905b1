"""How a connection gets its session: a Hello opens one, or resumes one, and then the process states its Holds.

Must never decide anything about memory.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from membroker.v1 import handoff_pb2 as pb
from membroker.wire.names import MAX_CLIENT_CHARACTERS, PROTOCOL_REVISION, PROTOCOL_VERSION, session_name

from ... import __version__
from ...core import effects as fx
from ...core import events as ev
from ...core.denied import Denied, Reason, deny
from ...core.rows import SessionRow
from ...runtime.connections import SessionConnection
from ...system.failpoints import reach
from ..convert import Refused
from ..dispatch import new_token
from ..messages import LOCATION_NUMBERS
from .endpoint import HandoffEndpoint
from .holds import Holds
from .peer import Peer

HOLDS_SECONDS = 10.0
"""How long a process that resumes may take from its Welcome to its last Holds."""

_Pair = tuple[socket.socket, socket.socket]


class Newcomer(SessionConnection, Protocol):
    """What a handshake needs of its connection."""

    @property
    def session(self) -> int | None:
        """The session of this connection, if it has one yet."""
        ...

    def begin(self, session: int, tenant: str) -> None:
        """Take the session that the handshake has opened or resumed."""
        ...

    def welcome(self, frame: pb.Frame, pair: _Pair) -> None:
        """Send the Welcome with one end of the socket of notices, and keep the other."""
        ...

    def pause(self) -> None:
        """Read nothing before the next turn of the event loop."""
        ...

    def answer(self, request_id: int, result: fx.Result | Denied) -> None:
        """Answer a request."""
        ...

    def refuse(self, request_id: int, denied: Denied) -> None:
        """Answer with a refusal and end the connection once it is sent."""
        ...

    def violated(self, request_id: int, what: str) -> None:
        """End the connection because its peer broke the protocol."""
        ...


class Handshake:
    """The handshake of one connection, whose process is `peer`."""

    def __init__(self, connection: Newcomer, endpoint: HandoffEndpoint, peer: Peer) -> None:
        self.holds: Holds | None = None
        """What the process has stated so far, while it resumes; no other frame is allowed then."""
        self._connection = connection
        self._entrance = endpoint
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
            why = deny(Reason.DESCRIPTORS_EXHAUSTED, driver_says=f"socketpair: {error.strerror}")
            self._connection.refuse(request_id, why)
            return
        if hello.resume_token:
            self._resume(request_id, hello.resume_token, pair)
        else:
            self._open(request_id, hello, pair)

    def _open(self, request_id: int, hello: pb.Hello, pair: _Pair) -> None:
        peer, endpoint, tenant = self._peer, self._entrance.endpoint, self._entrance.tenant_of(self._peer)
        client = "".join(letter for letter in hello.client[:MAX_CLIENT_CHARACTERS] if letter.isprintable())
        token, token_hash = new_token()
        observer = hello.observer

        def opened(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._turn_away(request_id, pair, result)
                return
            assert isinstance(result, fx.SessionOpened)
            row = self._loop.broker.ledger.sessions[result.session]
            self._dispatcher.admit(row)
            self._begin(row, self._loop.links)
            self._welcome(request_id, row, token, pair, resumed=False)

        self._loop.ask(
            lambda call: ev.OpenSession(
                call, tenant, peer.pid, peer.uid, peer.identity, observer, client, endpoint, token_hash
            ),
            opened,
        )

    def _resume(self, request_id: int, token: str, pair: _Pair) -> None:
        try:
            row = self._dispatcher.find(token, self._entrance.endpoint)
        except Refused as refused:
            self._turn_away(request_id, pair, refused.denied)
            return

        def resumed(result: fx.Result | Denied) -> None:
            if isinstance(result, Denied):
                self._turn_away(request_id, pair, result)
                return
            assert isinstance(result, fx.SessionResumed)
            for connections in (self._loop.links, self._loop.resuming):
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

        self._loop.ask(lambda call: ev.ResumeSession(call, row.session, self._peer.identity), resumed)

    def _turn_away(self, request_id: int, pair: _Pair, denied: Denied) -> None:
        for end in pair:
            end.close()
        self._connection.refuse(request_id, denied)

    def _begin(self, row: SessionRow, connections: dict[int, SessionConnection]) -> None:
        connections[row.session] = self._connection
        self._connection.begin(row.session, row.tenant)

    def _welcome(self, request_id: int, row: SessionRow, token: str, pair: _Pair, *, resumed: bool) -> None:
        device = self._entrance.device
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
            self._loop.links[session] = self._loop.resuming.pop(session)
        self._connection.answer(request_id, result)

    def end(self) -> None:
        """Expect no more Holds."""
        self.holds = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
