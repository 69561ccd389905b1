"""Every refusal as a caller sees it: a code, a full sentence, an ErrorInfo, and whether a retry can help.

The numbers are those that the code passes, found by looking at each `deny(` of the daemon, so that a sentence that
asks for another number shows as `<name>` here and not in an operator's terminal.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, PreconditionFailure, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status
from tests.support.sizes import GIB, MIB

import membrokerd
from membrokerd.core.denied import Denied, Reason, deny
from membrokerd.edge.convert import Refused, parse_model
from membrokerd.edge.errors import DOMAIN, to_status

MODEL = "tenants/red/models/llama"
SEGMENT = f"{MODEL}/segments/weights"
LEVEL = {
    "level": "model",
    "model": MODEL,
    "location": "device",
    "requested_bytes": 6 * MIB,
    "used_bytes": 8 * MIB,
    "available_bytes": 4 * MIB,
    "limit_bytes": 12 * MIB,
}
SHARE = {"share_bytes": 20 * MIB, "obtainable_bytes": 12 * MIB}
MADE = {"model": MODEL, "level": "device", "location": "device", "requested_bytes": 6 * MIB}
SAYS = {**MADE, "driver_says": "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)"}
NUMBERS: dict[Reason, list[dict[str, int | str]]] = {
    Reason.MODEL_LIMIT: [LEVEL],
    Reason.TENANT_LIMIT: [LEVEL],
    Reason.CAPACITY: [
        LEVEL,
        {**LEVEL, **SHARE},
        {**LEVEL, **SHARE, "waited_ms": 1_500},
        {**LEVEL, **SHARE, "recalled_bytes": 6 * MIB},
        {**LEVEL, "reserved_bytes": 2 * MIB},
    ],
    Reason.DEVICE_FULL: [SAYS, {**MADE, "device_free_bytes": 5, "available_bytes": 0, "reserve_bytes": 9}],
    Reason.DRIVER_FAILED: [
        SAYS,
        {"driver_says": "the device does not answer, and nothing is lent until it does (a GPU is lost)"},
    ],
    Reason.DESCRIPTORS_EXHAUSTED: [SAYS, {"driver_says": "socketpair: Too many open files"}],
    Reason.DELIVERY_FAILED: [{}, {"model": MODEL}, {"model": MODEL, "location": "device"}],
    Reason.LOCATION_UNAVAILABLE: [{"location": "host"}],
    Reason.INVALID_SIZE: [
        {"size_bytes": size, "least_bytes": 2 * MIB, "granularity_bytes": 2 * MIB}
        for size in (-(1 << 63), 0, (1 << 63) - 1)
    ],
    Reason.INVALID_COUNT: [{"count": -1, "max_count": 65_536}],
    Reason.INVALID_NAME: [
        {"kind": "tenant", "name": ""},
        {"kind": "model", "name": "a\n\x1b[2J{count}"},
        {"kind": "segment", "name": "w"},
    ],
    Reason.INVALID_ARGUMENT: [{"what": "an extent id stands twice in the release"}],
    Reason.INVALID_PAGE_TOKEN: [{}],
    Reason.MODEL_NOT_FOUND: [{"model": MODEL}],
    Reason.QUOTA_CONFLICT: [
        {
            "what": "the guarantees of all tenants together",
            "asked_bytes": 9,
            "bound": "the capacity",
            "limit_bytes": 5,
            "location": "device",
        },
    ],
    Reason.MODEL_CONFLICT: [
        {"model": MODEL, "what": "device limit", "asked": 5, "registered": 7},
        {"model": MODEL, "what": "virtual_capacity", "asked": 5, "registered": "nothing"},
    ],
    Reason.MODEL_EXISTS: [{"model": MODEL}],
    Reason.MODEL_IN_USE: [{"model": MODEL, "used_bytes": 2 * MIB}],
    Reason.EXTENT_NOT_FOUND: [{"extent": (1 << 64) - 1}],
    Reason.SESSION_NOT_DETACHED: [{"session": "sessions/1c", "what": "is open, its process is connected"}],
    Reason.SESSION_NOT_EVICTABLE: [{"session": "sessions/1c", "what": "its process is dead already"}],
    Reason.TENANT_NOT_FOUND: [{"tenant": "green"}, {"tenant": "acme", "hint": ", and each user is one here"}],
    Reason.TENANT_EXISTS: [{"tenant": "green", "hint": ", in the configuration file"}],
    Reason.TENANT_CONFIGURED: [{"tenant": "green"}],
    Reason.TENANT_DELETED: [{"tenant": "green"}],
    Reason.TOO_MANY_TENANTS: [{"limit": 64}],
    Reason.SEGMENT_NOT_FOUND: [{"segment": SEGMENT}, {"segment": (1 << 64) - 1}],
    Reason.SEGMENT_EXISTS: [
        {"segment": SEGMENT, "state": state, "sessions": 2} for state in ("writing", "sealed", "ending", "releasing")
    ],
    Reason.SEGMENT_NOT_SEALED: [{"segment": SEGMENT}],
    Reason.SEGMENT_NOT_WRITABLE: [{"segment": SEGMENT, "state": "sealed"}],
    Reason.WRITER_DIED: [{"segment": SEGMENT}],
    Reason.SEGMENT_AMBIGUOUS: [{"segment": "tenants/red/models/-/segments/weights", "models": "llama, qwen"}],
    Reason.TOO_MANY_SESSIONS: [
        {"limit": 16, "of": "process"},
        {"limit": 16, "of": "process", "detached": "sessions/1c sessions/1d"},
        {"limit": 128, "of": "broker"},
        {"limit": 64, "of": "tenant"},
    ],
    Reason.TOO_MANY_MODELS: [{"limit": 256, "tenant": "red"}, {"limit": 4_096}],
    Reason.TOO_MANY_REQUESTS: [{"limit": 16}, {"limit": 1_024, "whose": "tenant", "calls": "attaches that wait"}],
    Reason.TOO_MANY_SEGMENTS: [
        {"limit": 256, "of": "tenant", "what": "segments"},
        {"limit": 4_096, "of": "broker", "what": "extents of segments"},
    ],
    Reason.TOKEN_REQUIRED: [{}],
    Reason.TOKEN_REJECTED: [{}],
    Reason.ENDPOINT_FORBIDDEN: [{"uid": 4_294_967_295}],
    Reason.PEER_UNKNOWN: [{"what": "it died before it was greeted"}],
    Reason.UNSUPPORTED_VERSION: [{"version": (1 << 32) - 1, "supported": 1}],
    Reason.PROTOCOL_VIOLATION: [{"what": "Hello was said already"}],
    Reason.REQUEST_ID_IN_USE: [{"request_id": (1 << 64) - 1}],
    Reason.OBSERVER: [{}],
    Reason.STOPPING: [{}],
    Reason.DRAINING: [{}],
    Reason.JOURNAL_FULL: [{"driver_says": "no room for its journal"}],
    Reason.INTERNAL: [{}, MADE, {"fault": "the limit cannot be kept in /var/lib/x: No space left on device"}],
}
RETRY = {
    Reason.MODEL_LIMIT,
    Reason.TENANT_LIMIT,
    Reason.CAPACITY,
    Reason.DEVICE_FULL,
    Reason.DRIVER_FAILED,
    Reason.DESCRIPTORS_EXHAUSTED,
    Reason.TOO_MANY_SESSIONS,
    Reason.TOO_MANY_MODELS,
    Reason.TOO_MANY_REQUESTS,
    Reason.SEGMENT_EXISTS,
    Reason.SEGMENT_NOT_SEALED,
    Reason.WRITER_DIED,
    Reason.TOO_MANY_SEGMENTS,
    Reason.TOO_MANY_TENANTS,
    Reason.STOPPING,
    Reason.DRAINING,
    Reason.JOURNAL_FULL,
}
"""What error_reason.proto says of each: "Retry"."""


def details(status: Status, kind: type) -> list[object]:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_a_whole_status(reason: Reason) -> None:
    for numbers in NUMBERS[reason]:
        status = to_status(Denied(reason, numbers))
        assert status.code in Code.values()
        assert status.code != Code.OK
        assert status.message
        assert not [key for key in (*LEVEL, "of", "says", "what", "granularity") if f"<{key}" in status.message]
        assert "<" not in status.message
        assert "{" not in status.message.replace("{count}", "")
        assert status.message.isprintable()
        (info,) = details(status, ErrorInfo)
        assert (info.reason, info.domain) == (reason.value, DOMAIN)
        assert dict(info.metadata) == {key: str(value) for key, value in numbers.items()}
        assert bool(details(status, RetryInfo)) == (reason in RETRY)
        assert len(details(status, QuotaFailure)) == (status.code == Code.RESOURCE_EXHAUSTED)
        assert len(details(status, BadRequest)) == (status.code == Code.INVALID_ARGUMENT)
        assert len(details(status, PreconditionFailure)) == (status.code == Code.FAILED_PRECONDITION)


def test_the_numbers_here_are_those_that_the_code_passes() -> None:
    """Each `deny(Reason.X, a=…, b=…)` of the daemon has just the keys of one of the samples above."""
    seen = 0
    for path in Path(membrokerd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "deny"):
                continue
            first = node.args[0]
            keys = {keyword.arg for keyword in node.keywords}
            if not isinstance(first, ast.Attribute) or None in keys:
                continue  # the level's reason, and the version's numbers, which stand in variables
            samples = [set(numbers) for numbers in NUMBERS[Reason(first.attr)]]
            assert keys in samples, f"{path.name}:{node.lineno}: {first.attr} with {keys}, here {samples}"
            seen += 1
    assert seen > 30


def test_a_refusal_fits_into_what_a_client_takes() -> None:
    """gRPC clients take 8 KiB of metadata. The longest is a name of unprintable letters, which are shown escaped."""
    for letter in ("\U000e0001", "é", '"', "\0", "a"):
        with pytest.raises(Refused) as caught:
            parse_model(letter * 10_000)
        status = to_status(caught.value.denied)
        assert len(status.SerializeToString()) * 4 // 3 + 3 * len(status.message.encode()) < 8_000, letter


MISSPELT = "tenants/red/models/-/segments/wieghts"
EXISTS, CONFLICT = {"segment": SEGMENT}, {"model": MODEL, "what": "device limit"}
FULL_BY_2 = {"location": "device", "limit_bytes": 4 * GIB, "used_bytes": 2 * GIB + 2 * MIB}
SENTENCES: list[tuple[Reason, dict[str, int | str], list[str]]] = [
    (Reason.MODEL_LIMIT, LEVEL, [MODEL, "12.0 MiB", "8.0 MiB", "6.0 MiB", "4.0 MiB", "device"]),
    # No number is rounded: "2.0 GiB more does not fit, only 2.0 GiB does" by one granule.
    (
        Reason.MODEL_LIMIT,
        {"model": MODEL, **FULL_BY_2, "requested_bytes": 2 * GIB, "available_bytes": 2 * GIB - 2 * MIB},
        ["holds 2050.0 MiB: 2.0 GiB more does not fit, only 2046.0 MiB does$"],
    ),
    (
        Reason.DEVICE_FULL,
        {**MADE, "device_free_bytes": 6 * MIB, "available_bytes": 2 * MIB, "reserve_bytes": 4 * MIB},
        ["not have enough free device memory (6.0 MiB, of which 4.0 MiB must stay free): a process"],
    ),
    (
        Reason.CAPACITY,
        {**LEVEL, **SHARE, "waited_ms": 1_500},
        ["; its share is 20.0 MiB, 12.0 MiB more than it has, and the request waited 1.5 s at the broker$"],
    ),
    (
        Reason.CAPACITY,
        {**LEVEL, "share_bytes": 20 * MIB, "obtainable_bytes": 0},
        ["; its share is 20.0 MiB, and it has that much$"],
    ),
    (Reason.CAPACITY, {**LEVEL, "share_bytes": 0, "obtainable_bytes": 0}, ["; its share is 0 B$"]),
    (
        Reason.CAPACITY,
        {**LEVEL, **SHARE, "recalled_bytes": 6 * MIB},
        ["12.0 MiB more than it has, and this session has not yet answered a recall of 6.0 MiB of it$"],
    ),
    # An existing segment can be attached. A deleted one cannot, and deleting it again does not help: wait. A segment
    # "is writing" nothing: its writer is.
    (
        Reason.SEGMENT_EXISTS,
        {**EXISTS, "state": "writing"},
        ["attach it, publish its next version", "is being written: "],
    ),
    (Reason.SEGMENT_EXISTS, {**EXISTS, "state": "sealed"}, ["attach it, publish its next version", "is sealed: "]),
    *(
        (Reason.SEGMENT_EXISTS, {**EXISTS, "state": at}, ["wait until its memory is free, and try again", "!attach"])
        for at in ("ending", "releasing")
    ),
    (Reason.SEGMENT_NOT_WRITABLE, {**EXISTS, "state": "writing"}, ["is being written: "]),
    (Reason.SEGMENT_NOT_WRITABLE, {**EXISTS, "state": "sealed"}, ["is sealed: "]),
    (Reason.MODEL_EXISTS, {"model": MODEL}, ["join it without `exclusive`"]),
    (Reason.TOO_MANY_SESSIONS, {"limit": 16, "of": "process"}, ["connect once"]),
    (Reason.TOO_MANY_SESSIONS, {"limit": 64, "of": "tenant"}, ["!connect once"]),  # others have opened them
    # A slip of the unit, TiB for GiB, at a broker that has no segment: it cannot say that it has so many.
    (
        Reason.TOO_MANY_SEGMENTS,
        {"limit": 4_096, "of": "broker", "what": "extents of segments"},
        ["^the broker may have at most 4096 extents of segments, and this segment would be more: delete some$"],
    ),
    # The misspelt name is shown, and neither the wire's wildcard nor a generation.
    (Reason.SEGMENT_NOT_FOUND, {"segment": SEGMENT}, [f"there is no segment {SEGMENT}; it may be"]),
    (
        Reason.SEGMENT_NOT_FOUND,
        {"segment": MISSPELT},
        ["there is no segment wieghts in any model of tenants/red; it may be"],
    ),
    (Reason.SEGMENT_NOT_FOUND, {"segment": 7}, ["holds no segment of the generation 7"]),
    (
        Reason.SEGMENT_AMBIGUOUS,
        {"segment": "tenants/red/models/-/segments/weights", "models": "llama-7b, qwen"},
        ["as in llama-7b/weights or qwen/weights$"],
    ),
    # A worker restarts with another size and finds the model with the old numbers, for a minute.
    (
        Reason.MODEL_CONFLICT,
        {**CONFLICT, "asked": 8 * GIB, "registered": 4 * GIB},
        ["with device limit 4.0 GiB, not 8.0 GiB", "`Model.limit`"],
    ),
    (Reason.MODEL_CONFLICT, {**CONFLICT, "asked": 8 * GIB + 1, "registered": 8 * GIB}, ["8.0 GiB, not 8589934593 B"]),
]


@pytest.mark.parametrize(("reason", "numbers", "parts"), SENTENCES)
def test_a_sentence_says_what_can_be_done(reason: Reason, numbers: dict[str, int | str], parts: list[str]) -> None:
    """Each part stands in it: `^` and `$` are its begin and its end, and `!` is what it does not say."""
    told = f"^{to_status(deny(reason, **numbers)).message}$"
    for part in parts:
        assert (part.removeprefix("!") in told) != part.startswith("!"), told
