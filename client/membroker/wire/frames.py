"""Frames and descriptors on a handoff socket: one packet, one frame, and up to 64 descriptors beside it.

Library and daemon both stand on it. It owns no connection and no state, and must never decide anything: what a frame
means is its callers' business.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ..v1 import handoff_pb2 as pb
from .descriptors import MAX_DESCRIPTORS as MAX_DESCRIPTORS
from .descriptors import close_all as close_all
from .descriptors import receive as receive_packet
from .descriptors import send as send

PROTOCOL_VERSION = 1
PROTOCOL_REVISION = 1
"""What is understood beyond the first edition of the version; the list is at `Welcome.protocol_revision`."""
MAX_FRAME_BYTES = 65_536
MAX_IDS_PER_FRAME = 4_096
MAX_EXTENTS_PER_CALL = 65_536
WINDOW = 2
"""Deliveries of one session that may be unacknowledged. Without it a peer that never reads would fill the kernel's
table of descriptors in flight, which is counted per user of the *sender*, so for every session at once."""

# Plain ints: each operation on the enum of the socket module costs as much as a system call.
_TRUNC, _CTRUNC = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)


class EndOfConnection(Exception):
    """The other end is gone, or sent a packet of no bytes, which SEQPACKET cannot tell from it."""


class BrokenPacket(Exception):
    """What arrived is no frame: too long, not decodable, or with descriptors that nobody asked for."""


class Packet(NamedTuple):
    """One frame and its descriptors. `truncated`: the kernel dropped descriptors (RLIMIT_NOFILE)."""

    frame: pb.Frame
    descriptors: list[int]
    truncated: bool


def encode(frame: pb.Frame) -> bytes:
    """Return the frame as the bytes of one packet."""
    data = frame.SerializeToString()
    assert 0 < len(data) <= MAX_FRAME_BYTES, f"a frame of {len(data)} bytes"
    return data


def decode(data: bytes | memoryview) -> pb.Frame:
    """Return the frame in `data`. Raises `BrokenPacket` when there is none, or a frame of an unknown kind."""
    try:
        frame = pb.Frame.FromString(bytes(data))
    except DecodeError as error:
        raise BrokenPacket("the packet is not a frame") from error
    if frame.WhichOneof("kind") is None:
        raise BrokenPacket("the frame is of no kind that this version knows")
    return frame


def receive(connection: socket.socket) -> Packet:
    """Receive one packet with its descriptors (CLOEXEC), which are the caller's to close.

    Raises `EndOfConnection`, `BrokenPacket` (what came with it is closed), and what `recvmsg` raises.
    """
    data, descriptors, flags = receive_packet(connection, MAX_FRAME_BYTES)
    try:
        if flags & _TRUNC:
            raise BrokenPacket(f"the packet is longer than {MAX_FRAME_BYTES} bytes")
        if not data:
            raise EndOfConnection
        return Packet(decode(data), descriptors, bool(flags & _CTRUNC))
    except BaseException:
        close_all(descriptors)
        raise


def receive_without_descriptors(connection: socket.socket, buffer: bytearray) -> pb.Frame:
    """Receive one packet into `buffer`, of MAX_FRAME_BYTES, taking no descriptor whatever was sent.

    Without a control buffer the kernel installs none of a stranger's descriptors here and says so.
    Raises as `receive`, and `BrokenPacket` for a packet that carried descriptors.
    """
    count, _, flags, _ = connection.recvmsg_into([buffer])
    if flags & _TRUNC:
        raise BrokenPacket(f"the packet is longer than {MAX_FRAME_BYTES} bytes")
    if flags & _CTRUNC:
        raise BrokenPacket("the packet carries descriptors")
    if not count:
        raise EndOfConnection
    return decode(memoryview(buffer)[:count])
