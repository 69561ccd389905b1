"""The host driver's figures: how many bytes are alive in the extents that it created, in whatever process.

Owns one inotify descriptor with an IN_DELETE_SELF watch on each memfd, and the table of their sizes. The kernel fires a
watch exactly when the last descriptor, mapping or queued packet in any process is gone. A watch keeps nothing alive. It
must never hold a descriptor or a mapping of an extent, because that would keep the memory alive.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack

from ...wire.descriptors import close_all
from .. import libc as _libc
from ..driver import Location
from ..errno import driver_call, invalid, translated
from . import table as _table

_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16
_FREED = _libc.IN_DELETE_SELF | _libc.IN_IGNORED


class ExtentWatch:
    """The living extents and their sizes, by location. Not thread-safe: the driver locks.

    `survivors` are the descriptors of a dead process's watch. This watch takes them over, with the events that were
    queued in the meantime. If they are refused, the caller still owns them, and nothing was read from them. Without
    survivors, the two descriptors are made when they are first needed: a user may have only 128 inotify instances, and
    most processes never create an extent. `granularity` is in bytes; every size is a multiple of it.
    """

    def __init__(self, granularity: int, survivors: Mapping[str, int] | None = None) -> None:
        self._granularity = granularity
        self._descriptors: dict[str, int] = {}
        """`watches` and `table`, once they are made."""
        self._entries: dict[int, tuple[int, Location]] = {}
        self.counted: dict[Location, int] = dict.fromkeys(Location, 0)
        """Bytes by location, those included whose end was not read yet: see `used`."""
        if survivors:
            self._take_over(survivors)

    def survivors(self) -> dict[str, int]:
        """Return the descriptors that the next daemon needs. The watch keeps owning them."""
        return dict(self._made())

    def add(self, extent: int, size: int, location: Location) -> None:
        """Start to count the memfd `extent`. The caller still holds it open, so its end cannot be missed."""
        first, call = not self._descriptors, "inotify_add_watch"
        try:
            descriptors = self._made()
            number = _libc.inotify_add_watch(descriptors["watches"], f"/proc/self/fd/{extent}", _libc.IN_DELETE_SELF)
            call = "pwrite"
            _table.write(descriptors["table"], number, size, location)
        except BaseException as error:
            if first:
                self.close()
            if isinstance(error, OSError):
                raise translated(call, error) from error
            raise
        self._entries[number] = (size, location)
        self.counted[location] += size
        if number % _table.SWEEP_NUMBERS == 0:
            self._drain(descriptors["watches"])
            _table.sweep(descriptors["table"], self._entries)

    def used(self, location: Location) -> int:
        """Return the bytes of `location` that are alive now, in any process."""
        if self._descriptors:
            self._drain(self._descriptors["watches"])
        return self.counted[location]

    def inodes(self) -> set[int]:
        """Return the inodes of the living extents: /proc/PID/maps shows them, too."""
        return set(_living_watches(self._descriptors["watches"]).values()) if self._descriptors else set()

    def close(self) -> None:
        """Close the descriptors and forget the counts. Freed extents are no longer noticed."""
        # Forget first: if another thread forks now, the child closes only what is still known, and nothing twice.
        descriptors, self._descriptors = self._descriptors, {}
        close_all(descriptors.values())
        self._entries.clear()
        self.counted = dict.fromkeys(Location, 0)

    def _made(self) -> dict[str, int]:
        if not self._descriptors:
            with ExitStack() as undo:
                with driver_call("inotify_init1"):
                    watches = _libc.inotify_init()
                undo.callback(os.close, watches)
                self._descriptors = {"watches": watches, "table": _table.create()}
                undo.pop_all()
        return self._descriptors

    def _take_over(self, survivors: Mapping[str, int]) -> None:
        if survivors.keys() != {"watches", "table"}:
            raise invalid("survivors", f"the host driver's survivors are watches and table, not {', '.join(survivors)}")
        watches, table = survivors["watches"], survivors["table"]
        _check_kind(watches, "anon_inode:inotify", "watches")
        _check_kind(table, f"/memfd:{_table.NAME} (deleted)", "table")
        living = _living_watches(watches)
        entries = _table.read(table, living.keys(), self._granularity)
        # One entry may be missing: the process died while it created that extent. No other process has the extent, so
        # it does not count.
        if len(living) - len(entries) > 1:
            raise invalid("pread", f"the table is too short: it has {len(entries)} of {len(living)} living watches")
        for descriptor in survivors.values():
            os.set_inheritable(descriptor, False)
        os.set_blocking(watches, False)
        self._descriptors, self._entries = dict(survivors), entries
        for size, location in entries.values():
            self.counted[location] += size

    def _drain(self, watches: int) -> None:
        overflowed, data = False, _read(watches)
        while data:
            for number, mask, _, _ in _EVENT.iter_unpack(data):  # only a watched directory's events have names
                # A freed extent causes both events. The kernel lists the watch until the second, so a recount may run
                # between them.
                if mask & _FREED:
                    if number in self._entries:
                        self._forget(number)
                elif mask & _libc.IN_Q_OVERFLOW:
                    overflowed = True
            data = _read(watches) if len(data) == _READ_BYTES else b""  # less than that was all
        if overflowed:
            self._recount(watches)

    def _recount(self, watches: int) -> None:
        """Drop every entry whose watch the kernel no longer lists. Needed after lost events."""
        for number in self._entries.keys() - _living_watches(watches).keys():
            self._forget(number)

    def _forget(self, number: int) -> None:
        size, location = self._entries.pop(number)
        self.counted[location] -= size


def _read(watches: int) -> bytes:
    """Return the queued events, as many as fit into a read; empty if nothing is queued."""
    try:
        return os.read(watches, _READ_BYTES)
    except BlockingIOError:
        return b""


def _check_kind(descriptor: int, link: str, name: str) -> None:
    try:
        found = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        found = "closed"
    if found != link:
        raise invalid("readlink", f"the survivor `{name}` (descriptor {descriptor}) is {found}, not {link}")


def _living_watches(watches: int) -> dict[int, int]:
    """Return number and inode of the watches that the kernel still has (`inotify wd:HEX ino:HEX …` in fdinfo)."""
    with driver_call("open"), open(f"/proc/self/fdinfo/{watches}", encoding="ascii") as lines:
        found = [line.split(maxsplit=3) for line in lines if line.startswith("inotify ")]
    return {int(number.removeprefix("wd:"), 16): int(inode.removeprefix("ino:"), 16) for _, number, inode, _ in found}
