"""Notices: what the broker sends without being asked, and the program's callbacks for it.

Owns the threads of a session: one reads notices and does the work of finalizers, another runs the callbacks of recalls.
It must never refer to a session: a session that is garbage must be able to end.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol

from ..interrupts import STOPPING_SECONDS
from ..types import Draining, Notice, Undrained
from ..v1 import handoff_pb2 as pb
from ..v1.resources_pb2 import SleepStatus
from . import messages
from .background import Background
from .connection import Connection
from .endpoint import call_failed

logger: logging.Logger = logging.getLogger("membroker")

RECALLS_REVISION = 2
"""The first revision of a broker that recalls memory."""
UNSUPPORTED = SleepStatus(state=SleepStatus.UNSUPPORTED, detail="this program has no engine that can sleep")
MOST_RECALLS = 1024
"""How many recalls may wait for a callback. The broker has one open at a time for a model and location."""


class RecallListener(Protocol):
    """The object that hears the broker's recalls."""

    def heard(self, message: pb.Recall, connection: Connection) -> None:
        """Take a recall. The lock is held."""
        ...

    def heard_sleep(self, message: pb.Sleep, connection: Connection) -> None:
        """Take an operator's question. The lock is held."""
        ...

    def lost(self) -> None:
        """Drop the open recalls: the connection is lost."""
        ...


class Notices:
    """The notices of one session. `lock` orders them with its states; `connected` returns its connection, if it is up.

    Raises `DescriptorLimit` and `ThreadLimit` if the thread cannot start.
    """

    def __init__(self, lock: threading.RLock, connected: Callable[[], Connection | None]) -> None:
        self._lock = lock
        self._connected = connected
        self._callbacks: list[Callable[[Notice], object]] = []
        self.recalls: Callable[[], RecallListener | None] = lambda: None
        """Returns the object that hears the broker's recalls, if it is alive: only the user's objects keep it."""
        self._recalling: Background | None = None
        self.callback_thread: int = 0
        """The number of the thread that runs callbacks of recalls; 0 before the first one."""
        self.draining: Draining | None = None
        """The drain that has not ended, as far as the present connection knows."""
        self._background = _start(self._hear, "membroker")
        self.later: Callable[[Callable[[], None]], None] = self._background.later
        """Do work in the background thread. For finalizers: takes no lock."""

    def listen(self, notices: socket.socket, connection: Connection) -> None:
        """Read the notices of a new connection from now on."""
        self._background.listen(notices, connection.read_to_the_end)

    def on_notice(self, callback: Callable[[Notice], object]) -> None:
        """Call `callback` with each notice from now on, and at once with a drain that has not ended."""
        with self._lock:
            self._callbacks.append(callback)
            if self.draining is not None:
                self.later(partial(_call, callback, self.draining))

    def tell(self, notice: Notice) -> None:
        """Call the callbacks with a notice, in the background thread. The lock is held, so they come in order."""
        if isinstance(notice, Draining):
            self.draining = notice
        elif isinstance(notice, Undrained):
            self.draining = None
        for callback in self._callbacks:
            self.later(partial(_call, callback, notice))

    def _hear(self, message: pb.Notice) -> None:
        kind = message.WhichOneof("kind")
        if kind == "release_refused":
            logger.warning("the broker refused a release: %s", message.release_refused.message)
        elif kind == "stopping":
            if (connection := self._connected()) is not None:
                connection.heard_stopping()
            logger.info("the broker is stopping; mapped memory stays valid")
        elif kind == "recall":
            self._hear_recall(message.recall)
        elif kind == "sleep":
            self._hear_sleep(message.sleep)
        notice = messages.notice(message)
        if notice is not None:
            with self._lock:
                self.tell(notice)

    # Recalls

    def _hear_recall(self, message: pb.Recall) -> None:
        with self._lock:
            recalls, connection = self.recalls(), self._connected()
            if connection is None or connection.revision < RECALLS_REVISION:
                return
            if recalls is not None:
                recalls.heard(message, connection)
            else:  # no object of the user is left that could release anything
                self.later(partial(connection.answer_recall, message.recall_id, message.bytes))

    def _hear_sleep(self, message: pb.Sleep) -> None:
        with self._lock:
            recalls, connection = self.recalls(), self._connected()
            if connection is None:
                return
            if recalls is not None:
                recalls.heard_sleep(message, connection)
            else:
                self.later(partial(connection.answer_sleep, message.sleep_id, UNSUPPORTED))

    def start_callbacks(self) -> None:
        """Start the thread that runs callbacks of recalls, if it does not run. The lock is held."""
        if self._recalling is None:
            self._recalling = _start(lambda _: None, "membroker-recall")
            self.callback_thread = self._recalling.thread

    def call_back(self, work: Callable[[], None]) -> bool:
        """Do `work` in the thread for callbacks; return False without such a thread, or if too much waits for it."""
        if self._recalling is None or self._recalling.backlog >= MOST_RECALLS:
            return False
        self._recalling.later(work)
        return True

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Run no callback, and no work of finalizers, during a block."""
        with ExitStack() as ends:
            for thread in filter(None, (self._background, self._recalling)):
                ends.enter_context(thread.held_up())
            yield

    # The end

    def stop(self, *, wait: bool) -> None:
        """End the threads. Without `wait`, a callback that still runs is left alone."""
        self._background.stop()
        if self._recalling is not None:
            self._recalling.stop(STOPPING_SECONDS if wait else 0.0)

    def abandon(self) -> None:
        """In a forked child: close what was inherited."""
        self._background.abandon()
        if self._recalling is not None:
            self._recalling.abandon()


def _start(on_notice: Callable[[pb.Notice], None], name: str) -> Background:
    try:
        return Background(on_notice, name)
    except OSError as error:
        raise call_failed("socketpair", error) from error


def _call(callback: Callable[[Notice], object], notice: Notice) -> None:
    try:
        callback(notice)
    except BaseException:  # sys.exit() too: it would end the thread, and with it all that is released there
        logger.exception("a callback for notices has failed at %r", notice)
