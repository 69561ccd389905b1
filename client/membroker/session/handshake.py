"""Hello and Welcome: the first round trip of a session.

Owns what may go wrong before there is a session, as typed errors. It must never keep a descriptor when it raises.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from ..errors import BrokerAbsent, BrokerUnavailable, DescriptorLimit, MembrokerError, ProtocolError, from_status
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from ..wire.names import PROTOCOL_VERSION
from .endpoint import DESCRIPTORS_SHORT, open_socket, set_timeout, silent


def open_session(path: Path, hello: pb.Hello, timeout: float) -> tuple[socket.socket, socket.socket, pb.Welcome]:
    """Open a session on the handoff socket at `path`; return that socket, the one of notices, and the Welcome.

    `timeout`, in seconds, bounds each of connecting, greeting and being greeted. Raises `BrokerUnavailable`,
    `AccessDenied`, `TooMany`, `ProtocolError`, `DescriptorLimit`.
    """
    connection = open_socket(path, timeout)
    try:
        notices, welcome = _greet(connection, path, hello)
        set_timeout(connection, 0)
    except BaseException:
        connection.close()
        raise
    return connection, notices, welcome


def _greet(connection: socket.socket, path: Path, hello: pb.Hello) -> tuple[socket.socket, pb.Welcome]:
    try:
        # Who is refused as a stranger is answered before the greeting: the answer can be read, and nothing written.
        with suppress(BrokenPipeError):
            handoff.send(connection, handoff.encode(pb.Frame(request_id=1, hello=hello)))
        packet = _hear(connection)
    except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
        raise _unanswered(path, error) from error
    try:
        welcome = _welcome_of(packet)
        return socket.socket(fileno=packet.descriptors[0]), welcome
    except BaseException:
        handoff.close_all(packet.descriptors)
        raise


def _hear(connection: socket.socket) -> handoff.Packet:
    """Return the broker's first packet, also when it hung up with our greeting unread: that is told once, before it."""
    try:
        return handoff.receive(connection)
    except ConnectionResetError:
        return handoff.receive(connection)


def _unanswered(path: Path, error: Exception) -> MembrokerError:
    if isinstance(error, BlockingIOError):
        return BrokerUnavailable(silent(path))
    if isinstance(error, handoff.BrokenPacket):
        return ProtocolError(f"what listens at {path} is no broker of this protocol: {error}")
    return BrokerAbsent(
        f"the broker at {path} closed the connection without an answer: it is stopping, or its log says why"
    )


def _welcome_of(packet: handoff.Packet) -> pb.Welcome:
    """Return the Welcome, or raise for what came instead. The descriptors stay the caller's."""
    frame = packet.frame
    if frame.WhichOneof("kind") == "reply" and frame.reply.WhichOneof("result") == "error":
        raise from_status(frame.reply.error)
    if packet.truncated:
        raise DescriptorLimit(DESCRIPTORS_SHORT)
    if frame.WhichOneof("kind") != "welcome" or len(packet.descriptors) != 1:
        raise ProtocolError("the broker's first frame is not a Welcome with one descriptor")
    if frame.welcome.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the broker speaks version {frame.welcome.protocol_version} of the protocol and this library "
            f"{PROTOCOL_VERSION}: install the membroker that matches the daemon"
        )
    return frame.welcome
