"""A call in flight on the handoff connection: what it has brought so far, and when it is over.

Owns the state of one call, what a packet means for it, and the count of the deliveries that were taken. It must never
touch a socket: the connection does, and keeps calls under its own lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from ..errors import DescriptorLimit, MembrokerError, ProtocolError, from_status
from ..memory.lender import Placement
from ..v1.broker_pb2 import AllocateExtentsRequest
from ..v1.handoff_pb2 import Frame, Reply
from ..wire import frames as handoff
from ..wire.names import MAX_WAIT_SECONDS
from .endpoint import DESCRIPTORS_SHORT

Outcome = Message | MembrokerError
"""The end of a call: the response, or the refusal as it will be raised."""


@dataclass(slots=True, eq=False)
class Call:
    """One call in flight: `deadline` is on the monotonic clock, and `note` records what the call did.

    `request` says what it borrows, and is empty for a call that borrows no extents. `placement` is None for a call that
    brings no descriptors.
    `expected` is how many extents must arrive before it is over. Only an answer by gRPC sets it: on the handoff socket
    every delivery precedes the answer.
    """

    request_id: int
    request: AllocateExtentsRequest
    placement: Placement | None
    deadline: float | None
    note: Callable[[], None] | None
    inbox: deque[handoff.Packet] = field(default_factory=deque)
    extent_ids: list[int] = field(default_factory=list)
    segment: int = 0
    outcome: Outcome | None = None
    expected: int = 0
    by_grpc: bool = False
    sent: bool = False
    keep: bool = False
    """The placement could not unmap what it took, so that is still held."""

    def seconds_left(self) -> float | None:
        """Return how long the answer may still take; None for any time."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


class Taken:
    """`count` is how many deliveries of one connection were taken, counted from the first one without a gap.

    Every frame to the broker carries the count, which acknowledges these deliveries. The connection's lock is held.
    """

    __slots__ = ("_arrived", "count")

    def __init__(self) -> None:
        self.count = 0
        self._arrived: dict[tuple[int, int], bool] = {}

    def arrived(self, frame: Frame) -> None:
        """Note that a delivery has arrived. Called in the order of arrival."""
        self._arrived[frame.request_id, frame.delivery.part] = False

    def take(self, frame: Frame) -> bool:
        """Note that a delivery was taken; say whether the count rose. It does not while an earlier one is missing."""
        self._arrived[frame.request_id, frame.delivery.part] = True
        before = self.count
        while self._arrived and self._arrived[first := next(iter(self._arrived))]:
            del self._arrived[first]
            self.count += 1
        return self.count > before


def let_wait(frame: Frame, until: float) -> None:
    """Set the wait of a request so that it ends at `until`, on the monotonic clock."""
    left = max(0.0, until - time.monotonic())
    request = getattr(frame, str(frame.WhichOneof("kind")))
    request.wait.FromNanoseconds(min(int(left * 1e9), MAX_WAIT_SECONDS * 10**9))


def outcome_of(reply: Reply) -> Outcome:
    """Return the outcome of a call that got this answer."""
    result = reply.WhichOneof("result")
    if result == "error":
        return from_status(reply.error)
    if result is None:
        return ProtocolError("the broker's answer is empty, or of a kind that this version does not know")
    response: Message = getattr(reply, result)
    return response


def incomplete(packet: handoff.Packet) -> MembrokerError:
    """Return the error for a delivery with more or fewer descriptors than extents."""
    there, ids = len(packet.descriptors), len(packet.frame.delivery.extent_ids)
    if packet.truncated:
        return DescriptorLimit(f"{there} of {ids} descriptors arrived: {DESCRIPTORS_SHORT}")
    return ProtocolError(f"{there} descriptors came for {ids} extents")
