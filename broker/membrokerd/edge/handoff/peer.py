"""Who is at the other end of a socket: the process and the user that the kernel reports, and whether it lives.

Owns the pidfd, which is free of pid reuse and readable when the process is dead. On kernels without SO_PEERPIDFD
(before 6.5) it opens one by pid and compares start times, inside one pid namespace only.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...core.denied import Denied, Reason, deny

_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)
_CREDENTIALS = struct.Struct("3i")
_DRAINED_PACKETS = 64
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Unattested(Exception):
    """The peer cannot be told, may not enter, or is dead."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.reason)
        self.denied = denied


@dataclass(frozen=True, slots=True)
class Peer:
    """A process: `pidfd` is ours to close; `identity` is equal for all connections of one process.

    `pid` is 0 for a process of a pid namespace that the broker cannot see into.
    """

    pid: int
    uid: int
    pidfd: int
    identity: str

    def is_alive(self) -> bool:
        """Say whether the process lives: its pidfd is readable once it is dead."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


def attest(connection: socket.socket, uids: frozenset[int]) -> Peer:
    """Return who is at the other end, if it may enter and lives; raises `Unattested`.

    `uids` are the users that the endpoint admits; none means whomever its socket's mode let connect. The facts are
    taken first and the liveness last: a pid that was reused in between would show as dead.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    uid &= 0xFFFFFFFF
    if uids and uid not in uids:
        raise Unattested(deny(Reason.ENDPOINT_FORBIDDEN, uid=uid))
    try:
        pidfd, identity = _identify(connection, pid)
    except OSError as error:
        raise Unattested(deny(Reason.DESCRIPTORS_EXHAUSTED, driver_says=f"attesting: {error.strerror}")) from error
    peer = Peer(pid, uid, pidfd, identity)
    if not peer.is_alive():
        os.close(pidfd)
        raise Unattested(deny(Reason.PEER_UNKNOWN, what="it died before it was greeted"))
    return peer


def hang_up(connection: socket.socket) -> None:
    """Close a peer's socket so that it still reads what was said last.

    Closing with packets unread makes the peer's next read fail with ECONNRESET, before the answer that is queued
    for it. So what it sent is taken first, as far as is reasonable, and dropped.
    """
    with suppress(OSError):
        for _ in range(_DRAINED_PACKETS):
            if not connection.recv(1):
                break
    connection.close()


def _identify(connection: socket.socket, pid: int) -> tuple[int, str]:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return _identify_by_pid(pid)
    try:
        return pidfd, identity_of(pidfd, pid)
    except OSError:
        os.close(pidfd)
        raise


def identity_of(pidfd: int, pid: int) -> str:
    """Return what is equal for all connections of one process, at every daemon of this boot, and for no other's."""
    if _inodes_identify():
        return f"pidfd:{os.fstat(pidfd).st_ino}"
    # Two containers' processes both have pid 0 here: what cannot be told apart must not count as one.
    return f"pid:{pid}:{_start_time(pid)}" if pid else f"unseen:{secrets.token_hex(8)}"


def _identify_by_pid(pid: int) -> tuple[int, str]:
    """The way of older kernels: the pid's start time before and after the pidfd says that it is one process."""
    if pid <= 0:
        raise Unattested(
            deny(Reason.PEER_UNKNOWN, what="it is in another pid namespace, and this kernel (before 6.5) has no pidfds")
        )
    before = _start_time(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        raise Unattested(deny(Reason.PEER_UNKNOWN, what=f"pidfd_open({pid}): {error.strerror}")) from error
    try:
        after = _start_time(pid)
    except OSError:
        os.close(pidfd)
        raise
    if before is None or before != after:
        os.close(pidfd)
        raise Unattested(deny(Reason.PEER_UNKNOWN, what="it died before it was greeted"))
    return pidfd, f"pid:{pid}:{before}"


def _start_time(pid: int) -> int | None:
    """Return the 22nd field of /proc/PID/stat, in clock ticks since boot, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    return int(text.rpartition(")")[2].split()[19])


def image_of(pid: int) -> tuple[str, ...] | None:
    """Return what an exec changes of a process: where its program and its stack lie. Both are random.

    None where this broker may not see that, or cannot see the process. It is equal for all of a process's life up to
    an exec; after one it may be equal too, where address space randomization is turned off.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text() if pid > 0 else ""
    except OSError:
        return None
    image = tuple(text.rpartition(")")[2].split()[23:26])  # startcode, endcode, startstack: the fields 26 to 28
    return image if image and image[-1] != "0" else None


@cache
def _inodes_identify() -> bool:
    """Say whether this kernel (6.9 on) gives each process's pidfds an inode of their own.

    Before, all anonymous descriptors share one inode, an eventfd's among them.
    """
    with ExitStack() as opened:
        pidfd = os.pidfd_open(os.getpid())
        opened.callback(os.close, pidfd)
        event = os.eventfd(0)
        opened.callback(os.close, event)
        return os.fstat(pidfd).st_ino != os.fstat(event).st_ino
