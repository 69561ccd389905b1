"""The exceptions of the library: typed, with the numbers, and with what to do.

Owns the one table from the wire's reasons to classes. It must never decide by the text of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status

    from .types import Move

DOMAIN = "membroker"


class MembrokerError(Exception):
    """Base of everything that membroker raises by itself.

    `reason` is the broker's ErrorReason without its prefix (`MODEL_LIMIT`), or empty for an error of the library.
    `metadata` has the numbers behind the sentence, as text. `request` is the refused request, which `membroker explain`
    takes; it is empty for other errors.
    """

    request = ""

    def __init__(self, message: str, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata: dict[str, str] = dict(metadata or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the class with its message, and some classes take other arguments.
        return _remake, (type(self),), {**self.__dict__, "args": self.args}


def _remake(kind: type[MembrokerError]) -> MembrokerError:
    """Return an empty error of a class, for pickle and copy: a worker's error travels to another process."""
    base: Any = kind
    # `kind.__new__` may be MemoryError's, which refuses to make a subclass: find the first base of Python's own.
    while base.__module__ != "builtins":
        base = base.__base__
    made: MembrokerError = base.__new__(kind)
    return made


class OutOfMemory(MembrokerError, MemoryError):
    """The broker, or a limit in this process, refused to lend more.

    `level` says which limit: `model`, `tenant`, `capacity`, `device` or `shared pool`. `requested_bytes`,
    `available_bytes` and `limit_bytes` are at that level. A smaller request could have got `available_bytes` at that
    moment. `limit_bytes` is None if the level has no limit of its own (a GPU that other programs filled). If the
    broker's capacity refused, `share_bytes`, `obtainable_bytes` and, if the request waited, `waited_seconds` are set,
    too.
    """

    @property
    def level(self) -> str:
        """Which limit refused."""
        return self.metadata.get("level", "")

    @property
    def requested_bytes(self) -> int:
        """Bytes asked for at that level: whole pages, or granules."""
        return int(self.metadata.get("requested_bytes", 0))

    @property
    def asked_bytes(self) -> int:
        """Bytes that the call asked for, before rounding up."""
        return int(self.metadata.get("asked_bytes", self.requested_bytes))

    @property
    def available_bytes(self) -> int:
        """Bytes that this level would still have granted at that moment."""
        return int(self.metadata.get("available_bytes", 0))

    @property
    def limit_bytes(self) -> int | None:
        """The limit of this level in bytes, or None."""
        return self._number("limit_bytes")

    @property
    def share_bytes(self) -> int | None:
        """The bytes that the model could have had if it wanted all there is; None if the level has no shares.

        The capacity is divided among the models that hold or want memory: each has its guarantee, and the rest is
        divided by weight. What others already hold is not taken from them.
        """
        return self._number("share_bytes")

    @property
    def obtainable_bytes(self) -> int | None:
        """How many more bytes the model could get by waiting, up to `share_bytes`. None if the level has no shares."""
        return self._number("obtainable_bytes")

    @property
    def waited_seconds(self) -> float:
        """How long the request waited at the broker before it was refused; 0.0 if it did not wait."""
        return int(self.metadata.get("waited_ms", 0)) / 1000

    def _number(self, key: str) -> int | None:
        text = self.metadata.get(key)
        return None if text is None else int(text)


OutOfPhysicalMemory = OutOfMemory
"""The name by which candle-cuda-vmm knows it."""


class OutOfVirtualMemory(MembrokerError, MemoryError):
    """The reserved addresses do not suffice: no free run is long enough, or growing would pass their end.

    Deallocate, `compact`, or reserve more in another pool. `available_bytes` is the most that would have fitted.
    """

    available_bytes: int
    requested_bytes: int

    def __init__(self, requested: int, available: int, message: str = "") -> None:
        super().__init__(
            message
            or f"no {requested} bytes of free addresses lie side by side, aligned as asked: "
            f"the largest free run has {available}. Deallocate, compact, or reserve more (virtual_capacity)"
        )
        self.requested_bytes, self.available_bytes = requested, available


class BrokerUnavailable(MembrokerError, ConnectionError):
    """No broker answers. The message says what is wrong and which command mends it."""


class BrokerAbsent(BrokerUnavailable):
    """No broker listens at the endpoint. One may still come, so `connect` waits for it."""


class SessionLost(BrokerUnavailable):
    """The broker does not know the session, so it cannot be resumed. Mapped memory stays valid until closed."""


class InvalidRequest(MembrokerError, ValueError):
    """An argument that no broker would accept: a size, a count or a name."""


class InvalidPageSize(InvalidRequest):
    """The page size is not a power of two, or smaller than the granularity."""


class InvalidOffset(InvalidRequest):
    """A range of a pool lies outside its virtual capacity, or its end overflows."""


class AlreadyMapped(MembrokerError):
    """A page of the range is allocated already."""


class NotMapped(MembrokerError):
    """A page of the range is not allocated."""


class Offloaded(AlreadyMapped, NotMapped):
    """A page of the range is offloaded: it is allocated, and has no memory until it is restored."""


class StillMapped(MembrokerError):
    """Something is mapped there. Unmap it first."""


class NotFound(MembrokerError, LookupError):
    """The broker does not know the name or the id, or it is not this session's."""


class ModelNotFound(NotFound):
    """This tenant or shared pool has no such model, or this session has not registered it."""


class ModelConflict(MembrokerError):
    """Another process has registered the model with other numbers than the ones given."""


class ModelAlreadyExists(MembrokerError):
    """The model exists and `exclusive=True` was passed, or a shared pool has a model of that name already."""


class ModelInUse(MembrokerError):
    """The model cannot be left: this session is still charged for memory, or views of its pool are alive."""


class SegmentNotFound(NotFound):
    """This tenant has no such segment, or it is deleted, or this session does not hold it."""


class SegmentExists(MembrokerError):
    """The model has a segment of that name: attach it, publish its next version with `replace=True`, or delete it.

    After a deletion the name is free when the last session that holds the segment has left. Those who publish wait for
    that, and delete a segment that a program has left, as by its death.
    """


class SegmentNotSealed(MembrokerError, TimeoutError):
    """The segment was still being written when the timeout ended."""


class SegmentNotWritable(MembrokerError):
    """This process has sealed the segment, or did not create it."""


class WriterDied(MembrokerError):
    """The segment was deleted, or its writer died or left it, before it was sealed. Create the segment again."""


class AccessDenied(MembrokerError, PermissionError):
    """The endpoint does not admit this process, or the call needs another endpoint."""


class ProtocolError(MembrokerError):
    """Library and broker do not understand each other: their versions differ, or one of them is defective."""


class TooMany(MembrokerError):
    """A bound of the broker is reached: sessions, models, segments, extents or unanswered calls."""


class DescriptorLimit(MembrokerError, OSError):
    """This process or the broker has no file descriptor left. Raise RLIMIT_NOFILE (`ulimit -n`)."""


class ThreadLimit(MembrokerError, RuntimeError):
    """This process can start no thread. Raise its limit of processes (`ulimit -u`, `TasksMax=`, `pids.max`)."""


class DeviceFailure(MembrokerError):
    """A driver call failed. The message has the driver's own words."""


class ManagedMemoryUnavailable(MembrokerError):
    """This driver or device does not support managed memory, or this hint. The message says which."""


class CompactionFailed(DeviceFailure):
    """The driver failed during a compaction. `moves` were made before that, and their bytes stay where they are now."""

    def __init__(self, message: str, moves: Sequence[Move]) -> None:
        super().__init__(message)
        self.moves: tuple[Move, ...] = tuple(moves)


class Cancelled(MembrokerError):
    """The call was given up: another thread has cancelled its `CancelScope`. Nothing of the call is left."""


class ClosedError(MembrokerError):
    """The object is closed, or belongs to the parent of this forked process."""


_CLASSES: dict[str, type[MembrokerError]] = {
    "MODEL_LIMIT": OutOfMemory,
    "TENANT_LIMIT": OutOfMemory,
    "CAPACITY": OutOfMemory,
    "DEVICE_FULL": OutOfMemory,
    "DRIVER_FAILED": DeviceFailure,
    "DESCRIPTORS_EXHAUSTED": DescriptorLimit,
    "DELIVERY_FAILED": BrokerUnavailable,
    "LOCATION_UNAVAILABLE": InvalidRequest,
    "INVALID_SIZE": InvalidRequest,
    "INVALID_COUNT": InvalidRequest,
    "INVALID_NAME": InvalidRequest,
    "INVALID_ARGUMENT": InvalidRequest,
    "INVALID_PAGE_TOKEN": InvalidRequest,
    "QUOTA_CONFLICT": InvalidRequest,
    "MODEL_NOT_FOUND": ModelNotFound,
    "MODEL_CONFLICT": ModelConflict,
    "MODEL_EXISTS": ModelAlreadyExists,
    "MODEL_IN_USE": ModelInUse,
    "EXTENT_NOT_FOUND": NotFound,
    "SESSION_NOT_DETACHED": NotFound,
    "SESSION_NOT_EVICTABLE": InvalidRequest,
    "TENANT_NOT_FOUND": NotFound,
    "TENANT_EXISTS": InvalidRequest,
    "TENANT_CONFIGURED": InvalidRequest,
    "TENANT_DELETED": AccessDenied,
    "SEGMENT_NOT_FOUND": SegmentNotFound,
    "SEGMENT_EXISTS": SegmentExists,
    "SEGMENT_NOT_SEALED": SegmentNotSealed,
    "SEGMENT_NOT_WRITABLE": SegmentNotWritable,
    "WRITER_DIED": WriterDied,
    "SEGMENT_AMBIGUOUS": InvalidRequest,
    "TOO_MANY_SESSIONS": TooMany,
    "TOO_MANY_MODELS": TooMany,
    "TOO_MANY_REQUESTS": TooMany,
    "TOO_MANY_SEGMENTS": TooMany,
    "TOO_MANY_TENANTS": TooMany,
    "TOKEN_REQUIRED": AccessDenied,
    "TOKEN_REJECTED": AccessDenied,
    "ENDPOINT_FORBIDDEN": AccessDenied,
    "PEER_UNKNOWN": AccessDenied,
    "OBSERVER": AccessDenied,
    "UNSUPPORTED_VERSION": ProtocolError,
    "PROTOCOL_VIOLATION": ProtocolError,
    "REQUEST_ID_IN_USE": ProtocolError,
    "STOPPING": BrokerUnavailable,
    "DRAINING": BrokerUnavailable,
    "JOURNAL_FULL": BrokerUnavailable,
    "INTERNAL": MembrokerError,
}


def from_status(status: Status) -> MembrokerError:
    """Return the exception for a broker's Status, by the ErrorInfo in its details."""
    from google.rpc.error_details_pb2 import ErrorInfo

    info = ErrorInfo()
    for detail in status.details:
        if detail.Is(ErrorInfo.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            kind = _CLASSES.get(info.reason, MembrokerError)
            return kind(status.message, info.reason, dict(info.metadata))
    return MembrokerError(status.message)
