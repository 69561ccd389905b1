"""One attempt to take a session up again: Hello with its token, what it holds, and the broker's answer.

Owns the new connection's sockets until somebody keeps them. It must never decide whether to try again, and never
state anything before the broker has said that it knows the session.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import BrokerUnavailable, MembrokerError, ProtocolError, from_status
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from .endpoint import set_timeout, silent
from .handshake import open_session
from .inventory import Held

REJECTED = "TOKEN_REJECTED"


class Attempt:
    """One attempt at the handoff socket at `path`; `timeout`, in seconds, bounds each of its steps.

    Every method raises the broker's refusal, `BrokerUnavailable`, `ProtocolError` or `DescriptorLimit`.
    """

    def __init__(self, path: Path, hello: pb.Hello, timeout: float) -> None:
        self._path = path
        self._hello = hello
        self._timeout = timeout
        self._sockets: list[socket.socket] = []
        self.revision = 0
        """Of the broker that was met: `Welcome.protocol_revision`."""

    def greet(self) -> None:
        """Be recognized: raises with the reason TOKEN_REJECTED where the session is not known."""
        connection, notices, welcome = open_session(self._path, self._hello, self._timeout)
        self._sockets += connection, notices
        self.revision = welcome.protocol_revision
        if not welcome.resumed:
            raise MembrokerError("it opened another session, as a broker that knows of no resuming does", REJECTED)

    def state(self, held: Held, request_id: int) -> pb.ResumeResponse:
        """State what the session holds, and return what the broker says to it."""
        connection = self._sockets[0]
        set_timeout(connection, self._timeout)
        try:
            for holds in held.frames():
                handoff.send(connection, handoff.encode(pb.Frame(request_id=request_id, holds=holds)))
            packet = handoff.receive(connection)
        except BlockingIOError as error:
            raise BrokerUnavailable(silent(self._path)) from error
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            raise BrokerUnavailable(f"the broker at {self._path} went away again: {error!r}") from error
        handoff.close_all(packet.descriptors)
        set_timeout(connection, 0)
        reply = packet.frame.reply
        if reply.HasField("error"):
            raise from_status(reply.error)
        if not reply.HasField("resume"):
            raise ProtocolError("the broker's answer to the last Holds is none to it")
        return reply.resume

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """Return the connection and the socket of notices. They are closed with the attempt unless `keep` is called."""
        connection, notices = self._sockets
        return connection, notices

    def keep(self) -> None:
        """Let the sockets outlive the attempt."""
        self._sockets.clear()

    def cut(self) -> None:
        """End the attempt from another thread, which waits for nothing."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close what nobody keeps."""
        while self._sockets:
            self._sockets.pop().close()


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each attempt: 50 ms, twice as many each time up to 1 s, up to half less by lot.

    By lot, because all workers of a machine lose their broker in the same moment.
    """
    seconds = 0.05
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, 1.0)
