"""What the kernel tells of a process: an identity that survives reconnecting, and what an exec changes.

Owns the reading of /proc and of pidfds' inodes. It must never decide who may enter.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack
from functools import cache
from pathlib import Path

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def identity_of(pidfd: int, pid: int) -> str:
    """Return what is equal for all connections of one process, at every daemon of this boot, and for no other's."""
    if _inodes_identify():
        return f"pidfd:{os.fstat(pidfd).st_ino}"
    # Two containers' processes both have pid 0 here: what cannot be told apart must not count as one.
    return f"pid:{pid}:{start_time(pid)}" if pid else f"unseen:{secrets.token_hex(8)}"


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


def start_time(pid: int) -> int | None:
    """Return the 22nd field of /proc/PID/stat, in clock ticks since boot, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    return int(text.rpartition(")")[2].split()[19])


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
