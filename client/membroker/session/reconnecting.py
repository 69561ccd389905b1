"""The connection of a session that reconnects: one `Connection` after another, for as long as the session lives.

Owns the present connection, the thread that replaces a lost one, and the calls that wait meanwhile. Other threads see
a new connection only when the broker and the inventory agree; until then, only the Holds, and what was released since,
go over it. It must never know what a call is about, nor refer to a session: a session that is garbage must be able to
end.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from ..cancellation import CancelScope, innermost
from ..errors import AccessDenied, BrokerUnavailable, ClosedError, MembrokerError, SessionLost, ThreadLimit
from ..interrupts import Condition, here, let_through
from ..memory.lender import Placement
from ..threads import start_thread
from ..types import Disconnected, Forgotten, Resumed
from ..v1 import handoff_pb2 as pb
from .connection import Connection
from .handshake import REJECTED, open_session, pauses, reconcile
from .inventory import HeldResources, Inventory
from .machine import detach, releases
from .notices import Notices
from .rpc import CONTROL_SECONDS, METHODS, READS, GrpcCalls

logger: logging.Logger = logging.getLogger("membroker")

LIFECYCLE: Final[Mapping[str, Mapping[str, str]]] = {
    "connected": {
        "connection lost": "lost",
        # From here on the end of the connection is expected.
        "goodbye": "leaving",
        "closed": "closed",
    },
    # Calls wait. Until a thread has begun to reconnect, they try to start one.
    "lost": {
        "thread started": "reconnecting",
        "goodbye": "leaving",
        "closed": "closed",
    },
    # A thread tries to resume the session. Calls wait.
    "reconnecting": {
        "resumed": "connected",
        "token rejected": "unknown",
        "goodbye": "leaving",
        "closed": "closed",
    },
    # The broker does not know the session. Calls raise `SessionLost`.
    "unknown": {
        "closed": "closed",
    },
    "leaving": {
        "closed": "closed",
    },
    "closed": {},
}
"""`LIFECYCLE[state][cause]` is the next state. A cause that has no entry comes too late, and changes nothing."""

_AWAY = ("lost", "reconnecting")
NOTICING_SECONDS = 1.0
"""When a call by gRPC has failed: how much later the handoff connection may end for the same cause."""
REMINDER_SECONDS = 60.0
AGAIN_SECONDS = 0.1
"""How often a call tries to start the thread that reconnects, where none could start."""
_SINCE = {"register_model": 1, "unregister_model": 1, **dict.fromkeys(READS, 3)}
"""Frames that not every broker knows, and the first revision that does. They are sent by gRPC to an older one."""
_UNANSWERED = ("", "STOPPING", "DELIVERY_FAILED", REJECTED)
"""Reasons of errors after which a call is repeated on the next connection, if there is one."""


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
        self._outage = outage
        self._by_grpc = by_grpc
        self._answer_within = CONTROL_SECONDS if by_grpc else None
        """How long to wait for the answer to a release: a later call by gRPC could overtake it otherwise."""
        self._request_ids = itertools.count(2)  # 1 is the Hello
        self._changed = Condition()
        self._state = "connected"
        self._closing = False
        self._attempt: tuple[socket.socket, ...] = ()
        """The sockets of an attempt to resume, which `close` cuts."""
        self._trouble = ""
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
        return self.connection if self._state == "connected" else None

    def start_callbacks(self) -> None:
        """Start the thread that runs callbacks of recalls, if it does not run."""
        with self._changed.lock:
            if self._closing:
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
            connection.call(frame, timeout=0.0 if self._closing else CONTROL_SECONDS)

    def interrupted(self) -> None:
        """Drop the present connection, because an interrupt left a call half done. Raises nothing.

        The session resumes on a new one, states what it holds, and the broker credits the rest. Other threads' calls
        are repeated there.
        """
        self.connection.interrupt()

    def _next(self, connection: Connection, error: MembrokerError) -> Connection:
        """Return the connection after a lost one. Raises if that takes too long, or if this one is not lost."""
        if error.reason not in _UNANSWERED:
            raise error
        begun = time.monotonic()
        scope = innermost.get() or CancelScope()
        with self._changed.lock, scope.waking(self._changed.wake):
            while self.connection is connection:
                let_through()
                scope.check()
                if self._closing or self._state in ("leaving", "closed"):
                    raise ClosedError("this client is closed")
                if self._state == "unknown":
                    raise SessionLost(self._trouble)
                lost = connection.lost or error.reason == "STOPPING"
                left = begun + (self._patience() if lost else min(NOTICING_SECONDS, self._outage)) - time.monotonic()
                if left <= 0:
                    raise self._too_long(error) if connection.lost else error
                self._changed.wait(min(left, AGAIN_SECONDS) if self._state == "lost" else left)
                if self._state == "lost":
                    self._begin_to_reconnect()
            return self.connection

    def _patience(self) -> float:
        """Return how many seconds to wait for the next connection. After an interrupt, the broker is still there."""
        return max(self._outage, self._timeout) if self.connection.interrupted else self._outage

    def _too_long(self, error: MembrokerError) -> MembrokerError:
        if not self._outage:
            return error
        tried = f", the last attempt to reconnect said: {self._trouble}" if self._trouble else ""
        return BrokerUnavailable(f"{error}; this call waited {self._outage:g} s for it{tried}")

    # An outage

    def _move(self, cause: str) -> bool:
        """Go to the next state, if there is one for this cause, and wake all that wait. The lock is held."""
        following = LIFECYCLE[self._state].get(cause)
        if following is not None:
            self._state = following
        self._changed.tell_all()
        return following is not None

    def _lose(self, connection: Connection) -> None:
        """Begin to reconnect, if this is the present connection. After an interrupt in here it is called again."""
        with self._changed.lock:
            if connection is not self.connection or self._state not in ("connected", "lost"):
                return
            if self._state == "connected":
                self._trouble = ""
                self._grpc.patient = False
                if (recalls := self.notices.recalls()) is not None:
                    recalls.lost()
                self.notices.tell(Disconnected())
                self._move("connection lost")
            self._begin_to_reconnect()

    def _begin_to_reconnect(self) -> None:
        """Start the thread that reconnects, or note that it cannot start: a waiting call tries again. Lock is held."""
        try:
            start_thread(self._reconnect, "membroker-reconnect", self.connection)
        except ThreadLimit as error:
            if not self._trouble:
                logger.warning("the connection to the broker is lost, and %s", error)
            self._trouble = str(error)

    def _reconnect(self, lost: Connection) -> None:
        with self._changed.lock:
            if lost is not self.connection or not self._move("thread started"):
                return  # after an interrupt a second thread may have been started
        begun = reminded = time.monotonic()
        level = logging.INFO if lost.interrupted else logging.WARNING
        gone = "disconnected, because an interrupt left a call half done" if lost.interrupted else "gone"
        logger.log(level, "the broker at %s is %s: mapped memory stays valid, reconnecting", self._path, gone)
        # Calls in flight may still have memory mapped that the resume will not state.
        lost.wait_until_idle()
        lost.close()
        self._grpc.cancel_frames()
        for pause in itertools.chain([0.0] if lost.interrupted else [], pauses()):
            with self._changed.lock:
                if not self._reconnects_for(pause):
                    return
            try:
                self._resume(begun)
            except (MembrokerError, OSError) as error:
                if getattr(error, "reason", "") == REJECTED:
                    self._reject(error)
                    return
                self._trouble = str(error)
            else:
                seconds = time.monotonic() - begun
                logger.log(level, "the broker at %s is back after %.1f s, and the session goes on", self._path, seconds)
                return
            if time.monotonic() - reminded >= REMINDER_SECONDS:
                reminded = time.monotonic()
                logger.warning("no broker for %.0f s, still reconnecting: %s", reminded - begun, self._trouble)

    def _reconnects_for(self, seconds: float) -> bool:
        """Wait that long, or until the session is resumed or over; return whether it still reconnects. Lock is held."""
        deadline = time.monotonic() + seconds
        while self._state in _AWAY and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        return self._state in _AWAY

    def _resume(self, begun: float) -> None:
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
            while not self._use(connection, notices, stated, begun):
                stated = connection.catch_up(stated, self._timeout)
            undo.pop_all()

    def _use(self, connection: Connection, notices: socket.socket, stated: HeldResources, begun: float) -> bool:
        """Let all calls use the new connection, unless less is held now than was `stated` to the broker."""
        with self._changed.lock:
            if self.inventory.held() != stated:
                return False
            if connection.lost or not self._move("resumed"):
                raise BrokerUnavailable(f"the connection to the broker at {self._path} ended again")
            if self._closing:
                connection.close_soon()
            self.connection, self.notices.draining, self._attempt = connection, None, ()
            self._grpc.patient = True
            self.notices.listen(notices, connection)
            self.notices.tell(Resumed(time.monotonic() - begun))
        return True

    def _reject(self, error: Exception) -> None:
        """Give up: the broker does not know the session."""
        with self._changed.lock:
            self._trouble = (
                f"the broker at {self._path} does not know this session: {error}; mapped memory stays valid until it "
                "is closed, and counts as unaccounted at the broker; call connect() again"
            )
            if self._move("token rejected"):
                logger.warning("%s", self._trouble)
                self.notices.tell(Forgotten())

    # The end

    def end_waits(self, *, at_exit: bool) -> None:
        """Let no call wait any more: neither for another connection, nor at the broker for memory or a seal.

        The calls in flight end with their connection. For its goodbye the session still gets another connection, but
        not at exit.
        """
        with self._changed.lock:
            self._closing = True
            self._answer_within = None  # for a release; the goodbye has an answer of its own
            self.connection.close_soon()
            if at_exit:
                self._move("goodbye")
            self._changed.tell_all()
        if not at_exit and self.connection.has_calls:
            self.connection.interrupt()

    def say_goodbye(self, *, wait: bool) -> None:
        """End the session at the broker; `wait` for the next connection as long as the goodbye, or a call, may take."""
        with self._changed.lock:
            self._reconnects_for(min(self._timeout, self._patience()) if wait else 0.0)
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
        self._state = "closed"
        self._changed = Condition()
        for attempted in self._attempt:
            attempted.close()
        self.connection.abandon()
        self.notices.abandon()
        self._grpc.abandon()
