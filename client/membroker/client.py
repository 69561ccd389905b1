"""`connect` and `Client`: what a worker begins with.

Owns the public side of a session: registering models and reading the books. It must never show a message of the
wire, nor do what a `Session`, a `Model` or a pool does.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from . import arguments
from .closing import Closing
from .errors import BrokerAbsent, BrokerUnavailable, InvalidRequest
from .model import Model
from .segment import Segment
from .session import messages
from .session.endpoint import find_endpoint
from .session.reconnecting import pauses
from .session.session import Session
from .types import DeviceStatus, ModelStatus, Notice, SegmentStatus, SessionStatus
from .v1 import broker_pb2 as pb
from .vmm.driver import Driver, Location

logger = logging.getLogger("membroker")

PAGE = 1000
"""How many entries of a listing one call asks for: the most that a broker gives."""


def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    transport: str = "handoff",
    observer: bool = False,
    client: str | None = None,
    timeout: float = 5.0,
    outage: float = 30.0,
    driver: Driver | None = None,
) -> Client:
    """Open a session with the broker at `endpoint` and return its client, which ends it.

    `endpoint` is a directory; without it MEMBROKER_ENDPOINT, else the only broker of this machine.
    `transport="grpc"` borrows by gRPC calls, which are slower; descriptors come on the handoff socket in any case.
    An `observer` reads the books and borrows nothing. `client` is what people see in `membroker sessions`, by
    default the program's name. `driver` replaces the driver of the broker's device and stays the caller's.

    Where no broker is there yet, it is waited for, `timeout` seconds at most, which also bounds the greeting and the
    goodbye. When the broker goes away later, what is mapped stays valid, and the session goes on with the next broker
    that knows it: it tries for ever. `outage` is how many seconds a call waits for that before it raises
    `BrokerUnavailable`; with 0 it raises at once. Both are at most a week, and `timeout` is more than 0.

    Raises `BrokerUnavailable` or `AccessDenied` with what is wrong and the command that mends it,
    `InvalidRequest`, `ProtocolError`, `TooMany` or `DescriptorLimit`.
    """
    timeout = arguments.seconds_of("timeout", timeout, positive=True)
    outage = arguments.seconds_of("outage", outage)
    attempt = partial(
        enter,
        endpoint,
        transport=transport,
        observer=observer,
        client=client,
        timeout=timeout,
        outage=outage,
        driver=driver,
    )
    deadline, told = time.monotonic() + timeout, False
    for pause in pauses():
        try:
            return attempt()
        except BrokerUnavailable as error:
            left = deadline - time.monotonic()
            if left <= 0 or not (isinstance(error, BrokerAbsent) or error.reason == "STOPPING"):
                raise
            if not told:
                logger.info("waiting up to %g s for a broker: %s", timeout, error)
                told = True
        time.sleep(min(pause, left))
    raise AssertionError("pauses() has no end")


def enter(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    transport: str = "handoff",
    observer: bool = False,
    client: str | None = None,
    timeout: float = 5.0,
    outage: float = 0.0,
    driver: Driver | None = None,
) -> Client:
    """As `connect`, but a broker that is not there, or goes, is not waited for: for commands, which can be repeated."""
    session = Session(
        find_endpoint(endpoint),
        transport=transport,
        observer=observer,
        client=arguments.name_of("client", client) if client is not None else _program(),
        timeout=timeout,
        outage=outage,
        driver=driver,
    )
    return Client(session)


def _program() -> str:
    name = os.path.basename(sys.argv[0] if sys.argv else "") or os.path.basename(sys.executable) or "python"
    return name.encode(errors="replace").decode()  # the name of a file may be of any bytes


class Client(Closing):
    """One session of this process with one broker. Thread-safe. `connect()` makes it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def session(self) -> str:
        """The name of this session, `sessions/{session}`."""
        return self._session.welcome.session

    @property
    def tenant(self) -> str:
        """The tenant as which this process entered, `tenants/{tenant}`."""
        return self._session.welcome.tenant

    @property
    def endpoint(self) -> Path:
        """The directory of the endpoint."""
        return self._session.endpoint

    @property
    def device_uuid(self) -> str:
        """The device's UUID as NVML writes it, or `host`."""
        return self._session.welcome.device_uuid

    @property
    def driver(self) -> str:
        """The kind of the device's driver, `cuda` or `host`."""
        return self._session.welcome.driver

    @property
    def granularity(self) -> int:
        """Every extent is a multiple of this many bytes."""
        return self._session.welcome.granularity_bytes

    @property
    def capacities(self) -> dict[str, int]:
        """The bytes that the broker may lend, by location."""
        limits = self._session.welcome.capacities
        return {messages.location_name(limit.location): limit.limit_bytes for limit in limits}

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process was forked from the client's."""
        return self._session.closed

    def register_model(
        self,
        name: str,
        *,
        virtual_capacity: int | str | None = None,
        limit: int | str | None = None,
        host_limit: int | str | None = None,
        exclusive: bool = False,
    ) -> Model:
        """Register the model `name` of this tenant, or join it; nothing is charged by this.

        `virtual_capacity` is how many bytes of addresses its pools reserve by default, `limit` and `host_limit`
        the most that it may be charged at the device and at the host: bytes, or text such as `"8GiB"`. A limit
        can lower what the broker's configuration allows, never raise it. A number left out joins whatever is there.

        Raises `ModelConflict` when it is registered with other numbers, `ModelAlreadyExists` when `exclusive`
        and it is registered at all, `InvalidRequest`, `TooMany`, `AccessDenied` (an observer), `BrokerUnavailable`.
        """
        asked = {Location.DEVICE: ("limit", limit), Location.HOST: ("host_limit", host_limit)}
        request = pb.RegisterModelRequest(
            model_id=arguments.name_of("model", name),
            limits=[
                messages.limit(location, arguments.bytes_of(what, size))
                for location, (what, size) in asked.items()
                if size is not None
            ],
            exclusive=exclusive,
        )
        if virtual_capacity is not None:
            request.virtual_capacity_bytes = arguments.bytes_of("virtual_capacity", virtual_capacity, at_least=1)
        self._session.check_open()
        return Model(self._session, self._session.register_model(request))

    def attach(self, name: str, *, timeout: float = 60.0) -> Segment:
        """Attach a segment of this tenant, read-only.

        `name` is the segment's own, `model/segment` where several models have one of that name, or its resource name.
        Waits up to `timeout` seconds, at most a day, for a segment that is still being written, and anew after an
        outage of the broker. Raises
        `SegmentNotFound` at once where there is none, `SegmentNotSealed` when the time is over, `WriterDied`,
        `InvalidRequest`, `DeviceFailure`, `DescriptorLimit`, `BrokerUnavailable`.
        """
        self._session.check_open()
        return Segment.attach(self._session, self._segment_name(name), timeout)

    def delete_segment(self, name: str) -> SegmentStatus:
        """End a segment of this tenant: nobody can attach it, and its bytes come back when its last session has left.

        `name` is as in `attach`. Returns it as it ends, with how many sessions still hold it. Raises `SegmentNotFound`.
        """
        self._session.check_open()
        request = pb.DeleteSegmentRequest(name=self._segment_name(name))
        return messages.segment(self._session.transport.delete_segment(request))

    def segments(self) -> list[SegmentStatus]:
        """Return this tenant's segments, in the order they began."""
        pages = _pages(
            lambda token: self._call("ListSegments", pb.ListSegmentsRequest(page_size=PAGE, page_token=token))
        )
        return [segment for page in pages for segment in messages.segments(page.segments)]

    def _segment_name(self, name: str) -> str:
        """Return the resource name that a user's name of a segment means."""
        if arguments.name_of("segment", name).startswith("tenants/"):
            return name
        model, _, own = name.rpartition("/")
        return f"{self.tenant}/models/{model or '-'}/segments/{own}"

    def device(self) -> DeviceStatus:
        """Return the device and its books, as they are now."""
        return messages.device(self._call("GetDevice", pb.GetDeviceRequest()))

    def models(self) -> list[ModelStatus]:
        """Return this tenant's models, by name."""
        pages = _pages(lambda token: self._call("ListModels", pb.ListModelsRequest(page_size=PAGE, page_token=token)))
        return [model for page in pages for model in messages.models(page.models)]

    def sessions(self) -> list[SessionStatus]:
        """Return this tenant's sessions, in the order they began."""
        pages = _pages(
            lambda token: self._call("ListSessions", pb.ListSessionsRequest(page_size=PAGE, page_token=token))
        )
        return [session for page in pages for session in messages.sessions(page.sessions)]

    def on_notice(self, callback: Callable[[Notice], object]) -> None:
        """Call `callback` with each `Draining`, `Undrained`, `Stopping`, `Disconnected`, `Resumed` and `Forgotten`.

        It is called in the library's own thread, one notice after another, and first of all with a drain that goes on
        already; while it runs, nothing that is garbage is given back. What it raises is logged. It is kept until the
        client is closed, and what it refers to as well. Raises `InvalidRequest` for what cannot be called.
        """
        if not callable(callback):
            raise InvalidRequest(f"on_notice wants a function of one notice, not {callback!r}")
        self._session.check_open()
        self._session.reconnecting.on_notice(callback)

    def close(self) -> None:
        """Give back all that this client's pools and buffers hold, and end the session. Idempotent.

        Raises nothing when the broker is away. Memory that has living views, and with it the session, stays until
        the last view is gone; no call is possible meanwhile. A broker that is gone is waited for as long as
        `connect`'s `timeout`, and no longer than its `outage`; when it is not back by then, the session stays charged
        there until this process ends, or an operator has it forgotten.
        """
        self._session.close()

    def __repr__(self) -> str:
        return f"<membroker.Client {self.session} of {self.tenant} at {self.endpoint}>"

    def _call(self, method: str, request: Any) -> Any:
        self._session.check_open()
        return self._session.ask(method, request)


def _pages(ask: Callable[[str], Any]) -> Iterable[Any]:
    """Yield the pages of a listing, the first by an empty token."""
    page = ask("")
    yield page
    while page.next_page_token:
        page = ask(page.next_page_token)
        yield page
