"""A broker's Status becomes the exception that fits, by its reason and never by its text."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

import membroker
from membroker import errors, vmm
from membroker import safetensors as tensor_index
from membroker.managed import hints as managed
from membroker.types import Move
from membroker.v1 import error_reason_pb2

REASONS = [
    name.removeprefix("ERROR_REASON_")
    for name in error_reason_pb2.ErrorReason.keys()  # noqa: SIM118 - an enum wrapper, not a dict
    if name != "ERROR_REASON_UNSPECIFIED"
]


def status(message: str, reason: str = "", domain: str = "membroker", **metadata: str) -> status_pb2.Status:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata))
    other = any_pb2.Any()
    other.Pack(error_details_pb2.RetryInfo())
    return status_pb2.Status(code=8, message=message, details=[other, info])


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_a_class(reason: str) -> None:
    """A reason that the proto has and the table has not would reach users as a bare MembrokerError."""
    error = errors.from_status(status("no", reason))
    assert error.reason == reason
    assert str(error) == "no"
    assert reason == "INTERNAL" or type(error) is not errors.MembrokerError


def test_out_of_memory_tells_the_numbers() -> None:
    """A scheduler reads from the exception how much smaller its request must be, without parsing a sentence."""
    numbers = {"level": "model", "requested_bytes": "8", "available_bytes": "5", "limit_bytes": "100"}
    error = errors.from_status(status("the model's limit", "MODEL_LIMIT", **numbers))
    assert isinstance(error, membroker.OutOfMemory)
    assert isinstance(error, MemoryError)
    assert (error.level, error.requested_bytes, error.available_bytes, error.limit_bytes) == ("model", 8, 5, 100)
    full = errors.from_status(
        status("a card that strangers filled", "DEVICE_FULL", level="device", requested_bytes="8")
    )
    assert isinstance(full, membroker.OutOfMemory)
    assert (full.level, full.available_bytes, full.limit_bytes) == ("device", 0, None)


@pytest.mark.parametrize(
    "unknown",
    [status("x", "FROM_A_LATER_BROKER"), status("x", "MODEL_LIMIT", domain="other"), status_pb2.Status(message="x")],
)
def test_an_unknown_reason(unknown: status_pb2.Status) -> None:
    """A newer broker, another service's error, or no details: still an error, with its message."""
    error = errors.from_status(unknown)
    assert type(error) is membroker.MembrokerError
    assert str(error) == "x"


ENTRY = managed.PrefetchEntry(4096, 8, 0)
ARGUMENTS: dict[type[Exception], tuple[Any, ...]] = {
    membroker.OutOfMemory: ("full", "MODEL_LIMIT", {"level": "model", "requested_bytes": "8", "limit_bytes": "100"}),
    membroker.OutOfVirtualMemory: (8, 5),
    managed.PrefetchFailed: (1, ENTRY, (ENTRY,), ValueError("why")),
    membroker.CompactionFailed: ("the driver failed", [Move(4, 0, 2)]),
    **dict.fromkeys(
        (vmm.DriverError, vmm.DriverOutOfMemory, vmm.DriverLimit, vmm.DriverUnavailable),
        ("mmap", "ENOMEM", 12, "a hint"),
    ),
}
"""What an error is made from, where it is not a sentence, a reason and the numbers."""


def public_errors() -> list[type[Exception]]:
    modules = (membroker, vmm, errors, managed, tensor_index)
    names = ((module, name) for module in modules for name in getattr(module, "__all__", dir(module)))
    kinds = (kind for module, name in names if isinstance(kind := getattr(module, name), type))
    ours = {kind for kind in kinds if issubclass(kind, Exception) and kind.__module__.startswith("membroker")}
    return sorted(ours, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", public_errors())
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_travel(kind: type[Exception], way: Callable[[Exception], Exception]) -> None:
    """A worker of a process pool raises one: it arrives as what it was, and does not break the pool."""
    error = kind(*ARGUMENTS.get(kind, ("a sentence", "A_REASON", {"number": "1"})))
    error.add_note("in worker 3")
    arrived = way(error)
    assert type(arrived) is kind
    assert (str(arrived), arrived.args, vars(arrived)) == (str(error), error.args, vars(error))
    told = [name for name in dir(kind) if name.endswith("_bytes")]
    assert [getattr(arrived, name) for name in told] == [getattr(error, name) for name in told]


def test_errors_are_also_the_builtin_ones() -> None:
    """Code that never heard of membroker, such as a framework's retry on MemoryError, catches them."""
    for mine, builtin in (
        (membroker.OutOfMemory, MemoryError),
        (membroker.BrokerUnavailable, ConnectionError),
        (membroker.AccessDenied, PermissionError),
        (membroker.InvalidRequest, ValueError),
        (membroker.NotFound, LookupError),
        (membroker.DescriptorLimit, OSError),
        (membroker.SegmentNotSealed, TimeoutError),
    ):
        assert issubclass(mine, builtin)
        assert issubclass(mine, membroker.MembrokerError)
