"""The mirror where systemd started the daemon: copies of descriptors in systemd's descriptor store (sd_notify(3)).

A message for each descriptor, since a name is for a whole message; then a barrier, the end of a pipe that systemd
closes when it has come so far. What is beyond its maximum systemd drops without a word, so what it has is counted here.
All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from membroker.wire.frames import close_all, send

from ..observe import sd_notify as notify
from .descriptor_store import Done, Kept, sort
from .keeper_client import IN_FLIGHT_SECONDS, Put

_FIRST_INHERITED = 3
_BARRIER = "BARRIER=1"


class _BarredPut(Put):
    """A put, and the pipe of its barrier."""

    def __init__(self, items: Sequence[tuple[str, int]], done: Done, late: Callable[[], None]) -> None:
        self.reader, self.writer = os.pipe()
        try:
            super().__init__(items, done, late)
        except OSError:
            close_all((self.reader, self.writer))
            raise

    def close_writer(self) -> None:
        """Leave this end to systemd alone."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def end(self, error: OSError | None) -> None:
        self.close_writer()
        os.close(self.reader)
        super().end(error)


class _Message(NamedTuple):
    text: str
    descriptors: Sequence[int] = ()
    put: _BarredPut | None = None


class SystemdMirror:
    """Copies in systemd's store, at most `maximum` of them; `names` are those that are there already."""

    def __init__(self, connection: socket.socket, maximum: int, names: Iterable[str]) -> None:
        self._io = asyncio.get_running_loop()
        self._sock = connection
        self._sock.setblocking(False)
        self._maximum = maximum
        self._names = set(names)
        self._unsent: deque[_Message] = deque()
        self._puts: dict[_BarredPut, None] = {}

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        """Copy descriptors; fails when they would be more than systemd keeps, or when it does not answer."""
        if len(self._names.union(name for name, _ in items)) > self._maximum:
            full = f"systemd keeps {len(self._names)} descriptors of {self._maximum}: raise FileDescriptorStoreMax="
            self._io.call_soon(done, OSError(full))
            return
        try:
            put = _BarredPut(items, done, lambda: self._end(put, TimeoutError("systemd does not answer")))
        except OSError as error:
            self._io.call_soon(done, error)
            return
        self._puts[put] = None
        self.drop(list(put.copies))  # systemd would keep both of one name
        self._names.update(put.copies)
        for name, copy in put.copies.items():
            self._unsent.append(_Message(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [copy], put))
        self._unsent.append(_Message(_BARRIER, [put.writer], put))
        self._watch()
        self._flush()

    def drop(self, names: Sequence[str]) -> None:
        """Let go of names."""
        for name in names:
            if name in self._names:
                self._names.remove(name)
                self._unsent.append(_Message(f"FDSTOREREMOVE=1\nFDNAME={name}"))
        self._flush()

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Nothing: a systemd that is begun anew has lost the daemon too."""

    def close(self) -> None:
        """Leave systemd with what it has."""
        self._io.remove_writer(self._sock)
        self._names.clear()
        self._unsent.clear()
        self._fail(ConnectionError("the broker stops"))
        self._sock.close()

    def _flush(self) -> None:
        while self._unsent:
            message = self._unsent[0]
            try:
                send(self._sock, message.text.encode(), message.descriptors)
            except BlockingIOError:
                self._io.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    self._io.call_later(IN_FLIGHT_SECONDS, self._flush)
                else:
                    self._io.call_soon(self._fail, error)
                return
            self._unsent.popleft()
            if message.put is not None and message.text == _BARRIER:
                message.put.close_writer()
        self._io.remove_writer(self._sock)

    # --- puts: systemd comes to their barriers in order, so only the first is watched ---

    def _watch(self) -> None:
        for put in self._puts:
            self._io.add_reader(put.reader, self._end, put, None)
            return

    def _end(self, put: _BarredPut, error: OSError | None) -> None:
        if put in self._puts:
            self._io.remove_reader(put.reader)
            del self._puts[put]
            self._unsent = deque(message for message in self._unsent if message.put is not put)
            self._watch()
            put.end(error)

    def _fail(self, error: OSError) -> None:
        for put in list(self._puts):
            self._end(put, error)


def systemd_available(configured_maximum: int = 0) -> bool:
    """Say whether systemd keeps descriptors of this service. `configured_maximum`: where it does not say how many."""
    return bool(os.environ.get("NOTIFY_SOCKET")) and _maximum(configured_maximum) > 0


def started_by_systemd() -> bool:
    """Say whether this process is the main one of a systemd service (248 and later say so)."""
    return os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())


def open_systemd(configured_maximum: int = 0) -> tuple[SystemdMirror, Kept]:
    """Return a mirror in systemd's store, and what it has of a predecessor; raises OSError.

    systemd says how many it keeps from version 254 on, and before that `configured_maximum` does: it must be no more
    than FileDescriptorStoreMax=.
    """
    connection = notify.connect()
    if connection is None:
        raise OSError("systemd did not start this process")
    items = _inherited()
    names = [name for name, _ in items]
    kept, unknown = sort(items)
    mirror = SystemdMirror(connection, _maximum(configured_maximum), names)
    mirror.drop(unknown)
    return mirror, kept


def _maximum(configured: int) -> int:
    told = os.environ.get("FDSTORE", "")
    return int(told) if told.isdecimal() else configured


def _inherited() -> list[tuple[str, int]]:
    """Return what systemd passed to this process, by name. Its children get neither it nor the word of it."""
    pid, count, names = (os.environ.pop(key, "") for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    descriptors = range(_FIRST_INHERITED, _FIRST_INHERITED + int(count))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return list(zip(names.split(":") + [""] * len(descriptors), descriptors, strict=False))
