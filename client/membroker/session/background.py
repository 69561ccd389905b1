"""The threads of a session: one reads notices and does the work of finalizers, another runs the callbacks of recalls.

Owns the socket of notices, a queue of work, and the wake-up for it. It must never refer to a client: a client that is
garbage must be able to end.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..interrupts import STOPPING_SECONDS, Condition
from ..threads import start_thread
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from ..wire.names import MAX_FRAME_BYTES

logger: logging.Logger = logging.getLogger("membroker")


class Background:
    """A thread that hands each notice to `on_notice`, and does the work that `later` got, one piece after the other.

    Raises `OSError` and `ThreadLimit`, and leaves nothing behind then.
    """

    def __init__(self, on_notice: Callable[[pb.Notice], None], name: str = "membroker") -> None:
        self._on_notice = on_notice
        self._on_end: Callable[[], None] = lambda: None
        self._notices: socket.socket | None = None
        self._work: deque[Callable[[], None]] = deque()
        self._urgent: deque[Callable[[], None]] = deque()
        """Work that is done even while the other work is held up."""
        self._held_up: list[object] = []
        self._busy = False
        self._changed = Condition()
        self._buffer = bytearray(MAX_FRAME_BYTES)
        self._running = True
        self._woken, self._wake = socket.socketpair()
        try:
            self._woken.setblocking(False)
            self._wake.setblocking(False)
            self._poller = select.poll()
            self._poller.register(self._woken, select.POLLIN)
            self._thread = start_thread(self._run, name)
        except BaseException:
            self._close()
            raise

    @property
    def thread(self) -> int:
        """The thread's number, as `threading.get_ident` returns it in that thread."""
        return self._thread.ident or 0

    @property
    def backlog(self) -> int:
        """How many pieces of work have not begun."""
        return len(self._work)

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` soon. For finalizers: an append and a write that cannot block, no lock."""
        self._work.append(work)
        self._wake_up()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Do no work during a block, only read notices. The block begins when running work has ended.

        It does not wait for that longer than `STOPPING_SECONDS`: the work may wait for a lock of the caller.
        """
        token, deadline = object(), time.monotonic() + STOPPING_SECONDS
        try:
            with self._changed.lock:
                self._held_up.append(token)
                while self._busy and threading.get_ident() != self.thread and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
            yield
        finally:
            try:
                if token in self._held_up:
                    self._held_up.remove(token)
            finally:  # also after an interrupt
                self._wake_up()

    def _wake_up(self) -> None:
        try:
            self._wake.send(b"\0")
        except OSError:
            # Full: the thread is awake already. Closed: there is no session left to do the work in.
            return

    def listen(self, notices: socket.socket, on_end: Callable[[], None]) -> None:
        """Read the notices of the session's next connection from now on; `on_end` is called when they end."""
        self._urgent.append(lambda: self._listen(notices, on_end))
        self._wake_up()

    def _listen(self, notices: socket.socket, on_end: Callable[[], None]) -> None:
        self._stop_reading()
        self._notices, self._on_end = notices, on_end
        self._poller.register(notices, select.POLLIN)

    def stop(self, patience: float | None = None) -> None:
        """Finish the queue, also while it is held up, end the thread and close its sockets.

        Waits for that, but not longer than `patience` seconds, and not in the thread itself.
        """
        self._urgent.append(self._halt)
        self._wake_up()
        if self._thread is not threading.current_thread():
            self._thread.join(patience)

    def abandon(self) -> None:
        """In a forked child: close what was inherited. The thread exists only in the parent."""
        self._running = False
        self._changed = Condition()
        self._work.clear()
        self._urgent.clear()
        self._close()

    def _halt(self) -> None:
        self._running = False

    def _run(self) -> None:
        while self._running:
            ready = {descriptor for descriptor, _ in self._poller.poll()}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if self._notices is not None and self._notices.fileno() in ready:
                self._read_notice(self._notices)
            self._work_off(self._urgent)
            self._work_off(self._work)
        self._close()

    def _stop_reading(self) -> None:
        if self._notices is not None:
            self._poller.unregister(self._notices)
            self._notices.close()
            self._notices = None

    def _work_off(self, queue: deque[Callable[[], None]]) -> None:
        while queue:
            with self._changed.lock:
                if self._held_up and self._running and queue is self._work:
                    return
                self._busy = True
            work = queue.popleft()
            try:
                work()
            except BaseException:  # sys.exit() too: the thread must go on for the rest
                logger.exception("work in the background has failed")
            # Do not keep it until the next piece of work: it may be the last reference to a client.
            del work
            with self._changed.lock:
                self._busy = False
                self._changed.tell_all()

    def _read_notice(self, notices: socket.socket) -> None:
        try:
            frame, _ = handoff.receive_without_descriptors(notices, self._buffer)
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
            if connection is not None:
                connection.close()
