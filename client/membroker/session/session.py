"""One session: its line to the broker, its driver, and what is held of it.

Owns the order of the beginning and of the end: nothing is told to the broker as given back before it is unmapped.
It must never be referred to by the background thread, so that a client that was forgotten ends by itself, and in
a forked child it lets go of everything without a lock, a call or a frame.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from ..errors import ClosedError, InvalidRequest, ModelNotFound
from ..interrupts import uninterrupted
from ..memory.lender import Tracked
from ..memory.region import device_failures
from ..v1 import broker_pb2, resources_pb2
from ..v1 import handoff_pb2 as pb
from ..v1.handoff_pb2 import Frame
from ..vmm import open_driver
from ..vmm.driver import Driver
from ..wire.frames import PROTOCOL_VERSION
from .connection import Connection
from .declarations import Declarations
from .reconnecting import Line
from .rpc import CONTROL_SECONDS
from .transport import GrpcTransport, HandoffTransport, Transport


class Control:
    """The calls over one line. Each raises the broker's refusal, `BrokerUnavailable`, `SessionLost`, `ClosedError`.

    Models are registered `by_handoff`, where the broker knows how: a session that only borrows needs no gRPC channel.
    """

    def __init__(self, line: Line, *, by_handoff: bool) -> None:
        self._line = line
        self._by_handoff = by_handoff

    def ask(self, method: str, request: Any) -> Any:
        """Make a call that changes nothing."""
        return self._line.conduct(lambda _connection, _again: self._call(method, request))

    def register_model(self, request: broker_pb2.RegisterModelRequest) -> resources_pb2.Model:
        """Register a model or join it."""
        name = f"{self._line.welcome.tenant}/models/{request.model_id}"

        def attempt(connection: Connection, again: bool) -> resources_pb2.Model:
            if again and name in connection.models and name not in self._line.registry.models:
                # Registered for this session, and not by a call that returned: it was this one.
                request.exclusive = False
            if self._by_handoff and connection.revision:
                answer = connection.call(Frame(register_model=request), timeout=CONTROL_SECONDS)
            else:
                request.request_id = connection.new_request_id()
                answer = self._call("RegisterModel", request)
            model = cast("resources_pb2.Model", answer)
            self._line.registry.registered(model.name)
            return model

        return self._line.conduct(attempt)

    def leave_model(self, name: str) -> None:
        """Take one registration back: leave a model unless this session has registered it more often."""
        if self._line.registry.strike_registration(name):
            self.unregister_model(name)

    def unregister_model(self, name: str) -> None:
        """Leave a model."""

        def attempt(connection: Connection, again: bool) -> None:
            request = broker_pb2.UnregisterModelRequest(name=name)
            try:
                if self._by_handoff and connection.revision:
                    connection.call(Frame(unregister_model=request), timeout=CONTROL_SECONDS)
                else:
                    request.request_id = connection.new_request_id()
                    self._call("UnregisterModel", request)
            except ModelNotFound:
                if not again:
                    raise
            self._line.registry.left(name)

        self._line.conduct(attempt)

    def _call(self, method: str, request: Any) -> Any:
        return self._line.calls.call(method, request, CONTROL_SECONDS)


logger = logging.getLogger("membroker")


class _Link:
    """What a session holds of the outside world, apart from it: the last one to go can be a finalizer's work."""

    def __init__(self, line: Line, driver: Driver | None) -> None:
        self.line = line
        self.driver = driver
        self.owns_driver = driver is None

    def end(self, *, wait: bool = True) -> None:
        """Say goodbye and close everything, also when the waiting is interrupted."""
        with ExitStack() as ends:
            ends.callback(self._close_driver)
            ends.callback(self.line.close)
            self.line.say_goodbye(wait=wait)

    def _close_driver(self) -> None:
        if self.driver is not None and self.owns_driver:
            self.driver.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited; the parent feels nothing of it."""
        self.line.abandon()
        if self.driver is not None:
            self.driver.abandon()


class Session:
    """An open session at `endpoint`. Raises what `open_session` raises, and then has left nothing behind.

    `timeout` and `outage` are those of `connect`.
    """

    def __init__(
        self,
        endpoint: Path,
        *,
        transport: str,
        observer: bool,
        client: str,
        timeout: float,
        outage: float,
        driver: Driver | None,
    ) -> None:
        if transport not in ("handoff", "grpc"):
            raise InvalidRequest(f'a transport is "handoff" or "grpc", not {transport!r}')
        if isinstance(driver, str):
            raise InvalidRequest(f"a driver is one that is open, not {driver!r}: without it the broker's is opened")
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, observer=observer, client=client[:128])
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._closed = self._ended = self._forked = False
        self._holdings: set[Tracked] = set()
        self.line = Line(endpoint, hello, timeout=timeout, outage=outage)
        self._link = _Link(self.line, driver)
        self.welcome = self.line.welcome
        self.control = Control(self.line, by_handoff=transport == "handoff")
        self.transport: Transport = (GrpcTransport if transport == "grpc" else HandoffTransport)(self.line)
        self.declarations = Declarations(self.transport)
        self._forgotten = weakref.finalize(self, self.line.later, self._link.end)
        self._forgotten.atexit = False
        _living.add(self)

    def check_open(self) -> None:
        """Raise `ClosedError` when the client is closed, or was inherited over a fork. Takes no lock."""
        if self._forked:
            raise ClosedError("this client belongs to the process that this one was forked from: connect() anew")
        if self._closed:
            raise ClosedError("this client is closed")

    @property
    def closed(self) -> bool:
        """Whether the session has ended, or ends when the last view is gone."""
        return self._closed or self._forked

    @property
    def connection(self) -> Connection:
        """The connection that there is, or the lost one until there is another."""
        return self.line.connection

    @property
    def driver(self) -> Driver:
        """The driver of the broker's device, opened at the first need. Raises `DeviceFailure`."""
        # While closing, holdings still unmap.
        if self._forked or self._ended:
            self.check_open()
        return self._link.driver or self._open_driver()

    def _open_driver(self) -> Driver:
        with self._lock, device_failures():
            if self._link.driver is None:
                self._link.driver = open_driver(self.welcome.driver, self.welcome.device_uuid, context=True)
        return self._link.driver

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` in the background thread."""
        self.line.later(work)

    def track(self, holding: Tracked) -> None:
        """Know of what is held. Raises `ClosedError` when the client is closed."""
        self.check_open()
        with self._lock:
            self.check_open()
            self._holdings.add(holding)

    def untrack(self, holding: Tracked) -> None:
        """Forget what was given back; the last one ends a session whose close waited for it."""
        self._holdings.discard(holding)
        if self._closed and not self._holdings:
            self.later(self._end)

    def interrupted(self) -> None:
        """Drop the connection that there is: an interrupt may have left a call of this thread half done."""
        if not self._forked:
            self.connection.interrupted()

    def close(self, *, at_exit: bool = False) -> None:
        """Give everything back and end the session; what has living views ends with the last of them.

        At exit a broker that is away is not waited for: it sees the process end. What the driver fails to unmap is
        logged, and held until this is closed again.
        """
        if self._forked or self._ended:  # and no lock is touched that another thread of a parent may have held
            return
        uninterrupted(lambda: self._close(at_exit=at_exit))

    def _close(self, *, at_exit: bool) -> None:
        with self._lock:
            self._closed = True
        self.line.end_waits(at_exit=at_exit)
        for memory in list(self._holdings):
            try:
                memory.end()
            except Exception:
                logger.exception("memory of a closed client could not be released")
        if not self._holdings:
            self._end(wait=not at_exit)

    def _end(self, *, wait: bool = True) -> None:
        with self._lock:
            if self._ended or self._forked:
                return
            self._ended = True
        self._forgotten.detach()
        self._link.end(wait=wait)

    def abandon(self) -> None:
        """In a forked child: from now on everything of this session raises `ClosedError`."""
        self._forked = True
        self._forgotten.detach()
        for memory in self._holdings:
            memory.abandon()
        self._link.abandon()


_living: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_all() -> None:
    for session in list(_living):
        session.close(at_exit=True)


def _abandon_all() -> None:
    for session in list(_living):
        session.abandon()
    _living.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
