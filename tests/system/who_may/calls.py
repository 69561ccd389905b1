"""The rows of the permission table that are calls: what the broker answers to each actor."""

from __future__ import annotations

import ctypes
import functools
import http.client
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb

from .table import BOTH, MARK, PAGE, Party, outcome, row

_OWN = "broker: ids are looked up among what the session itself holds"
_JOINED = "broker: models are looked up among those that the session itself registered or joined"
_TENANT = "broker: names begin with the tenant, and the endpoint is the tenant"
_DOOR = "kernel: the sockets' owner and mode"
_SERVED = "broker: AdminService is served at `admin/` alone"


@row(
    "M1",
    "register a model of its own",
    "yes yes yes UNIMPLEMENTED EACCES yes yes",
    _DOOR,
    transports=BOTH,
)
def register_own(me: Party, target: Any) -> Any:
    return me.ask(target, "RegisterModel", bpb.RegisterModelRequest(model_id=f"{target.model_id}-own"))


@row(
    "M2",
    "join S's model",
    "yes yes its-own UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def join(me: Party, target: Any) -> Any:
    """Another tenant cannot even say whose model it means: names are its own."""
    answer = me.ask(target, "RegisterModel", bpb.RegisterModelRequest(model_id=target.model_id))
    return answer if isinstance(answer, Status) or answer.name == target.model else "its-own"


@row(
    "M3",
    "leave S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def leave(me: Party, target: Any) -> Any:
    return me.ask(target, "UnregisterModel", bpb.UnregisterModelRequest(name=target.idle))


# --- memory and segments ---


@row(
    "B2",
    "join S's model, then allocate under it",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
    before=join,
)
@row(
    "B1",
    "allocate under S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def allocate(me: Party, target: Any) -> Any:
    return me.ask(target, "AllocateExtents", raw.allocation(target.model, PAGE))


@row(
    "B3",
    "release S's extent",
    "yes EXTENT_NOT_FOUND EXTENT_NOT_FOUND UNIMPLEMENTED EACCES EXTENT_NOT_FOUND EXTENT_NOT_FOUND",
    _OWN,
    transports=BOTH,
)
def release(me: Party, target: Any) -> Any:
    return me.ask(target, "ReleaseExtents", bpb.ReleaseExtentsRequest(extent_ids=[target.extent]))


@row(
    "B4",
    "declare under S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def declare(me: Party, target: Any) -> Any:
    return me.ask(target, "DeclareMemory", bpb.DeclareMemoryRequest(model=target.model, declared_bytes=PAGE))


@row(
    "G2",
    "join S's model, then create a segment under it",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
    before=join,
)
@row(
    "G1",
    "create a segment under S's model without having joined it",
    "yes MODEL_NOT_FOUND MODEL_NOT_FOUND UNIMPLEMENTED EACCES MODEL_NOT_FOUND MODEL_NOT_FOUND",
    _JOINED,
    transports=BOTH,
)
def create(me: Party, target: Any) -> Any:
    return me.ask(target, "CreateSegment", raw.segment_of(target.model, "new", PAGE))


@row(
    "G3",
    "seal the segment that S writes",
    "yes SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND",
    _OWN,
    transports=BOTH,
)
def seal(me: Party, target: Any) -> Any:
    return me.ask(target, "SealSegment", bpb.SealSegmentRequest(generation=target.draft_generation))


@row(
    "G4",
    "attach S's sealed segment",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def attach(me: Party, target: Any) -> Any:
    return me.ask(target, "AttachSegment", bpb.AttachSegmentRequest(name=target.sealed))


@row(
    "G5",
    "attach it by its own name alone (`-` for the model)",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def attach_by_label(me: Party, target: Any) -> Any:
    name = f"{target.tenant}/models/-/segments/{target.label}"
    return me.ask(target, "AttachSegment", bpb.AttachSegmentRequest(name=name))


@row(
    "G6",
    "detach S from a segment",
    "yes SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES SEGMENT_NOT_FOUND SEGMENT_NOT_FOUND",
    _OWN,
    transports=BOTH,
)
def detach(me: Party, target: Any) -> Any:
    return me.ask(target, "DetachSegment", bpb.DetachSegmentRequest(generation=target.sealed_generation))


@row(
    "G7",
    "delete S's sealed segment",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def delete(me: Party, target: Any) -> Any:
    return me.ask(target, "DeleteSegment", bpb.DeleteSegmentRequest(name=target.sealed))


@row(
    "G8",
    "delete the segment that S is writing",
    "yes yes SEGMENT_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
    transports=BOTH,
)
def delete_draft(me: Party, target: Any) -> Any:
    return me.ask(target, "DeleteSegment", bpb.DeleteSegmentRequest(name=target.draft))


# --- looking ---


@row(
    "L1",
    "see the device and its sums (GetDevice)",
    "yes yes yes UNIMPLEMENTED EACCES yes yes",
    _DOOR,
)
def look(me: Party, target: Any) -> Any:
    return me.ask(target, "GetDevice", bpb.GetDeviceRequest())


@row(
    "L2",
    "see S's model in ListModels",
    "yes yes not-shown UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def find_model(me: Party, target: Any) -> Any:
    answer = me.ask(target, "ListModels", bpb.ListModelsRequest(page_size=1000))
    return answer if isinstance(answer, Status) else _shown(answer.models, target.model)


@row(
    "L3",
    "see S in ListSessions",
    "yes yes not-shown UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def find_session(me: Party, target: Any) -> Any:
    answer = me.ask(target, "ListSessions", bpb.ListSessionsRequest(page_size=1000))
    return answer if isinstance(answer, Status) else _shown(answer.sessions, target.session)


@row(
    "L4",
    "see S's segment in ListSegments",
    "yes yes not-shown UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def find_segment(me: Party, target: Any) -> Any:
    answer = me.ask(target, "ListSegments", bpb.ListSegmentsRequest(page_size=1000))
    return answer if isinstance(answer, Status) else _shown(answer.segments, target.sealed)


def _shown(rows: Any, name: str) -> str:
    return "yes" if any(row.name == name for row in rows) else "not-shown"


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


@row(
    "L5",
    "ask for the health, without a token",
    "yes yes yes yes EACCES yes yes",
    _DOOR,
)
def health(me: Party, target: Any) -> Any:
    with grpc.insecure_channel(f"unix:{me.door}/grpc.sock") as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)


@row(
    "L7",
    "see how much could be borrowed for S's model (GetAvailable)",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def see_available(me: Party, target: Any) -> Any:
    return me.ask(target, "GetAvailable", bpb.GetAvailableRequest(model=target.model))


@row(
    "L8",
    "see S's model by its name (GetModel)",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def get_model(me: Party, target: Any) -> Any:
    return me.ask(target, "GetModel", bpb.GetModelRequest(name=target.model))


@row(
    "L9",
    "see why requests for S's model were refused (ListDecisions)",
    "yes yes MODEL_NOT_FOUND UNIMPLEMENTED EACCES yes yes",
    _TENANT,
)
def list_decisions(me: Party, target: Any) -> Any:
    return me.ask(target, "ListDecisions", bpb.ListDecisionsRequest(name=target.model))


# --- the operator's ---


@row(
    "A1",
    "AdminService, each call that reads",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def read_all(me: Party, target: Any) -> Any:
    """Each call of AdminService that reads: all are answered alike."""
    calls = {
        "GetDevice": bpb.GetDeviceRequest(),
        "ListModels": bpb.ListModelsRequest(page_size=1000),
        "ListSessions": bpb.ListSessionsRequest(page_size=1000),
        "ListSegments": bpb.ListSegmentsRequest(page_size=1000),
        "ListDecisions": bpb.ListDecisionsRequest(name=target.model),
        "ListTenants": apb.ListTenantsRequest(),
        "ListQuotas": apb.ListQuotasRequest(),
        "ListProcesses": apb.ListProcessesRequest(),
    }
    (one,) = {outcome(functools.partial(raw.admin_call, me.door, *call))[0] for call in calls.items()}
    return one


@row(
    "A2",
    "AdminService, SetQuota",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def set_quota(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "SetQuota", apb.SetQuotaRequest(name=target.model, limit_bytes=64 * PAGE))


@row(
    "A3",
    "AdminService, DeleteSegment",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def delete_any(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "DeleteSegment", bpb.DeleteSegmentRequest(name=target.sealed))


@row(
    "A5",
    "AdminService, ForgetSession of an open session",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED SESSION_NOT_DETACHED EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def forget_open(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "ForgetSession", apb.ForgetSessionRequest(name=target.session))


@row(
    "A6",
    "AdminService, Drain and Undrain",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def drain_and_undrain(me: Party, target: Any) -> Any:
    drained = raw.admin_call(me.door, "Drain", apb.DrainRequest())
    undrained = raw.admin_call(me.door, "Undrain", apb.UndrainRequest())
    assert type(drained) is type(undrained)
    return undrained


@row(
    "A7",
    "AdminService, EvictSession of a session that has ended",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED SESSION_NOT_EVICTABLE EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def evict_ended(me: Party, target: Any) -> Any:
    """S itself is a session of the process that runs the tests."""
    return raw.admin_call(me.door, "EvictSession", apb.EvictSessionRequest(name="sessions/1"))


@row(
    "A8",
    "AdminService, SleepModel",
    "UNIMPLEMENTED UNIMPLEMENTED UNIMPLEMENTED yes EACCES UNIMPLEMENTED UNIMPLEMENTED",
    _SERVED,
)
def sleep_model(me: Party, target: Any) -> Any:
    return raw.admin_call(me.door, "SleepModel", apb.SleepModelRequest(name=target.model))


@row(
    "A4",
    "open `admin/grpc.sock`",
    "- EACCES EACCES yes EACCES ENOENT ENOENT",
    "kernel: `admin/` is the daemon's user's, 0700; a mount",
    kernel=True,
)
def open_admin(me: Party, target: Any) -> Any:
    return raw.admin_call(Path(target.admin), "GetDevice", bpb.GetDeviceRequest())


# --- secrets ---


@row(
    "T1",
    "call without a token",
    "TOKEN_REQUIRED TOKEN_REQUIRED TOKEN_REQUIRED UNIMPLEMENTED EACCES TOKEN_REQUIRED TOKEN_REQUIRED",
    "broker: the register of tokens",
)
def ask_without(me: Party, target: Any) -> Any:
    return me.ask(target, "ListModels", bpb.ListModelsRequest(), token="")


@row(
    "T2",
    "list with S's token",
    "yes yes TOKEN_REJECTED UNIMPLEMENTED EACCES yes yes",
    "broker: a token is good at its own endpoint alone",
)
def ask_as_s(me: Party, target: Any) -> Any:
    return me.ask(target, "ListModels", bpb.ListModelsRequest(), token=target.token)


@row(
    "T3",
    "release S's extent with S's token",
    "yes yes TOKEN_REJECTED UNIMPLEMENTED EACCES yes yes",
    "broker: a token is good at its own endpoint alone",
)
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
    """By a mapping, by a write, by a hole, by a descriptor opened again: all are refused alike."""
    descriptor, libc = target.sealed_descriptor, ctypes.CDLL(None, use_errno=True)

    def punch() -> None:
        if libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(PAGE)):
            raise OSError(ctypes.get_errno(), "fallocate")

    def anew() -> None:
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            os.pwrite(again, b"mine", 0)
        finally:
            os.close(again)

    tries: list[Callable[[], Any]] = [lambda: mmap.mmap(descriptor, PAGE), lambda: os.pwrite(descriptor, b"mine", 0)]
    (one,) = {outcome(each)[0] for each in [*tries, punch, anew]}
    return one
