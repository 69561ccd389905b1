"""One session: its connection to the broker, its driver, its models, and what is mapped for it.

Owns the order of the beginning; `MemoryOwner` owns that of the end. The background thread must never refer to it, so
that a client that is garbage ends by itself.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from ..arguments import name_of
from ..errors import InvalidRequest, ModelNotFound, SegmentNotFound
from ..interrupts import device_failures
from ..memory.lender import Tracked
from ..memory.owner import MemoryOwner
from ..v1 import broker_pb2, resources_pb2
from ..v1 import handoff_pb2 as pb
from ..v1.handoff_pb2 import Frame
from ..v1.resources_pb2 import Segment
from ..vmm import open_driver
from ..vmm.driver import Driver
from ..wire.names import MAX_CLIENT_CHARACTERS, PROTOCOL_VERSION
from .connection import Connection
from .declarations import Declarations
from .endpoint import find_endpoint
from .recalls import SessionRecalls
from .reconnecting import ReconnectingConnection
from .rpc import CONTROL_SECONDS


class _SessionLink:
    """The connection and the driver of a session. They do not refer to it, so that its finalizer can close them."""

    def __init__(self, connection: ReconnectingConnection, driver: Driver | None) -> None:
        self.connection = connection
        self.driver = driver
        self.owns_driver = driver is None
        self.later: Callable[[Callable[[], None]], None] = connection.notices.later

    def end(self, *, wait: bool = True) -> None:
        """Say goodbye and close everything, also when an interrupt ends the wait for the answer."""
        with ExitStack() as ends:
            ends.callback(self._close_driver)
            ends.callback(self.connection.close, wait=wait)
            self.connection.say_goodbye(wait=wait)

    def _close_driver(self) -> None:
        if self.driver is not None and self.owns_driver:
            self.driver.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited; the parent does not notice."""
        self.connection.abandon()
        if self.driver is not None:
            self.driver.abandon()


class Session(MemoryOwner[_SessionLink]):
    """An open session. Raises what `open_session` raises, and then leaves nothing behind.

    The arguments are those of `connect`. Unlike `connect`, it does not wait for a broker that is absent, and by default
    its calls do not wait for one that goes away: commands can be repeated.
    """

    _name, _instead = "client", "call connect() again"

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        transport: str = "handoff",
        observer: bool = False,
        client: str | None = None,
        timeout: float = 5.0,
        outage: float = 0.0,
        driver: Driver | None = None,
    ) -> None:
        self.endpoint: Path = find_endpoint(endpoint)
        name = _program() if client is None else name_of("client", client)
        if transport not in ("handoff", "grpc"):
            raise InvalidRequest(f'a transport is "handoff" or "grpc", not {transport!r}')
        if isinstance(driver, str):
            raise InvalidRequest(f"a driver is one that is open, not {driver!r}: without it the broker's is opened")
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, observer=observer, client=name[:MAX_CLIENT_CHARACTERS])
        self.reconnecting: ReconnectingConnection = ReconnectingConnection(
            self.endpoint, hello, timeout=timeout, outage=outage, by_grpc=transport == "grpc"
        )
        self.welcome: pb.Welcome = self.reconnecting.welcome
        self.declarations: Declarations = Declarations(self.reconnecting)
        self._recalls: Callable[[], SessionRecalls | None] = lambda: None
        super().__init__(_SessionLink(self.reconnecting, driver))

    @property
    def connection(self) -> Connection:
        """The present connection, or the lost one until there is another."""
        return self.reconnecting.connection

    @property
    def recalls(self) -> SessionRecalls:
        """The recalls of this session. The caller keeps them alive; the session has only a weak reference.

        A callback usually refers to a pool, and the pool's memory refers to this session. So with a reference from
        here, the pool would never become garbage.
        """
        known = self._recalls()
        if known is None:
            known = SessionRecalls(self.reconnecting, lambda: self._holdings)
            self._recalls = weakref.ref(known)
        return known

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

    # Models, segments, and what is read

    def ask(self, kind: str, request: Message) -> Any:
        """Read the books, by a frame of this kind. Raises `ClosedError`."""
        self.check_open()
        frame = Frame()
        getattr(frame, kind).CopyFrom(request)
        return self.reconnecting.call(frame, timeout=CONTROL_SECONDS)

    def register_model(self, request: broker_pb2.RegisterModelRequest) -> resources_pb2.Model:
        """Register a model or join it."""
        name = f"{self.welcome.tenant}/models/{request.model_id}"
        registered = self.reconnecting.inventory.models

        def before_repeat(connection: Connection) -> None:
            if name in connection.models and name not in registered:
                # This session has the model, but no call that registers it has returned: so the first attempt did it.
                frame.register_model.exclusive = False

        frame = Frame(register_model=request)
        model: resources_pb2.Model = self.reconnecting.call(frame, timeout=CONTROL_SECONDS, before_repeat=before_repeat)
        self.reconnecting.inventory.registered(model.name)
        return model

    def leave_model(self, name: str) -> None:
        """Undo one registration: leave a model, unless this session has registered it more than once."""
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
        if (recalls := self._recalls()) is not None:
            recalls.forget(name)

    def delete_segment(self, request: broker_pb2.DeleteSegmentRequest) -> Segment:
        """End a segment."""
        repeated: list[Connection] = []
        try:
            answer: Segment = self.reconnecting.call(Frame(delete_segment=request), before_repeat=repeated.append)
        except SegmentNotFound:
            if not repeated:
                raise
            # The first attempt had deleted it, and its answer was lost.
            return Segment(name=request.name, generation=request.generation, state=Segment.ENDING)
        return answer

    # The end

    def close(self) -> None:
        """Release everything and end the session; memory with living views ends with the last of them.

        What the driver fails to unmap is logged, and held until this is called again. An interrupt is raised when the
        work is done. At exit it does not wait for a lost broker, which sees the process end.
        """
        self._close()

    def abandon(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._end_recalls()
        super().abandon()

    def _end_recalls(self) -> None:
        if (recalls := self._recalls()) is not None:
            recalls.end()

    def _end_waits(self, *, wait: bool) -> None:
        self._end_recalls()
        self.reconnecting.end_waits(at_exit=not wait)


def _program() -> str:
    """Return the program's name. An interpreter that another program embeds may have no arguments, and no path."""
    for path in (*getattr(sys, "argv", ())[:1], sys.executable):
        if isinstance(path, str) and (name := os.path.basename(path)) and name != "-c":
            return name.encode(errors="replace").decode()  # a file's name may have any bytes
    return "python"


class SessionOwner:
    """The session's part of an `Owner` of memory: all but `give_back`."""

    later: Callable[[Callable[[], None]], None]
    interrupted: Callable[[], None]
    untrack: Callable[[Tracked], None]
    track: Callable[[Tracked], None]

    def __init__(self, session: Session) -> None:
        self._session = session
        self.track, self.untrack = session.track, session.untrack
        self.interrupted, self.later = session.reconnecting.interrupted, session.later

    @property
    def driver(self) -> Driver:
        """The driver of the broker's device, in this process."""
        return self._session.driver
