"""The connection of a session that reconnects: one `Connection` after another, for as long as the session lives.

Owns the present connection, the thread that replaces a lost one, and the threads of calls that wait meanwhile; what
each of them does next, `outages` decides. Other threads see a new connection only when the broker and the inventory
agree; until then, only the Holds, and what was released since, go over it. It must never know what a call is about, nor
refer to a session: a session that is garbage must be able to end.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..cancellation import CancelScope, innermost
from ..errors import AccessDenied, BrokerUnavailable, ClosedError, MembrokerError, ThreadLimit
from ..interrupts import Condition, here, let_through
from ..memory.lender import Placement
from ..threads import start_thread
from ..types import Disconnected, Forgotten, Resumed
from ..v1 import handoff_pb2 as pb
from .connection import Connection
from .handshake import open_session, reconcile
from .inventory import Inventory
from .machine import detach, releases
from .notices import Notices
from .outages import Outages
from .rpc import CONTROL_SECONDS, METHODS, READS, GrpcCalls

logger: logging.Logger = logging.getLogger("membroker")

_SINCE = {"register_model": 1, "unregister_model": 1, **dict.fromkeys(READS, 3)}
"""Frames that not every broker knows, and the first revision that does. They are sent by gRPC to an older one."""


class ReconnectingConnection:
    """The sockets and the gRPC channel of a session, opened here; raises what `open_session` raises.

    `timeout`, in seconds, bounds each step of a handshake and the goodbye. `outage` is how many seconds a call waits
    for the next connection. With `by_grpc`, all frames that gRPC has a method for are sent by gRPC.
    """

    welcome: pb.Welcome

    def __init__(self, endpoint: Path, hello: pb.Hello, *, timeout: float, outage: float, by_grpc: bool) -> None:
        self.inventory: Inventory = Inventory()
        self._path = endpoint / "handoff.sock"
        self._timeout = timeout
        self._by_grpc = by_grpc
        self._answer_within = CONTROL_SECONDS if by_grpc else None
        """How long to wait for the answer to a release: a later call by gRPC could overtake it otherwise."""
        self._request_ids = itertools.count(2)  # 1 is the Hello
        self._changed = Condition()
        self._attempt: tuple[socket.socket, ...] = ()
        """The sockets of an attempt to resume, which `close` cuts."""
        handoff, notices, self.welcome = open_session(self._path, hello, timeout)
        self._hello = pb.Hello()
        self._hello.CopyFrom(hello)
        self._hello.resume_token = self.welcome.token
        self._grpc = GrpcCalls(endpoint / "grpc.sock", self.welcome.token)
        with ExitStack() as undo:
            undo.callback(handoff.close)
            undo.callback(notices.close)
            self.notices: Notices = Notices(self._changed.lock, self._connected)
            undo.callback(self.notices.stop, wait=True)
            with self._changed.lock:  # a connection that is lost at once finds itself here
                self.connection: Connection = self._open(handoff, self.welcome.protocol_revision)
                self._outages = Outages(str(self._path), self.connection.calls, outage=outage, timeout=timeout)
            self.notices.listen(notices, self.connection)
            undo.pop_all()

    def _open(self, handoff: socket.socket, revision: int, models: Sequence[str] = ()) -> Connection:
        """Return a connection over a socket on which the broker has greeted."""
        unknown = tuple(kind for kind, since in _SINCE.items() if revision < since)
        connection = Connection(
            handoff,
            str(self._path),
            self.inventory,
            revision=revision,
            session=self.welcome.session,
            request_ids=self._request_ids,
            models=models,
            grpc=self._grpc,
            by_grpc=METHODS if self._by_grpc else unknown,
            on_lost=self._lose,
        )
        if self._by_grpc:
            connection.start_reader()
        return connection

    def _connected(self) -> Connection | None:
        return self.connection if self._outages.state == "connected" else None

    def start_callbacks(self) -> None:
        """Start the thread that runs callbacks of recalls, if it does not run."""
        with self._changed.lock:
            if self._outages.is_closing:
                raise ClosedError("this client is closed")
            self.notices.start_callbacks()

    # Calls

    def call(
        self,
        frame: pb.Frame,
        placement: Placement | None = None,
        *,
        timeout: float | None = None,
        note: Callable[[], None] | None = None,
        before_repeat: Callable[[Connection], object] | None = None,
        until: float | None = None,
    ) -> Any:
        """Make a call over the present connection, and repeat it over the next one when the connection is lost.

        `before_repeat` is called with the next connection. The broker lets a request wait for memory `until` that time
        on the monotonic clock; None: as long as its rules say. Raises what `Connection.call` raises,
        `BrokerUnavailable` when there is no connection for too long, `SessionLost` and `ClosedError`.
        """
        connection = self.connection
        while True:
            if here.task is not None:
                let_through()  # an interrupt ends the present connection: one that came before cannot end this call
            try:
                return connection.call(frame, placement, timeout=timeout, note=note, until=until)
            except (BrokerUnavailable, AccessDenied) as error:
                connection = self._next(connection, error)
            if before_repeat is not None:
                before_repeat(connection)

    def release(self, extent_ids: Sequence[int]) -> None:
        """Release extents that are unmapped; those that are released already are skipped.

        Raises nothing when the broker is gone: a resume states only what is still held. After an interrupt in here the
        caller calls `interrupted`, for the same reason.
        """
        with self._changed.lock:
            connection, known = self.connection, self.inventory.strike_extents(extent_ids)
        try:
            connection.tell(releases(known, no_reply=self._answer_within is None), self._answer_within)
        except (BrokerUnavailable, ClosedError):
            return

    def detach(self, generation: int) -> None:
        """End one hold of a segment. Raises as little as `release`."""
        with self._changed.lock:
            connection, known = self.connection, self.inventory.strike_segment(generation)
        with suppress(BrokerUnavailable, ClosedError):
            if known:
                connection.tell([detach(generation, no_reply=self._answer_within is None)], self._answer_within)

    def say_less(self, frame: pb.Frame, note: Callable[[], None]) -> None:
        """Tell the broker that something is less, which `note` records at once; wait for the answer unless it closes.

        Raises nothing when the broker is gone: a resume states what is noted.
        """
        with self._changed.lock:
            connection = self.connection
            note()
        with suppress(BrokerUnavailable, ClosedError):
            connection.call(frame, timeout=0.0 if self._outages.is_closing else CONTROL_SECONDS)

    def interrupted(self) -> None:
        """Drop the present connection, because an interrupt left a call half done. Raises nothing.

        The session resumes on a new one, states what it holds, and the broker credits the rest. Other threads' calls
        are repeated there.
        """
        self.connection.interrupt()

    def _next(self, connection: Connection, error: MembrokerError) -> Connection:
        """Return the connection after a lost one. Raises if that takes too long, or if this one is not lost."""
        begun = time.monotonic()
        scope = innermost.get() or CancelScope()
        with self._changed.lock, scope.waking(self._changed.wake):
            while left := self._outages.wait(connection.calls, error, begun, time.monotonic()):
                let_through()
                scope.check()
                self._changed.wait(left)
                if self._outages.state == "lost":
                    self._begin_to_reconnect()
            return self.connection

    # An outage

    def _move(self, cause: str) -> None:
        """Note what has happened, and wake all that wait. The lock is held."""
        self._outages.move(cause)
        self._changed.tell_all()

    def _lose(self, connection: Connection) -> None:
        """Begin to reconnect, if this is the present connection. After an interrupt in here it is called again."""
        with self._changed.lock:
            if connection is self.connection and self._outages.state == "connected":
                self._grpc.patient = False
                if (recalls := self.notices.recalls()) is not None:
                    recalls.lost()
                self.notices.tell(Disconnected())
                self._move("connection lost")
            if self._outages.state == "lost":
                self._begin_to_reconnect()

    def _begin_to_reconnect(self) -> None:
        """Start the thread that reconnects, or note that it cannot start: a waiting call tries again. Lock is held."""
        try:
            start_thread(self._reconnect, "membroker-reconnect", self.connection)
        except ThreadLimit as error:
            if not self._outages.trouble:
                logger.warning("the connection to the broker is lost, and %s", error)
            self._outages.trouble = str(error)

    def _reconnect(self, lost: Connection) -> None:
        outages = self._outages
        with self._changed.lock:
            if not outages.begin(lost.calls, time.monotonic()):
                return
        begun, is_interrupted = outages.begun, lost.calls.is_interrupted
        level = logging.INFO if is_interrupted or self._hello.observer else logging.WARNING
        gone = "disconnected, because an interrupt left a call half done" if is_interrupted else "gone"
        logger.log(level, "the broker at %s is %s: mapped memory stays valid, reconnecting", self._path, gone)
        # Calls in flight may still have memory mapped that the resume will not state.
        lost.wait_until_idle()
        lost.close()
        self._grpc.cancel_frames()
        while self._is_away_until(outages.next_try(time.monotonic())):
            try:
                self._resume()
            except (MembrokerError, OSError) as error:
                self._failed(error)
            else:
                seconds = time.monotonic() - begun
                logger.log(level, "the broker at %s is back after %.1f s, and the session goes on", self._path, seconds)
                return

    def _is_away_until(self, end: float) -> bool:
        """Wait until then, or until the session is resumed or over; return whether it still waits for a connection."""
        with self._changed.lock:
            while self._outages.is_away and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._outages.is_away

    def _resume(self) -> None:
        """Try once to resume the session, and let all calls use the new connection."""
        handoff, notices, welcome = open_session(self._path, self._hello, self._timeout)
        with ExitStack() as undo:
            undo.callback(handoff.close)
            undo.callback(notices.close)
            undo.callback(setattr, self, "_attempt", ())
            self._attempt = handoff, notices
            stated, models = reconcile(handoff, self._path, self.inventory, next(self._request_ids), self._timeout)
            connection = self._open(handoff, welcome.protocol_revision, models)
            undo.callback(connection.close)
            while True:
                with self._changed.lock:
                    if self.inventory.held() == stated:
                        self._outages.resumed(connection.calls)
                        undo.pop_all()
                        self.connection, self.notices.draining, self._attempt = connection, None, ()
                        self._grpc.patient = True
                        self.notices.listen(notices, connection)
                        self.notices.tell(Resumed(time.monotonic() - self._outages.begun))
                        self._changed.tell_all()
                        return
                stated = connection.catch_up(stated, self._timeout)

    def _failed(self, error: Exception) -> None:
        """An attempt to resume has failed, perhaps for good: the broker does not know the session."""
        with self._changed.lock:
            if warning := self._outages.failed(error, time.monotonic()):
                logger.warning("%s", warning)
            if self._outages.state == "unknown":
                self.notices.tell(Forgotten())
            self._changed.tell_all()

    # The end

    def end_waits(self, *, at_exit: bool) -> None:
        """Let no call wait any more: neither for another connection, nor at the broker for memory or a seal.

        The calls in flight end with their connection. For its goodbye the session still gets another connection, but
        not at exit.
        """
        with self._changed.lock:
            self._answer_within = None  # for a release; the goodbye has an answer of its own
            self._outages.close_soon()
            if at_exit:
                self._move("goodbye")
            self._changed.tell_all()
        if not at_exit and self.connection.calls.at_broker:
            self.connection.interrupt()

    def say_goodbye(self, *, wait: bool) -> None:
        """End the session at the broker; `wait` for the next connection as long as the goodbye, or a call, may take."""
        if wait:
            self._is_away_until(time.monotonic() + min(self._timeout, self._outages.patience))
        with self._changed.lock:
            self._move("goodbye")
        self.connection.say_goodbye(self._timeout)

    def close(self, *, wait: bool = True) -> None:
        """Close everything. Calls in flight, and later ones, raise `ClosedError`.

        Without `wait`, a callback that still runs is left alone; otherwise this waits for it, for a limited time.
        """
        with self._changed.lock:
            self._move("closed")
            attempt = self._attempt
        for attempted in attempt:
            with suppress(OSError):
                attempted.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self._grpc.close()
        self.notices.stop(wait=wait)

    def abandon(self) -> None:
        """In a forked child: close what was inherited. Takes no lock; never a shutdown, which the parent would feel."""
        self._outages.move("closed")
        self._changed = Condition()
        for attempted in self._attempt:
            attempted.close()
        self.connection.abandon()
        self.notices.abandon()
        self._grpc.abandon()
