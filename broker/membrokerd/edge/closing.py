"""How the sockets of peers are closed: descriptors may lie in them unread, and nobody may wait for those.

From Linux 6.16 on, no descriptor gets there (SO_PASSRIGHTS in `system/device_directory.py`). Before, this is what can
be done.

The kernel keeps what a packet carries until the packet is read or its socket is closed, and the thread that does that
lets go of it. If nobody else has it, that takes long: 0.3 s for each GiB of a memfd, and any time for a TCP socket that
lingers (SO_LINGER). So a packet with descriptors is never read, and its socket is closed on a thread. A signal ends the
lingering.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections import deque
from contextlib import suppress

from membroker.wire.descriptors import carries_descriptors

MOST_THREADS = 8
"""Threads of an endpoint that close at a time, so that closing takes no longer than accepting."""
MOST_WAITING = 64
"""How many sockets of an endpoint may wait for its threads. It accepts no more until there are fewer."""
INTERRUPT_SECONDS = 0.002
_SIGNAL = signal.SIGURG
_READ_PACKETS = 64
_READ_BYTES = 16 * 1024


class SocketCloser:
    """Closes the connections of one endpoint."""

    def __init__(self) -> None:
        self._io = asyncio.get_running_loop()
        self._waiting: deque[socket.socket] = deque()
        self._threads: set[threading.Thread] = set()
        """Each closes a socket now."""

    @property
    def is_crowded(self) -> bool:
        """Whether too many connections wait to be closed."""
        return len(self._waiting) >= MOST_WAITING

    def hang_up(self, connection: socket.socket) -> None:
        """Close a peer's socket so that it can still read the last frame.

        Closing with packets unread makes the peer's next read fail with ECONNRESET, before the answer that is queued
        for it. So what it sent is taken first, as far as is reasonable, and dropped.
        """
        if _is_emptied(connection):
            connection.close()
            return
        self._waiting.append(connection)
        self._begin()

    def _begin(self) -> None:
        """Close the next socket, unless enough are closing."""
        if len(self._threads) >= MOST_THREADS or not self._waiting:
            return
        self._io.add_signal_handler(_SIGNAL, lambda: None)  # by default it is ignored, and interrupts nothing
        heard = threading.Event()
        thread = threading.Thread(target=self._close, args=(self._waiting[0], heard), name="closing", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there can be no more threads now
            self._io.call_later(INTERRUPT_SECONDS, self._begin)
            return
        self._waiting.popleft()
        self._threads.add(thread)
        self._io.call_later(INTERRUPT_SECONDS, self._interrupt, thread)

    def _close(self, connection: socket.socket, heard: threading.Event) -> None:
        """Close a socket, in a thread. Only the first packet with descriptors is read: each one may take a signal."""
        with suppress(OSError):
            connection.recv(_READ_BYTES)
        _is_emptied(connection)
        connection.close()
        with suppress(RuntimeError):  # the event loop has ended
            self._io.call_soon_threadsafe(self._closed, threading.current_thread(), heard)
            heard.wait()  # a signal to a thread that has ended may end the process

    def _closed(self, thread: threading.Thread, heard: threading.Event) -> None:
        self._threads.discard(thread)
        heard.set()
        self._begin()

    def _interrupt(self, thread: threading.Thread) -> None:
        """Let the thread not wait for a socket that lingers."""
        if thread in self._threads and thread.ident is not None:
            signal.pthread_kill(thread.ident, _SIGNAL)
            self._io.call_later(INTERRUPT_SECONDS, self._interrupt, thread)


def _is_emptied(connection: socket.socket) -> bool:
    """Let nothing more come from the peer, and read what has come. Return False if something is left."""
    try:
        connection.shutdown(socket.SHUT_RD)
        for _ in range(_READ_PACKETS):
            try:
                if carries_descriptors(connection):
                    return False
                if not connection.recv(_READ_BYTES):
                    break
            except ConnectionResetError:  # it is said once, before what the peer has sent
                continue
        else:
            return False
        # A packet of 0 bytes is read like the end. With SO_PASSCRED it carries the sender's credentials.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        return connection.type is socket.SOCK_STREAM or not carries_descriptors(connection)
    except OSError:
        return False
