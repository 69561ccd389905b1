"""The library's one lasting thread of its own: it reads notices, and does the work that others leave behind.

Owns the socket of notices, a queue of work, and the wake-up for it. It must never read the call socket on its own
account (a reader thread doubles a round trip) before the broker has closed it, and never hold a client: one that
nobody refers to must be able to end.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from ..wire.names import MAX_FRAME_BYTES

logger = logging.getLogger("membroker")


class Background:
    """Reads `notices` and hands each to `on_notice`, their end to `on_end`; does what `later` was given, in order."""

    def __init__(
        self, notices: socket.socket, on_notice: Callable[[pb.Notice], None], on_end: Callable[[], None]
    ) -> None:
        self._notices = notices
        self._on_notice = on_notice
        self._on_end = on_end
        self._work: deque[Callable[[], None]] = deque()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._poller.register(self._notices, select.POLLIN)
        self._buffer = bytearray(MAX_FRAME_BYTES)
        self._running = True
        self._thread = threading.Thread(target=self._run, name="membroker", daemon=True)
        self._thread.start()

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` soon. For finalizers: an append and a write that cannot block, no lock."""
        self._work.append(work)
        try:
            self._wake.send(b"\0")
        except OSError:
            # Full: the thread is awake already. Closed: there is no session left to do the work in.
            return

    def listen(self, notices: socket.socket, on_end: Callable[[], None]) -> None:
        """Read other notices instead, those of the session's next connection."""
        self.later(lambda: self._listen(notices, on_end))

    def _listen(self, notices: socket.socket, on_end: Callable[[], None]) -> None:
        self._stop_reading()
        self._notices.close()
        self._notices, self._on_end = notices, on_end
        self._poller.register(notices, select.POLLIN)

    def stop(self) -> None:
        """Finish the queue, end the thread and close its sockets."""
        self.later(self._halt)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. The thread did not come along."""
        self._running = False
        self._work.clear()
        self._close()

    def _halt(self) -> None:
        self._running = False

    def _run(self) -> None:
        while self._running:
            ready = {descriptor for descriptor, _ in self._poller.poll()}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if self._notices.fileno() in ready:
                self._read_notice()
            self._work_off()
        self._close()

    def _stop_reading(self) -> None:
        with suppress(KeyError):
            self._poller.unregister(self._notices)

    def _work_off(self) -> None:
        while self._work:
            work = self._work.popleft()
            try:
                work()
            except BaseException:  # who ends this thread ends everything that is left to it
                logger.exception("what was left to do in the background has failed")
            # Not kept until the next one: it may be the last reference to a client.
            del work

    def _read_notice(self) -> None:
        try:
            frame = handoff.receive_without_descriptors(self._notices, self._buffer)
        except handoff.BrokenPacket:
            self._stop_reading()
        except (handoff.EndOfConnection, OSError):
            self._stop_reading()
            self._on_end()
        else:
            if frame.WhichOneof("kind") == "notice":
                self._on_notice(frame.notice)

    def _close(self) -> None:
        for connection in (self._notices, self._woken, self._wake):
            connection.close()
