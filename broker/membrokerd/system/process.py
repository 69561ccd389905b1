"""Facts about a process from the kernel: an identity that stays the same over reconnects, and what an exec() changes.

Owns the reading of /proc and of pidfds' inodes. It must never decide which processes may connect.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from membroker.wire.system_calls import describe

from ..core.denied import Denied, Reason, deny

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_SHORT = (*NO_DESCRIPTOR, errno.ENOMEM, errno.ENOBUFS)


def call_failed(call: str, error: OSError) -> Denied:
    """Return the refusal of a request for which a system call of the daemon failed, with its name and reason."""
    if error.errno in _SHORT:
        return deny(Reason.DESCRIPTORS_EXHAUSTED, driver_says=describe(call, error))
    return deny(Reason.INTERNAL, fault=f"this system refused the broker a call ({describe(call, error)})")


def identity_of(pidfd: int, pid: int) -> str:
    """Return an identity that all connections of a process share until the next boot, and no other process has."""
    if _inodes_identify():
        return f"pidfd:{os.fstat(pidfd).st_ino}"
    # Processes of other pid namespaces all have pid 0 here. They must not count as one process.
    return f"pid:{pid}:{start_time(pid)}" if pid else f"unseen:{secrets.token_hex(8)}"


def image_of(pid: int) -> tuple[str, ...] | None:
    """Return the addresses of a process's program and stack, which an exec() changes because both are random.

    Returns None if the broker cannot see the process or may not see its addresses. The addresses change only by an
    exec(). Without address space randomization they may stay the same even then.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text() if pid > 0 else ""
    except OSError:
        return None
    image = tuple(text.rpartition(")")[2].split()[23:26])  # startcode, endcode, startstack: the fields 26 to 28
    return image if image and image[-1] != "0" else None


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (/proc/PID/stat), or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    return int(text.rpartition(")")[2].split()[19])


@cache
def _inodes_identify() -> bool:
    """Return whether this kernel gives each process's pidfds an inode of their own, as Linux 6.9 and later do.

    On older kernels a pidfd has the same inode as every other anonymous descriptor, for example an eventfd.
    """
    with ExitStack() as opened:
        pidfd = os.pidfd_open(os.getpid())
        opened.callback(os.close, pidfd)
        event = os.eventfd(0)
        opened.callback(os.close, event)
        return os.fstat(pidfd).st_ino != os.fstat(event).st_ino
