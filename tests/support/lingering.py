"""A TCP socket that lingers for an hour: the thread that closes it last waits so long, unless a signal comes."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from membroker.wire.descriptors import send

_kept: list[socket.socket] = []
"""Their other ends, which read nothing and stay open."""


def pass_lingering(connection: socket.socket, data: bytes) -> None:
    """Pass on a socket that lingers, and keep none of it here: the other end must not close it before that."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        _kept.append(listener.accept()[0])
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sock.send(bytes(65_536))
        send(connection, data, [sock.fileno()])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3_600))
