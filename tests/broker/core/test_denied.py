"""The core's reasons and the contract's reasons are one list, though the core may not import the contract."""

from __future__ import annotations

from membroker.v1 import error_reason_pb2
from membrokerd.core.denied import Reason

PREFIX = "ERROR_REASON_"


def test_the_reasons_are_those_of_the_contract() -> None:
    """A reason that is only on one side could never be told to a worker, or never be sent."""
    names = error_reason_pb2.ErrorReason.keys()
    assert all(name.startswith(PREFIX) for name in names)
    assert {name.removeprefix(PREFIX) for name in names} - {"UNSPECIFIED"} == {reason.name for reason in Reason}
