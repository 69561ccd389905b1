"""The rows of the permission table about files and processes: what the kernel refuses."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from .table import HANDOFF, Party, alike, greet, row

_DOOR = "kernel: the sockets' owner and mode"
_DIRECTORY = "kernel: the directories are the daemon's user's, 0755; a read-only mount"


row("S1", "open a session at S's endpoint", "- yes EACCES yes EACCES yes yes", _DOOR, transports=HANDOFF, kernel=True)(
    lambda me, target: greet(me.theirs)
)
row(
    "S2",
    "open one where the mode admits all and `uids` names the tenant's user alone",
    "- yes ENDPOINT_FORBIDDEN ENDPOINT_FORBIDDEN ENDPOINT_FORBIDDEN ENOENT ENOENT",
    "broker: `uids` against SO_PEERCRED; a mount",
    transports=HANDOFF,
    kernel=True,
)(lambda me, target: greet(Path(target.listed)))


@row("F1", "replace the endpoint's sockets", "- EACCES EACCES yes EACCES EROFS yes", _DIRECTORY, kernel=True)
def replace_sockets(me: Party, target: Any) -> Any:
    """Put something else where the broker's sockets are: who can could pose as the broker. Then put them back."""
    return alike(*(functools.partial(_move_away, me.theirs / name) for name in ("handoff.sock", "grpc.sock")))


def _move_away(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.with_suffix(".away").rename(path)


@row(
    "F2",
    "replace the endpoint's directory, or those above it",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: as F1; only the endpoint is mounted",
    kernel=True,
)
def replace_directory(me: Party, target: Any) -> Any:
    """The same one floor higher: the endpoint, the tenants, the device."""
    endpoint = Path(target.endpoint)
    paths = (endpoint, endpoint.parent, endpoint.parent.parent)
    return alike(*(functools.partial(_move_away, path) for path in paths))


@row(
    "F3",
    "change the sockets' mode, to let others in",
    "- yes EPERM yes EPERM EROFS yes",
    "kernel: the sockets' owner; a read-only mount",
    kernel=True,
)
def change_mode(me: Party, target: Any) -> Any:
    for name in ("handoff.sock", "grpc.sock"):
        path = me.theirs / name
        path.chmod(path.stat().st_mode & 0o777)
    return "yes"


@row(
    "F4",
    "make the mount of the endpoint writable",
    "- - - - - EPERM -",
    "kernel: a container has no CAP_SYS_ADMIN, unless it is privileged",
    kernel=True,
)
def remount(me: Party, target: Any) -> Any:
    """MS_REMOUNT | MS_BIND, without MS_RDONLY."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, bytes(me.theirs), None, 32 | 4096, None):
        raise OSError(ctypes.get_errno(), "mount")
    return "yes"


@row(
    "F5",
    "read `state/`, or take its lock",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: `state/` is the daemon's user's, 0700; a mount",
    kernel=True,
)
def read_state(me: Party, target: Any) -> Any:
    state = Path(target.state)
    return alike(lambda: os.listdir(state), (state / "epoch").read_bytes, lambda: _lock(state / "lock"))


def _lock(path: Path) -> None:
    """Open the daemon's lock, which the daemon has: who could take it could keep the next daemon out."""
    with path.open("r+") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@row(
    "F6", "signal the daemon", "- EPERM EPERM yes EPERM ESRCH ESRCH", "kernel: the user; the PID namespace", kernel=True
)
def signal_daemon(me: Party, target: Any) -> Any:
    os.kill(target.pid, 0)
    return "yes"


@row(
    "F7",
    "read the daemon's descriptors, its environment, or its log by its stderr",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: the user; the PID namespace",
    kernel=True,
)
def reach_into_daemon(me: Party, target: Any) -> Any:
    """Among its descriptors are those of every segment; its stderr is its log."""
    process = Path("/proc", str(target.pid))
    log = process / "fd" / "2"
    return alike(lambda: os.listdir(process / "fd"), (process / "environ").read_bytes, lambda: log.open("rb").close())
