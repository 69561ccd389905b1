"""Every refusal as a caller sees it: a code, a full sentence, an ErrorInfo, and whether a retry can help.

The numbers have the names that the code passes, found by looking at each `deny(` of the daemon, so that a sentence that
asks for another number shows as `<name>` here and not in an operator's terminal.
"""

from __future__ import annotations

import ast
import functools
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
IN_VARIABLES: list[tuple[Reason, dict[str, int | str]]] = [
    *((reason, LEVEL) for reason in (Reason.MODEL_LIMIT, Reason.TENANT_LIMIT, Reason.CAPACITY)),
    (Reason.CAPACITY, {**LEVEL, "reserved_bytes": 2 * MIB}),
    *((reason, SAYS) for reason in (Reason.DEVICE_FULL, Reason.DRIVER_FAILED, Reason.DESCRIPTORS_EXHAUSTED)),
    (Reason.DELIVERY_FAILED, {"model": MODEL, "location": "device"}),
    (Reason.UNSUPPORTED_VERSION, {"version": (1 << 32) - 1, "supported": 1}),
    (Reason.INTERNAL, MADE),
]
"""Refusals whose numbers stand in variables where they are made."""
TEXTS = {
    "kind": "model",
    "location": "host",
    "model": MODEL,
    "models": "llama, qwen",
    "name": "a\n\x1b[2J{count}",
    "of": "process",
    "segment": SEGMENT,
    "session": "sessions/1c",
    "state": "sealed",
    "tenant": "green",
}
"""The values that are texts."""
TEXTS |= {key: f"its {key}" for key in ("bound", "calls", "driver_says", "fault", "hint", "what", "whose")}
RETRY = """
    MODEL_LIMIT TENANT_LIMIT CAPACITY DEVICE_FULL DRIVER_FAILED DESCRIPTORS_EXHAUSTED TOO_MANY_SESSIONS TOO_MANY_MODELS
    TOO_MANY_REQUESTS TOO_MANY_SEGMENTS TOO_MANY_TENANTS SEGMENT_EXISTS SEGMENT_NOT_SEALED WRITER_DIED STOPPING DRAINING
    JOURNAL_FULL
"""
"""What error_reason.proto says of each: "Retry"."""


@functools.cache
def refusals() -> list[tuple[Reason, dict[str, int | str]]]:
    """Return each `deny(Reason.X, a=…, b=…)` of the daemon, with values, and those whose numbers are in variables."""
    found = list(IN_VARIABLES)
    for path in Path(membrokerd.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "deny":
                reason, keys = node.args[0], [keyword.arg for keyword in node.keywords]
                if isinstance(reason, ast.Attribute) and None not in keys:
                    numbers = {str(key): TEXTS.get(str(key), 6 * MIB) for key in keys}
                    found.append((Reason(reason.attr), numbers))
    return found


def details(status: Status, kind: type) -> list[object]:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_a_whole_status(reason: Reason) -> None:
    samples = [numbers for which, numbers in refusals() if which is reason]
    assert samples
    for numbers in samples:
        status = to_status(Denied(reason, numbers))
        assert status.code in Code.values()
        assert status.code != Code.OK
        assert "<" not in status.message, "a number that is not there"
        assert "{" not in status.message.replace("{count}", "")
        assert status.message.isprintable()
        (info,) = details(status, ErrorInfo)
        assert (info.reason, info.domain) == (reason.value, DOMAIN)
        assert dict(info.metadata) == {key: str(value) for key, value in numbers.items()}
        assert bool(details(status, RetryInfo)) == (reason.value in RETRY.split())
        assert len(details(status, QuotaFailure)) == (status.code == Code.RESOURCE_EXHAUSTED)
        assert len(details(status, BadRequest)) == (status.code == Code.INVALID_ARGUMENT)
        assert len(details(status, PreconditionFailure)) == (status.code == Code.FAILED_PRECONDITION)


def test_a_refusal_fits_into_what_a_client_takes() -> None:
    """gRPC clients take 8 KiB of metadata. The longest is a name of unprintable letters, which are shown escaped."""
    for letter in ("\U000e0001", "é", '"', "\0", "a"):
        with pytest.raises(Refused) as caught:
            parse_model(letter * 10_000)
        status = to_status(caught.value.denied)
        assert len(status.SerializeToString()) * 4 // 3 + 3 * len(status.message.encode()) < 8_000, letter


EXISTS, CONFLICT = {"segment": SEGMENT}, {"model": MODEL, "what": "device limit"}
FULL_BY_2 = {"location": "device", "limit_bytes": 4 * GIB, "used_bytes": 2 * GIB + 2 * MIB}
ANY_MODELS = "tenants/red/models/-/segments/weights"
SENTENCES: list[tuple[Reason, dict[str, int | str], list[str]]] = [
    # No number is rounded: "2.0 GiB more does not fit, only 2.0 GiB does" by one granule.
    (
        Reason.MODEL_LIMIT,
        {"model": MODEL, **FULL_BY_2, "requested_bytes": 2 * GIB, "available_bytes": 2 * GIB - 2 * MIB},
        [f"the model {MODEL} may hold 4.0 GiB", "holds 2050.0 MiB: 2.0 GiB more does not fit, only 2046.0 MiB does$"],
    ),
    (
        Reason.CAPACITY,
        {**LEVEL, **SHARE, "waited_ms": 1_500, "recalled_bytes": 6 * MIB},
        ["; its share is 20.0 MiB, 12.0 MiB more than it has, ", "a recall of 6.0 MiB", "waited 1.5 s at the broker$"],
    ),
    # An existing segment can be attached. A deleted one cannot, and deleting it again does not help: wait. A segment
    # "is writing" nothing: its writer is.
    (Reason.SEGMENT_EXISTS, {**EXISTS, "state": "writing"}, ["attach it, publish its next", "is being written: "]),
    (Reason.SEGMENT_EXISTS, {**EXISTS, "state": "ending"}, ["wait until its memory is free, and try again", "!attach"]),
    # A name in any model is shown, and neither the wire's wildcard nor a generation.
    (Reason.SEGMENT_NOT_FOUND, {"segment": SEGMENT}, [f"there is no segment {SEGMENT}; it may be"]),
    (Reason.SEGMENT_NOT_FOUND, {"segment": ANY_MODELS}, ["no segment weights in any model of tenants/red; it may be"]),
    # A worker restarts with another size and finds the model with the old numbers, for a minute.
    (Reason.MODEL_CONFLICT, {**CONFLICT, "asked": 8 * GIB + 1, "registered": 8 * GIB}, ["8.0 GiB, not 8589934593 B"]),
]


@pytest.mark.parametrize(("reason", "numbers", "parts"), SENTENCES)
def test_a_sentence_says_what_can_be_done(reason: Reason, numbers: dict[str, int | str], parts: list[str]) -> None:
    """Each part stands in it: `^` and `$` are its begin and its end, and `!` is what it does not say."""
    told = f"^{to_status(deny(reason, **numbers)).message}$"
    for part in parts:
        assert (part.removeprefix("!") in told) != part.startswith("!"), told
