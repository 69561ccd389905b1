"""Hello, Welcome and Holds: how a session begins on its first connection, and goes on over the next one.

Owns the typed errors of both, and the sockets until they are handed over. It must never keep a descriptor when it
raises.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import BrokerAbsent, BrokerUnavailable, DescriptorLimit, MembrokerError, ProtocolError, from_status
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from ..wire.names import PROTOCOL_VERSION
from .endpoint import DESCRIPTORS_CUT, open_socket, set_timeout, silent
from .inventory import HeldResources, Inventory
from .outages import REJECTED

logger: logging.Logger = logging.getLogger("membroker")


def open_session(path: Path, hello: pb.Hello, timeout: float) -> tuple[socket.socket, socket.socket, pb.Welcome]:
    """Open or resume a session on the handoff socket at `path`; return that socket, that of notices, and the Welcome.

    `timeout`, in seconds, bounds each of connecting, sending the Hello and receiving the Welcome. Raises
    `BrokerUnavailable`, `AccessDenied`, `TooMany`, `ProtocolError`, `DescriptorLimit`, and an error with the reason
    `REJECTED` if the broker did not resume the session that the Hello names.
    """
    connection = open_socket(path, timeout)
    try:
        notices, welcome = _greet(connection, path, hello, timeout)
        set_timeout(connection, 0)
    except BaseException:
        connection.close()
        raise
    return connection, notices, welcome


def reconcile(
    connection: socket.socket, path: Path, inventory: Inventory, request_id: int, timeout: float
) -> tuple[HeldResources, Sequence[str]]:
    """State what a session holds on the socket on which it resumes, and forget what the broker does not know of that.

    Return what the broker knows of it, and the models that it lists. `timeout`, in seconds, bounds each step. Raises
    the broker's refusal, `BrokerUnavailable` and `ProtocolError`.
    """
    held = inventory.held()
    set_timeout(connection, timeout)
    try:
        for holds in held.frames():
            handoff.send(connection, handoff.encode(pb.Frame(request_id=request_id, holds=holds)))
        packet = _receive(connection, timeout)
    except BlockingIOError as error:
        raise BrokerUnavailable(silent(path)) from error
    except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
        raise BrokerUnavailable(f"the broker at {path} went away again: {error!r}") from error
    handoff.close_all(packet.descriptors)
    set_timeout(connection, 0)
    reply = packet.frame.reply
    if reply.HasField("error"):
        raise from_status(reply.error)
    if not reply.HasField("resume"):
        raise ProtocolError("the broker did not answer the last Holds with a ResumeResponse")
    extents, generations = reply.resume.unknown_extent_ids, reply.resume.unknown_generations
    if extents or generations:
        logger.warning(
            "the broker does not know %d extents and %d segments that this process holds: they stay mapped "
            "until they are closed, and are charged to no model",
            *(len(extents), len(generations)),
        )
        inventory.forget(extents, generations)
        held = held.without(extents, generations)
    return held, reply.resume.models


def _greet(connection: socket.socket, path: Path, hello: pb.Hello, timeout: float) -> tuple[socket.socket, pb.Welcome]:
    try:
        # A process that is not admitted is answered before its Hello: it can read the answer, but cannot write.
        with suppress(BrokenPipeError):
            handoff.send(connection, handoff.encode(pb.Frame(request_id=1, hello=hello)))
        packet = _hear(connection, timeout)
    except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
        raise _unanswered(path, error) from error
    try:
        welcome = _welcome_of(packet)
        if hello.resume_token and not welcome.resumed:
            raise MembrokerError("it opened another session, as a broker does that cannot resume", REJECTED)
        return socket.socket(fileno=packet.descriptors[0]), welcome
    except BaseException:
        handoff.close_all(packet.descriptors)
        raise


def _hear(connection: socket.socket, timeout: float) -> handoff.Packet:
    """Return the broker's first packet.

    If the broker hung up with our Hello unread, the first read fails with ECONNRESET, and the next one has the packet.
    """
    try:
        return _receive(connection, timeout)
    except ConnectionResetError:
        return _receive(connection, timeout)


def _receive(connection: socket.socket, timeout: float) -> handoff.Packet:
    """Return the next packet. Raises `BlockingIOError` if none comes in time.

    The kernel's own timeout begins again after each signal that the program handles, such as a timer's.
    """
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(timeout * 1000):
        raise BlockingIOError
    return handoff.receive(connection)


def _unanswered(path: Path, error: Exception) -> MembrokerError:
    if isinstance(error, BlockingIOError):
        return BrokerUnavailable(silent(path))
    if isinstance(error, handoff.BrokenPacket):
        return ProtocolError(f"the process that listens at {path} does not speak this protocol: {error}")
    return BrokerAbsent(
        f"the broker at {path} closed the connection without an answer: it is stopping, or its log says why"
    )


def _welcome_of(packet: handoff.Packet) -> pb.Welcome:
    """Return the Welcome, or raise for what came instead. The caller still owns the descriptors."""
    frame = packet.frame
    if frame.WhichOneof("kind") == "reply" and frame.reply.WhichOneof("result") == "error":
        raise from_status(frame.reply.error)
    if packet.truncated:
        raise DescriptorLimit(DESCRIPTORS_CUT)
    if frame.WhichOneof("kind") != "welcome" or len(packet.descriptors) != 1:
        raise ProtocolError("the broker's first frame is not a Welcome with one descriptor")
    if frame.welcome.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the broker speaks version {frame.welcome.protocol_version} of the protocol and this library "
            f"{PROTOCOL_VERSION}: install the membroker that matches the daemon"
        )
    return frame.welcome
