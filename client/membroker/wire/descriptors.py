"""Descriptors beside the bytes of a packet (SCM_RIGHTS): how they are sent, received and closed.

The only file that touches SCM_RIGHTS; the handoff and the keeper of descriptors stand on it. What a packet means is
their business. The keeper must start fast: nothing but a little of the standard library is imported here.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

MAX_DESCRIPTORS = 64
"""Descriptors in one packet. The kernel allows 253; a packet is also the unit in which the broker takes turns."""

Control = list[tuple[int, int, bytes]]
Received = tuple[bytes, Control, int, Any]
"""What `recvmsg` returns."""

# Plain ints: each operation on the enum of the socket module costs as much as a system call.
_CLOEXEC, _NOSIGNAL = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)
_DESCRIPTOR = array.array("i").itemsize
_CONTROL_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * _DESCRIPTOR)


def send(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet. The descriptors stay open and the caller's; raises what `sendmsg` raises."""
    assert len(descriptors) <= MAX_DESCRIPTORS
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], control, _NOSIGNAL)


def receive(
    connection: socket.socket, max_bytes: int, landing: list[Received] | None = None
) -> tuple[bytes, list[int], int]:
    """Receive one packet: its bytes, its descriptors (CLOEXEC), which are the caller's to close, and the flags.

    MSG_TRUNC: there were more bytes. MSG_CTRUNC: there were more descriptors, or no more may be open in this process.
    Whatever was received is in `landing` first: Ctrl-C may end this function. Raises what `recvmsg` raises.
    """
    if landing is None:
        landing = []
    # One step of the interpreter, so nothing is received that is not in the list.
    landing.extend(map(connection.recvmsg, (max_bytes,), (_CONTROL_BYTES,), (_CLOEXEC,)))
    data, control, flags, _ = landing[-1]
    return data, descriptors_in(control), flags


def descriptors_in(control: Control) -> list[int]:
    """Return the descriptors in the control messages of a packet."""
    found = array.array("i")
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % _DESCRIPTOR])
    return list(found)


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
