"""The host twin's truth: how many bytes live in extents that this watch has seen born, wherever they live now.

Owns one inotify descriptor with an IN_DELETE_SELF watch on each memfd. The kernel fires it exactly when the
last descriptor, mapping or queued packet in any process is gone, and the watch itself keeps nothing alive.
It must never hold a descriptor or a mapping of an extent, or it would become the reason that memory stays.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack

from membroker.vmm import _libc
from membroker.vmm._errors import driver_call
from membroker.vmm.driver import Location

_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class ExtentWatch:
    """The living extents and their sizes, by location. Not thread-safe: the driver locks.

    `descriptor` and `entries` (watch number -> (size in bytes, location)) take up another process's watch: a
    daemon that restarts gets the inotify descriptor back from its descriptor store, with the deaths that
    happened meanwhile still queued in it. Without them the descriptor is made at the first `add`, because a
    user may have only 128 inotify instances and most processes never create an extent.
    """

    def __init__(
        self, descriptor: int | None = None, entries: Mapping[int, tuple[int, Location]] | None = None
    ) -> None:
        self._descriptor = descriptor
        self._entries = dict(entries or {})
        self._used = dict.fromkeys(Location, 0)
        for size, location in self._entries.values():
            self._used[location] += size
        if descriptor is not None:
            self._recount(descriptor)

    @property
    def descriptor(self) -> int | None:
        """The inotify descriptor, or None while nothing was ever created. It stays the watch's."""
        return self._descriptor

    @property
    def entries(self) -> dict[int, tuple[int, Location]]:
        """A copy of the table, watch number -> (size in bytes, location), for a descriptor store."""
        return dict(self._entries)

    def add(self, extent: int, size: int, location: Location) -> None:
        """Begin to count the memfd `extent`. The caller still holds it open, so it cannot die unseen."""
        with ExitStack() as undo:
            if self._descriptor is None:
                with driver_call("inotify_init1"):
                    self._descriptor = _libc.inotify_init()
                undo.callback(self.close)
            with driver_call("inotify_add_watch"):
                path = f"/proc/self/fd/{extent}"
                number = _libc.inotify_add_watch(self._descriptor, path, _libc.IN_DELETE_SELF)
            undo.pop_all()
        self._entries[number] = (size, location)
        self._used[location] += size

    def used(self, location: Location) -> int:
        """Return the bytes of `location` that live now, in any process."""
        if self._descriptor is not None:
            self._drain(self._descriptor)
        return self._used[location]

    def close(self) -> None:
        """Close the inotify descriptor and forget the table. Deaths are no longer seen."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._entries.clear()
        self._used = dict.fromkeys(Location, 0)

    def _drain(self, descriptor: int) -> None:
        overflowed = False
        while events := _read(descriptor):
            for number, mask in events:
                overflowed |= bool(mask & _libc.IN_Q_OVERFLOW)
                if mask & _libc.IN_DELETE_SELF:
                    self._forget(number)
        if overflowed:
            self._recount(descriptor)

    def _recount(self, descriptor: int) -> None:
        """Drop every entry whose watch the kernel no longer lists: the answer when deaths went unreported."""
        living = _living_watches(descriptor)
        for number in self._entries.keys() - living:
            self._forget(number)

    def _forget(self, number: int) -> None:
        size, location = self._entries.pop(number, (0, Location.HOST))
        self._used[location] -= size


def _read(descriptor: int) -> list[tuple[int, int]]:
    """Return the queued events as (watch number, mask); an empty list when there are none."""
    try:
        data = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return []
    events, at = [], 0
    while at < len(data):
        number, mask, _cookie, name_bytes = _EVENT.unpack_from(data, at)
        events.append((number, mask))
        at += _EVENT.size + name_bytes
    return events


def _living_watches(descriptor: int) -> set[int]:
    """Return the numbers of the watches that the kernel still has (`inotify wd:HEX …` in fdinfo)."""
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
        return {int(line.split()[1].removeprefix("wd:"), 16) for line in lines if line.startswith("inotify ")}
