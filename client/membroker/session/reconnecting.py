"""The line of a session to its broker: one connection after another, for as long as the session lives.

Owns the connection that there is, the thread that replaces a lost one, and the waiting of the calls meanwhile. A new
connection is there for others only when the broker has agreed with the registry, so nothing but Holds goes over it
before. It must never know what a call is about, nor hold a session: one that nobody refers to must be able to end.
"""

from __future__ import annotations

import itertools
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import (
    AccessDenied,
    BrokerUnavailable,
    ClosedError,
    DescriptorLimit,
    MembrokerError,
    ProtocolError,
    SessionLost,
    from_status,
)
from ..interrupts import Condition, let_through
from ..types import Disconnected, Draining, Forgotten, Notice, Resumed, Undrained
from ..v1 import broker_pb2
from ..v1 import handoff_pb2 as pb
from ..wire import frames as handoff
from . import messages
from .background import Background
from .connection import Connection
from .endpoint import DESCRIPTORS_SHORT, set_timeout, silent
from .handshake import open_session
from .inventory import Held, Registry
from .rpc import GrpcCalls

REJECTED = "TOKEN_REJECTED"


class Attempt:
    """One attempt at the handoff socket at `path`; `timeout`, in seconds, bounds each of its steps.

    Every method raises the broker's refusal, `BrokerUnavailable`, `ProtocolError` or `DescriptorLimit`.
    """

    def __init__(self, path: Path, hello: pb.Hello, timeout: float) -> None:
        self._path = path
        self._hello = hello
        self._timeout = timeout
        self._sockets: list[socket.socket] = []
        self.revision = 0
        """Of the broker that was met: `Welcome.protocol_revision`."""

    def greet(self) -> None:
        """Be recognized: raises with the reason TOKEN_REJECTED where the session is not known."""
        connection, notices, welcome = open_session(self._path, self._hello, self._timeout)
        self._sockets += connection, notices
        self.revision = welcome.protocol_revision
        if not welcome.resumed:
            raise MembrokerError("it opened another session, as a broker that knows of no resuming does", REJECTED)

    def state(self, held: Held, request_id: int) -> pb.ResumeResponse:
        """State what the session holds, and return what the broker says to it."""
        connection = self._sockets[0]
        set_timeout(connection, self._timeout)
        try:
            for holds in held.frames():
                handoff.send(connection, handoff.encode(pb.Frame(request_id=request_id, holds=holds)))
            packet = handoff.receive(connection)
        except BlockingIOError as error:
            raise BrokerUnavailable(silent(self._path)) from error
        except (handoff.EndOfConnection, handoff.BrokenPacket, OSError) as error:
            raise BrokerUnavailable(f"the broker at {self._path} went away again: {error!r}") from error
        handoff.close_all(packet.descriptors)
        set_timeout(connection, 0)
        reply = packet.frame.reply
        if reply.HasField("error"):
            raise from_status(reply.error)
        if not reply.HasField("resume"):
            raise ProtocolError("the broker's answer to the last Holds is none to it")
        return reply.resume

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """Return the connection and the socket of notices. They are closed with the attempt unless `keep` is called."""
        connection, notices = self._sockets
        return connection, notices

    def keep(self) -> None:
        """Let the sockets outlive the attempt."""
        self._sockets.clear()

    def cut(self) -> None:
        """End the attempt from another thread, which waits for nothing."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close what nobody keeps."""
        while self._sockets:
            self._sockets.pop().close()


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each attempt: 50 ms, twice as many each time up to 1 s, up to half less by lot.

    By lot, because all workers of a machine lose their broker in the same moment.
    """
    seconds = 0.05
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, 1.0)


logger = logging.getLogger("membroker")

_T = TypeVar("_T")

NOTICING_SECONDS = 1.0
"""How long the end of the handoff connection may come after a call by gRPC failed of the same death."""
REMINDER_SECONDS = 60.0


class Line:
    """The two sockets and the channel of a session, opened here; raises what `open_session` raises.

    `timeout`, in seconds, bounds each step of a greeting and the goodbye. `outage` is how many seconds a call waits
    for a broker that is gone.
    """

    def __init__(self, endpoint: Path, hello: pb.Hello, *, timeout: float, outage: float) -> None:
        self.registry = Registry()
        self._path = endpoint / "handoff.sock"
        self._timeout = timeout
        self._outage = outage
        self._request_ids = itertools.count(2)  # 1 is the Hello
        self._changed = Condition()
        self._attempt: Attempt | None = None
        self._reconnecting = True  # until everything is there that it needs
        self._no_waiting = False
        self._parting = False
        self._end: tuple[type[MembrokerError], str] | None = None
        self._trouble = ""
        self._callbacks: list[Callable[[Notice], object]] = []
        self._draining: Draining | None = None
        handoff, notices, self.welcome = open_session(self._path, hello, timeout)
        self._hello = pb.Hello()
        self._hello.CopyFrom(hello)
        self._hello.resume_token = self.welcome.token
        self.calls = GrpcCalls(endpoint / "grpc.sock", self.welcome.token)
        with ExitStack() as undo:
            undo.callback(handoff.close)
            undo.callback(notices.close)
            try:
                self.connection = Connection(
                    *(handoff, str(self._path), self.registry),
                    revision=self.welcome.protocol_revision,
                    request_ids=self._request_ids,
                    on_lost=self._lose,
                )
                undo.callback(self.connection.close)
                self._background = Background(notices, self._hear, self.connection.read_to_the_end)
            except OSError as error:
                raise DescriptorLimit(DESCRIPTORS_SHORT) from error
            undo.pop_all()
        self._settle()

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` in the background thread. For finalizers: takes no lock."""
        self._background.later(work)

    # Calls

    def conduct(self, attempt: Callable[[Connection, bool], _T]) -> _T:
        """Make a call over the connection there is, and anew over the next one when the broker is gone under it.

        `attempt(connection, again)` makes it, whole, and leaves nothing behind when it raises. Raises what it raises,
        `BrokerUnavailable` when the broker is away for too long, `SessionLost` and `ClosedError`.
        """
        connection, again = self.connection, False
        while True:
            try:
                return attempt(connection, again)
            except (BrokerUnavailable, AccessDenied) as error:
                if error.reason not in ("", "STOPPING", "DELIVERY_FAILED", REJECTED):
                    raise
                let_through()
                connection, again = self._next(connection, error), True

    def give_back(self, extent_ids: Sequence[int]) -> tuple[Connection, Sequence[int]]:
        """Strike extents that are unmapped; return those that the broker is to be told of, and where.

        Over a connection that is lost it need not be told: the next one begins with what is held still.
        """
        with self._changed.lock:
            return self.connection, self.registry.strike_extents(extent_ids)

    def let_go(self, generation: int) -> tuple[Connection, bool]:
        """Strike one hold of a segment, as `give_back`."""
        with self._changed.lock:
            return self.connection, self.registry.strike_segment(generation)

    def declare_less(self, request: broker_pb2.DeclareMemoryRequest) -> Connection:
        """Enter a declaration that is no more than the one before, and return where the broker is to be told."""
        with self._changed.lock:
            self.registry.declared(request)
            return self.connection

    def _next(self, connection: Connection, error: MembrokerError) -> Connection:
        """Return the connection after one that is lost; raise when that takes too long, or when it is not lost."""
        begun = time.monotonic()
        with self._changed.lock:
            while self.connection is connection:
                if self._no_waiting:
                    raise ClosedError("this client is closed")
                if self._end is not None:
                    raise self._end[0](self._end[1])
                patient = connection.lost or error.reason == "STOPPING"
                left = begun + (self._outage if patient else min(NOTICING_SECONDS, self._outage)) - time.monotonic()
                if left <= 0:
                    raise self._too_long(error) if connection.lost else error
                self._changed.wait(left)
            return self.connection

    def _too_long(self, error: MembrokerError) -> MembrokerError:
        if not self._outage:
            return error
        tried = f", the last attempt to reconnect said: {self._trouble}" if self._trouble else ""
        return BrokerUnavailable(f"{error}; this call waited {self._outage:g} s for it{tried}")

    # Notices

    def on_notice(self, callback: Callable[[Notice], object]) -> None:
        """Call `callback` with each notice from now on, and with the drain that goes on."""
        with self._changed.lock:
            self._callbacks.append(callback)
            if self._draining is not None:
                self.later(partial(_call, callback, self._draining))

    def _hear(self, message: pb.Notice) -> None:
        kind = message.WhichOneof("kind")
        if kind == "release_refused":
            logger.warning("the broker refused what was given back: %s", message.release_refused.message)
        elif kind == "stopping":
            self.connection.heard_stopping()
            logger.info("the broker stops; what is mapped stays valid")
        notice = messages.notice(message)
        if notice is not None:
            self._tell(notice)

    def _tell(self, notice: Notice) -> None:
        with self._changed.lock:
            if isinstance(notice, Draining):
                self._draining = notice
            elif isinstance(notice, Undrained):
                self._draining = None
            callbacks = list(self._callbacks)
        for callback in callbacks:
            self.later(partial(_call, callback, notice))

    # An outage

    def _lose(self, connection: Connection) -> None:
        """Begin to reconnect, once for each connection that is lost."""
        with self._changed.lock:
            self._changed.tell_all()
            if connection is not self.connection or self._reconnecting or self._parting or self._end is not None:
                return
            self._reconnecting = True
            self.calls.patient = False
        threading.Thread(target=self._reconnect, args=(connection,), name="membroker-reconnect", daemon=True).start()

    def _reconnect(self, lost: Connection) -> None:
        begun = reminded = time.monotonic()
        self._trouble = ""
        level = logging.DEBUG if lost.dropped else logging.WARNING
        why = "a call was interrupted" if lost.dropped else f"the broker at {self._path} is gone"
        logger.log(level, "%s: what is mapped stays valid, reconnecting", why)
        self._tell(Disconnected())
        # Until then something is mapped that nobody will hold.
        lost.wait_until_idle()
        lost.close()
        for pause in pauses():
            self._pause(pause)
            if self._end is not None or self._take_up():
                break
            if time.monotonic() - reminded >= REMINDER_SECONDS:
                reminded = time.monotonic()
                logger.warning("no broker for %.0f s, still reconnecting: %s", reminded - begun, self._trouble)
        if self._end is None:
            seconds = time.monotonic() - begun
            logger.log(level, "the broker at %s is back after %.1f s, and the session goes on", self._path, seconds)
            self._tell(Resumed(seconds))
        self._settle()

    def _settle(self) -> None:
        """From now on a loss begins another outage, also one that was there before."""
        with self._changed.lock:
            self._reconnecting = False
            self._changed.tell_all()
        if self.connection.lost:
            self._lose(self.connection)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed.lock:
            while self._end is None and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _take_up(self) -> bool:
        """Try once to take the session up again; say whether there is nothing left to try."""
        self._attempt = attempt = Attempt(self._path, self._hello, self._timeout)
        try:
            attempt.greet()
            held = self.registry.held()
            response = attempt.state(held, next(self._request_ids))
            self._take_over(attempt, held, response)
        except (MembrokerError, OSError) as error:
            self._trouble = str(error)
            if getattr(error, "reason", "") != REJECTED:
                return False
            self._give_up(error)
        finally:
            self._attempt = None
            attempt.close()
        return True

    def _take_over(self, attempt: Attempt, held: Held, response: pb.ResumeResponse) -> None:
        """Give the new connection to everybody, once the broker knows also what was given back meanwhile."""
        extents, generations = response.unknown_extent_ids, response.unknown_generations
        if extents or generations:
            logger.warning(
                "the broker does not know %d extents and %d segments that this process holds: they stay mapped until "
                "they are closed, and are charged to nobody",
                *(len(extents), len(generations)),
            )
        self.registry.forget(extents, generations)
        held = held.without(extents, generations)
        handoff, notices = attempt.sockets()
        connection = Connection(
            *(handoff, str(self._path), self.registry),
            revision=attempt.revision,
            request_ids=self._request_ids,
            models=response.models,
            on_lost=self._lose,
        )
        try:
            while not self._publish(connection, notices, held):
                now = self.registry.held()
                given_back = held.minus(now)
                connection.release(given_back.extents)
                for generation in given_back.segments.elements():
                    connection.detach(generation)
                for (model, location), less in held.lowered_to(now).items():
                    request = broker_pb2.DeclareMemoryRequest(model=model, location=location, declared_bytes=less)
                    connection.call(pb.Frame(declare=request), timeout=self._timeout)
                held = replace(held.minus(given_back), declarations=now.declarations)
        except BaseException:
            connection.close()
            raise
        attempt.keep()

    def _publish(self, connection: Connection, notices: socket.socket, held: Held) -> bool:
        """Put the connection in the place of the lost one, unless something of `held` is not held any more."""
        with self._changed.lock:
            if self._end is not None:
                raise self._end[0](self._end[1])
            now = self.registry.held()
            if not held.minus(now).is_empty() or held.lowered_to(now):
                return False
            self.connection, self._draining = connection, None
            self.calls.patient = True
            self._background.listen(notices, connection.read_to_the_end)
            self._changed.tell_all()
        return True

    def _give_up(self, error: Exception) -> None:
        why = (
            f"the broker at {self._path} does not know this session: {error}; what is mapped stays valid until it is "
            "closed, and counts as unaccounted there; connect() anew"
        )
        logger.warning("%s", why)
        with self._changed.lock:
            self._end = self._end or (SessionLost, why)
            self._changed.tell_all()
        self._tell(Forgotten())

    # The end

    def end_waits(self, *, at_exit: bool) -> None:
        """Let no call wait for another connection any more. The session still gets one to end over, but not at exit."""
        with self._changed.lock:
            self._no_waiting, self._parting = True, at_exit
            self._changed.tell_all()

    def say_goodbye(self, *, wait: bool) -> None:
        """End the session at the broker; `wait` for one that is away as long as the goodbye, or a call, may take."""
        deadline = time.monotonic() + (min(self._timeout, self._outage) if wait else 0.0)
        with self._changed.lock:
            while self.connection.lost and self._reconnecting and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._parting = True
        self.connection.say_goodbye(self._timeout)

    def close(self) -> None:
        """Close everything. Calls in flight, and later ones, raise `ClosedError`."""
        with self._changed.lock:
            self._end = self._end or (ClosedError, "the client is closed")
            attempt = self._attempt
            self._changed.tell_all()
        if attempt is not None:
            attempt.cut()
        self.connection.close()
        self.calls.close()
        self._background.stop()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. Takes no lock; never a shutdown, which the parent feels."""
        self._end = (ClosedError, "this client belongs to the process that this one was forked from")
        self._changed = Condition()
        if self._attempt is not None:
            self._attempt.close()
        self.connection.abandon()
        self._background.abandon()
        self.calls.abandon()


def _call(callback: Callable[[Notice], object], notice: Notice) -> None:
    try:
        callback(notice)
    except BaseException:  # sys.exit() too: it would end the thread, and with it all that is given back there
        logger.exception("a callback for notices has failed at %r", notice)
