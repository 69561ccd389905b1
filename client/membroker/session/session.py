"""One session: its connection to the broker, its driver, its models, and what is mapped for it.

Owns the order of the beginning and of the end: the broker is told that memory is released only after it is unmapped.
The background thread must never refer to it, so that a client that is garbage ends by itself. In a forked child it
drops everything without a lock, a call or a frame.
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
from ..interrupts import device_failures, uninterrupted
from ..memory.lender import Tracked
from ..v1 import broker_pb2, resources_pb2
from ..v1 import handoff_pb2 as pb
from ..v1.handoff_pb2 import Frame
from ..vmm import open_driver
from ..vmm.driver import Driver
from ..wire.names import MAX_CLIENT_CHARACTERS, PROTOCOL_VERSION
from .connection import Connection
from .declarations import Declarations
from .reconnecting import ReconnectingConnection
from .rpc import CONTROL_SECONDS
from .transport import Transport

logger = logging.getLogger("membroker")


class _Link:
    """The connection and the driver of a session, apart from it: a finalizer of the session can close them."""

    def __init__(self, connection: ReconnectingConnection, driver: Driver | None) -> None:
        self.connection = connection
        self.driver = driver
        self.owns_driver = driver is None

    def end(self, *, wait: bool = True) -> None:
        """Say goodbye and close everything, also when an interrupt ends the wait for the answer."""
        with ExitStack() as ends:
            ends.callback(self._close_driver)
            ends.callback(self.connection.close)
            self.connection.say_goodbye(wait=wait)

    def _close_driver(self) -> None:
        if self.driver is not None and self.owns_driver:
            self.driver.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited; the parent does not notice."""
        self.connection.abandon()
        if self.driver is not None:
            self.driver.abandon()


class Session:
    """An open session at `endpoint`. Raises what `open_session` raises, and then leaves nothing behind.

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
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, observer=observer, client=client[:MAX_CLIENT_CHARACTERS])
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._closed = self._ended = self._forked = False
        self._holdings: set[Tracked] = set()
        self.reconnecting = ReconnectingConnection(
            endpoint, hello, timeout=timeout, outage=outage, by_grpc=transport == "grpc"
        )
        self._link = _Link(self.reconnecting, driver)
        self.welcome = self.reconnecting.welcome
        self.transport = Transport(self.reconnecting)
        self.declarations = Declarations(self.transport)
        self._forgotten = weakref.finalize(self, self.reconnecting.later, self._link.end)
        self._forgotten.atexit = False
        _living.add(self)

    def check_open(self) -> None:
        """Raise `ClosedError` when the client is closed, or was inherited over a fork. Takes no lock."""
        if self._forked:
            raise ClosedError("this client belongs to the process that this one was forked from: call connect() again")
        if self._closed:
            raise ClosedError("this client is closed")

    @property
    def closed(self) -> bool:
        """Whether the session has ended, or ends when the last view is gone."""
        return self._closed or self._forked

    @property
    def connection(self) -> Connection:
        """The present connection, or the lost one until there is another."""
        return self.reconnecting.connection

    @property
    def driver(self) -> Driver:
        """The driver of the broker's device, opened when it is first needed. Raises `DeviceFailure`."""
        # While the session closes, its memory is still unmapped by it.
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
        self.reconnecting.later(work)

    def interrupted(self) -> None:
        """Drop the present connection, because an interrupt left a call half done. Raises nothing.

        The session resumes on a new one, states what it holds, and the broker credits the rest. Other threads' calls
        are repeated there.
        """
        if not self._forked:
            self.reconnecting.interrupted()

    # Models, and what is read by gRPC

    def ask(self, method: str, request: Any) -> Any:
        """Make a call that changes nothing."""
        return self.reconnecting.ask(method, request)

    def register_model(self, request: broker_pb2.RegisterModelRequest) -> resources_pb2.Model:
        """Register a model or join it."""
        name = f"{self.welcome.tenant}/models/{request.model_id}"
        registered = self.reconnecting.inventory.models

        def before_repeat(connection: Connection) -> None:
            if name in connection.models and name not in registered:
                # It is registered for this session, by no call that returned: so by the first attempt.
                frame.register_model.exclusive = False

        frame = Frame(register_model=request)
        answer = self.reconnecting.call(frame, timeout=CONTROL_SECONDS, before_repeat=before_repeat)
        model = cast("resources_pb2.Model", answer)
        self.reconnecting.inventory.registered(model.name)
        return model

    def leave_model(self, name: str) -> None:
        """Take one registration back: leave a model unless this session has registered it more often."""
        if self.reconnecting.inventory.strike_registration(name):
            self.unregister_model(name)

    def unregister_model(self, name: str) -> None:
        """Leave a model."""
        repeated: list[Connection] = []
        frame = Frame(unregister_model=broker_pb2.UnregisterModelRequest(name=name))
        try:
            self.reconnecting.call(frame, timeout=CONTROL_SECONDS, before_repeat=repeated.append)
        except ModelNotFound:
            if not repeated:
                raise
        self.reconnecting.inventory.left(name)

    # What is mapped for it

    def track(self, memory: Tracked) -> None:
        """Let `close` end this memory. Raises `ClosedError` when the client is closed."""
        self.check_open()
        with self._lock:
            self.check_open()
            self._holdings.add(memory)

    def untrack(self, memory: Tracked) -> None:
        """Forget memory that was released. The last one ends a session whose `close` waits for it."""
        self._holdings.discard(memory)
        if self._closed and not self._holdings:
            self.later(self._end)

    def close(self, *, at_exit: bool = False) -> None:
        """Release everything and end the session; memory with living views ends with the last of them.

        At exit it does not wait for a lost broker, which sees the process end. What the driver fails to unmap is
        logged, and held until this is called again. An interrupt is raised when the work is done.
        """
        if self._forked or self._ended:  # and no lock is touched that another thread of a parent may have held
            return
        uninterrupted(lambda: self._close(at_exit=at_exit))

    def _close(self, *, at_exit: bool) -> None:
        with self._lock:
            self._closed = True
        self.reconnecting.end_waits(at_exit=at_exit)
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
