"""The library's one thread of its own: it reads notices, and does the work that finalizers leave behind.

Owns the socket of notices, a queue of work, and the wake-up for it. It must never read the call socket on its own
account (a reader thread doubles a round trip), and never hold a client: one that nobody refers to must be able
to end.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from membroker import handoff
from membroker.v1 import handoff_pb2 as pb

logger = logging.getLogger("membroker")


class Background:
    """Reads `notices` and hands each to `on_notice`; does what `later` was given, in order."""

    def __init__(self, notices: socket.socket, on_notice: Callable[[pb.Notice], None]) -> None:
        self._notices = notices
        self._on_notice = on_notice
        self._work: deque[Callable[[], None]] = deque()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._buffer = bytearray(handoff.MAX_FRAME_BYTES)
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
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._notices, select.POLLIN)
        while self._running:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if self._notices.fileno() in ready and not self._read_notice():
                poller.unregister(self._notices)
            self._work_off()
        self._close()

    def _work_off(self) -> None:
        while self._work:
            work = self._work.popleft()
            try:
                work()
            except Exception:
                logger.exception("what a finalizer left to do has failed")
            # Not kept until the next one: it may be the last reference to a client.
            del work

    def _read_notice(self) -> bool:
        """Read one notice; False at the end of the connection."""
        try:
            frame = handoff.receive_without_descriptors(self._notices, self._buffer)
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError):
            return False
        if frame.WhichOneof("kind") == "notice":
            self._on_notice(frame.notice)
        return True

    def _close(self) -> None:
        for connection in (self._notices, self._woken, self._wake):
            connection.close()
