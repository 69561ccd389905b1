"""Frames and descriptors on a handoff socket: one frame is one packet, with up to 64 descriptors.

Library and daemon both use it. It owns no connection and no state, and must never decide anything: its callers know
what a frame means.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ..v1 import handoff_pb2 as pb
from .descriptors import close_all as close_all
from .descriptors import receive as receive_packet
from .descriptors import send as send
from .names import MAX_FRAME_BYTES

# Plain ints: each operation on the enum of the socket module costs as much as a system call.
_TRUNC, _CTRUNC, _PEEK = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC), int(socket.MSG_PEEK)


class EndOfConnection(Exception):
    """The other end closed the socket, or sent a packet of 0 bytes: SEQPACKET cannot tell the two apart."""


class BrokenPacket(Exception):
    """The packet is not a frame: too long, not decodable, or with descriptors where none are allowed."""


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
    """Return the frame in `data`. Raises `BrokenPacket` for bytes that are not a frame of a known kind."""
    try:
        frame = pb.Frame.FromString(bytes(data))
    except DecodeError as error:
        raise BrokenPacket("the packet is not a frame") from error
    if frame.WhichOneof("kind") is None:
        raise BrokenPacket("this version does not know the kind of the frame")
    return frame


def receive(connection: socket.socket) -> Packet:
    """Receive one packet with its descriptors (CLOEXEC), which the caller must close.

    Raises `EndOfConnection`, `BrokenPacket` (after closing its descriptors), and what `recvmsg` raises.
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


def receive_without_descriptors(connection: socket.socket, buffer: bytearray) -> tuple[pb.Frame, int]:
    """Receive one packet into `buffer`, of MAX_FRAME_BYTES, and never a descriptor; return it, and its bytes.

    Raises as `receive`, and `BrokenPacket` for a packet that carries descriptors, which stays unread.
    """
    if connection.recvmsg(0, 0, _PEEK)[2] & _CTRUNC:  # as `carries_descriptors`, without a call for each frame
        raise BrokenPacket("the packet carries descriptors")
    count, _, flags, _ = connection.recvmsg_into([buffer])
    if flags & _TRUNC:
        raise BrokenPacket(f"the packet is longer than {MAX_FRAME_BYTES} bytes")
    if not count:
        raise EndOfConnection
    return decode(memoryview(buffer)[:count]), count
