"""A bare handoff: two processes, a packet there and one back with the descriptor, and nothing else.

No books, no protection, no frames: the least that borrowing can cost where another process owns the card, in Python.
It must never use the library above the driver.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from typing import Any

from membroker.vmm import open_driver
from membroker.vmm.sizes import MIB

from .bare import TWIN_BYTES, Bare

_ASK, _GIVE, _READY = b"ask", b"give", b"ready"
_MAX_BYTES = 64
_START_SECONDS = 60.0


class BarePair:
    """One extent of `size` bytes, lent by a process that does nothing else. Owns that process."""

    def __init__(self, bare: Bare, driver: str, size: int) -> None:
        self._bare, self._size = bare, size
        self._address = 0
        self._handles: list[Any] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        context = multiprocessing.get_context("spawn")  # CUDA survives no fork
        self._lender = context.Process(target=_lend, args=(theirs, driver, size), daemon=True)
        with theirs:
            self._lender.start()
        self._socket.settimeout(_START_SECONDS)
        try:
            if self._socket.recv(_MAX_BYTES) != _READY:
                raise RuntimeError("the lender of the bare handoff did not start")
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(None)

    def take(self) -> None:
        self._address = self._bare.reserve(self._size)
        self._socket.send(_ASK)
        _, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, 1)
        lent = [(descriptor, self._size) for descriptor in descriptors]
        self._handles = self._bare.back_imported(self._address, lent, read_only=False)
        os.close(descriptors[0])

    def give(self) -> None:
        self._bare.unback(self._address, self._size, self._handles)
        self._bare.unreserve(self._address, self._size)
        self._socket.send(_GIVE)

    def close(self) -> None:
        """End the lender."""
        self._socket.close()
        self._lender.join(_START_SECONDS)
        self._lender.kill()


def _lend(asked: socket.socket, kind: str, size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears Ctrl-C, and its end is the socket's
    driver = open_driver("host", total_bytes=TWIN_BYTES) if kind == "host" else open_driver(kind)
    (anchor,) = driver.lend(2 * MIB, 1)  # as a broker keeps one: without, an export takes a millisecond
    asked.send(_READY)
    while word := asked.recv(_MAX_BYTES):
        if word == _ASK:
            (descriptor,) = driver.lend(size, 1)
            socket.send_fds(asked, [word], [descriptor])
            os.close(descriptor)
    os.close(anchor)
    driver.close()
