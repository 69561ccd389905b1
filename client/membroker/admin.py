"""`Admin`: the operator's endpoint of one device, with the books of all tenants.

Owns the calls of AdminService, and the values that only it returns. Everything else about the books is in `types`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .closing import Closing
from .errors import BrokerUnavailable
from .session import messages
from .session.endpoint import check_path, diagnose, not_answering
from .session.rpc import GrpcCalls, rows_of
from .types import Decision, DeviceStatus, ModelStatus, SegmentStatus, SessionStatus, SleepStatus
from .v1 import admin_pb2, broker_pb2
from .v1.admin_pb2_grpc import AdminServiceStub
from .vmm.driver import Location

CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    """A limit, a guarantee and a weight set by command. They are None if nothing is set.

    `shortfall_bytes` is how much of all guarantees at the location cannot be kept now.
    """

    name: str
    location: str
    limit_bytes: int | None
    used_bytes: int
    guarantee_bytes: int | None = None
    shortfall_bytes: int = 0
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class TenantBooks:
    """What a tenant is charged at one location. `limit_bytes` is None if only the capacity applies.

    `guarantee_bytes` is its own guarantee, or the sum of its models' if that is more. `weight` is in force among
    tenants. Its requests wait for `waiting_bytes`.
    """

    location: str
    used_bytes: int
    limit_bytes: int | None
    guarantee_bytes: int = 0
    weight: int = 1
    waiting_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """The settings of a tenant that was made by command; `mode` has the permission bits of its sockets."""

    uids: tuple[int, ...]
    owner: int | None
    group: int | None
    mode: int | None
    lend_unused: bool
    idle_sleep_seconds: float | None


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """A tenant: what it is charged by location, and how many models and sessions it has, without observers.

    `settings` is None if it was not made by command. `deleting`: it is gone when nothing of it is lent.
    """

    name: str
    books: Mapping[str, TenantBooks]
    models: int
    sessions: int
    settings: TenantSettings | None = None
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process that uses the device, as the driver and the books see it; bytes of the device.

    `used_bytes` is the driver's figure. `excess_bytes` is the part that is neither charged to its sessions nor part of
    the segments that they hold. `command` is empty if the broker cannot read it, and
    `pod_uid` and `pod_name` as in `SessionStatus`.
    """

    pid: int
    command: str
    used_bytes: int
    charged_bytes: int
    segment_bytes: int
    excess_bytes: int
    sessions: tuple[str, ...]
    models: tuple[str, ...]
    pod_uid: str = ""
    pod_name: str = ""


@dataclass(frozen=True, slots=True)
class SessionSleep:
    """What one session answers to `membroker sleep` or `wake`. `status` is None if it did not answer in time.

    A `detached` session has no connection, and was not asked.
    """

    session: str
    pid: int
    status: SleepStatus | None
    detached: bool


class Admin(Closing):
    """AdminService at `path`, the `grpc.sock` of a device's admin endpoint. Raises the library's errors.

    A context manager. Only the daemon's user and root may connect.
    """

    def __init__(self, path: Path) -> None:
        _knock(path)
        self._path = path
        self._calls = GrpcCalls(path, service=AdminServiceStub)

    @property
    def endpoint(self) -> str:
        """Where the device's tenants are entered: the directory of the only one, else as a pattern."""
        tenants = self._path.parent.with_name("tenants")
        try:
            names = [entry.name for entry in tenants.iterdir()]
        except OSError:
            names = []
        return str(tenants / (names[0] if len(names) == 1 else "NAME"))

    def device(self) -> DeviceStatus:
        """Return the device and its books."""
        return messages.value(DeviceStatus, self._call("GetDevice", broker_pb2.GetDeviceRequest()))

    def models(self) -> list[ModelStatus]:
        """Return the models of all tenants, by tenant and name."""
        found = rows_of(self._call, "ListModels", broker_pb2.ListModelsRequest(), "models")
        return [messages.value(ModelStatus, model) for model in found]

    def sessions(self) -> list[SessionStatus]:
        """Return the sessions of all tenants, in the order in which they began."""
        found = rows_of(self._call, "ListSessions", broker_pb2.ListSessionsRequest(), "sessions")
        return [messages.value(SessionStatus, session) for session in found]

    def segments(self) -> list[SegmentStatus]:
        """Return the segments of all tenants, in the order in which they began."""
        found = rows_of(self._call, "ListSegments", broker_pb2.ListSegmentsRequest(), "segments")
        return [messages.value(SegmentStatus, segment) for segment in found]

    def tenants(self) -> list[TenantStatus]:
        """Return the tenants by name: the configured ones, and others that have a session or are charged."""
        found = rows_of(self._call, "ListTenants", admin_pb2.ListTenantsRequest(), "tenants")
        return [_tenant(tenant) for tenant in found]

    def create_tenant(self, name: str, settings: Mapping[str, Any], *, dry_run: bool = False) -> TenantStatus:
        """Make a tenant, `tenants/…`, with these fields of `TenantSettings` on the wire, and return it.

        With `dry_run` nothing is made: what would be refused is refused.
        """
        given = admin_pb2.TenantSettings(**settings)
        request = admin_pb2.CreateTenantRequest(name=name, settings=given, validate_only=dry_run)
        return _tenant(self._call("CreateTenant", request))

    def update_tenant(self, name: str, settings: Mapping[str, Any], *, dry_run: bool = False) -> TenantStatus:
        """Change settings of a tenant, as `create_tenant`; None removes one."""
        given = admin_pb2.TenantSettings(**{field: value for field, value in settings.items() if value is not None})
        request = admin_pb2.UpdateTenantRequest(name=name, settings=given, validate_only=dry_run)
        request.update_mask.paths.extend(settings)
        return _tenant(self._call("UpdateTenant", request))

    def delete_tenant(self, name: str) -> TenantStatus:
        """Begin to delete a tenant, `tenants/…`, and return how far it is. It is gone when nothing of it is lent."""
        return _tenant(self._call("DeleteTenant", admin_pb2.DeleteTenantRequest(name=name)))

    def endpoint_of(self, tenant: str) -> Path:
        """Return the directory at which programs enter `tenants/…`."""
        return self._path.parent.with_name("tenants") / tenant.removeprefix("tenants/")

    def delete_segment(self, name: str) -> None:
        """End a segment of any tenant, by its resource name."""
        self._call("DeleteSegment", broker_pb2.DeleteSegmentRequest(name=name))

    def set_quota(
        self, name: str, location: Location, numbers: Mapping[str, int | None], *, dry_run: bool = False
    ) -> QuotaStatus:
        """Set numbers of a quota of `tenants/…` or `tenants/…/models/…`; None removes one.

        They are `limit_bytes`, `guarantee_bytes` and `weight`. With `dry_run` nothing is set: what would be refused is
        refused, and what would be in force is returned.
        """
        request = admin_pb2.SetQuotaRequest(
            name=name,
            location=messages.LOCATION_NUMBERS[location],
            limit_bytes=numbers.get("limit_bytes"),
            guarantee_bytes=numbers.get("guarantee_bytes"),
            weight=numbers.get("weight"),
            validate_only=dry_run,
        )
        request.update_mask.paths.extend(numbers)
        return messages.value(QuotaStatus, self._call("SetQuota", request))

    def quotas(self, *, configured: bool = False) -> list[QuotaStatus]:
        """Return the quotas that were set by command; with `configured`, all that are in force."""
        quotas = self._call("ListQuotas", admin_pb2.ListQuotasRequest(all=configured)).quotas
        return [messages.value(QuotaStatus, quota) for quota in quotas]

    def processes(self) -> list[ProcessStatus]:
        """Return the processes that the driver sees using the device, largest excess first."""
        processes = self._call("ListProcesses", admin_pb2.ListProcessesRequest()).processes
        return [messages.value(ProcessStatus, process) for process in processes]

    def decisions(self, name: str) -> list[Decision]:
        """Return why the last requests of `tenants/…/models/…` were refused or waited, and its memory was recalled."""
        answer = self._call("ListDecisions", broker_pb2.ListDecisionsRequest(name=name))
        return [messages.value(Decision, decision) for decision in answer.decisions]

    def forget(self, name: str) -> SessionStatus:
        """End a detached session, `sessions/…`, and return its last state."""
        return messages.value(SessionStatus, self._call("ForgetSession", admin_pb2.ForgetSessionRequest(name=name)))

    def evict(self, name: str) -> SessionStatus:
        """End the process of a session, `sessions/…`, and return the session's last state."""
        return messages.value(SessionStatus, self._call("EvictSession", admin_pb2.EvictSessionRequest(name=name)))

    def sleep_model(self, name: str, *, wake: bool, keep_weights: bool, within: float) -> list[SessionSleep]:
        """Ask the engines of a model to sleep or to wake, and return how far each is. Ask again until all are there."""
        request = admin_pb2.SleepModelRequest(name=name, wake=wake, keep_weights=keep_weights)
        request.within.FromMilliseconds(round(within * 1000))
        return [
            messages.value(
                SessionSleep,
                session,
                status=messages.value(SleepStatus, session.status) if session.HasField("status") else None,
            )
            for session in self._call("SleepModel", request).sessions
        ]

    def drain(self, deadline: datetime | None, *, exits: bool) -> DeviceStatus:
        """Stop lending; with `exits` the daemon exits once nothing is charged, or at the deadline."""
        request = admin_pb2.DrainRequest(exit=exits)
        if deadline is not None:
            request.deadline.FromDatetime(deadline)
        return messages.value(DeviceStatus, self._call("Drain", request))

    def undrain(self) -> DeviceStatus:
        """Lend again."""
        return messages.value(DeviceStatus, self._call("Undrain", admin_pb2.UndrainRequest()))

    def close(self) -> None:
        """Close the channel."""
        self._calls.close()

    def _call(self, method: str, request: Any) -> Any:
        try:
            return self._calls.call(method, request, CALL_SECONDS)
        except BrokerUnavailable as error:
            if not error.reason:  # no answer: gRPC cannot tell a stopped broker from a dead one
                _knock(self._path)
                raise BrokerUnavailable(not_answering(self._path)) from error
            raise


def _tenant(message: admin_pb2.Tenant) -> TenantStatus:
    return messages.value(
        TenantStatus,
        message,
        books=messages.by_location(TenantBooks, message.books),
        settings=messages.value(TenantSettings, message.settings) if message.HasField("settings") else None,
    )


def _knock(path: Path) -> None:
    """Try to connect, and raise an error that says what is wrong; gRPC would report UNAVAILABLE for everything."""
    check_path(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)  # a stopped broker's queue may be full
        try:
            connection.connect(os.fspath(path))
        except OSError as error:
            raise diagnose(path, error) from error
