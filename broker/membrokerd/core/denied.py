"""Refusals: a reason and the numbers behind it, as a value.

A refusal changes nothing. It has no sentence here: the edges write it from the numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Reason(enum.StrEnum):
    """Why. The names of `membroker.v1.ErrorReason`; a test holds the two together."""

    MODEL_LIMIT = enum.auto()
    TENANT_LIMIT = enum.auto()
    CAPACITY = enum.auto()
    DEVICE_FULL = enum.auto()
    DRIVER_FAILED = enum.auto()
    DESCRIPTORS_EXHAUSTED = enum.auto()
    DELIVERY_FAILED = enum.auto()
    LOCATION_UNAVAILABLE = enum.auto()
    INVALID_SIZE = enum.auto()
    INVALID_COUNT = enum.auto()
    INVALID_NAME = enum.auto()
    INVALID_ARGUMENT = enum.auto()
    INVALID_PAGE_TOKEN = enum.auto()
    MODEL_NOT_FOUND = enum.auto()
    MODEL_CONFLICT = enum.auto()
    MODEL_EXISTS = enum.auto()
    MODEL_IN_USE = enum.auto()
    EXTENT_NOT_FOUND = enum.auto()
    TENANT_NOT_FOUND = enum.auto()
    TOO_MANY_SESSIONS = enum.auto()
    TOO_MANY_MODELS = enum.auto()
    TOO_MANY_REQUESTS = enum.auto()
    TOKEN_REQUIRED = enum.auto()
    TOKEN_REJECTED = enum.auto()
    ENDPOINT_FORBIDDEN = enum.auto()
    PEER_UNKNOWN = enum.auto()
    UNSUPPORTED_VERSION = enum.auto()
    PROTOCOL_VIOLATION = enum.auto()
    REQUEST_ID_IN_USE = enum.auto()
    OBSERVER = enum.auto()
    STOPPING = enum.auto()
    INTERNAL = enum.auto()

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[str]) -> str:
        return name


@dataclass(frozen=True, slots=True)
class Denied:
    """A refusal: `numbers` are the facts behind it, sizes in bytes and named so (`limit_bytes`)."""

    reason: Reason
    numbers: Mapping[str, int | str] = field(default_factory=dict)


def deny(reason: Reason, **numbers: int | str) -> Denied:
    """Return a refusal with its numbers."""
    return Denied(reason, numbers)
