"""`connect` and `Client`: where a worker begins.

Owns the public side of a session: registering models and reading the books. It must never show a message of the wire,
nor do the work of a `Session`, a `Model` or a pool.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from . import arguments
from .cancellation import innermost
from .closing import Closing
from .errors import BrokerAbsent, BrokerUnavailable, InvalidRequest, SegmentNotFound
from .model import Model
from .segment import Segment
from .session import messages
from .session.endpoint import endpoint_of_device
from .session.outages import pauses
from .session.rpc import rows_of
from .session.session import Session
from .threads import check_patches
from .tracebacks import ends_at_the_caller, shortened
from .types import Decision, DeviceStatus, ModelStatus, Notice, SegmentStatus, SessionStatus
from .v1 import broker_pb2 as pb
from .v1.resources_pb2 import Limit
from .versions import attach_newest, newest_name
from .vmm.driver import Driver, Location
from .vmm.sizes import Size
from .wire.names import LIMIT_VARIABLE, MODEL_VARIABLE

logger: logging.Logger = logging.getLogger("membroker")


@shortened
def connect(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    device: object = None,
    transport: str = "handoff",
    observer: bool = False,
    client: str | None = None,
    timeout: float = 5.0,
    outage: float = 30.0,
    driver: Driver | None = None,
) -> Client:
    """Open a session with the broker at `endpoint`, and return its client. `Client.close` ends the session.

    `endpoint` is a directory. Without it, the environment variable MEMBROKER_ENDPOINT gives the directory; if that is
    not set, the client connects to the only broker of this machine, or of the device that CUDA_VISIBLE_DEVICES and
    torchrun's LOCAL_RANK leave. `device` names one instead: its number as in `cuda:1`, which counts in
    CUDA_VISIBLE_DEVICES, its UUID, or a `torch.device`. `transport="grpc"` borrows by gRPC calls, which are
    slower; descriptors still come on the handoff socket. An `observer` reads the books and borrows nothing. `client` is
    the name that `membroker sessions` shows for this process; the default is the program's name. `driver` replaces the
    driver of the broker's device; the caller must close it.

    If no broker is there yet, this waits up to `timeout` seconds, which also limits the first and the last call of the
    session. When the broker goes away later, mapped memory stays valid, and the session reconnects to the next broker,
    without a limit of time. Meanwhile a call waits `outage` seconds before it raises `BrokerUnavailable`; with 0 it
    raises at once. `timeout` and `outage` are at most a week, and `timeout` is more than 0.

    Raises `BrokerUnavailable` and `AccessDenied`, whose messages name the command that solves the problem,
    `InvalidRequest`, `ProtocolError`, `TooMany`, `DescriptorLimit` and `membroker.errors.ThreadLimit`.
    """
    check_patches()
    if endpoint is not None and device is not None:
        raise InvalidRequest("connect takes an endpoint or a device: an endpoint is of one device")
    timeout = arguments.seconds_of("timeout", timeout, positive=True)
    outage = arguments.seconds_of("outage", outage)
    deadline, has_logged, scope = time.monotonic() + timeout, False, innermost.get()
    for pause in pauses():
        if scope is not None:
            scope.check()
        try:
            session = Session(
                endpoint if device is None else endpoint_of_device(device),
                transport=transport,
                observer=observer,
                client=client,
                timeout=timeout,
                outage=outage,
                driver=driver,
            )
            return Client(session)
        except BrokerUnavailable as error:
            left = deadline - time.monotonic()
            if left <= 0 or not (isinstance(error, BrokerAbsent) or error.reason == "STOPPING"):
                raise
            if not has_logged:
                logger.info("waiting up to %g s for a broker: %s", timeout, error)
                has_logged = True
        time.sleep(min(pause, left))
    raise AssertionError("pauses() has no end")


def enter(
    endpoint: str | os.PathLike[str] | None = None,
    *,
    observer: bool = False,
    client: str | None = None,
    outage: float = 0.0,
) -> Client:
    """Do as `connect`, for a command: an absent broker is an error at once, and so is one that goes away in a call."""
    return Client(Session(endpoint, observer=observer, client=client, outage=outage))


@ends_at_the_caller()
class Client(Closing):
    """One session of this process with one broker. Thread-safe, and a context manager. `connect()` makes it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recalls = session.recalls  # the callbacks live as long as the client

    @property
    def session(self) -> str:
        """The name of this session, `sessions/{session}`."""
        return self._session.welcome.session

    @property
    def tenant(self) -> str:
        """The tenant of the endpoint, `tenants/{tenant}`."""
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
    def driver_kind(self) -> str:
        """The kind of the device's driver, `"cuda"` or `"host"`; `Model.driver` is the driver itself."""
        return self._session.welcome.driver

    @property
    def broker_version(self) -> str:
        """The version of the daemon that opened this session; empty if that daemon is too old to report it."""
        return self._session.welcome.version

    @property
    def granularity(self) -> int:
        """The size of every extent is a multiple of this many bytes."""
        return self._session.welcome.granularity_bytes

    @property
    def capacities(self) -> dict[str, int]:
        """The bytes that the broker could lend when this session began, by location. `device()` has today's."""
        limits = self._session.welcome.capacities
        return {messages.location_name(limit.location): limit.limit_bytes for limit in limits}

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process was forked from the client's."""
        return self._session.closed

    def model(
        self,
        name: str | None = None,
        *,
        virtual_capacity: Size | None = None,
        limit: Size | None = None,
        host_limit: Size | None = None,
        exclusive: bool = False,
    ) -> Model:
        """Register the model `name` of this tenant, or join it. This charges nothing.

        As a context manager, `with client.model("chat", limit="8GiB") as model`, it leaves the model at the end.

        Without `name`, the environment variable MEMBROKER_MODEL gives the name; `membroker run --model` sets it. For
        that model, MEMBROKER_LIMIT gives the limit if `limit` is not given.

        Sizes are in bytes, or text such as `"8GiB"`. `virtual_capacity` is how many bytes of addresses a pool of the
        model reserves by default. `limit` and `host_limit` are the most that the model may be charged at the device and
        at the host. They can lower what the broker's configuration allows, but never raise it. If the model is
        registered already, a number that is left out keeps its registered value.

        While no other process uses the model, other numbers replace those that are registered, for all its sessions: a
        cell of a notebook can be edited and run again.

        Raises `ModelConflict` if another living process has registered the model with other numbers (to change the
        limit for both, set `Model.limit`), `ModelAlreadyExists` if it is registered and `exclusive` is true,
        `InvalidRequest`, `TooMany`, `AccessDenied` (an observer), and `BrokerUnavailable`.
        """
        chosen = os.environ.get(MODEL_VARIABLE)
        name = chosen if name is None else name
        if not name:
            raise InvalidRequest(f"model() needs a name, or {MODEL_VARIABLE}=… as `membroker run --model` sets it")
        what = "limit"
        if limit is None and name == chosen and (default := os.environ.get(LIMIT_VARIABLE)):
            what, limit = LIMIT_VARIABLE, default
        asked = {Location.DEVICE: (what, limit), Location.HOST: ("host_limit", host_limit)}
        request = pb.RegisterModelRequest(
            model_id=arguments.name_of("model", name),
            limits=[
                Limit(location=messages.LOCATION_NUMBERS[location], limit_bytes=arguments.bytes_of(what, size))
                for location, (what, size) in asked.items()
                if size is not None
            ],
            exclusive=exclusive,
        )
        if virtual_capacity is not None:
            request.virtual_capacity_bytes = arguments.bytes_of("virtual_capacity", virtual_capacity, at_least=1)
        self._session.check_open()
        return Model(self._session, self._session.register_model(request))

    def attach(self, name: str, *, timeout: float = 60.0, newer_than: Segment | None = None) -> Segment:
        """Attach a segment of this tenant, read-only.

        `name` is the segment's own name, `model/segment` if several models have a segment of that name, or its resource
        name. Waits up to `timeout` seconds, at most a day, while the segment is being written. After an outage of the
        broker the wait begins again.

        A name that was published with `replace` means its newest version. With `newer_than` the call waits for a
        version after that segment, which a program that reloads its weights does in a thread.

        Raises `SegmentNotFound` at once if it does not exist, `SegmentNotSealed` after the timeout, `WriterDied`,
        `InvalidRequest`, `DeviceFailure`, `DescriptorLimit`, and `BrokerUnavailable`.
        """
        self._session.check_open()
        generation = None if newer_than is None else newer_than.generation
        return attach_newest(self._session, self._segment_name(name), timeout, generation)

    def delete_segment(self, name: str) -> SegmentStatus:
        """Delete a segment: it can no longer be attached, and its memory is free when its last session has left.

        `name` is as in `attach`. Returns its status, with the number of sessions that still hold it. Raises
        `SegmentNotFound`, `InvalidRequest`, and `BrokerUnavailable`.
        """
        self._session.check_open()
        whole = self._segment_name(name)
        try:
            deleted = self._session.delete_segment(pb.DeleteSegmentRequest(name=whole))
        except SegmentNotFound:
            newest = newest_name(self._session, whole)
            if newest is None:
                raise
            deleted = self._session.delete_segment(pb.DeleteSegmentRequest(name=newest))
        return messages.value(SegmentStatus, deleted)

    def segments(self) -> list[SegmentStatus]:
        """Return this tenant's segments, in the order in which they were created."""
        found = rows_of(self._session.ask, "list_segments", pb.ListSegmentsRequest(), "segments")
        return [messages.value(SegmentStatus, segment) for segment in found]

    def _segment_name(self, name: str) -> str:
        """Return the resource name that a user's name of a segment means."""
        if arguments.name_of("segment", name).startswith("tenants/"):
            return name
        model, _, own = name.rpartition("/")
        return f"{self.tenant}/models/{model or '-'}/segments/{own}"

    def device(self) -> DeviceStatus:
        """Return the device and its books, as they are now."""
        return messages.value(DeviceStatus, self._session.ask("get_device", pb.GetDeviceRequest()))

    def model_status(self, name: str) -> ModelStatus:
        """Return the figures of one model of this tenant, by its own name or its resource name, as they are now.

        The session need not have registered it. Raises `ModelNotFound`, `InvalidRequest` for a name that no model may
        have, and `BrokerUnavailable`.
        """
        if not arguments.name_of("model", name).startswith("tenants/"):
            name = f"{self.tenant}/models/{name}"
        return messages.value(ModelStatus, self._session.ask("get_model", pb.GetModelRequest(name=name)))

    def models(self) -> list[ModelStatus]:
        """Return this tenant's models, by name."""
        found = rows_of(self._session.ask, "list_models", pb.ListModelsRequest(), "models")
        return [messages.value(ModelStatus, model) for model in found]

    def sessions(self) -> list[SessionStatus]:
        """Return this tenant's sessions, in the order in which they were opened."""
        found = rows_of(self._session.ask, "list_sessions", pb.ListSessionsRequest(), "sessions")
        return [messages.value(SessionStatus, session) for session in found]

    def decisions(self, name: str) -> list[Decision]:
        """Return why requests of a model were refused or had to wait, and why its memory was recalled. Newest first.

        `name` is the name of a model, or the name of one request (`MembrokerError.request`). The broker keeps the last
        8 decisions of each model, in memory. Raises `ModelNotFound`, `InvalidRequest`, and `BrokerUnavailable`.
        """
        if not arguments.name_of("model", name).startswith(("tenants/", "sessions/")):
            name = f"{self.tenant}/models/{name}"
        found = self._session.ask("list_decisions", pb.ListDecisionsRequest(name=name)).decisions
        return [messages.value(Decision, decision) for decision in found]

    def on_notice(self, callback: Callable[[Notice], object]) -> None:
        """Call `callback` with each `Draining`, `Undrained`, `Stopping`, `Disconnected`, `Resumed` and `Forgotten`.

        A thread of the library calls it, with one notice at a time. If a drain is under way, `Draining` is the first.
        While the callback runs, garbage-collected memory is not released, so return soon. An exception is logged. The
        callback and all that it refers to live until the client is closed. Raises `InvalidRequest` for an object that
        is not callable.
        """
        if not callable(callback):
            raise InvalidRequest(f"on_notice takes a function of one notice, not {callback!r}")
        self._session.check_open()
        self._session.reconnecting.notices.on_notice(callback)

    def defer_recalls(self) -> AbstractContextManager[None]:
        """Hold up recalls, and all work of the library's own threads, during a block: for a CUDA graph capture.

        During the block no callback of `Model.on_recall` or `on_notice` runs, no spare page is released, and no
        garbage-collected memory is released. Each of these would wait for the device, and such a wait ends every
        capture in this process. All of it happens after the block. A recall whose deadline passes during the block is
        therefore answered late. If a callback is running, the block begins when it has returned, or after 5 seconds.
        `TorchMemory.capture` calls this by itself.
        """
        self._session.check_open()
        return self._session.reconnecting.notices.held_up()

    def close(self) -> None:
        """Release all memory that this client's pools and buffers hold, and end the session. Idempotent.

        Memory with living views stays mapped until the last view is gone. The session stays open until then, too, and
        ends without another call. If the broker is unreachable, this raises nothing. It waits for the `timeout` that
        was passed to `connect`, or for the `outage` if that is shorter. If the broker does not return in that time, the
        session stays charged until this process ends or an operator forgets the session. In a signal handler that has
        interrupted a call of the library, another thread closes it soon afterwards.
        """
        self._session.close()

    def __repr__(self) -> str:
        return f"<membroker.Client {self.session} of {self.tenant} at {self.endpoint}{', closed' * self.closed}>"
