"""The one table from a refusal to a `google.rpc.Status`: its code, its sentence, and whether a retry can help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, PreconditionFailure, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from membroker.vmm import format_exact
from membroker.wire import names

from ..core.denied import Denied, Reason

DOMAIN = "membroker"
RETRY_SECONDS = 1
"""What RetryInfo suggests if a retry can help: not so short that clients hammer, not so long that they give up."""


class _Row(NamedTuple):
    code: int
    sentence: str
    retry: bool = False


_LEVEL = (
    "{of} may hold {limit} of {location} memory and holds {used}{kept}: {requested} more does not fit, only "
    "{available} does"
)

_TABLE: Mapping[Reason, _Row] = {
    Reason.MODEL_LIMIT: _Row(Code.RESOURCE_EXHAUSTED, "the model " + _LEVEL, retry=True),
    Reason.TENANT_LIMIT: _Row(Code.RESOURCE_EXHAUSTED, "the tenant of " + _LEVEL, retry=True),
    Reason.CAPACITY: _Row(
        Code.RESOURCE_EXHAUSTED,
        "the broker may lend {limit} of {location} memory and has lent {used}{kept}: {requested} more for {of} does "
        "not fit, only {available} does{fair}",
        retry=True,
    ),
    Reason.DEVICE_FULL: _Row(
        Code.RESOURCE_EXHAUSTED,
        "the books allow {requested} more for {of}, but the device itself does not have enough free {location} "
        "memory{free}: a process uses memory that this broker did not lend (`membroker status` shows it as "
        "unaccounted){says}",
        retry=True,
    ),
    Reason.DRIVER_FAILED: _Row(Code.INTERNAL, "the driver failed{says}", retry=True),
    Reason.DESCRIPTORS_EXHAUSTED: _Row(
        Code.RESOURCE_EXHAUSTED,
        "the broker has run out of file descriptors or another system resource{says}",
        retry=True,
    ),
    Reason.DELIVERY_FAILED: _Row(
        Code.UNAVAILABLE, "the session's handoff connection is lost, so the broker cannot deliver the memory"
    ),
    Reason.LOCATION_UNAVAILABLE: _Row(
        Code.FAILED_PRECONDITION, "this broker lends no {location} memory (`host_capacity` in its configuration)"
    ),
    Reason.INVALID_SIZE: _Row(
        Code.INVALID_ARGUMENT,
        "{size_bytes} bytes is not a valid size: it must be at least {least}, less than 2^63 bytes "
        "and a multiple of {granularity}",
    ),
    Reason.INVALID_COUNT: _Row(Code.INVALID_ARGUMENT, "a count must be between 1 and {max_count}, not {count}"),
    Reason.INVALID_NAME: _Row(Code.INVALID_ARGUMENT, "{name!r} is not a valid name of a {kind}, {grammar}"),
    Reason.INVALID_ARGUMENT: _Row(Code.INVALID_ARGUMENT, "{what}"),
    Reason.INVALID_PAGE_TOKEN: _Row(Code.INVALID_ARGUMENT, "this broker did not issue this page token"),
    Reason.MODEL_NOT_FOUND: _Row(Code.NOT_FOUND, "this session has not registered the model {of}"),
    Reason.MODEL_CONFLICT: _Row(
        Code.FAILED_PRECONDITION,
        "{of} is registered with {what} {registered}, not {asked}: leave the number out to join it as it is, change "
        "its limit for all its sessions (`Model.limit`, `replace_limits`), or end its other sessions",
    ),
    Reason.MODEL_EXISTS: _Row(
        Code.ALREADY_EXISTS, "{of} is registered already: join it without `exclusive`, or end the other worker"
    ),
    Reason.MODEL_IN_USE: _Row(Code.FAILED_PRECONDITION, "this session still holds {used} of {of}: release that first"),
    Reason.EXTENT_NOT_FOUND: _Row(Code.NOT_FOUND, "extent {extent} is not lent to this session"),
    Reason.SESSION_NOT_DETACHED: _Row(
        Code.FAILED_PRECONDITION,
        "{session} {what}: only a detached session can be forgotten (`membroker sessions --admin` shows which are)",
    ),
    Reason.SESSION_NOT_EVICTABLE: _Row(Code.FAILED_PRECONDITION, "{session} cannot be evicted: {what}"),
    Reason.TENANT_NOT_FOUND: _Row(Code.NOT_FOUND, "there is no tenant {tenant!r} in the broker's configuration{hint}"),
    Reason.TENANT_EXISTS: _Row(Code.ALREADY_EXISTS, "there is a tenant {tenant!r} already{hint}"),
    Reason.TENANT_CONFIGURED: _Row(
        Code.FAILED_PRECONDITION,
        "the tenant {tenant!r} is in the daemon's configuration file: change or remove it there, and reload the "
        "daemon. By command its limits, guarantees and weights can be changed (`membroker quota set {tenant}`)",
    ),
    Reason.TENANT_DELETED: _Row(
        Code.FAILED_PRECONDITION,
        "the tenant {tenant!r} is being deleted: it takes no new sessions and no changes, and is gone when nothing of "
        "it is lent",
    ),
    Reason.SEGMENT_NOT_FOUND: _Row(Code.NOT_FOUND, "{missing}"),
    Reason.SEGMENT_EXISTS: _Row(Code.ALREADY_EXISTS, "{segment} exists and is {told}: {advice}", retry=True),
    Reason.SEGMENT_NOT_SEALED: _Row(
        Code.DEADLINE_EXCEEDED, "{segment} is still being written: attach it with a longer timeout", retry=True
    ),
    Reason.SEGMENT_NOT_WRITABLE: _Row(
        Code.FAILED_PRECONDITION,
        "{segment} is {told}: only the session that created a segment can seal it",
    ),
    Reason.WRITER_DIED: _Row(
        Code.ABORTED,
        "{segment} will never be sealed: its create failed, it was deleted or lost, or its writer died or left it. "
        "Create it again when its memory is free",
        retry=True,
    ),
    Reason.SEGMENT_AMBIGUOUS: _Row(
        Code.INVALID_ARGUMENT, "several models have a segment of that name: give its model, as in {choices}"
    ),
    Reason.TOO_MANY_SEGMENTS: _Row(
        Code.RESOURCE_EXHAUSTED,
        "the {of} may have at most {limit} {what}, and this segment would be more: delete some",
        retry=True,
    ),
    Reason.TOO_MANY_TENANTS: _Row(
        Code.RESOURCE_EXHAUSTED,
        "there are {limit} tenants that were made by command, which is the maximum: delete some",
        retry=True,
    ),
    Reason.TOO_MANY_SESSIONS: _Row(
        Code.RESOURCE_EXHAUSTED, "the {of} has {limit} sessions, which is the maximum{detached}", retry=True
    ),
    Reason.TOO_MANY_MODELS: _Row(
        Code.RESOURCE_EXHAUSTED, "the {holder} has {limit} models, which is the maximum", retry=True
    ),
    Reason.TOO_MANY_REQUESTS: _Row(
        Code.RESOURCE_EXHAUSTED, "the {whose} has {limit} {calls}, which is the maximum", retry=True
    ),
    Reason.TOKEN_REQUIRED: _Row(
        Code.UNAUTHENTICATED,
        "the call has no `membroker-token`: open a session on this endpoint's handoff.sock to get a token",
    ),
    Reason.TOKEN_REJECTED: _Row(
        Code.UNAUTHENTICATED, "the token is unknown here: its session has ended, or it belongs to another endpoint"
    ),
    Reason.ENDPOINT_FORBIDDEN: _Row(
        Code.PERMISSION_DENIED,
        "uid {uid} may not use this endpoint: an operator must add it to the tenant's `uids` in the daemon's "
        "configuration, and reload the daemon",
    ),
    Reason.PEER_UNKNOWN: _Row(Code.PERMISSION_DENIED, "the kernel cannot say which process is connecting: {what}"),
    Reason.UNSUPPORTED_VERSION: _Row(
        Code.FAILED_PRECONDITION, "the client speaks protocol version {version}, this broker speaks {supported}"
    ),
    Reason.PROTOCOL_VIOLATION: _Row(Code.INVALID_ARGUMENT, "{what}"),
    Reason.QUOTA_CONFLICT: _Row(
        Code.FAILED_PRECONDITION,
        "{what} would be {asked} of {location} memory, more than {bound} ({limit}): first lower a guarantee, or raise "
        "{bound}",
    ),
    Reason.REQUEST_ID_IN_USE: _Row(Code.ALREADY_EXISTS, "a request with the id {request_id} is still in flight"),
    Reason.OBSERVER: _Row(
        Code.PERMISSION_DENIED,
        "this session is an observer (`observer=True`): it can read the books, and cannot borrow",
    ),
    Reason.STOPPING: _Row(Code.UNAVAILABLE, "the broker is stopping", retry=True),
    Reason.DRAINING: _Row(
        Code.UNAVAILABLE,
        "an operator is draining this device: it lends nothing more until `membroker undrain`",
        retry=True,
    ),
    Reason.JOURNAL_FULL: _Row(
        Code.UNAVAILABLE,
        "the broker cannot record what it lends{says}: make room on the disk of its runtime directory",
        retry=True,
    ),
    Reason.INTERNAL: _Row(Code.INTERNAL, "{fault}; the books are unchanged"),
}
assert set(_TABLE) == set(Reason)

_NAMES = {
    "tenant": f"tenants/TENANT: {names.grammar('TENANT')}",
    "model": f"tenants/TENANT/models/MODEL: {names.grammar('MODEL')}",
    "segment": f"tenants/TENANT/models/MODEL/segments/SEGMENT: {names.grammar('MODEL', 'SEGMENT')}",
}
"""How each kind of name is written."""
_ATTACH = (
    "attach it, publish its next version (replace=True), "
    "or delete it and wait until the last session that holds it has left"
)
_WAIT = "wait until its memory is free, and try again"
_ADVICE = {
    "writing": f"{_ATTACH}; an attach waits for the seal",
    "sealed": _ATTACH,
    "ending": f"it is deleted, or was never sealed, and a session still has it mapped; {_WAIT}",
    "releasing": f"it is deleted, and its memory is not free yet; {_WAIT}",
}
"""What to do about a segment that has the name already, by its state."""


def to_status(denied: Denied) -> Status:
    """Return the Status of a refusal: its sentence, an ErrorInfo with the numbers, and the standard details."""
    row = _TABLE[denied.reason]
    status = Status(code=row.code, message=row.sentence.format_map(_Words(denied.numbers)))
    metadata = {key: str(value) for key, value in denied.numbers.items()}
    status.details.add().Pack(ErrorInfo(reason=denied.reason.value, domain=DOMAIN, metadata=metadata))
    detail = _standard_detail(row, denied, status.message)
    if detail is not None:
        status.details.add().Pack(detail)
    if row.retry:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_SECONDS)))
    return status


def _standard_detail(row: _Row, denied: Denied, sentence: str) -> Any:
    subject = str(denied.numbers.get("model", denied.numbers.get("tenant", "")))
    if row.code == Code.RESOURCE_EXHAUSTED:
        return QuotaFailure(violations=[QuotaFailure.Violation(subject=subject, description=sentence)])
    if row.code == Code.INVALID_ARGUMENT:
        return BadRequest(field_violations=[BadRequest.FieldViolation(description=sentence)])
    if row.code == Code.FAILED_PRECONDITION:
        violation = PreconditionFailure.Violation(type=denied.reason.value, subject=subject, description=sentence)
        return PreconditionFailure(violations=[violation])
    return None


class _Words(dict[str, object]):
    """The numbers of a refusal as its sentence needs them: sizes with units, and text for what is absent."""

    def __init__(self, numbers: Mapping[str, int | str]) -> None:
        super().__init__(numbers)
        for key, value in numbers.items():
            if (key.endswith("_bytes") or key in ("asked", "registered")) and isinstance(value, int):
                self[key.removesuffix("_bytes")] = format_exact(value)
        self.setdefault("of", numbers.get("model", "it"))
        self.setdefault("hint", "")
        lost = numbers.get("detached")
        once = ": connect once, and use that client for all calls" if numbers.get("of") == "process" else ""
        forget = f"; `membroker forget SESSION` ends those that are detached: {lost}" if lost else ""
        self["detached"] = once + forget
        self["holder"] = f"tenant {numbers['tenant']}" if "tenant" in numbers else "broker"
        reserved = numbers.get("reserved_bytes")
        self["kept"] = f", and {format_exact(int(reserved))} of the rest is reserved for others" if reserved else ""
        self["fair"] = _fair(numbers)
        self.setdefault("whose", "session")
        self.setdefault("calls", "allocations in flight")
        self.setdefault("fault", "a fault of the broker, written in its log")
        free, reserve = (numbers.get(key) for key in ("device_free_bytes", "reserve_bytes"))
        kept = f", of which {format_exact(int(reserve))} must stay free" if reserve else ""
        self["free"] = "" if free is None else f" ({format_exact(int(free))}{kept})"
        says = numbers.get("driver_says")
        self["says"] = f": {says}" if says else ""
        self["grammar"] = _NAMES.get(str(numbers.get("kind")))
        self["told"] = "being written" if numbers.get("state") == "writing" else numbers.get("state")
        self["advice"] = _ADVICE.get(str(numbers.get("state")), _ATTACH)
        if "segment" in numbers:
            self["missing"] = _missing(numbers["segment"])
            label = str(numbers["segment"]).rpartition("/")[2]
            self["choices"] = " or ".join(f"{model}/{label}" for model in str(numbers.get("models", "")).split(", "))

    def __missing__(self, key: str) -> object:
        return f"<{key}>"


def _fair(numbers: Mapping[str, int | str]) -> str:
    """Say what the model could have, what its session is asked to release, and how long the request waited."""
    if "share_bytes" not in numbers:
        return ""
    share, obtainable = int(numbers["share_bytes"]), int(numbers["obtainable_bytes"])
    has = f", {format_exact(obtainable)} more than it has" if obtainable else ", and it has that much" if share else ""
    waited = (
        f", and the request waited {int(numbers['waited_ms']) / 1000:.1f} s at the broker"
        if "waited_ms" in numbers
        else ""
    )
    recalled = ""
    if "recalled_bytes" in numbers:
        size = format_exact(int(numbers["recalled_bytes"]))
        recalled = f", and this session has not yet answered a recall of {size} of it"
    return f"; its share is {format_exact(share)}{has}{recalled}{waited}"


def _missing(segment: int | str) -> str:
    """Say that a segment does not exist: by its generation, by its name, or by its own name in any model."""
    if isinstance(segment, int):
        return f"this session holds no segment of the generation {segment}: it has not attached it, or has left it"
    where, _, label = segment.rpartition("/segments/")
    there = f"no segment {segment}"
    if where.endswith("/models/-"):  # a client's way to write that any model will do
        there = f"no segment {label} in any model of {where.removesuffix('/models/-')}"
    return (
        f"there is {there}; it may be deleted, or another tenant's: `membroker segments` lists all that this tenant has"
    )
