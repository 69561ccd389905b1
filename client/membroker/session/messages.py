"""Messages of the wire as status values, and locations in both forms.

Status values have the wire's names, so one function translates them all. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import UTC
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ..types import (
    DeviceStatus,
    Draining,
    LocationBooks,
    ModelBooks,
    ModelStatus,
    Notice,
    SessionBooks,
    SessionStatus,
    SleepRequest,
    SleepStatus,
    Stopping,
    Undrained,
)
from ..v1 import handoff_pb2
from ..v1 import resources_pb2 as pb
from ..vmm.driver import Location

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")
_BOOKS: Mapping[type, tuple[str, type[DataclassInstance]]] = {
    DeviceStatus: ("locations", LocationBooks),
    ModelStatus: ("books", ModelBooks),
    SessionStatus: ("books", SessionBooks),
}
"""The field of a status value that has books by location, and their kind."""
LOCATION_NUMBERS: Mapping[Location, pb.Location.ValueType] = {
    Location.DEVICE: pb.LOCATION_DEVICE,
    Location.HOST: pb.LOCATION_HOST,
}
"""The wire's number for each location."""
MAX_DETAIL = 400
"""The most characters of the sentence in a `SleepStatus`."""


def location_name(location: pb.Location.ValueType) -> str:
    """Return `"device"` or `"host"` for the wire's number."""
    return pb.Location.Name(location).removeprefix("LOCATION_").lower()


def value(kind: type[_T], message: Message, **special: Any) -> _T:
    """Return a status value with what `message` has under the same names; `special` gives the other fields.

    Absent fields are None, times are in UTC, enums are words, and lists are tuples. Books are by location.
    """
    if kind is ModelStatus:
        model: Any = message
        special["guests"] = tuple([value(SleepStatus, status) for status in model.guests])
    if kind in _BOOKS:
        books_name, books = _BOOKS[kind]
        special[books_name] = by_location(books, getattr(message, books_name))
    names = [field.name for field in fields(kind) if field.name not in special]
    return kind(**{name: _plain(message, name) for name in names}, **special)


def _plain(message: Message, name: str) -> Any:
    field, found = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.has_presence and not message.HasField(name):
        return None
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(found)  # a newer broker may send others
        return known.name.removeprefix("LOCATION_").removeprefix("CAUSE_UNSPECIFIED").lower() if known else str(found)
    if isinstance(found, Timestamp):
        return found.ToDatetime(UTC)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(found)
    return found if isinstance(found, str | int | float) else tuple(found)


def by_location(kind: type[_T], books: Iterable[Any]) -> dict[str, _T]:
    """Return books by the name of their location."""
    return {location_name(each.location): value(kind, each) for each in books}


def notice(message: handoff_pb2.Notice) -> Notice | None:
    """Return what a user is told of a broker's notice; None if the notice is for the library only."""
    kind = message.WhichOneof("kind")
    if kind == "draining":
        deadline = message.draining.deadline.ToDatetime(UTC) if message.draining.HasField("deadline") else None
        return Draining(deadline)
    if kind == "undrained":
        return Undrained()
    return Stopping() if kind == "stopping" else None


def sleep_request(message: handoff_pb2.Sleep, now: float) -> SleepRequest:
    """Return what an operator, or the broker by itself, asks; `now` is the time of `time.monotonic`."""
    within = message.within.seconds + message.within.nanos / 1e9
    idle = message.idle.seconds + message.idle.nanos / 1e9 if message.HasField("idle") else None
    return SleepRequest(message.wake, message.keep_weights, now + max(0.0, within), idle)


def sleep_status_to_wire(status: SleepStatus) -> pb.SleepStatus:
    """Return the message. Raises `ValueError` for an unknown state."""
    return pb.SleepStatus(
        state=pb.SleepStatus.State.Value(status.state.upper()),
        cache_bytes=status.cache_bytes,
        weight_bytes=status.weight_bytes,
        detail=status.detail[:MAX_DETAIL],
        idle_ms=status.idle_ms,
        asleep_ms=status.asleep_ms,
        by_itself=status.by_itself,
        cause=pb.SleepStatus.Cause.Value(status.cause.upper() or "CAUSE_UNSPECIFIED"),
        needed_bytes=status.needed_bytes,
        sleep_took_ms=status.sleep_took_ms,
        wake_took_ms=status.wake_took_ms,
    )
