"""The mirror for a daemon that systemd started: copies of descriptors in systemd's descriptor store (sd_notify(3)).

Each descriptor has its own message, because a name applies to a whole message. Then comes a barrier: one end of a pipe,
which systemd closes when it has handled everything before it. systemd silently drops descriptors beyond its maximum, so
this module counts what systemd has. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from membroker.wire.frames import close_all, send

from ..system import sd_notify as notify
from ..system.retry import Retry
from .descriptor_store import Done, StoredDescriptors, sort
from .keeper_client import Put

_FIRST_INHERITED = 3
_BARRIER = "BARRIER=1"


class _BarredPut(Put):
    """A put with the pipe of its barrier."""

    def __init__(self, items: Sequence[tuple[str, int]], done: Done, late: Callable[[], None]) -> None:
        self.reader, self.writer = os.pipe()
        try:
            super().__init__(items, done, late)
        except OSError:
            close_all((self.reader, self.writer))
            raise

    def close_writer(self) -> None:
        """Close this process's copy of the writing end, so that only systemd has it."""
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
    """Copies in systemd's store, at most `maximum`; `names` are already there."""

    def __init__(self, connection: socket.socket, maximum: int, names: Iterable[str]) -> None:
        self._io = asyncio.get_running_loop()
        self._sock = connection
        self._sock.setblocking(False)
        self._retry = Retry(self._sock)
        self._maximum = maximum
        self._names = set(names)
        self._unsent: deque[_Message] = deque()
        self._puts: dict[_BarredPut, None] = {}

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        """Copy descriptors. Fails if systemd's store would be too full, or if systemd does not answer."""
        if len(self._names.union(name for name, _ in items)) > self._maximum:
            full = (
                f"systemd has {len(self._names)} descriptors of this service and keeps at most {self._maximum}: "
                "raise FileDescriptorStoreMax="
            )
            self._io.call_soon(done, OSError(full))
            return
        try:
            put = _BarredPut(items, done, lambda: self._end(put, TimeoutError("systemd does not answer")))
        except OSError as error:
            self._io.call_soon(done, error)
            return
        self._puts[put] = None
        self.drop(list(put.copies))  # else systemd would keep two descriptors of one name
        self._names.update(put.copies)
        for name, copy in put.copies.items():
            self._unsent.append(_Message(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [copy], put))
        self._unsent.append(_Message(_BARRIER, [put.writer], put))
        self._watch()
        self._flush()

    def drop(self, names: Sequence[str]) -> None:
        """Remove these names."""
        for name in names:
            if name in self._names:
                self._names.remove(name)
                self._unsent.append(_Message(f"FDSTOREREMOVE=1\nFDNAME={name}"))
        self._flush()

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Do nothing: the daemon does not outlive systemd."""

    def close(self) -> None:
        """Disconnect. systemd keeps what it has."""
        self._retry.stop()
        self._names.clear()
        self._unsent.clear()
        self._fail(ConnectionError("the broker is stopping"))
        self._sock.close()

    def _flush(self) -> None:
        while self._unsent:
            message = self._unsent[0]
            try:
                send(self._sock, message.text.encode(), message.descriptors)
            except OSError as error:
                if not self._retry.after(error, self._flush):
                    self._io.call_soon(self._fail, error)
                return
            self._unsent.popleft()
            if message.put is not None and message.text == _BARRIER:
                message.put.close_writer()
        self._retry.stop()

    # --- puts: systemd handles their barriers in order, so only the first is watched ---

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
    """Return whether systemd keeps descriptors of this service.

    `configured_maximum` is used by systemd before version 254, which does not say how many it keeps.
    """
    return bool(os.environ.get("NOTIFY_SOCKET")) and _maximum(configured_maximum) > 0


def open_systemd(configured_maximum: int = 0) -> tuple[SystemdMirror, StoredDescriptors]:
    """Return a mirror in systemd's store, and the descriptors that a predecessor left there; raises OSError.

    From version 254 on, systemd says how many descriptors it keeps. Before that, `configured_maximum` says so; it must
    not exceed FileDescriptorStoreMax=.
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
    announced = os.environ.get("FDSTORE", "")
    return int(announced) if announced.isdecimal() else configured


def _inherited() -> list[tuple[str, int]]:
    """Return the descriptors that systemd passed to this process, with their names.

    Child processes do not inherit them, nor the environment variables that announce them.
    """
    pid, count, names = (os.environ.pop(key, "") for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    descriptors = range(_FIRST_INHERITED, _FIRST_INHERITED + int(count))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return list(zip(names.split(":") + [""] * len(descriptors), descriptors, strict=False))
