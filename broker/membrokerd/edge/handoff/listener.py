"""The handoff socket of one endpoint: accepts, attests, and keeps the connections that it accepted.

Bounds how many may stay without a Hello, and for how long. Decides nothing about memory.
"""

from __future__ import annotations

import asyncio
import socket
import time

from membroker.v1 import handoff_pb2 as pb
from membroker.vmm import DeviceInfo
from membroker.wire import frames as handoff
from membroker.wire.names import MAX_FRAME_BYTES

from ...core.denied import Reason
from ...observe import logs
from ...restart.process_watch import Watch
from ..dispatch import Dispatcher
from ..errors import to_status
from .connection import Connection
from .outbox import Traffic
from .peer import Peer, Unattested, attest, hang_up

ACCEPTS_PER_TURN = 32
MAX_SILENT = 64
"""Connections of one endpoint that have not said Hello. The oldest makes room for the newest."""
HELLO_SECONDS = 5.0
REFUSED_LINE_SECONDS = 1.0
PAUSE_SECONDS = 0.1
"""How long to wait before accepting again when the process has no descriptor left."""


class Listener:
    """The listening socket of one endpoint, and its connections."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: str,
        tenant: str | None,
        uids: frozenset[int],
        dispatcher: Dispatcher,
        device: DeviceInfo,
        traffic: Traffic,
        watch: Watch,
    ) -> None:
        self.endpoint = endpoint
        self.dispatcher = dispatcher
        self.device = device
        self.buffer = bytearray(MAX_FRAME_BYTES)
        self.watch = watch
        self._sock = sock
        self._tenant = tenant
        self._uids = uids
        self.traffic = traffic
        self._unsaid = 0
        self._silent_until = 0.0
        self._silent: dict[Connection, asyncio.TimerHandle] = {}
        self._greeted: set[Connection] = set()
        self._io = asyncio.get_running_loop()
        self._io.add_reader(sock, self._acceptable)

    def tenant_of(self, peer: Peer) -> str:
        """Return the tenant to charge: the endpoint's, or one for each uid if it has none."""
        return self._tenant or f"uid-{peer.uid}"

    def admit(self, uids: frozenset[int]) -> None:
        """Let only these users open sessions from now on. Open sessions stay."""
        self._uids = uids

    def _acceptable(self) -> None:
        turns = self.dispatcher.loop.turns
        for _ in range(ACCEPTS_PER_TURN):
            if not turns.may(self.endpoint, self._sock.fileno()):
                return
            began = time.perf_counter()
            went_on = self._accept_one()
            turns.charge(self.endpoint, time.perf_counter() - began)
            if not went_on:
                return

    def _accept_one(self) -> bool:
        """Accept a connection. Return False when none is waiting, or no descriptor is left."""
        try:
            connection, _ = self._sock.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            self.refused(Reason.DESCRIPTORS_EXHAUSTED, error=error.strerror)
            self._io.remove_reader(self._sock)
            self._io.call_later(PAUSE_SECONDS, self._resume)
            return False
        self._accept(connection)
        return True

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._io.add_reader(self._sock, self._acceptable)

    def _accept(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            peer = attest(sock, self._uids)
        except Unattested as error:
            self._turn_away(sock, error)
            return
        except OSError as error:
            logs.log("cannot attest", endpoint=self.endpoint, error=error.strerror)
            sock.close()
            return
        connection = Connection(self, sock, peer)
        self._silent[connection] = self._io.call_later(HELLO_SECONDS, self._give_up, connection, "it sent no Hello")
        if len(self._silent) > MAX_SILENT:
            self._give_up(next(iter(self._silent)), "too many connections sent no Hello")

    def _give_up(self, connection: Connection, why: str) -> None:
        """Close a connection, unless its Hello has arrived unread because the broker itself was suspended."""
        connection.hear()
        if connection.session is None:
            connection.close(why)

    def _turn_away(self, sock: socket.socket, error: Unattested) -> None:
        self.refused(error.denied.reason)
        reply = pb.Frame(reply=pb.Reply(error=to_status(error.denied)))
        try:
            handoff.send(sock, handoff.encode(reply))
        except OSError:
            logs.debug("it did not wait for the answer", endpoint=self.endpoint)
        hang_up(sock)

    # --- what connections report ---

    def greeted(self, connection: Connection) -> None:
        """Note that a connection has a session."""
        self._silent.pop(connection).cancel()
        self._greeted.add(connection)

    def ended(self, connection: Connection) -> None:
        """Note that a connection is closed."""
        self._greeted.discard(connection)
        timer = self._silent.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def refused(self, reason: Reason, **fields: object) -> None:
        """Count a refused connection. It is logged at most once a second, so that no peer can fill the log."""
        self.traffic.refused[reason.value] += 1
        self._unsaid += 1
        if self._io.time() < self._silent_until:
            return
        logs.log("connection refused", endpoint=self.endpoint, reason=reason.value, count=self._unsaid, **fields)
        self._unsaid = 0
        self._silent_until = self._io.time() + REFUSED_LINE_SECONDS

    def close(self) -> None:
        """Stop accepting, and end every connection."""
        self._io.remove_reader(self._sock)
        self._sock.close()
        for connection in [*self._silent, *self._greeted]:
            connection.notify(pb.Frame(notice=pb.Notice(stopping=pb.Stopping())))
            connection.close("the broker stops")
