"""Messages of the wire as status values, and locations in both forms.

Status values have the wire's names, so one function translates them all. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ..types import (
    Available,
    Decision,
    DeviceStatus,
    Draining,
    LocationBooks,
    ModelBooks,
    ModelStatus,
    Notice,
    SegmentStatus,
    SessionBooks,
    SessionStatus,
    SleepRequest,
    SleepStatus,
    Stopping,
    Undrained,
)
from ..v1 import broker_pb2, handoff_pb2
from ..v1 import resources_pb2 as pb
from ..vmm.driver import Location

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")
MAX_DETAIL = 400
"""The most characters of the sentence in a `SleepStatus`."""


def location_to_wire(location: Location) -> pb.Location.ValueType:
    """Return the wire's number for a location."""
    return pb.LOCATION_DEVICE if location is Location.DEVICE else pb.LOCATION_HOST


def location_name(location: pb.Location.ValueType) -> str:
    """Return `"device"` or `"host"` for the wire's number."""
    return pb.Location.Name(location).removeprefix("LOCATION_").lower()


def limit(location: Location, size: int) -> pb.Limit:
    """Return a limit of `size` bytes at a location."""
    return pb.Limit(location=location_to_wire(location), limit_bytes=size)


def value(kind: type[_T], message: Message, **special: Any) -> _T:
    """Return a status value with what `message` has under the same names; `special` gives the other fields.

    Absent fields are None, times are in UTC, enums are words, and lists are tuples.
    """
    found = {field.name: _plain(message, field.name) for field in fields(kind) if field.name not in special}
    return kind(**found, **special)


def _plain(message: Message, name: str) -> Any:
    field, found = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.has_presence and not message.HasField(name):
        return None
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(found)  # a newer broker may send others
        return known.name.removeprefix("LOCATION_").lower() if known else str(found)
    if isinstance(found, Timestamp):
        return found.ToDatetime(UTC)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(found)
    return found if isinstance(found, str | int) else tuple(found)


def by_location(kind: type[_T], books: Iterable[Any]) -> dict[str, _T]:
    """Return books by the name of their location."""
    return {location_name(each.location): value(kind, each) for each in books}


def device(message: pb.Device) -> DeviceStatus:
    """Return a device and its books."""
    return value(DeviceStatus, message, locations=by_location(LocationBooks, message.locations))


def models(messages: Iterable[pb.Model]) -> list[ModelStatus]:
    """Return models and their books."""
    return [model(message) for message in messages]


def model(message: pb.Model) -> ModelStatus:
    """Return a model and its books."""
    return value(ModelStatus, message, books=by_location(ModelBooks, message.books))


def available(message: broker_pb2.Available) -> Available:
    """Return what could be borrowed."""
    return value(Available, message)


def segments(messages: Iterable[pb.Segment]) -> list[SegmentStatus]:
    """Return segments."""
    return [segment(message) for message in messages]


def segment(message: pb.Segment) -> SegmentStatus:
    """Return a segment."""
    return value(SegmentStatus, message)


def sessions(messages: Iterable[pb.Session]) -> list[SessionStatus]:
    """Return sessions and their books."""
    return [session(message) for message in messages]


def decisions(messages: Iterable[pb.Decision]) -> list[Decision]:
    """Return why requests were refused or waited, and memory was recalled."""
    return [value(Decision, each) for each in messages]


def session(message: pb.Session) -> SessionStatus:
    """Return a session and its books."""
    return value(SessionStatus, message, books=by_location(SessionBooks, message.books))


def notice(message: handoff_pb2.Notice) -> Notice | None:
    """Return what a user is told of a broker's notice; None for what is the library's own business."""
    kind = message.WhichOneof("kind")
    if kind == "draining":
        deadline = message.draining.deadline.ToDatetime(UTC) if message.draining.HasField("deadline") else None
        return Draining(deadline)
    if kind == "undrained":
        return Undrained()
    return Stopping() if kind == "stopping" else None


def sleep_request(message: handoff_pb2.Sleep, now: float) -> SleepRequest:
    """Return what an operator asks; `now` is the time of `time.monotonic`."""
    within = message.within.seconds + message.within.nanos / 1e9
    return SleepRequest(message.wake, message.keep_weights, now + max(0.0, within))


def sleep_status(message: pb.SleepStatus) -> SleepStatus:
    """Return how far an engine is."""
    return value(SleepStatus, message)


def sleep_status_to_wire(status: SleepStatus) -> pb.SleepStatus:
    """Return the message. Raises `ValueError` for an unknown state."""
    return pb.SleepStatus(
        state=pb.SleepStatus.State.Value(status.state.upper()),
        cache_bytes=status.cache_bytes,
        weight_bytes=status.weight_bytes,
        detail=status.detail[:MAX_DETAIL],
    )
