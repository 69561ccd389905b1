"""Descriptors that travel with a packet (SCM_RIGHTS): how they are sent, received, copied and closed.

Also which process is at the other end (SO_PEERCRED). The only file that uses either. The handoff and the keeper of
descriptors use it, and know what a packet means. The keeper must start fast, so this imports only a little of the
standard library.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable, Sequence

from .names import MAX_DESCRIPTORS

# Plain ints: each operation on the enum of the socket module costs as much as a system call.
_CLOEXEC, _NOSIGNAL = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)
_PEEK, _CTRUNC = int(socket.MSG_PEEK), int(socket.MSG_CTRUNC)
_DESCRIPTOR = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR)
_CREDENTIALS = struct.Struct("iII")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end, as it was when it connected, or began to listen."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet. The caller's descriptors stay open. Raises what `sendmsg` raises."""
    assert len(descriptors) <= MAX_DESCRIPTORS
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], control, _NOSIGNAL)


def receive(connection: socket.socket, max_bytes: int) -> tuple[bytes, list[int], int]:
    """Receive one packet: its bytes, its descriptors (CLOEXEC), which the caller must close, and the flags.

    MSG_TRUNC: there were more bytes. MSG_CTRUNC: there were more descriptors, or this process may open no more.
    Raises what `recvmsg` raises.
    """
    received: list[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = []
    try:
        # In one step of the interpreter: a signal is handled before the kernel installs descriptors, or when the list
        # has them. In between they would be open, and no code would know their numbers.
        received.extend(map(connection.recvmsg, (max_bytes,), (_CONTROL_BYTES,), (_CLOEXEC,)))
        [(data, control, flags, _)] = received
        return data, _descriptors_in(control), flags
    except BaseException:
        for _, control, _, _ in received:
            close_all(_descriptors_in(control))
        raise


def carries_descriptors(connection: socket.socket) -> bool:
    """Say whether the next packet carries descriptors; it stays unread. Raises what `recvmsg` raises.

    To read it without a control buffer may take long: the kernel lets go of the descriptors then.
    """
    return bool(connection.recvmsg(0, 0, _PEEK)[2] & _CTRUNC)


def peek(connection: socket.socket, max_bytes: int) -> bytes | None:
    """Return what comes next on a stream, which stays unread; None: it carries descriptors."""
    data, _, flags, _ = connection.recvmsg(max_bytes, 0, _PEEK)
    return None if flags & _CTRUNC else data


def _descriptors_in(control: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % _DESCRIPTOR])
    return found.tolist()


def copy_all(descriptors: Iterable[int]) -> list[int]:
    """Return a copy of each descriptor (CLOEXEC). Raises `OSError`, and has made none then."""
    copies: list[int] = []
    try:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
    except OSError:
        close_all(copies)
        raise
    return copies


def close_each(descriptors: list[int]) -> None:
    """Close descriptors and remove them from the list: each once, even if Ctrl-C comes and this runs again."""
    while descriptors:
        descriptor = descriptors[-1]
        del descriptors[-1]  # no call stands between this and the close, so no signal is handled there
        os.close(descriptor)


def close_all(descriptors: Iterable[int]) -> None:
    """Close each descriptor."""
    for descriptor in descriptors:
        os.close(descriptor)
