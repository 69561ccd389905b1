"""The daemon's views of its books as messages, for listings and answers. Nothing is decided here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import resources_pb2 as rpb
from membroker.vmm import MemoryInfo
from membroker.wire.names import session_name

from ..config.config import CreatedTenant, TenantConfig
from ..core import effects as fx
from ..core.names import ModelName
from ..core.snapshot import LocationView, ModelView, SessionView, TenantView
from ..runtime.decisions import DecisionRecord
from ..runtime.idle_sleep import SleepView
from ..system.pods import NO_POD, Pod
from .errors import to_status

LOCATION_NUMBERS: Mapping[str, rpb.Location.ValueType] = {"device": rpb.LOCATION_DEVICE, "host": rpb.LOCATION_HOST}
MAX_NAMES_SHOWN = 128
"""Of a session's models, and of its segments: a session that has more of both still fits into a frame."""
_NO_SHARES: Mapping[str, Mapping[ModelName, int]] = {}
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
    "retired": rpb.Segment.ENDING,
    "dropping": rpb.Segment.ENDING,
    "releasing": rpb.Segment.RELEASING,
}


def from_location(row: LocationView, info: MemoryInfo | None, headroom: int, gate_reserve: int) -> rpb.LocationBooks:
    """Return the books of a location as a message; `info` is what the device shows of it."""
    books = rpb.LocationBooks(
        location=LOCATION_NUMBERS[row.location],
        capacity_bytes=row.capacity,
        lent_bytes=row.lent,
        releasing_bytes=row.releasing,
        stock_bytes=row.stock,
        free_bytes=row.free,
        headroom_bytes=headroom,
        gate_reserve_bytes=gate_reserve,
    )
    books.reserved_bytes, books.guarantee_shortfall_bytes = row.reserved, row.shortfall
    books.waiting_bytes, books.waiting_requests = row.waiting, row.waiting_requests
    if row.unaccounted is not None:
        books.unaccounted_bytes = max(0, row.unaccounted)
    if info is not None:
        books.device_total_bytes, books.device_used_bytes = info.total, info.used
    return books


def from_model(
    row: ModelView,
    shares: Mapping[str, Mapping[ModelName, int]] = _NO_SHARES,
    sleep: SleepView | None = None,
    now_ns: int = 0,
    guests: Sequence[rpb.SleepStatus] = (),
) -> rpb.Model:
    """Return a model's row as a message, with its shares by location and how its engines sleep, if that is known.

    `guests` is what its guests have said.
    """
    since = None if sleep is None or sleep.since is None else _began(sleep.since, now_ns)
    return rpb.Model(
        name=str(row.name),
        virtual_capacity_bytes=row.virtual_capacity,
        sessions=row.sessions,
        allocations_total=row.allocations,
        releases_total=row.releases,
        denials_total=dict(row.denials),
        books=[
            rpb.ModelBooks(
                location=LOCATION_NUMBERS[books.location],
                used_bytes=books.used,
                peak_bytes=books.peak,
                releasing_bytes=books.releasing,
                declared_bytes=books.declared,
                limit_bytes=books.limit,
                asked_limit_bytes=books.asked_limit,
                extents=books.extents,
                segment_bytes=books.segments,
                guarantee_bytes=books.guarantee,
                weight=books.weight,
                waiting_bytes=books.waiting,
                waiting_requests=books.waiting_requests,
                recallable_bytes=books.recallable,
                recalled_bytes=books.recalled,
                late_bytes=books.late,
                share_bytes=shares[books.location].get(row.name, 0) if shares.get(books.location) else None,
            )
            for books in row.locations
        ],
        idle_sleep_ms=None if sleep is None else sleep.after_ms,
        asleep_sessions=0 if sleep is None else sleep.asleep,
        asleep_since=since,
        asleep_by_itself=sleep is not None and sleep.by_itself,
        guests=guests,
    )


def from_session(row: SessionView, now_ns: int, pod: Pod = NO_POD) -> rpb.Session:
    """Return a session's row as a message; `now_ns` is CLOCK_MONOTONIC, `pod` the process's pod."""
    models, segments = sorted(map(str, row.models)), list(map(str, row.segments))
    return rpb.Session(
        name=session_name(row.session),
        tenant=f"tenants/{row.tenant}",
        state=_STATES[row.state],
        pid=row.pid,
        uid=row.uid,
        observer=row.observer,
        client=row.client,
        models=models[:MAX_NAMES_SHOWN],
        more_models=max(0, len(models) - MAX_NAMES_SHOWN),
        books=[
            rpb.SessionBooks(location=LOCATION_NUMBERS[where], used_bytes=size, extents=extents)
            for where, size, extents in row.locations
        ],
        create_time=_began(row.began_at, now_ns),
        segments=segments[:MAX_NAMES_SHOWN],
        more_segments=max(0, len(segments) - MAX_NAMES_SHOWN),
        pod_uid=pod.uid,
        pod_name=pod.name,
    )


def from_tenant(row: TenantView, config: TenantConfig | None) -> apb.Tenant:
    """Return a tenant's row as a message; `config` is None for one that is not configured."""
    made = config if isinstance(config, CreatedTenant) else None
    return apb.Tenant(
        name=f"tenants/{row.tenant}",
        books=[
            apb.TenantBooks(
                location=LOCATION_NUMBERS[books.location],
                used_bytes=books.used,
                limit_bytes=books.limit,
                guarantee_bytes=books.guarantee,
                weight=books.weight,
                waiting_bytes=books.waiting,
            )
            for books in row.locations
        ],
        models=row.models,
        sessions=row.sessions,
        settings=None if made is None else _from_settings(made),
        deleting=made is not None and made.deleting,
    )


def _from_settings(made: CreatedTenant) -> apb.TenantSettings:
    return apb.TenantSettings(
        uids=sorted(made.uids),
        owner=made.owner,
        group=made.group,
        mode=made.mode,
        lend_unused=made.lend_unused,
        idle_sleep_seconds=made.idle_sleep_seconds,
    )


def from_segment(row: fx.SegmentView, now_ns: int) -> rpb.Segment:
    """Return a segment as a message; `now_ns` is CLOCK_MONOTONIC."""
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


def from_decision(decision: DecisionRecord, tenant: str | None) -> rpb.Decision:
    """Return a decision as a message. A tenant does not see which other tenant's model wanted its memory."""
    wanted_by = "" if decision.wanted_by is None else str(decision.wanted_by)
    if decision.wanted_by is not None and tenant not in (None, decision.wanted_by.tenant):
        wanted_by = "tenants/-/models/-"
    return rpb.Decision(
        kind=rpb.Decision.Kind.Value(decision.kind.upper()),
        time=timestamp(decision.at),
        model=str(decision.name),
        location=LOCATION_NUMBERS[decision.location],
        session=session_name(decision.session),
        request_id=decision.request_id,
        size_bytes=decision.size,
        returned_bytes=decision.returned,
        after_ms=decision.after_ms,
        result=decision.result,
        why="" if decision.why is None else to_status(decision.why).message,
        guaranteed=decision.guaranteed,
        wanted_by=wanted_by,
    )


def _began(at_ns: int, now_ns: int) -> Timestamp:
    return timestamp(time.time() - (now_ns - at_ns) / 1e9)


def timestamp(seconds: float) -> Timestamp:
    """Return a Unix time as a message."""
    return Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
