"""The wire's messages as the library's values, and the library's words as the wire's.

Owns one function for each message that a user gets to see. It must never make a call or decide anything.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from datetime import UTC
from numbers import Real
from typing import Any

from .errors import InvalidRequest
from .notices import Draining, Notice, Stopping, Undrained
from .types import (
    Available,
    DeviceStatus,
    LocationBooks,
    ModelBooks,
    ModelStatus,
    SegmentStatus,
    SessionBooks,
    SessionStatus,
)
from .v1 import broker_pb2, handoff_pb2
from .v1 import resources_pb2 as pb
from .vmm.driver import AccessFlags, Location
from .vmm.sizes import MAX_BYTES, parse_size

MAX_SECONDS = 7 * 24 * 3600.0
"""The longest time that a user may ask for: a week. What the kernel waits by ends at 24 days."""

_TO_WIRE = {Location.DEVICE: pb.LOCATION_DEVICE, Location.HOST: pb.LOCATION_HOST}


def location_of(location: Location | str) -> Location:
    """Return `"device"` or `"host"` as a `Location`; raises `InvalidRequest` for anything else."""
    if isinstance(location, Location):
        return location
    try:
        return Location(location)
    except ValueError:
        raise InvalidRequest(f'a location is "device" or "host", not {location!r}') from None


def access_of(access: AccessFlags | str) -> AccessFlags:
    """Return `"none"`, `"read"` or `"read_write"` as `AccessFlags`; raises `InvalidRequest` for anything else."""
    if isinstance(access, AccessFlags):
        return access
    for flags in AccessFlags:
        if access == flags.name.lower():
            return flags
    raise InvalidRequest(f'an access is "none", "read" or "read_write", not {access!r}')


def bytes_of(what: str, size: int | str, at_least: int = 0) -> int:
    """Return a size of a user in bytes; `what` names it in the `InvalidRequest` that this raises."""
    try:
        value = parse_size(size)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{what}: {error}") from error
    if value < at_least:
        raise InvalidRequest(f"{what} must be at least {at_least} bytes, not {size!r}")
    return value


def whole_number(what: str, value: object, wrong: type[InvalidRequest] = InvalidRequest) -> int:
    """Return an int, or what is one (`__index__`), as NumPy's are; a bool is not, nor a float. Raises `wrong`."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]  # what has none is refused below
    except TypeError:
        pass
    raise wrong(f"{what} is a whole number, not {value!r}")


def shape_of(shape: object) -> tuple[int, ...]:
    """Return a shape as ints, each from 0 to 2^63-1; raises `InvalidRequest` for anything else."""
    if isinstance(shape, str | bytes) or not isinstance(shape, Sequence):
        raise InvalidRequest(f"a shape is a sequence of whole numbers, as (1000, 64), not {shape!r}")
    found = tuple(whole_number("a dimension", dimension) for dimension in shape)
    if not all(0 <= dimension <= MAX_BYTES for dimension in found):
        raise InvalidRequest(f"a shape is whole numbers from 0 to 2^63-1, not {shape!r}")
    return found


def name_of(what: str, name: str) -> str:
    """Return a name of a user; `what` says of what in the `InvalidRequest` that this raises for what is no text.

    What a name may consist of is the broker's to say.
    """
    if not isinstance(name, str) or any("\ud800" <= character <= "\udfff" for character in name):
        raise InvalidRequest(f"the name of a {what} is text, and of characters that UTF-8 has, not {name!r}")
    return name


def parts_of(name: str) -> tuple[str, ...]:
    """Return the tenant, the model and the segment that a resource name has, as far as it has them.

    A model's own name may have a slash inside.
    """
    _, tenant, *rest = name.split("/", 3)
    if not rest:
        return (tenant,)
    model, _, segment = rest[1].rpartition("/segments/")
    return (tenant, model, segment) if model else (tenant, rest[1])


def seconds_of(what: str, seconds: float, *, positive: bool = False) -> float:
    """Return a time of a user in seconds; `what` names it in the `InvalidRequest` that this raises."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_SECONDS or (positive and not seconds):
        least = "more than 0" if positive else "0 or more"
        raise InvalidRequest(f"{what} is a number of seconds, {least} and at most a week, not {seconds!r}")
    return float(seconds)


def contiguous_bytes(what: str, data: Any) -> memoryview:
    """Return the bytes of what has contiguous ones; `what` names it in the `InvalidRequest` that this raises."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidRequest(f"{what} is contiguous bytes, not {type(data).__name__}: {error}") from error


def check_range(offset: int, size: int, total: int, what: str) -> tuple[int, int]:
    """Return both as ints. Raises `InvalidRequest` unless [offset, offset + size) lies in `total` bytes of `what`."""
    offset, size = whole_number("an offset", offset), whole_number("a size", size)
    if not 0 <= offset <= total or not 0 <= size <= total - offset:
        raise InvalidRequest(f"{size} bytes at {offset} do not lie in {what} of {total} bytes")
    return offset, size


def location_to_wire(location: Location) -> pb.Location.ValueType:
    """Return the wire's number for a location."""
    return _TO_WIRE[location]


def location_name(location: pb.Location.ValueType) -> str:
    """Return `"device"` or `"host"` for the wire's number."""
    return pb.Location.Name(location).removeprefix("LOCATION_").lower()


def limit(location: Location, size: int) -> pb.Limit:
    """Return a limit of `size` bytes at a location."""
    return pb.Limit(location=_TO_WIRE[location], limit_bytes=size)


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
