"""A call in flight on the handoff connection: what has come of it, and when it is over.

Owns the state of one call, what a packet means for it, the contract for what takes its descriptors, and the count of
the deliveries that were taken. It must never touch a socket: the connection does, and keeps calls under its own lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import Message

from ..errors import DescriptorLimit, MembrokerError, ProtocolError, from_status
from ..v1 import broker_pb2, resources_pb2
from ..v1.handoff_pb2 import Delivery, Frame, Reply
from ..wire import frames as handoff
from ..wire.descriptors import close_each
from .endpoint import DESCRIPTORS_SHORT

Outcome = Message | MembrokerError
"""The end of a call: the response, or the refusal as it will be raised."""


class DeliveryHandler(Protocol):
    """Takes the descriptors of one call, and again from the first one when it is made anew after `undo`."""

    def receive(self, delivery: Delivery, descriptors: Sequence[int]) -> None:
        """Import the extents of one delivery. The descriptors are closed afterwards, whatever happens."""
        ...

    def undo(self) -> None:
        """Drop all that was received: the call has failed, and its extents are given back after this."""
        ...


class Nothing:
    """The handler of a call that brings no descriptors."""

    def receive(self, delivery: Delivery, descriptors: Sequence[int]) -> None:
        """Refuse them."""
        raise ProtocolError(f"{len(descriptors)} descriptors came with an answer that has none")

    def undo(self) -> None:
        """There is nothing to undo."""


class Call:
    """One call in flight. `beside`: its answer comes by gRPC, beside this connection; `note` enters what it did."""

    __slots__ = (
        *("beside", "deadline", "dry", "extent_ids", "inbox"),
        *("keep", "note", "outcome", "request_id", "segment", "sent", "thread"),
    )

    def __init__(
        self,
        request_id: int,
        *,
        beside: bool = False,
        deadline: float | None = None,
        note: Callable[[], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.beside = beside
        self.deadline = deadline
        self.note = note
        self.inbox: deque[handoff.Packet] = deque()
        self.extent_ids: list[int] = []
        self.segment = 0
        self.outcome: Outcome | None = None
        self.sent: list[int] = []
        self.dry = False
        self.keep = False
        self.thread = threading.get_ident()

    def is_waiting(self) -> bool:
        """Say whether there is no delivery to take, and not yet the answer with every delivery that precedes it."""
        if self.inbox:
            return False
        return self.outcome is None or (self.beside and not self._is_whole())

    def _is_whole(self) -> bool:
        """Say whether every delivery has been taken that precedes the answer, which came beside."""
        if isinstance(self.outcome, broker_pb2.AllocateExtentsResponse):
            return len(self.extent_ids) >= self.outcome.count
        if isinstance(self.outcome, resources_pb2.Segment):
            return len(self.extent_ids) >= self.outcome.extents
        return self.dry

    def seconds_left(self) -> float | None:
        """Return how long the answer may still take; None for ever."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def patience(self) -> float | None:
        """Return how many milliseconds to wait for the next packet; None for ever."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) * 1000


class Taken:
    """Counts the deliveries of one connection that were taken, from the first one without a gap: `count`.

    Every frame to the broker carries the count, which acknowledges all that it covers. Thread-safe.
    """

    __slots__ = ("_arrived", "_lock", "count")

    def __init__(self) -> None:
        self.count = 0
        self._arrived: dict[tuple[int, int], bool] = {}
        self._lock = threading.Lock()

    def arrived(self, frame: Frame) -> None:
        """Enter a delivery, in the order in which they come."""
        with self._lock:
            self._arrived[frame.request_id, frame.delivery.part] = False

    def take(self, frame: Frame) -> bool:
        """Note that a delivery was taken; say whether the count has gone up: not while one before it is not."""
        with self._lock:
            self._arrived[frame.request_id, frame.delivery.part] = True
            before = self.count
            while self._arrived and self._arrived[first := next(iter(self._arrived))]:
                del self._arrived[first]
                self.count += 1
            return self.count > before


def outcome_of(reply: Reply) -> Outcome:
    """Return how a call ends that is answered so."""
    result = reply.WhichOneof("result")
    if result == "error":
        return from_status(reply.error)
    if result is None:
        return ProtocolError("the broker answered with nothing that this version knows")
    response: Message = getattr(reply, result)
    return response


def check_whole(packet: handoff.Packet) -> None:
    """Raise unless every extent of a delivery came with its descriptor."""
    ids = packet.frame.delivery.extent_ids
    if packet.truncated:
        raise DescriptorLimit(f"{len(packet.descriptors)} of {len(ids)} descriptors arrived: {DESCRIPTORS_SHORT}")
    if len(ids) != len(packet.descriptors):
        raise ProtocolError(f"{len(packet.descriptors)} descriptors came for {len(ids)} extents")


def close_packet(packet: handoff.Packet) -> None:
    """Close the descriptors of a packet; each is forgotten first, so that none is closed twice."""
    close_each(packet.descriptors)


def close_packets(packets: deque[handoff.Packet]) -> None:
    """Close the descriptors of packets, and forget them."""
    while packets:
        close_packet(packets.popleft())
