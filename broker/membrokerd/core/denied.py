"""Refusals: a reason and the numbers behind it, as a value.

A refusal changes nothing. Its sentence is written at the edge, from the numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Reason(enum.StrEnum):
    """Why a request was refused: the names of `membroker.v1.ErrorReason`, which a test compares."""

    MODEL_LIMIT = "MODEL_LIMIT"
    TENANT_LIMIT = "TENANT_LIMIT"
    CAPACITY = "CAPACITY"
    DEVICE_FULL = "DEVICE_FULL"
    DRIVER_FAILED = "DRIVER_FAILED"
    DESCRIPTORS_EXHAUSTED = "DESCRIPTORS_EXHAUSTED"
    DELIVERY_FAILED = "DELIVERY_FAILED"
    LOCATION_UNAVAILABLE = "LOCATION_UNAVAILABLE"
    INVALID_SIZE = "INVALID_SIZE"
    INVALID_COUNT = "INVALID_COUNT"
    INVALID_NAME = "INVALID_NAME"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    INVALID_PAGE_TOKEN = "INVALID_PAGE_TOKEN"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_CONFLICT = "MODEL_CONFLICT"
    MODEL_EXISTS = "MODEL_EXISTS"
    MODEL_IN_USE = "MODEL_IN_USE"
    EXTENT_NOT_FOUND = "EXTENT_NOT_FOUND"
    SESSION_NOT_DETACHED = "SESSION_NOT_DETACHED"
    SESSION_NOT_EVICTABLE = "SESSION_NOT_EVICTABLE"
    TENANT_NOT_FOUND = "TENANT_NOT_FOUND"
    TENANT_EXISTS = "TENANT_EXISTS"
    TENANT_CONFIGURED = "TENANT_CONFIGURED"
    TENANT_DELETED = "TENANT_DELETED"
    SEGMENT_NOT_FOUND = "SEGMENT_NOT_FOUND"
    SEGMENT_EXISTS = "SEGMENT_EXISTS"
    SEGMENT_NOT_SEALED = "SEGMENT_NOT_SEALED"
    SEGMENT_NOT_WRITABLE = "SEGMENT_NOT_WRITABLE"
    WRITER_DIED = "WRITER_DIED"
    SEGMENT_AMBIGUOUS = "SEGMENT_AMBIGUOUS"
    TOO_MANY_SESSIONS = "TOO_MANY_SESSIONS"
    TOO_MANY_MODELS = "TOO_MANY_MODELS"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    TOO_MANY_SEGMENTS = "TOO_MANY_SEGMENTS"
    TOO_MANY_TENANTS = "TOO_MANY_TENANTS"
    TOKEN_REQUIRED = "TOKEN_REQUIRED"
    TOKEN_REJECTED = "TOKEN_REJECTED"
    ENDPOINT_FORBIDDEN = "ENDPOINT_FORBIDDEN"
    PEER_UNKNOWN = "PEER_UNKNOWN"
    UNSUPPORTED_VERSION = "UNSUPPORTED_VERSION"
    PROTOCOL_VIOLATION = "PROTOCOL_VIOLATION"
    QUOTA_CONFLICT = "QUOTA_CONFLICT"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    OBSERVER = "OBSERVER"
    STOPPING = "STOPPING"
    DRAINING = "DRAINING"
    JOURNAL_FULL = "JOURNAL_FULL"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class Denied:
    """A refusal: `numbers` are the facts behind it. The name of a size ends in its unit (`limit_bytes`)."""

    reason: Reason
    numbers: Mapping[str, int | str] = field(default_factory=dict)


def deny(reason: Reason, **numbers: int | str) -> Denied:
    """Return a refusal with its numbers."""
    return Denied(reason, numbers)
