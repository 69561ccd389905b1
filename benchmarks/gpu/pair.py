"""A bare handoff: a process that creates, others that map, a packet there and the descriptors back, and nothing else.

No books, no protection, no frames: the least that borrowing can cost where another process owns the GPU, in Python.
It must never use the library above the driver.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

from membroker.vmm import Driver, open_driver
from membroker.vmm.sizes import MIB
from membroker.wire.descriptors import close_all

from .bare import TWIN_BYTES, Bare

_READY = b"ready"
_ASK = struct.Struct("QQ")
"""A size, and how many extents of it; 0 extents says that memory was released."""
_START_SECONDS = 60.0
_PACKET = 64
"""Extents in one packet, as of the broker's."""


class Lender:
    """A process that lends extents at `path`. `ahead` keeps one ready of the size asked for last."""

    def __init__(self, driver: str, *, ahead: bool = False) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="membroker-bench-pair-"))
        self.path = self._directory / "lender"
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        context = multiprocessing.get_context("spawn")  # CUDA survives no fork
        self._process = context.Process(target=_lend, args=(theirs, self.path, driver, ahead), daemon=True)
        with theirs:
            self._process.start()
        self._ours.settimeout(_START_SECONDS)
        try:
            if self._ours.recv(len(_READY)) != _READY:
                raise RuntimeError("the lender of the bare handoff did not start")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._ours.close()
        self._process.join(_START_SECONDS)
        self._process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


class _Borrower:
    """A connection to a lender."""

    def __init__(self, bare: Bare, path: Path, size: int, count: int) -> None:
        self._bare, self._size, self._count = bare, size, count
        self._handles: list[Any] = []
        self._ask, self._give = _ASK.pack(size, count), _ASK.pack(size, 0)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(os.fspath(path))

    def _map(self, address: int) -> None:
        self._handles = []
        self._socket.send(self._ask)
        while len(self._handles) < self._count:
            _, descriptors, _, _ = socket.recv_fds(self._socket, _ASK.size, _PACKET)
            lent = [(descriptor, self._size) for descriptor in descriptors]
            at = address + len(self._handles) * self._size
            self._handles += self._bare.back_imported(at, lent, read_only=False)
            close_all(descriptors)

    def _unmap(self, address: int) -> None:
        self._bare.unback(address, self._size * self._count, self._handles)
        self._socket.send(self._give)


class PairExtent(_Borrower):
    """One extent that a lender creates: addresses, mapping."""

    def __init__(self, bare: Bare, path: Path, size: int) -> None:
        super().__init__(bare, path, size, 1)
        self._address = 0

    def take(self) -> None:
        self._address = self._bare.reserve(self._size)
        self._map(self._address)

    def give(self) -> None:
        self._unmap(self._address)
        self._bare.unreserve(self._address, self._size)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class PairPages(_Borrower):
    """Many extents that a lender creates, in addresses that stay reserved."""

    def __init__(self, bare: Bare, path: Path, size: int, page: int) -> None:
        super().__init__(bare, path, page, size // page)
        self._address = bare.reserve(size)

    def take(self) -> None:
        self._map(self._address)

    def give(self) -> None:
        self._unmap(self._address)

    def close(self) -> None:
        """Give the addresses back, and hang up."""
        self._bare.unreserve(self._address, self._size * self._count)
        self._socket.close()


# --- in the other process ---


def _lend(parent: socket.socket, path: Path, kind: str, ahead: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears Ctrl-C, and its end is the socket's
    driver = open_driver("host", total_bytes=TWIN_BYTES) if kind == "host" else open_driver(kind)
    (anchor,) = driver.lend(2 * MIB, 1)  # as a broker keeps one: without, an export takes a millisecond
    poll = select.epoll()
    connections: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        for one in (listener, parent):
            poll.register(one, select.EPOLLIN)
        parent.send(_READY)
        ready: list[int] = []
        while True:
            for number, _ in poll.poll():
                if number == parent.fileno():
                    close_all([anchor, *ready])
                    driver.close()
                    return
                if number == listener.fileno():
                    connection, _ = listener.accept()
                    connections[connection.fileno()] = connection
                    poll.register(connection, select.EPOLLIN)
                    continue
                asked = connections[number].recv(_ASK.size)
                if not asked:
                    poll.unregister(number)
                    connections.pop(number).close()
                    continue
                size, count = _ASK.unpack(asked)
                if count:
                    _send(connections[number], driver, size, count, ready)
                    if ahead:
                        ready += driver.lend(size, 1)


def _send(connection: socket.socket, driver: Driver, size: int, count: int, ready: list[int]) -> None:
    """Send so many extents; of what is ready there is one, of the right size, or none."""
    while count:
        descriptors = [ready.pop()] if ready else driver.lend(size, min(count, _PACKET))
        socket.send_fds(connection, [_READY], descriptors)
        close_all(descriptors)
        count -= len(descriptors)
