"""Opens, reads and replaces the daemon's own small files, and checks what is at the path first, and whose it is.

Other daemons, operators and accidents may have left something else there. A FIFO would block an ordinary `open`
forever, and a device could return endless bytes; both are refused, as are directories and sockets. The message of the
`OSError` says what was found.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from membroker.wire.ownership import stranger_in

MAX_TEXT_BYTES = 16 << 20
"""The longest TOML file that is read. Each model takes about 100 bytes, and their number is bounded."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, or what this user or one file may have of it."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPEN = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def open_file(path: Path, flags: int, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor. A new file has mode 0600.

    With `follow`, the last part of the path may be a symbolic link. Raises `OSError` for anything but a regular file,
    and never waits for the other end of a FIFO.
    """
    try:
        descriptor = os.open(path, flags | _OPEN | (0 if follow else os.O_NOFOLLOW), 0o600)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise _wrong_kind(path, os.lstat(path).st_mode) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _wrong_kind(path, mode)
    return descriptor


def _wrong_kind(path: Path, mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(errno.EINVAL, f"it is {kind} and must be a regular file", str(path))


def check_owner(path: Path, *, alone: bool = False) -> None:
    """Raise `OSError` if a user besides this one and root could put something else at this path.

    With `alone`, they may not add a file to this directory either, even if it has the sticky bit.
    """
    if why := stranger_in(path, alone=alone):
        what = f"{why}, and who can change it decides what this daemon does: give it to this user, closed to others"
        raise PermissionError(errno.EPERM, what, str(path))


def make_directory(path: Path) -> bool:
    """Create a directory and those above it, open to nobody else for writing; return False if it is there already."""
    missing = [part for part in (path, *path.parents) if not os.path.lexists(part)]
    made = False
    for part in reversed(missing):
        try:
            part.mkdir(0o755)
            made = part == path
        except FileExistsError:  # since this moment, by the daemon of another device
            made = False
    return made


def read_file(path: Path, max_bytes: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file; raises `OSError`, also if it is longer than `max_bytes`."""
    with open(open_file(path, os.O_RDONLY, follow=follow), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return data


def make_fresh(path: Path) -> int:
    """Create an empty file at `path`, replacing one that a crash left there. Return its descriptor, open read-write."""
    path.unlink(missing_ok=True)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content atomically and sync it to disk. Raises `OSError`, and leaves nothing behind then."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with open(make_fresh(fresh), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    fresh.rename(path)


def overwrite(descriptor: int, data: bytes) -> None:
    """Write over a small file's content, in the room that it has. Raises `OSError`."""
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)
