"""The calls that move memory, over either transport.

Owns `HandoffTransport`, one packet and its answer, and `GrpcTransport`, gRPC calls whose descriptors come on the
handoff socket. They differ in nothing that a pool could see, and must never decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from membroker.calls import DeliveryHandler, Outcome
from membroker.connection import Connection
from membroker.grpc_calls import CONTROL_SECONDS, GrpcCalls
from membroker.handoff import MAX_IDS_PER_FRAME
from membroker.v1 import broker_pb2 as pb
from membroker.v1.handoff_pb2 import Frame


class Transport(Protocol):
    """How a session asks for memory, and gives it back."""

    def allocate(self, request: pb.AllocateExtentsRequest, handler: DeliveryHandler) -> None:
        """Borrow extents, whose descriptors `handler` takes. All or nothing."""
        ...

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back."""
        ...

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Say what is allocated beside the broker."""
        ...


class HandoffTransport:
    """Everything on the handoff socket: request, descriptors and reply are one round trip."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def allocate(self, request: pb.AllocateExtentsRequest, handler: DeliveryHandler) -> None:
        """Borrow extents in one round trip."""
        self._connection.call(Frame(allocate=request), handler)

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back without waiting: the next call on the socket comes after it."""
        self._connection.release(extent_ids)

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare in one round trip."""
        self._connection.call(Frame(declare=request))


class GrpcTransport:
    """Calls by gRPC; descriptors on the handoff socket, under the call's request id."""

    def __init__(self, connection: Connection, calls: GrpcCalls) -> None:
        self._connection = connection
        self._calls = calls

    def allocate(self, request: pb.AllocateExtentsRequest, handler: DeliveryHandler) -> None:
        """Borrow extents: wait for the answer and for as many descriptors as it counts."""

        def start(request_id: int, finish: Callable[[Outcome], None]) -> None:
            request.request_id = request_id
            self._calls.start("AllocateExtents", request, finish)

        self._connection.call_beside(start, handler)

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back, and wait for the answers."""
        for first in range(0, len(extent_ids), MAX_IDS_PER_FRAME):
            some = extent_ids[first : first + MAX_IDS_PER_FRAME]
            request_id = self._connection.new_request_id()
            request = pb.ReleaseExtentsRequest(request_id=request_id, extent_ids=some)
            self._calls.call("ReleaseExtents", request, CONTROL_SECONDS)

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare by one call."""
        request.request_id = self._connection.new_request_id()
        self._calls.call("DeclareMemory", request, CONTROL_SECONDS)
