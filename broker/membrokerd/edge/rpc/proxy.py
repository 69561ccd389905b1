"""The gRPC socket of one endpoint, in front of its gRPC server: it accepts, bounds, and passes bytes on.

gRPC bounds neither its connections' unfinished header blocks (`http2.py`), nor what it has to say to a peer that asks
and never reads. So while anything waits to be sent to a peer, or to gRPC, nothing is read from that peer. Its time is
that of the peer's tenant. It must never change a byte, nor look into a call.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from membroker.wire.descriptors import peek, peer_of
from membroker.wire.system_calls import describe

from ...core.denied import Reason
from ...system.process import call_failed
from ...system.turns import Turns
from ..acceptor import Acceptor, Refusals
from .callers import announce
from .http2 import BrokenStream, FrameReader

CONNECTIONS_BESIDE = 16
"""Connections of an endpoint beyond one for each session: health checks, and connections that are just closing."""
READ_BYTES = 16 * 1024
"""The most that is read at once, and so the most that waits to be sent, beside a header block."""
UNREAD_BYTES = 2_048
"""The send buffer to the gRPC server, of which the kernel makes its least, 4.5 KiB. One thread of gRPC serves all peers
in turn, and reads all that has come from one: the more there may be, the longer the others wait."""


class Proxy:
    """The connections of one endpoint's gRPC socket, `max_connections` at most. `server` is where gRPC listens.

    `tenant_of` returns the tenant of a user. Where users are tenants, the one with the most connections makes room for
    others: its newest ends. With `announces` the server's calls know which process made them (`callers`).
    """

    def __init__(
        self,
        sock: socket.socket,
        server: Path,
        *,
        tenant_of: Callable[[int], str],
        max_connections: int,
        turns: Turns,
        refusals: Refusals,
        announces: bool = False,
    ) -> None:
        self._server = server
        self._announces = announces
        self._tenant_of = tenant_of
        self._max_connections = max_connections
        self._turns = turns
        self._refusals = refusals
        self._connections: dict[ProxiedConnection, str] = {}
        """Each with its tenant, the newest last."""
        self._acceptor = Acceptor(sock, turns, refusals, self._accept)

    def _accept(self, peer: socket.socket) -> None:
        server = None
        try:
            pid, uid = peer_of(peer)
            tenant = self._tenant_of(uid)
            if not self._make_room(tenant):
                self._acceptor.hang_up(peer)
                return
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
            if self._announces:
                announce(server, pid, uid)
            server.connect(os.fspath(self._server))
        except OSError as error:
            self._acceptor.hang_up(peer)
            if server is not None:
                server.close()
            self._refusals.note(call_failed("connect", error).reason, error=describe("connect", error))
            return
        connection = ProxiedConnection(
            peer, server, tenant, self._turns, self._refusals, self._acceptor.hang_up, self._connections.pop
        )
        self._connections[connection] = tenant

    def _make_room(self, tenant: str) -> bool:
        """Return whether this tenant may have one more connection, after ending another tenant's if necessary."""
        if len(self._connections) < self._max_connections:
            return True
        counts = Counter(self._connections.values())
        crowd, most = counts.most_common(1)[0]
        if most <= counts[tenant] + 1:
            return False
        next(connection for connection, owner in reversed(self._connections.items()) if owner == crowd).close()
        return True

    def close(self) -> None:
        """Accept no more, and end all connections."""
        self._acceptor.close()
        for connection in list(self._connections):
            connection.close()


class ProxiedConnection:
    """A peer's connection and the one to the gRPC server that belongs to it. It owns both sockets."""

    def __init__(
        self,
        peer: socket.socket,
        server: socket.socket,
        tenant: str,
        turns: Turns,
        refusals: Refusals,
        hang_up: Callable[[socket.socket], None],
        on_ended: Callable[[ProxiedConnection], object],
    ) -> None:
        self._peer = peer
        self._server = server
        self._tenant = tenant
        self._turns = turns
        self._refusals = refusals
        self._hang_up = hang_up
        self._on_ended = on_ended
        self._frames = FrameReader()
        self._unsent: dict[socket.socket, bytes] = {}
        """By socket: what it had no room for. While there is any, the peer is not read."""
        self._work = {source: partial(self._pass_on, source, sink) for source, sink in ((peer, server), (server, peer))}
        """By the socket that is read: what passes its bytes on."""
        self._io = asyncio.get_running_loop()
        for source in self._work:
            self._read_on(source)

    def _read_on(self, source: socket.socket) -> None:
        """Pass on what comes from a socket, when it is the tenant's turn."""
        self._io.add_reader(source, self._turns.put, self._tenant, self._work[source])

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> bool:
        """Read once from a socket, and send what may be passed on. The event loop says whether there is more."""
        if source.fileno() < 0 or sink in self._unsent or (source is self._peer and self._unsent):
            return False
        try:
            if source is self._peer:
                data = peek(source, READ_BYTES)
                if data is None:
                    raise BrokenStream("the peer passes descriptors")
                source.recv(len(data))
            else:
                data = source.recv(READ_BYTES)
            if not data:
                self.close()
            elif ready := self._frames.take(data) if source is self._peer else data:
                self._send(sink, ready)
        except BlockingIOError:
            pass
        except BrokenStream as error:
            self._refusals.note(Reason.PROTOCOL_VIOLATION, what=str(error))
            self.close()
        except OSError:
            self.close()
        return False

    def _send(self, sink: socket.socket, data: bytes) -> None:
        try:
            sent = sink.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            if sink is self._peer:
                self._io.remove_reader(self._server)
            self._io.remove_reader(self._peer)
            self._unsent[sink] = data[sent:]
            self._io.add_writer(sink, self._go_on, sink)

    def _go_on(self, sink: socket.socket) -> None:
        """Send what there was no room for, and read again once it is sent."""
        try:
            data = self._unsent[sink]
            sent = sink.send(data)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._unsent[sink] = data[sent:]
            return
        del self._unsent[sink]
        self._io.remove_writer(sink)
        if sink is self._peer:
            self._read_on(self._server)
        if not self._unsent:
            self._read_on(self._peer)

    def close(self) -> None:
        """End both connections."""
        if self._peer.fileno() < 0:
            return
        for sock in (self._peer, self._server):
            self._io.remove_reader(sock)
            self._io.remove_writer(sock)
        self._hang_up(self._peer)
        self._server.close()
        self._work.clear()  # what is there refers to this object: see `spare_collections`
        self._on_ended(self)
