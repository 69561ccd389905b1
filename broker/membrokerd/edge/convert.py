"""Between the wire and the core: messages to events, results and views to messages. Nothing is decided here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as hpb
from membroker.v1 import resources_pb2 as rpb
from membroker.vmm import DeviceInfo, MemoryInfo
from membroker.wire import names
from membroker.wire.names import session_name

from ..core import effects as fx
from ..core import events as ev
from ..core.denied import Denied, Reason, deny
from ..core.rows import Quota
from ..core.snapshot import DeviceView, LocationView, ModelView, SessionView, TenantView

_SHOWN_NAME = 100
"""How much of a malformed name is shown: an error is sent in gRPC metadata, which clients limit to 8 KiB."""
_LOCATIONS: Mapping[int, ev.Location] = {
    rpb.LOCATION_UNSPECIFIED: "device",
    rpb.LOCATION_DEVICE: "device",
    rpb.LOCATION_HOST: "host",
}
LOCATION_NUMBERS: Mapping[str, rpb.Location.ValueType] = {"device": rpb.LOCATION_DEVICE, "host": rpb.LOCATION_HOST}
_STATES: Mapping[str, rpb.Session.State.ValueType] = {
    "open": rpb.Session.OPEN,
    "leaving": rpb.Session.OPEN,
    "detached": rpb.Session.DETACHED,
    "releasing": rpb.Session.RELEASING,
}

_SEGMENT_STATES: Mapping[str, rpb.Segment.State.ValueType] = {
    "writing": rpb.Segment.WRITING,
    "sealing": rpb.Segment.WRITING,
    "sealed": rpb.Segment.SEALED,
    "ending": rpb.Segment.ENDING,
    "dropping": rpb.Segment.ENDING,
    "releasing": rpb.Segment.RELEASING,
}

MakeEvent = Callable[[int], ev.Event]


class Refused(Exception):
    """A request that is refused before, or by, the core."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.reason)
        self.denied = denied


@lru_cache(4096)
def parse_model(name: str) -> ev.ModelName:
    """Return the model that `tenants/{tenant}/models/{model}` names, or raise `Refused`."""
    parts = names.parse_model(name)
    if parts is None:
        raise Refused(deny(Reason.INVALID_NAME, name=name[:_SHOWN_NAME]))
    return ev.ModelName(*parts)


def parse_segment(name: str) -> ev.SegmentName:
    """Return the segment that `tenants/{tenant}/models/{model}/segments/{segment}` names, or raise `Refused`.

    `-` for the model is whichever model has it.
    """
    parts = names.parse_segment(name)
    if parts is None:
        raise Refused(deny(Reason.INVALID_NAME, name=name[:_SHOWN_NAME]))
    return ev.SegmentName(*parts)


def parse_quota_name(name: str) -> tuple[str, str | None]:
    """Return the tenant, and the model or None, that a quota is for, or raise `Refused`."""
    tenant = names.parse_tenant(name)
    return (tenant, None) if tenant else parse_model(name)


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


def parse_session(name: str) -> int:
    """Return the session that `sessions/{session}` names, or raise `Refused`."""
    session = names.parse_session(name)
    if session is None:
        raise Refused(
            deny(Reason.INVALID_ARGUMENT, what=f"{name[:_SHOWN_NAME]!r} does not name a session: sessions/SESSION")
        )
    return session


@lru_cache(8)
def parse_location(number: int) -> ev.Location:
    """Return the location of this number, or raise `Refused`; unspecified is the device."""
    location = _LOCATIONS.get(number)
    if location is None:
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"there is no location {number}"))
    return location


def to_event(session: int, tenant: str, request_id: int, request: Message) -> MakeEvent:
    """Return what makes the event of a session's request from the number of its call; raises `Refused`."""
    match request:
        case bpb.AllocateExtentsRequest():
            name, location = parse_model(request.model), parse_location(request.location)
            size, count, ahead = request.extent_bytes, request.count, request.ahead
            wait_ns = _wait_ns(request) if request.HasField("wait") else None
            return lambda call: ev.Allocate(call, session, request_id, name, location, size, count, wait_ns, ahead)
        case bpb.ReleaseExtentsRequest():
            ids = tuple(request.extent_ids)
            return lambda call: ev.Release(call, session, request_id, ids)
        case bpb.DeclareMemoryRequest():
            name, location = parse_model(request.model), parse_location(request.location)
            declared = request.declared_bytes
            return lambda call: ev.Declare(call, session, request_id, name, location, declared)
        case bpb.CreateSegmentRequest():
            name, location, size = parse_model(request.model), parse_location(request.location), request.size_bytes
            segment = parse_segment(f"{name}/segments/{request.segment_id}")
            wait_ns = _wait_ns(request)
            return lambda call: ev.CreateSegment(call, session, request_id, segment, location, size, wait_ns)
        case bpb.SealSegmentRequest():
            generation = request.generation
            return lambda call: ev.SealSegment(call, session, request_id, generation)
        case bpb.AttachSegmentRequest():
            segment, wait_ns = parse_segment(request.name), _wait_ns(request) or 0
            return lambda call: ev.AttachSegment(call, session, request_id, segment, wait_ns)
        case bpb.DetachSegmentRequest():
            generation = request.generation
            return lambda call: ev.DetachSegment(call, session, request_id, generation)
        case bpb.DeleteSegmentRequest():
            segment, generation = parse_segment(request.name), request.generation
            return lambda call: ev.DeleteSegment(call, session, request_id, segment, generation)
        case bpb.RegisterModelRequest():
            return _registration(session, tenant, request_id, request)
        case bpb.UnregisterModelRequest():
            name = parse_model(request.name)
            return lambda call: ev.UnregisterModel(call, session, request_id, name)
        case _:
            raise AssertionError(f"no event for {type(request).__name__}")


def _wait_ns(request: bpb.AllocateExtentsRequest | bpb.CreateSegmentRequest | bpb.AttachSegmentRequest) -> int | None:
    """Return how long a request waits, or None if it does not say. Raises `Refused` for no valid Duration."""
    if not request.HasField("wait"):
        return None
    seconds, nanos = request.wait.seconds, request.wait.nanos
    if seconds < 0 or not 0 <= nanos < 1_000_000_000:
        raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"a wait of {seconds} s and {nanos} ns is not a valid time"))
    return seconds * 1_000_000_000 + nanos


def _registration(session: int, tenant: str, request_id: int, request: bpb.RegisterModelRequest) -> MakeEvent:
    name = parse_model(f"tenants/{tenant}/models/{request.model_id}")
    virtual = request.virtual_capacity_bytes if request.HasField("virtual_capacity_bytes") else None
    limits: dict[ev.Location, int] = {}
    for limit in request.limits:
        location = parse_location(limit.location)
        if location in limits:
            raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"two limits for the {location} memory"))
        limits[location] = limit.limit_bytes
    exclusive = request.exclusive
    answers = request.answers_recalls if request.HasField("answers_recalls") else None
    return lambda call: ev.RegisterModel(call, session, request_id, name, virtual, limits, exclusive, answers)


def from_result(result: fx.Result) -> tuple[str, Any]:
    """Return the response of a session's call, and the name of its field in a handoff Reply.

    A model's, which shows its books, is `Dispatcher.response`'s.
    """
    match result:
        case fx.Allocated():
            return "allocate", bpb.AllocateExtentsResponse(count=result.count, extent_bytes=result.extent_bytes)
        case fx.Released():
            return "release", bpb.ReleaseExtentsResponse(released_bytes=result.released_bytes)
        case fx.Declared():
            return "declare", bpb.DeclareMemoryResponse(declared_bytes=result.declared_bytes)
        case fx.SegmentView():
            return "segment", from_segment(result, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        case fx.Reconciled():
            return "resume", hpb.ResumeResponse(
                unknown_extent_ids=result.unknown_extents,
                unknown_generations=result.unknown_segments,
                models=map(str, result.models),
            )
        case fx.Detached():
            return "detach_segment", bpb.DetachSegmentResponse()
        case fx.Done():  # a Goodbye has no other answer either, and is answered by its connection
            return "unregister_model", bpb.UnregisterModelResponse()
        case _:
            raise AssertionError(f"no response for {result}")


def from_recall(recall: fx.Recall) -> hpb.Frame:
    """Return the notice that asks a session for memory."""
    notice = hpb.Recall(
        recall_id=recall.recall, model=str(recall.name), location=LOCATION_NUMBERS[recall.location], bytes=recall.size
    )
    notice.within.FromNanoseconds(recall.within_ns)
    return hpb.Frame(notice=hpb.Notice(recall=notice))


def from_device(
    books: DeviceView,
    device: DeviceInfo,
    figures: Mapping[str, MemoryInfo | None],
    headroom: Mapping[str, int],
    *,
    version: str,
    pid: int,
    start_time: float,
    metrics_url: str,
    draining: bool,
) -> rpb.Device:
    """Return the device and its books."""
    return rpb.Device(
        uuid=device.uuid,
        product=device.name,
        driver=device.driver,
        granularity_bytes=device.granularity,
        locations=[_books(row, figures.get(row.location), headroom.get(row.location, 0)) for row in books.locations],
        revision=books.revision,
        version=version,
        pid=pid,
        start_time=_timestamp(start_time),
        metrics_url=metrics_url,
        sessions=books.sessions,
        detached_sessions=books.detached,
        draining=draining,
    )


def _books(row: LocationView, info: MemoryInfo | None, headroom: int) -> rpb.LocationBooks:
    books = rpb.LocationBooks(
        location=LOCATION_NUMBERS[row.location],
        capacity_bytes=row.capacity,
        lent_bytes=row.lent,
        releasing_bytes=row.releasing,
        stock_bytes=row.stock,
        free_bytes=row.free,
        headroom_bytes=headroom,
    )
    books.reserved_bytes, books.guarantee_shortfall_bytes = row.reserved, row.shortfall
    books.waiting_bytes, books.waiting_requests = row.waiting, row.waiting_requests
    if row.unaccounted is not None:
        books.unaccounted_bytes = max(0, row.unaccounted)
    if info is not None:
        books.device_total_bytes, books.device_used_bytes = info.total, info.used
    return books


def from_model(row: ModelView) -> rpb.Model:
    """Return a model's row as a message."""
    return rpb.Model(
        name=str(row.name),
        virtual_capacity_bytes=row.virtual_capacity,
        sessions=row.sessions,
        allocations_total=row.allocations,
        releases_total=row.releases,
        denials_total=dict(row.denials),
        books=[
            rpb.ModelBooks(
                location=LOCATION_NUMBERS[one.location],
                used_bytes=one.used,
                peak_bytes=one.peak,
                releasing_bytes=one.releasing,
                declared_bytes=one.declared,
                limit_bytes=one.limit,
                extents=one.extents,
                segment_bytes=one.segments,
                guarantee_bytes=one.guarantee,
                weight=one.weight,
                waiting_bytes=one.waiting,
                waiting_requests=one.waiting_requests,
                recallable_bytes=one.recallable,
                recalled_bytes=one.recalled,
                late_bytes=one.late,
            )
            for one in row.locations
        ],
    )


def from_session(row: SessionView, now_ns: int) -> rpb.Session:
    """Return a session's row as a message; `now_ns` is CLOCK_BOOTTIME."""
    return rpb.Session(
        name=session_name(row.session),
        tenant=f"tenants/{row.tenant}",
        state=_STATES[row.state],
        pid=row.pid,
        uid=row.uid,
        observer=row.observer,
        client=row.client,
        models=sorted(map(str, row.models)),
        books=[
            rpb.SessionBooks(location=LOCATION_NUMBERS[where], used_bytes=size, extents=extents)
            for where, size, extents in row.locations
        ],
        create_time=_began(row.began_at, now_ns),
        segments=[str(name) for name in row.segments],
    )


def from_tenant(row: TenantView) -> apb.Tenant:
    """Return a tenant's row as a message."""
    return apb.Tenant(
        name=f"tenants/{row.tenant}",
        books=[
            apb.TenantBooks(
                location=LOCATION_NUMBERS[one.location],
                used_bytes=one.used,
                limit_bytes=one.limit,
                guarantee_bytes=one.guarantee,
                weight=one.weight,
                waiting_bytes=one.waiting,
            )
            for one in row.locations
        ],
        models=row.models,
        sessions=row.sessions,
    )


def from_segment(row: fx.SegmentView, now_ns: int) -> rpb.Segment:
    """Return a segment as a message; `now_ns` is CLOCK_BOOTTIME."""
    return rpb.Segment(
        name=str(row.name),
        generation=row.segment,
        state=_SEGMENT_STATES[row.state],
        location=LOCATION_NUMBERS[row.location],
        size_bytes=row.size,
        extents=row.extents,
        sessions=row.sessions,
        writer=session_name(row.writer),
        create_time=_began(row.began_at, now_ns),
    )


def _began(at_ns: int, now_ns: int) -> Timestamp:
    return _timestamp(time.time() - (now_ns - at_ns) / 1e9)


def _timestamp(seconds: float) -> Timestamp:
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
