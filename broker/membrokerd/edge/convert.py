"""Between the wire and the core: messages to events, and results to messages. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from google.protobuf.message import Message

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as hpb
from membroker.v1 import resources_pb2 as rpb
from membroker.wire import names
from membroker.wire.paths import printable

from ..config.config import MAX_UIDS, QUOTA_KEYS
from ..core import effects as fx
from ..core import events as ev
from ..core.denied import Denied, Reason, deny
from ..core.names import Location, ModelName, QuotaKey, SegmentName
from ..core.rows import Quota
from ..runtime.loop import clock
from .messages import LOCATION_NUMBERS, from_segment

_SHOWN_NAME = 100
"""How much of a malformed name is shown: an error is sent in gRPC metadata, which clients limit to 8 KiB."""
_LOCATIONS: Mapping[int, Location] = {
    rpb.LOCATION_UNSPECIFIED: "device",
    rpb.LOCATION_DEVICE: "device",
    rpb.LOCATION_HOST: "host",
}


_M = TypeVar("_M", bound=Message)


class Refused(Exception):
    """Raised when a request or a peer is refused, by the core or before it."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.reason)
        self.denied = denied


LONG_BYTES = 1_024
"""Requests are shorter, but for a release of many ids, which never waits."""


def known_of(message: _M) -> _M:
    """Return a copy of a request, with nothing that this broker does not know, and that keeps no byte that came in.

    A request that waits is kept, and what is unknown in it, or in the frame around it, could be 64 KiB.
    """
    message.DiscardUnknownFields()
    return type(message).FromString(message.SerializeToString())


def _no_name_of(kind: str, name: str) -> Refused:
    return Refused(deny(Reason.INVALID_NAME, kind=kind, name=name[:_SHOWN_NAME]))


@lru_cache(4096)
def parse_model(name: str) -> ModelName:
    """Return the model that `tenants/{tenant}/models/{model}` names, or raise `Refused`."""
    parts = names.parse_model(name)
    if parts is None:
        raise _no_name_of("model", name)
    return ModelName(*parts)


def parse_segment(name: str) -> SegmentName:
    """Return the segment that `tenants/{tenant}/models/{model}/segments/{segment}` names, or raise `Refused`.

    `-` in place of the model means any model of the tenant.
    """
    parts = names.parse_segment(name)
    if parts is None:
        raise _no_name_of("segment", name)
    return SegmentName(*parts)


def parse_quota_name(name: str) -> tuple[str, str | None]:
    """Return the tenant, and the model or None, that a quota is for, or raise `Refused`."""
    return parse_model(name) if "/models/" in name else (parse_tenant(name), None)


NUMBERS_OF_TENANT = frozenset(chain.from_iterable(QUOTA_KEYS.values()))
"""The keys of a tenant that are limits, guarantees and weights."""
_SOCKET_KEYS = frozenset(("owner", "group", "mode"))
_SETTINGS: Mapping[str, str] = {
    field: field.removesuffix("_bytes") for field in apb.TenantSettings.DESCRIPTOR.fields_by_name
}
"""The key in the configuration for each field."""


def parse_tenant(name: str) -> str:
    """Return the tenant of `tenants/{tenant}`, or raise `Refused`."""
    tenant = names.parse_tenant(name)
    if tenant is None:
        raise _no_name_of("tenant", name)
    return tenant


def tenant_settings(settings: apb.TenantSettings) -> dict[str, Any]:
    """Return the settings that are given, as the configuration has them."""
    given: dict[str, Any] = {}
    for descriptor, value in settings.ListFields():
        key = _SETTINGS[descriptor.name]
        given[key] = list(value[: MAX_UIDS + 1]) if key == "uids" else f"{value:04o}" if key == "mode" else value
    return given


def changed_settings(request: apb.UpdateTenantRequest) -> dict[str, Any]:
    """Return the settings that the request's mask names; None for one that is removed. Raises `Refused`."""
    named = list(request.update_mask.paths)
    what = ""
    if unknown := set(named) - _SETTINGS.keys():
        what = f"update_mask: {sorted(unknown)[0][:_SHOWN_NAME]!r} is not a field of TenantSettings"
    elif fixed := _SOCKET_KEYS.intersection(named):
        what = (
            f"{sorted(fixed)[0]} is of the endpoint's sockets, which are open: delete the tenant, and create it again"
        )
    elif not named:
        what = "update_mask names nothing to change"
    given = tenant_settings(request.settings)
    if not what and (left := given.keys() - {_SETTINGS[field] for field in named}):
        what = f"{sorted(left)[0]} is set, and update_mask does not name it"
    if what:
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=what))
    return {_SETTINGS[field]: given.get(_SETTINGS[field]) for field in named}


def unkept(error: OSError) -> str:
    """Return why a command could not be written down, and what to do."""
    return (
        f"the command cannot be kept in {printable(error.filename)}: {error.strerror}; let the daemon write there "
        "(`state_directory` in its configuration), or make room"
    )


def changed_quota(quota: Quota, request: apb.SetQuotaRequest) -> Quota:
    """Return the quota with the fields that the request's mask names, or raise `Refused`."""
    named = set(request.update_mask.paths) or {"limit_bytes"}
    if unknown := named - {"limit_bytes", "guarantee_bytes", "weight"}:
        what = f"update_mask: {sorted(unknown)[0][:_SHOWN_NAME]!r} is not limit_bytes, guarantee_bytes or weight"
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=what))
    for field in ("limit_bytes", "guarantee_bytes", "weight"):
        if request.HasField(field) and field not in named:
            raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"{field} is set, and update_mask does not name it"))
    limit = request.limit_bytes if request.HasField("limit_bytes") else None
    guarantee = request.guarantee_bytes if request.HasField("guarantee_bytes") else None
    weight = request.weight if request.HasField("weight") else None
    return Quota(
        limit if "limit_bytes" in named else quota.limit,
        guarantee if "guarantee_bytes" in named else quota.guarantee,
        weight if "weight" in named else quota.weight,
    )


def quota_event(call: int, key: QuotaKey, quota: Quota, *, undo: bool = False) -> ev.SetQuota:
    """Return the event that puts a quota into force."""
    tenant, model, location = key
    return ev.SetQuota(
        call=call,
        tenant=tenant,
        model=model,
        location=location,
        limit=quota.limit,
        guarantee=quota.guarantee,
        weight=quota.weight,
        undo=undo,
    )


def parse_session(name: str) -> int:
    """Return the session that `sessions/{session}` names, or raise `Refused`."""
    session = names.parse_session(name)
    if session is None:
        raise Refused(
            deny(Reason.INVALID_ARGUMENT, what=f"{name[:_SHOWN_NAME]!r} does not name a session: sessions/SESSION")
        )
    return session


@lru_cache(8)
def parse_location(number: int) -> Location:
    """Return the location of this number, or raise `Refused`; unspecified is the device."""
    location = _LOCATIONS.get(number)
    if location is None:
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"there is no location {number}"))
    return location


def to_event(call: int, session: int, tenant: str, request_id: int, request: Message) -> ev.Event:
    """Return the event of a session's request; raises `Refused`."""
    match request:
        case bpb.AllocateExtentsRequest():
            name, location = parse_model(request.model), parse_location(request.location)
            extent_bytes, count = request.extent_bytes, request.count
            wait_ns = _wait_ns(request) if request.HasField("wait") else None
            ahead, wanted_bytes = request.ahead, request.wanted_bytes
            # By position, with the names of the fields: keywords take 0.3 us more.
            return ev.Allocate(
                call, session, request_id, name, location, extent_bytes, count, wait_ns, ahead, wanted_bytes
            )
        case bpb.ReleaseExtentsRequest():
            return ev.Release(call, session, request_id, tuple(request.extent_ids))
        case bpb.DeclareMemoryRequest():
            name, location = parse_model(request.model), parse_location(request.location)
            return ev.Declare(
                call=call,
                session=session,
                request_id=request_id,
                name=name,
                location=location,
                declared_bytes=request.declared_bytes,
                recallable=request.recallable,
                wait_ns=_wait_ns(request),
            )
        case bpb.CreateSegmentRequest():
            name, location, size = parse_model(request.model), parse_location(request.location), request.size_bytes
            segment = parse_segment(f"{name}/segments/{request.segment_id}")
            return ev.CreateSegment(
                call=call,
                session=session,
                request_id=request_id,
                name=segment,
                location=location,
                size=size,
                wait_ns=_wait_ns(request),
                delete_when_left=request.delete_when_left,
            )
        case bpb.SealSegmentRequest():
            return ev.SealSegment(call, session, request_id, request.generation)
        case bpb.AttachSegmentRequest():
            return ev.AttachSegment(call, session, request_id, parse_segment(request.name), _wait_ns(request) or 0)
        case bpb.DetachSegmentRequest():
            return ev.DetachSegment(call, session, request_id, request.generation)
        case bpb.DeleteSegmentRequest():
            segment, generation = parse_segment(request.name), request.generation
            return ev.DeleteSegment(call, session, request_id, segment, generation, request.only_if_left)
        case bpb.RegisterModelRequest():
            return _registration(call, session, request_id, tenant, request)
        case bpb.UnregisterModelRequest():
            return ev.UnregisterModel(call, session, request_id, parse_model(request.name))
        case _:
            raise AssertionError(f"no event for {type(request).__name__}")


def _wait_ns(
    request: bpb.AllocateExtentsRequest
    | bpb.DeclareMemoryRequest
    | bpb.CreateSegmentRequest
    | bpb.AttachSegmentRequest,
) -> int | None:
    """Return how long a request waits, or None if it does not say. Raises `Refused` if the Duration is invalid."""
    if not request.HasField("wait"):
        return None
    seconds, nanos = request.wait.seconds, request.wait.nanos
    if seconds < 0 or not 0 <= nanos < 1_000_000_000:
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"a wait of {seconds} s and {nanos} ns is not a valid time"))
    return seconds * 1_000_000_000 + nanos


def _registration(
    call: int, session: int, request_id: int, tenant: str, request: bpb.RegisterModelRequest
) -> ev.RegisterModel:
    name = parse_model(f"tenants/{tenant}/models/{request.model_id}")
    virtual = request.virtual_capacity_bytes if request.HasField("virtual_capacity_bytes") else None
    limits: dict[Location, int] = {}
    for limit in request.limits:
        location = parse_location(limit.location)
        if location in limits:
            raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"two limits for the {location} memory"))
        limits[location] = limit.limit_bytes
    answers = request.answers_recalls if request.HasField("answers_recalls") else None
    return ev.RegisterModel(
        call=call,
        session=session,
        request_id=request_id,
        name=name,
        virtual_capacity=virtual,
        limits=limits,
        exclusive=request.exclusive,
        answers=answers,
        replaces=request.replace_limits,
    )


def from_result(result: fx.Result) -> tuple[str, Any]:
    """Return the response of a session's call, and the name of its field in a handoff Reply.

    `Dispatcher.response` makes the response to a RegisterModel, which shows the model's books.
    """
    match result:
        case fx.Allocated():
            return "allocate", bpb.AllocateExtentsResponse(count=result.count, extent_bytes=result.extent_bytes)
        case fx.Released():
            return "release", bpb.ReleaseExtentsResponse(released_bytes=result.released_bytes)
        case fx.Declared():
            return "declare", bpb.DeclareMemoryResponse(declared_bytes=result.declared_bytes)
        case fx.SegmentView():
            return "segment", from_segment(result, clock())
        case fx.Reconciled():
            return "resume", hpb.ResumeResponse(
                unknown_extent_ids=result.unknown_extents,
                unknown_generations=result.unknown_segments,
                models=map(str, result.models),
            )
        case fx.Detached():
            return "detach_segment", bpb.DetachSegmentResponse()
        case fx.Done():  # of an UnregisterModel; the Done of a Goodbye is turned into a frame by its connection
            return "unregister_model", bpb.UnregisterModelResponse()
        case _:
            raise AssertionError(f"no response for {result}")


def from_recall(recall: fx.SendRecall) -> hpb.Frame:
    """Return the notice that asks a session for memory."""
    notice = hpb.Recall(
        recall_id=recall.recall,
        model=str(recall.name),
        location=LOCATION_NUMBERS[recall.location],
        bytes=recall.size,
        guaranteed=recall.is_guaranteed,
    )
    notice.within.FromNanoseconds(recall.within_ns)
    return hpb.Frame(notice=hpb.Notice(recall=notice))


def to_sleep(request: apb.SleepModelRequest) -> hpb.Sleep:
    """Return the question for the sessions of a model, or raise `Refused`."""
    within = request.within
    seconds = within.seconds + within.nanos / 1e9 if request.HasField("within") else 1.0
    if not 0 <= seconds <= names.MAX_WAIT_SECONDS:
        what = f"within is from 0 to {names.MAX_WAIT_SECONDS} seconds, not {seconds:g}"
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=what))
    question = hpb.Sleep(model=request.name, wake=request.wake, keep_weights=request.keep_weights)
    question.within.FromMilliseconds(round(seconds * 1000))
    return question


def size_of(request: Any) -> int:
    """Return the bytes that an allocation, a declaration or a create asks for."""
    match request:
        case bpb.AllocateExtentsRequest():
            return int(request.extent_bytes * request.count)
        case bpb.DeclareMemoryRequest():
            return int(request.declared_bytes)
        case _:
            return int(request.size_bytes)
