"""What the library raises: typed, with the numbers, and with what to do about it.

Owns the one table from the wire's reasons to classes. Must never decide by the text of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status

    from .types import Move

DOMAIN = "membroker"


class MembrokerError(Exception):
    """Base of all that membroker raises on its own account.

    `reason` is the broker's ErrorReason without its prefix (`MODEL_LIMIT`), or empty for what the library itself
    found; `metadata` has the numbers behind the sentence, as text.
    """

    def __init__(self, message: str, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = dict(metadata or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # By default a class is called with its sentence, and some are made from other things.
        return _remake, (type(self),), {**self.__dict__, "args": self.args}


def _remake(kind: type[MembrokerError]) -> MembrokerError:
    """Return an error without anything in it, for pickle and copy: a worker's error travels to who asked it."""
    base: Any = kind
    # As the class itself does when it is called. `kind.__new__` may be MemoryError's, which refuses.
    while base.__module__ != "builtins":
        base = base.__base__
    made: MembrokerError = base.__new__(kind)
    return made


class OutOfMemory(MembrokerError, MemoryError):
    """No more is lent. `level` says who refused: `model`, `tenant`, `capacity`, `device` or `shared pool`.

    `requested`, `available` and `limit` are bytes at that level; `available` is what a smaller request could have
    got at that moment, `limit` is None where the level has no number of its own (a card that strangers filled).
    """

    @property
    def level(self) -> str:
        """Which of the limits refused."""
        return self.metadata.get("level", "")

    @property
    def requested(self) -> int:
        """Bytes asked for at that level: whole pages, or granules."""
        return int(self.metadata.get("requested_bytes", 0))

    @property
    def asked(self) -> int:
        """Bytes that the call asked for, before they were rounded up."""
        return int(self.metadata.get("asked_bytes", self.requested))

    @property
    def available(self) -> int:
        """Bytes that this level would still have granted."""
        return int(self.metadata.get("available_bytes", 0))

    @property
    def limit(self) -> int | None:
        """The limit of this level, in bytes."""
        text = self.metadata.get("limit_bytes")
        return None if text is None else int(text)


OutOfPhysicalMemory = OutOfMemory
"""The name by which candle-cuda-vmm knows it."""


class OutOfVirtualMemory(MembrokerError, MemoryError):
    """The reserved addresses do not suffice: no free run of them is that long, or growing would pass their end.

    Deallocate, or `compact`, or reserve more in another pool. `requested` and `available`, the most that would have
    been possible, are in bytes.
    """

    def __init__(self, requested: int, available: int, message: str = "") -> None:
        super().__init__(
            message
            or f"no {requested} bytes of free addresses lie side by side, aligned as asked: "
            f"the largest free run has {available}"
        )
        self.requested, self.available = requested, available


class BrokerUnavailable(MembrokerError, ConnectionError):
    """No broker answers. The message says which of the possible things is wrong, and the command that mends it."""


class BrokerAbsent(BrokerUnavailable):
    """There is no broker where one was looked for, and one may come: `connect` waits for it."""


class SessionLost(BrokerUnavailable):
    """The broker does not know the session, so it cannot be taken up again. What is mapped stays valid until closed."""


class InvalidRequest(MembrokerError, ValueError):
    """An argument that no broker would accept: a size, a count, a name."""


class InvalidPageSize(InvalidRequest):
    """A page size is not a power of two, or below the granularity."""


class InvalidOffset(InvalidRequest):
    """A range of a pool lies outside its virtual capacity, or its sum overflows."""


class AlreadyMapped(MembrokerError):
    """A page of the range is backed already."""


class NotMapped(MembrokerError):
    """A page of the range is not backed."""


class Offloaded(AlreadyMapped, NotMapped):
    """A page of the range is offloaded: it is allocated, and has no memory until it is restored."""


class StillMapped(MembrokerError):
    """Something is mapped there: unmap it first."""


class NotFound(MembrokerError, LookupError):
    """The name or id is not known to the broker, at least not as this session's."""


class ModelNotFound(NotFound):
    """No such model at this tenant or in this shared pool, or this session has not registered it."""


class ModelConflict(MembrokerError):
    """The model is registered with other numbers than the ones given."""


class ModelAlreadyExists(MembrokerError):
    """`exclusive=True` was asked, and the model is there; or a shared pool has it already."""


class ModelInUse(MembrokerError):
    """The model can't be left: this session is still charged for memory there, or views of its pool are alive."""


class SegmentNotFound(NotFound):
    """No such segment at this tenant, or it is deleted, or this session does not hold it."""


class SegmentExists(MembrokerError):
    """The model has a segment of that name: attach it, or delete it and wait until its last session has left."""


class SegmentNotSealed(MembrokerError, TimeoutError):
    """The segment was still being written when the time to wait for it was over."""


class SegmentNotWritable(MembrokerError):
    """The segment is sealed, or another session writes it."""


class WriterDied(MembrokerError):
    """The writer of a segment died, left it or deleted it before it was sealed: whoever wants it makes it anew."""


class AccessDenied(MembrokerError, PermissionError):
    """The endpoint does not admit this process, or the call needs another endpoint."""


class ProtocolError(MembrokerError):
    """Library and broker do not understand each other: another version, or a defect of one of them."""


class TooMany(MembrokerError):
    """A bound of the broker is reached: sessions, models, segments, extents or calls in flight."""


class DescriptorLimit(MembrokerError, OSError):
    """This process, or the broker, has no file descriptor left. Raise RLIMIT_NOFILE (`ulimit -n`)."""


class DeviceFailure(MembrokerError):
    """The broker's driver failed. The message has the driver's own words."""


class ManagedMemoryUnavailable(MembrokerError):
    """Managed memory, or advice about it, is more than this driver or this device can. The message says which."""


class CompactionFailed(DeviceFailure):
    """The driver failed while a pool was compacted. `moves` were made before that, and what they moved stays there."""

    def __init__(self, message: str, moves: Sequence[Move]) -> None:
        super().__init__(message)
        self.moves = tuple(moves)


class ClosedError(MembrokerError):
    """The object is closed, or belongs to the process that this one was forked from."""


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
    "MODEL_NOT_FOUND": ModelNotFound,
    "MODEL_CONFLICT": ModelConflict,
    "MODEL_EXISTS": ModelAlreadyExists,
    "MODEL_IN_USE": ModelInUse,
    "EXTENT_NOT_FOUND": NotFound,
    "SESSION_NOT_DETACHED": NotFound,
    "TENANT_NOT_FOUND": NotFound,
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
