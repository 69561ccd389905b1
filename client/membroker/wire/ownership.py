"""Whose a path is: which other user could change what is there. And which ids stand for users that nobody can name.

A program that trusts a path trusts the owner of each part of it, of links too, and all who may write to one of its
directories. This is the only check of that: the daemon, its keeper and the library use it. It must start fast, and must
never change anything.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import Literal

ALL_IDS = (1 << 32) - 1
"""How many ids there are; the last number means no id."""
USUAL_OVERFLOW_ID = 65_534
_MOST_LINKS = 40
_PROC = Path("/proc")

Kind = Literal["uid", "gid"]


def stranger_in(path: Path, *, alone: bool = False) -> str:
    """Say which part of a path another user could change, and why; "" if nobody but this user and root can.

    Links are followed. What does not exist yet is left out: its directory decides who can make it. Others may write to
    a directory with the sticky bit, since they cannot replace what is in it; with `alone` the last part must be closed
    to them even so.
    """
    place, rest, links = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while True:
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"{place} cannot be looked at: {error.strerror}"
        if not _is_trusted(status.st_uid, is_last=not rest):
            return f"{place} belongs to {user_text(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"{place} leads to itself"
            target = Path(os.readlink(place))
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            place = Path("/") if target.is_absolute() else place.parent
        elif _is_open(place, status.st_mode, sticky_counts=not (alone and not rest)):
            return f"{place} can be changed by other users, as its mode is {stat.S_IMODE(status.st_mode):04o}"
        if not rest:
            return ""
        part = rest.pop()
        place = place.parent if part == ".." else place / part


def _is_trusted(uid: int, *, is_last: bool) -> bool:
    if uid == overflow_id("uid"):  # perhaps root's outside of this user namespace: "/" belongs to it, for example
        return not is_last
    return uid in (0, os.geteuid())


def _is_open(place: Path, mode: int, *, sticky_counts: bool) -> bool:
    """Say whether other users may change a file or a directory.

    On a read-only mount nobody can, as in a Kubernetes ConfigMap (0777).
    """
    if (
        not mode & 0o022
        or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
        or (sticky_counts and stat.S_ISDIR(mode) and mode & stat.S_ISVTX)
    ):
        return False
    return not os.statvfs(place).f_flag & os.ST_RDONLY


def is_ours(uid: int) -> bool:
    """Say whether a process of this user is one that we trust: it is root's, or our own."""
    return uid in (0, os.geteuid()) and uid != overflow_id("uid")


def overflow_id(kind: Kind) -> int | None:
    """Return the id by which the kernel names all users or groups that this user namespace does not map.

    None if it maps every id, so that each number means one user. If it maps only some, as `unshare -Ur`,
    `PrivateUsers=yes` and rootless containers do, this number means nobody: two users that have it are not the same.
    """
    return _overflow_id(kind, _PROC)


@functools.cache
def _overflow_id(kind: Kind, proc: Path) -> int | None:
    try:
        rows = (proc / "self" / f"{kind}_map").read_text().splitlines()
    except OSError:
        return None  # a kernel without user namespaces
    if sum(int(row.split()[2]) for row in rows) >= ALL_IDS:
        return None
    try:
        return int((proc / "sys" / "kernel" / f"overflow{kind}").read_text())
    except OSError:
        return USUAL_OVERFLOW_ID


def is_mapped(kind: Kind, number: int) -> bool:
    """Say whether this number means one user or group in this user namespace."""
    if overflow_id(kind) is None:
        return True
    rows = (_PROC / "self" / f"{kind}_map").read_text().splitlines()
    inside = ((int(first), int(count)) for first, _, count in map(str.split, rows))
    return number != overflow_id(kind) and any(first <= number < first + count for first, count in inside)


def namespace_trouble() -> str:
    """Say what a broker cannot do in this user namespace; "" if it maps every user."""
    number = overflow_id("uid")
    if number is None:
        return ""
    return (
        "this user namespace does not map every user (/proc/self/uid_map; `unshare -Ur`, PrivateUsers=yes, a rootless "
        f"container): all others have the uid {number} here, so their processes are refused"
    )


def user_text(uid: int) -> str:
    """Return a user for a sentence: `root (uid 0)`."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_text(gid: int) -> str:
    """Return a group for a sentence: `root (gid 0)`."""
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"
