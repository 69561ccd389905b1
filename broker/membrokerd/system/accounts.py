"""Which account a uid belongs to: `/etc/subuid` gives a user thousands of further uids, for containers without root.

Where each user is a tenant, all of these are one: with `newuidmap` a user runs a process under any of them, and would
else have as many limits and shares. The files are read again when they change. It must never ask a name service, which
may be on a network: the event loop calls this.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path

from . import files

_ETC = Path("/etc")


class Accounts:
    """The owner of each range of subordinate uids."""

    def __init__(self, etc: Path | None = None) -> None:
        self._subuid, self._passwd = (etc or _ETC) / "subuid", (etc or _ETC) / "passwd"
        self._seen: object = ()
        self._ranges: list[tuple[int, int, int]] = []
        """(first uid, uid behind the last, the owner's uid), sorted."""

    def owner_of(self, uid: int) -> int:
        """Return the uid of the account that this uid belongs to: its own, unless it is in a range of `/etc/subuid`.

        An owner that is not in `/etc/passwd` counts as the first uid of its first range.
        """
        seen = [_version(self._subuid), _version(self._passwd)]
        if seen != self._seen:
            self._seen, self._ranges = seen, self._read()
        place = bisect_right(self._ranges, (uid, 1 << 64, 0)) - 1
        if place >= 0 and uid < self._ranges[place][1]:
            return self._ranges[place][2]
        return uid

    def _read(self) -> list[tuple[int, int, int]]:
        uids = {row[0]: int(row[2]) for row in _rows(self._passwd) if len(row) > 2 and row[2].isdecimal()}
        ranges: list[tuple[int, int, int]] = []
        for row in _rows(self._subuid):
            if len(row) == 3 and row[1].isdecimal() and row[2].isdecimal():
                first, count = int(row[1]), int(row[2])
                owner = int(row[0]) if row[0].isdecimal() else uids.setdefault(row[0], first)
                ranges.append((first, first + count, owner))
        return sorted(ranges)


def _rows(path: Path) -> list[list[str]]:
    try:
        text = files.read_file(path, files.MAX_TEXT_BYTES, follow=True).decode(errors="replace")
    except OSError:
        return []  # most machines have no such ranges
    return [line.split(":") for line in text.splitlines()]


def _version(path: Path) -> object:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
