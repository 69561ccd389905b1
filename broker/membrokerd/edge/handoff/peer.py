"""The process at the other end of a socket, and its user, as the kernel reports them; and whether it is alive.

Owns the pidfd, which is free of pid reuse and readable when the process is dead. On kernels without SO_PEERPIDFD
(before 6.5) it opens one by pid and compares start times, inside one pid namespace only.
"""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass

from membroker.wire.descriptors import peer_of
from membroker.wire.ownership import overflow_id

from ...core.denied import Reason, deny
from ...system.process import NO_DESCRIPTOR, call_failed, identity_of, start_time
from ..convert import Refused

_SO_PEERPIDFD = getattr(socket, "SO_PEERPIDFD", 77)


@dataclass(frozen=True, slots=True)
class Peer:
    """A process. The owner of this value must close `pidfd`. `identity` is equal for all connections of one process.

    `pid` is 0 for a process of a pid namespace that the broker cannot see into.
    """

    pid: int
    uid: int
    pidfd: int
    identity: str

    def is_alive(self) -> bool:
        """Say whether the process is alive: its pidfd is readable once it is dead."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


def attest(connection: socket.socket, uids: frozenset[int]) -> Peer:
    """Return the process at the other end, if it is admitted and alive; raises `Refused`.

    `uids` are the users that the endpoint admits; without any, every user that the socket's mode admits. The facts are
    read first and the liveness last: a pid that was reused in between shows as dead.
    """
    pid, uid = peer_of(connection)
    if uid == overflow_id("uid"):
        what = f"its user is not mapped in this broker's user namespace, where the uid {uid} is all such users'"
        raise Refused(deny(Reason.PEER_UNKNOWN, what=what))
    if uids and uid not in uids:
        raise Refused(deny(Reason.ENDPOINT_FORBIDDEN, uid=uid))
    try:
        pidfd, identity = _identify(connection, pid)
    except OSError as error:
        raise Refused(call_failed("attesting", error)) from error
    peer = Peer(pid, uid, pidfd, identity)
    if not peer.is_alive():
        os.close(pidfd)
        raise Refused(deny(Reason.PEER_UNKNOWN, what="it died before it was greeted"))
    return peer


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


def _identify_by_pid(pid: int) -> tuple[int, str]:
    """Return a pidfd of the process, and its identity, on kernels without SO_PEERPIDFD; raises `Refused`.

    Equal start times before and after the pidfd is opened show that it is of the same process.
    """
    if pid <= 0:
        raise Refused(
            deny(Reason.PEER_UNKNOWN, what="it is in another pid namespace, and this kernel (before 6.5) has no pidfds")
        )
    before = start_time(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        raise Refused(deny(Reason.PEER_UNKNOWN, what=f"pidfd_open({pid}): {error.strerror}")) from error
    try:
        after = start_time(pid)
    except OSError:
        os.close(pidfd)
        raise
    if before is None or before != after:
        os.close(pidfd)
        raise Refused(deny(Reason.PEER_UNKNOWN, what="it died before it was greeted"))
    return pidfd, f"pid:{pid}:{before}"
