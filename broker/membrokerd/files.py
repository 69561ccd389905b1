"""Small files that other daemons, operators and accidents leave: what is there is checked before it is believed.

Owns how the daemon opens, reads and replaces a file of its own. A FIFO would block an ordinary `open` for ever, and a
device could hand out bytes without end; both are refused, as directories and sockets are. The message of the `OSError`
says what was found.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_TEXT_BYTES = 16 << 20
"""The longest file of TOML that is read: each of the most models there may be takes some 100 bytes."""
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
    """Open a regular file and return its descriptor; a file that is made has mode 0600.

    `follow`: the last part of the path may be a symbolic link. Raises `OSError` for anything but a regular file, and
    never waits for the other end of a FIFO.
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
    return OSError(errno.EINVAL, f"it is {kind}, and must be a regular file", str(path))


def read_file(path: Path, max_bytes: int, *, follow: bool = False) -> bytes:
    """Return the content of a regular file; raises `OSError`, also where it is longer than `max_bytes`."""
    with open(open_file(path, os.O_RDONLY, follow=follow), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return data


def make_fresh(path: Path) -> int:
    """Return a new, empty file at `path`, open for reading and writing, in place of what a crash left there."""
    path.unlink(missing_ok=True)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def replace_file(path: Path, data: bytes) -> None:
    """Put this content in place of a file's: whole and on the disk, or not at all. Raises `OSError`."""
    fresh = path.with_name(f"{path.name}.new")
    with open(make_fresh(fresh), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
