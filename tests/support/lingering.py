"""A TCP socket that lingers for an hour: the thread that closes it last waits so long, unless a signal comes."""

from __future__ import annotations

import array
import socket
import struct
from contextlib import ExitStack, suppress


def pass_lingering(connection: socket.socket, data: bytes, flags: int = 0) -> socket.socket:
    """Pass on a socket that lingers, and keep none of it here: its new owner must not close it before that.

    Return its other end, which reads nothing: it lingers while that is open.
    """
    with ExitStack() as failed:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as sock,
        ):
            end = failed.enter_context(listener.accept()[0])
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.send(bytes(65_536))
            passed = array.array("i", [sock.fileno()])
            connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)], flags)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3_600))
        failed.pop_all()
    return end
