"""Facts about a process from the kernel: an identity that stays the same over reconnects, what an exec() changes, and
the pod that it runs in.

Owns the reading of /proc and of pidfds' inodes. It must never decide which processes may connect.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import select
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from membroker.wire.system_calls import describe

from ..core.denied import Denied, Reason, deny

PROC = Path("/proc")
MAX_CGROUP_BYTES = 16 << 10
MAX_CGROUPS = 64
"""Lines of /proc/PID/cgroup: one with cgroup v2, and one for each hierarchy of v1."""
_HEX = "[0-9a-f]"
POD_UID = f"{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}}"
"""A pod's uid, in which systemd's names have _ for -; that of a static pod is a hash."""
_CLASS = "burstable|besteffort|guaranteed"
_POD = re.compile(
    # In a cgroup namespace of its own the broker sees the way up from there: /../../kubepods-pod….slice
    rf"(?:/\.\.)*(?:/(?:kubelet|kubepods|{_CLASS})|/kubelet\.slice|/(?:kubelet-)?kubepods(?:-(?:{_CLASS}))?\.slice)*"
    rf"(?:/pod|/(?:kubelet-)?kubepods(?:-(?:{_CLASS}))?-pod)({POD_UID})(?:\.slice)?(?:/|\Z)"
)
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
        image = tuple(_stat_of(pid)[23:26]) if pid > 0 else ()  # startcode, endcode, startstack: the fields 26 to 28
    except OSError:
        return None
    return image if image and image[-1] != "0" else None


def pod_of(pid: int, pidfd: int) -> str:
    """Return the uid of the Kubernetes pod that a process runs in, or "" if it is in none that the broker can see.

    Only the kubelet's own part of the path counts, from its beginning: a container may make cgroups of any name below
    its own, and a user below theirs. `pidfd` shows whether the pid was that of another process by then.
    """
    if pid <= 0:
        return ""
    try:
        with open(PROC / str(pid) / "cgroup", "rb") as file:
            lines = file.read(MAX_CGROUP_BYTES).decode("ascii", errors="replace").splitlines()
    except OSError:
        return ""
    paths = [line.split(":", 2)[2] for line in lines[:MAX_CGROUPS] if line.count(":") >= 2]
    found = {match[1].replace("_", "-") for match in map(_POD.match, paths) if match}
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return found.pop() if len(found) == 1 and not poll.poll(0) else ""


def pod_of_pid(pid: int) -> str:
    """Return the uid of the pod of a process that has this pid now, or "", as `pod_of`."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return ""
    try:
        return pod_of(pid, pidfd)
    finally:
        os.close(pidfd)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (/proc/PID/stat), or None if it does not exist."""
    try:
        return int(_stat_of(pid)[19])
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: the second is the process's name, and may be any bytes."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


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
