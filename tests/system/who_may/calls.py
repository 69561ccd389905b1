"""The rows of the permission table that are calls: what the broker answers to each actor."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import http.client
import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, until

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2 as rpb

from .table import BOTH, GRPC, KINDS, MARK, PAGE, Deed, Party, alike, row

_OWN = "broker: ids are looked up among what the session itself holds"
_JOINED = "broker: models are looked up among those that the session itself registered or joined"
_TENANT = "broker: names begin with the tenant, and the endpoint is the tenant"
_DOOR = "kernel: the sockets' owner and mode"
_SERVED = "broker: AdminService is served at `admin/` alone"


def _only_s(reason: str) -> str:
    """What is S's alone: others are refused for this reason."""
    return f"yes {reason} {reason} UNIMPLEMENTED EACCES {reason} {reason}"


def _tenants(reason: str) -> str:
    """What is the tenant's: another tenant gets this."""
    return f"yes yes {reason} UNIMPLEMENTED EACCES yes yes"


def _operators(outcome: str) -> str:
    return f"UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED {outcome} EACCES UNIMPLEMENTED UNIMPLEMENTED"


Fields = Callable[[Any], dict[str, Any]]
"""What a request about S has in its fields."""


def _request(method: str, fields: dict[str, Any]) -> Any:
    name = f"{method}Request"
    return getattr(bpb if hasattr(bpb, name) else apb, name)(**fields)


def call(
    number: str, what: str, outcomes: str, enforced: str, method: str, fields: Fields, before: Deed | None = None
) -> None:
    """Put a row into the table whose deed is one call of BrokerService, by each way that it has."""
    transports = BOTH if method in KINDS else GRPC
    put = row(number, what, outcomes, enforced, calls=(method,), transports=transports, before=before)
    put(lambda me, target: me.ask(target, method, _request(method, fields(target))))


def admin_call(number: str, outcome: str, method: str, fields: Fields, more: str = "") -> None:
    """Put a row into the table whose deed is one call of AdminService."""
    put = row(number, f"AdminService, {method}{more}", _operators(outcome), _SERVED, calls=(method,))
    put(lambda me, target: raw.admin_call(me.door, method, _request(method, fields(target))))


_ALL = "yes yes yes UNIMPLEMENTED EACCES yes yes"
call("M1", "register a model of its own", _ALL, _DOOR, "RegisterModel", lambda s: {"model_id": f"{s.model_id}-own"})
call("L1", "see the device and its sums (GetDevice)", _ALL, _DOOR, "GetDevice", lambda s: {})


@row("M2", "join S's model", _tenants("its-own"), _TENANT, calls=("RegisterModel",), transports=BOTH)
def join(me: Party, target: Any) -> Any:
    """Another tenant cannot even say whose model it means: names are its own."""
    answer = me.ask(target, "RegisterModel", bpb.RegisterModelRequest(model_id=target.model_id))
    return answer if isinstance(answer, Status) or answer.name == target.model else "its-own"


@row("M4", "change the limit of S's model", _tenants("its-own"), _TENANT, calls=("RegisterModel",), transports=BOTH)
def change_limit(me: Party, target: Any) -> Any:
    """It is the tenant's, as the model is; the operator's limit stays above it."""
    limit = rpb.Limit(location=rpb.LOCATION_DEVICE, limit_bytes=1 << 40)
    request = bpb.RegisterModelRequest(model_id=target.model_id, limits=[limit], replace_limits=True)
    answer = me.ask(target, "RegisterModel", request)
    return answer if isinstance(answer, Status) or answer.name == target.model else "its-own"


# --- memory and segments ---

_MODEL, _SEGMENT = "MODEL_NOT_FOUND", "SEGMENT_NOT_FOUND"
_WRITTEN: Fields = lambda s: {"generation": s.draft_generation}  # noqa: E731 - as the others
_OF_S: list[tuple[str, str, str, str, str, Fields]] = [
    ("M3", "leave S's model without having joined it", _MODEL, _JOINED, "UnregisterModel", lambda s: {"name": s.idle}),
    ("B3", "release S's extent", "EXTENT_NOT_FOUND", _OWN, "ReleaseExtents", lambda s: {"extent_ids": [s.extent]}),
    ("G3", "seal the segment that S writes", _SEGMENT, _OWN, "SealSegment", _WRITTEN),
    ("G6", "detach S from a segment", _SEGMENT, _OWN, "DetachSegment", lambda s: {"generation": s.sealed_generation}),
]
for _number, _what, _refusal, _enforced, _method, _fields in _OF_S:
    call(_number, _what, _only_s(_refusal), _enforced, _method, _fields)


def _under_model(**numbers: Any) -> Fields:
    return lambda s: {"model": s.model, **numbers}


_BY_MODEL: list[tuple[str, str, str, str, Fields]] = [
    ("B1", "B2", "allocate", "AllocateExtents", _under_model(extent_bytes=PAGE, count=1)),
    ("B4", "", "declare", "DeclareMemory", _under_model(declared_bytes=PAGE)),
    ("G1", "G2", "create a segment", "CreateSegment", _under_model(segment_id="new", size_bytes=PAGE)),
]
for _number, _joined, _what, _method, _fields in _BY_MODEL:
    _stranger = f"{_what} under S's model without having joined it"
    call(_number, _stranger, _only_s(_MODEL), _JOINED, _method, _fields)
    if _joined:
        _member = f"join S's model, then {_what} under it"
        call(_joined, _member, _tenants(_MODEL), _TENANT, _method, _fields, join)

_OF_THE_TENANT: list[tuple[str, str, str, str, Fields]] = [
    ("G4", "attach S's sealed segment", _SEGMENT, "AttachSegment", lambda s: {"name": s.sealed}),
    (
        "G5",
        "attach it by its own name alone (`-` for the model)",
        _SEGMENT,
        "AttachSegment",
        lambda s: {"name": f"{s.tenant}/models/-/segments/{s.label}"},
    ),
    ("G7", "delete S's sealed segment", _SEGMENT, "DeleteSegment", lambda s: {"name": s.sealed}),
    ("G8", "delete the segment that S is writing", _SEGMENT, "DeleteSegment", lambda s: {"name": s.draft}),
    ("L7", "see how much could be borrowed for S's model (GetAvailable)", _MODEL, "GetAvailable", _under_model()),
    ("L8", "see S's model by its name (GetModel)", _MODEL, "GetModel", lambda s: {"name": s.model}),
    (
        "L9",
        "see why requests for S's model were refused (ListDecisions)",
        _MODEL,
        "ListDecisions",
        lambda s: {"name": s.model},
    ),
]
for _number, _what, _refusal, _method, _fields in _OF_THE_TENANT:
    call(_number, _what, _tenants(_refusal), _TENANT, _method, _fields)

# --- looking ---


def _list(number: str, what: str, method: str, name: Callable[[Any], str]) -> None:
    """Put a row into the table about what of S a listing shows."""

    def deed(me: Party, target: Any) -> Any:
        answer = me.ask(target, method, getattr(bpb, f"{method}Request")(page_size=1000))
        if isinstance(answer, Status):
            return answer
        rows = getattr(answer, method.removeprefix("List").lower())
        return "yes" if any(row.name == name(target) for row in rows) else "not-shown"

    row(number, f"see {what} in {method}", _tenants("not-shown"), _TENANT, calls=(method,), transports=BOTH)(deed)


_list("L2", "S's model", "ListModels", lambda s: s.model)
_list("L3", "S", "ListSessions", lambda s: s.session)
_list("L4", "S's segment", "ListSegments", lambda s: s.sealed)


@row(
    "L6",
    "read `/metrics`, which shows every tenant's models",
    "yes yes yes yes yes ENETUNREACH ENETUNREACH",
    "kernel: 127.0.0.1 of the daemon's network namespace",
)
def scrape(me: Party, target: Any) -> Any:
    """Who can, sees everybody: S's model is there by name."""
    url = urlsplit(target.metrics_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=DEADLINE_SECONDS)
    try:
        connection.request("GET", url.path)
        body = connection.getresponse().read().decode()
    finally:
        connection.close()
    assert f'model="{target.model_id}"' in body
    return "yes"


@row("L5", "ask for the health, without a token", "yes yes yes yes EACCES yes yes", _DOOR)
def health(me: Party, target: Any) -> Any:
    with grpc.insecure_channel(f"unix:{me.door}/grpc.sock") as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)


# --- the operator's ---

_READS: Mapping[str, Fields] = {
    **dict.fromkeys(("GetDevice", "ListTenants", "ListQuotas", "ListProcesses", "Reload"), lambda s: {}),
    **dict.fromkeys(("ListModels", "ListSessions", "ListSegments"), lambda s: {"page_size": 1000}),
    "ListDecisions": lambda s: {"name": s.model},
}


@row("A1", "AdminService, each call that reads", _operators("yes"), _SERVED, calls=tuple(_READS))
def read_all(me: Party, target: Any) -> Any:
    """Each call of AdminService that reads: all are answered alike."""
    calls = [(method, _request(method, fields(target))) for method, fields in _READS.items()]
    return alike(*(functools.partial(raw.admin_call, me.door, *each) for each in calls))


admin_call("A2", "yes", "SetQuota", lambda s: {"name": s.model, "limit_bytes": 64 * PAGE})
admin_call("A3", "yes", "DeleteSegment", lambda s: {"name": s.sealed})
admin_call("A5", "SESSION_NOT_DETACHED", "ForgetSession", lambda s: {"name": s.session}, " of an open session")
# S itself is a session of the process that runs the tests.
_ENDED = " of a session that has ended"
admin_call("A7", "SESSION_NOT_EVICTABLE", "EvictSession", lambda s: {"name": "sessions/1"}, _ENDED)
admin_call("A8", "yes", "SleepModel", lambda s: {"name": s.model})


@row("A6", "AdminService, Drain and Undrain", _operators("yes"), _SERVED, calls=("Drain", "Undrain"))
def drain_and_undrain(me: Party, target: Any) -> Any:
    drained = raw.admin_call(me.door, "Drain", apb.DrainRequest())
    undrained = raw.admin_call(me.door, "Undrain", apb.UndrainRequest())
    assert type(drained) is type(undrained)
    return undrained


@row(
    "A9",
    "AdminService, CreateTenant, UpdateTenant and DeleteTenant",
    _operators("yes"),
    _SERVED,
    calls=("CreateTenant", "UpdateTenant", "DeleteTenant"),
)
def make_and_delete_a_tenant(me: Party, target: Any) -> Any:
    name = f"tenants/pod-{time.monotonic_ns()}"
    change = apb.UpdateTenantRequest(name=name, settings=apb.TenantSettings(uids=[1]))
    change.update_mask.paths.append("uids")
    made = raw.admin_call(me.door, "CreateTenant", apb.CreateTenantRequest(name=name))
    changed = raw.admin_call(me.door, "UpdateTenant", change)
    deleted = raw.admin_call(me.door, "DeleteTenant", apb.DeleteTenantRequest(name=name))
    assert type(made) is type(changed) is type(deleted)
    if isinstance(deleted, apb.Tenant):
        listed = apb.ListTenantsRequest(page_size=1000)
        until(lambda: name not in str(raw.admin_call(me.door, "ListTenants", listed)))
    return deleted


row(
    "A4",
    "open `admin/grpc.sock`",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: `admin/` is the daemon's user's, 0700; a mount",
    kernel=True,
)(lambda me, target: raw.admin_call(Path(target.admin), "GetDevice", bpb.GetDeviceRequest()))


# --- secrets ---


_NEEDED = "TOKEN_REQUIRED TOKEN_REQUIRED TOKEN_REQUIRED UNIMPLEMENTED EACCES TOKEN_REQUIRED TOKEN_REQUIRED"
row("T1", "call without a token", _NEEDED, "broker: the register of tokens")(
    lambda me, target: me.ask(target, "ListModels", bpb.ListModelsRequest(), token="")
)
_GOOD = "yes yes TOKEN_REJECTED UNIMPLEMENTED EACCES yes yes"
_ITS_OWN = "broker: a token is good at its own endpoint alone"
row("T2", "list with S's token", _GOOD, _ITS_OWN)(
    lambda me, target: me.ask(target, "ListModels", bpb.ListModelsRequest(), token=target.token)
)


@row("T3", "release S's extent with S's token", _GOOD, _ITS_OWN)
def release_as_s(me: Party, target: Any) -> Any:
    return me.ask(target, "ReleaseExtents", bpb.ReleaseExtentsRequest(extent_ids=[target.extent]), token=target.token)


@row(
    "T4",
    "get memory with S's token",
    "yes S-gets-it TOKEN_REJECTED UNIMPLEMENTED EACCES S-gets-it S-gets-it",
    "broker: descriptors leave on the connection of the session that is charged",
)
def borrow_as_s(me: Party, target: Any) -> Any:
    """S is charged, and nobody but S gets the memory."""
    answer = me.ask(target, "AllocateExtents", raw.allocation(target.model, PAGE), token=target.token)
    if isinstance(answer, Status):
        return answer
    at_me = me.session is not None and raw.is_readable(me.session.sock)
    return "yes" if at_me else "S-gets-it"


@row(
    "T5",
    "resume S's session with S's token",
    "- TOKEN_REJECTED TOKEN_REJECTED ENOENT EACCES TOKEN_REJECTED TOKEN_REJECTED",
    "broker: a session is resumed by its own process, at its own endpoint",
)
def resume_s(me: Party, target: Any) -> Any:
    with raw.Connection(me.door) as line:
        line.send(pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, resume_token=target.token)))
        frame = line.receive().frame
        return frame.reply.error if frame.HasField("reply") else frame


@row(
    "D1",
    "map, read and write an extent, by a descriptor that another process has passed on",
    "yes yes yes yes yes yes yes",
    "nothing: a descriptor is a bearer capability",
)
def map_extent(me: Party, target: Any) -> Any:
    with mmap.mmap(target.extent_descriptor, PAGE) as memory:
        assert memory[: len(MARK)] == MARK
        memory[100:104] = b"mine"
    return "yes"


@row(
    "D2",
    "map and read a sealed segment, by a descriptor that another process has passed on",
    "yes yes yes yes yes yes yes",
    "nothing: a descriptor is a bearer capability",
)
def map_sealed(me: Party, target: Any) -> Any:
    with mmap.mmap(target.sealed_descriptor, PAGE, prot=mmap.PROT_READ) as memory:
        assert memory[: len(MARK)] == MARK
    return "yes"


@row(
    "D3",
    "write to a sealed segment, by its descriptor, with the host driver",
    "EPERM EPERM EPERM EPERM EPERM EPERM EPERM",
    "kernel: the memfd's seals; on a GPU nothing",
)
def write_sealed(me: Party, target: Any) -> Any:
    """By a mapping, a write, a hole, another length, another seal, a descriptor opened again: all are refused alike.

    A mapping to read does not become one to write either.
    """
    descriptor, libc = target.sealed_descriptor, ctypes.CDLL(None, use_errno=True)

    def punch_a_hole() -> None:
        if libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(PAGE)):
            raise OSError(ctypes.get_errno(), "fallocate")

    def write_by_another_descriptor() -> None:
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            os.pwrite(again, b"mine", 0)
        finally:
            os.close(again)

    tries: list[Callable[[], Any]] = [lambda: mmap.mmap(descriptor, PAGE), lambda: os.pwrite(descriptor, b"mine", 0)]
    tries += [lambda size=size: os.ftruncate(descriptor, size) for size in (0, 2 * PAGE)]
    tries.append(lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE))
    refusal = alike(*tries, punch_a_hole, write_by_another_descriptor)
    libc.mmap.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(PAGE), mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0))
    assert libc.mprotect(address, ctypes.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert libc.munmap(address, ctypes.c_size_t(PAGE)) == 0
    return refusal
