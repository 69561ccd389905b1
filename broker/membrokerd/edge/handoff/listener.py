"""The handoff socket of one endpoint: accepts, attests, and keeps the connections that it accepted.

Bounds how many may stay without a Hello, and for how long. Decides nothing about memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

from ...core.denied import Denied
from ...system import logs
from ..acceptor import Acceptor
from ..convert import Refused
from ..errors import to_status
from .connection import HandoffConnection
from .endpoint import HandoffEndpoint
from .peer import attest

MAX_SILENT = 64
"""Connections of one endpoint that have not said Hello. One of the tenant with the most makes room, its oldest."""
HELLO_SECONDS = 5.0


class Listener:
    """The listening socket of one endpoint, and its connections."""

    def __init__(self, sock: socket.socket, endpoint: HandoffEndpoint, uids: frozenset[int]) -> None:
        self._endpoint = endpoint
        self._uids = uids
        self._silent: dict[HandoffConnection, asyncio.TimerHandle] = {}
        self._greeted: set[HandoffConnection] = set()
        self._io = asyncio.get_running_loop()
        self._acceptor = Acceptor(sock, endpoint.dispatcher.loop.turns, endpoint.refusals, self._accept)

    def admit(self, uids: frozenset[int]) -> None:
        """Let only these users open sessions from now on. Open sessions stay."""
        self._uids = uids

    def close_to_new(self, why: Denied) -> None:
        """Open no session from now on. Open sessions stay, are told to release all, and can resume."""
        self._endpoint.closed = why
        for connection in list(self._greeted):
            connection.notify(pb.Frame(notice=pb.Notice(draining=pb.Draining())))

    def _accept(self, sock: socket.socket) -> None:
        try:
            peer = attest(sock, self._uids)
        except Refused as error:
            self._turn_away(sock, error)
            return
        except OSError as error:
            logs.log("the kernel does not identify the peer", endpoint=self._endpoint.name, error=error.strerror)
            self._acceptor.hang_up(sock)
            return
        connection = HandoffConnection(
            self._endpoint, sock, peer, self._acceptor.hang_up, self._on_greeted, self._on_ended
        )
        self._silent[connection] = self._io.call_later(HELLO_SECONDS, self._give_up, connection, "it sent no Hello")
        if len(self._silent) > MAX_SILENT:
            tenants = Counter(silent.peers_tenant for silent in self._silent)
            crowd, _ = tenants.most_common(1)[0]
            oldest = next(silent for silent in self._silent if silent.peers_tenant == crowd)
            self._give_up(oldest, "too many connections sent no Hello")

    def _give_up(self, connection: HandoffConnection, why: str) -> None:
        """Close a connection, unless its Hello has arrived unread because the broker itself was suspended."""
        connection.read()
        if connection.session is None:
            connection.close(why)

    def _turn_away(self, sock: socket.socket, error: Refused) -> None:
        self._endpoint.refusals.note(error.denied.reason)
        reply = pb.Frame(reply=pb.Reply(error=to_status(error.denied)))
        try:
            handoff.send(sock, handoff.encode(reply))
        except OSError:
            logs.debug("a refused peer left before it got the answer", endpoint=self._endpoint.name)
        self._acceptor.hang_up(sock)

    # --- what connections report ---

    def _on_greeted(self, connection: HandoffConnection) -> None:
        """Note that a connection has a session."""
        self._silent.pop(connection).cancel()
        self._greeted.add(connection)

    def _on_ended(self, connection: HandoffConnection) -> None:
        """Note that a connection is closed."""
        self._greeted.discard(connection)
        timer = self._silent.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop accepting, and end every connection."""
        self._acceptor.close()
        for connection in [*self._silent, *self._greeted]:
            connection.notify(pb.Frame(notice=pb.Notice(stopping=pb.Stopping())))
            connection.close("the broker stops")
