"""Protobuf messages converted to the values that users see, and locations in both forms.

It translates and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC

from ..types import (
    Available,
    DeviceStatus,
    Draining,
    LocationBooks,
    ModelBooks,
    ModelStatus,
    Notice,
    SegmentStatus,
    SessionBooks,
    SessionStatus,
    Stopping,
    Undrained,
)
from ..v1 import broker_pb2, handoff_pb2
from ..v1 import resources_pb2 as pb
from ..vmm.driver import Location


def location_to_wire(location: Location) -> pb.Location.ValueType:
    """Return the wire's number for a location."""
    return pb.LOCATION_DEVICE if location is Location.DEVICE else pb.LOCATION_HOST


def location_name(location: pb.Location.ValueType) -> str:
    """Return `"device"` or `"host"` for the wire's number."""
    return pb.Location.Name(location).removeprefix("LOCATION_").lower()


def limit(location: Location, size: int) -> pb.Limit:
    """Return a limit of `size` bytes at a location."""
    return pb.Limit(location=location_to_wire(location), limit_bytes=size)


def device(message: pb.Device) -> DeviceStatus:
    """Return a device and its books."""
    return DeviceStatus(
        uuid=message.uuid,
        product=message.product,
        driver=message.driver,
        granularity=message.granularity_bytes,
        locations={books.location: books for books in map(_location_books, message.locations)},
        revision=message.revision,
        version=message.version,
        pid=message.pid,
        start_time=message.start_time.ToDatetime(UTC),
        sessions=message.sessions,
        detached_sessions=message.detached_sessions,
        metrics_url=message.metrics_url,
        draining=message.draining,
    )


def _location_books(message: pb.LocationBooks) -> LocationBooks:
    return LocationBooks(
        location=location_name(message.location),
        capacity=message.capacity_bytes,
        lent=message.lent_bytes,
        releasing=message.releasing_bytes,
        stock=message.stock_bytes,
        free=message.free_bytes,
        headroom=message.headroom_bytes,
        unaccounted=message.unaccounted_bytes if message.HasField("unaccounted_bytes") else None,
        device_total=message.device_total_bytes if message.HasField("device_total_bytes") else None,
        device_used=message.device_used_bytes if message.HasField("device_used_bytes") else None,
    )


def models(messages: Iterable[pb.Model]) -> list[ModelStatus]:
    """Return models and their books."""
    return [model(message) for message in messages]


def model(message: pb.Model) -> ModelStatus:
    """Return a model and its books."""
    return ModelStatus(
        name=message.name,
        virtual_capacity=message.virtual_capacity_bytes,
        books={books.location: books for books in map(_model_books, message.books)},
        sessions=message.sessions,
        allocations_total=message.allocations_total,
        releases_total=message.releases_total,
        denials_total=dict(message.denials_total),
    )


def _model_books(message: pb.ModelBooks) -> ModelBooks:
    return ModelBooks(
        location=location_name(message.location),
        used=message.used_bytes,
        peak=message.peak_bytes,
        releasing=message.releasing_bytes,
        declared=message.declared_bytes,
        limit=message.limit_bytes if message.HasField("limit_bytes") else None,
        extents=message.extents,
        segments=message.segment_bytes,
    )


def available(message: broker_pb2.Available) -> Available:
    """Return what could be borrowed."""
    return Available(now=message.now_bytes, limit=message.limit_bytes if message.HasField("limit_bytes") else None)


def segments(messages: Iterable[pb.Segment]) -> list[SegmentStatus]:
    """Return segments."""
    return [segment(message) for message in messages]


def segment(message: pb.Segment) -> SegmentStatus:
    """Return a segment."""
    return SegmentStatus(
        name=message.name,
        generation=message.generation,
        state=pb.Segment.State.Name(message.state).lower(),
        location=location_name(message.location),
        size=message.size_bytes,
        extents=message.extents,
        sessions=message.sessions,
        writer=message.writer,
        create_time=message.create_time.ToDatetime(UTC),
    )


def sessions(messages: Iterable[pb.Session]) -> list[SessionStatus]:
    """Return sessions and their books."""
    return [session(message) for message in messages]


def session(message: pb.Session) -> SessionStatus:
    """Return a session and its books."""
    return SessionStatus(
        name=message.name,
        tenant=message.tenant,
        state=pb.Session.State.Name(message.state).lower(),
        pid=message.pid,
        uid=message.uid,
        observer=message.observer,
        client=message.client,
        models=tuple(message.models),
        books={books.location: books for books in map(_session_books, message.books)},
        create_time=message.create_time.ToDatetime(UTC),
        segments=tuple(message.segments),
    )


def _session_books(message: pb.SessionBooks) -> SessionBooks:
    return SessionBooks(location_name(message.location), message.used_bytes, message.extents)


def notice(message: handoff_pb2.Notice) -> Notice | None:
    """Return what a user is told of a broker's notice; None for what is the library's own business."""
    kind = message.WhichOneof("kind")
    if kind == "draining":
        deadline = message.draining.deadline.ToDatetime(UTC) if message.draining.HasField("deadline") else None
        return Draining(deadline)
    if kind == "undrained":
        return Undrained()
    return Stopping() if kind == "stopping" else None
