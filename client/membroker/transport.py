"""The calls that move memory, over either transport.

Owns `HandoffTransport`, one packet and its answer, and `GrpcTransport`, gRPC calls whose descriptors come on the
handoff socket. They differ in nothing that a pool could see, and must never decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from google.protobuf.message import Message

from membroker.calls import DeliveryHandler, Outcome
from membroker.connection import Connection
from membroker.grpc_calls import CONTROL_SECONDS, GrpcCalls
from membroker.handoff import MAX_IDS_PER_FRAME
from membroker.v1 import broker_pb2 as pb
from membroker.v1.handoff_pb2 import Frame
from membroker.v1.resources_pb2 import Segment


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

    def create_segment(self, request: pb.CreateSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Make a segment, whose descriptors `handler` takes. All or nothing."""
        ...

    def attach_segment(self, request: pb.AttachSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Take hold of a segment, whose descriptors `handler` takes. All or nothing."""
        ...

    def seal_segment(self, generation: int) -> Segment:
        """End the writing of a segment."""
        ...

    def detach_segment(self, generation: int) -> None:
        """Let go of a segment."""
        ...

    def delete_segment(self, request: pb.DeleteSegmentRequest) -> Segment:
        """End a segment."""
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

    def create_segment(self, request: pb.CreateSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Make a segment in one round trip."""
        return cast("Segment", self._connection.call(Frame(create_segment=request), handler))

    def attach_segment(self, request: pb.AttachSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Attach in one round trip, which lasts as long as the writer writes."""
        return cast("Segment", self._connection.call(Frame(attach_segment=request), handler))

    def seal_segment(self, generation: int) -> Segment:
        """Seal in one round trip."""
        request = pb.SealSegmentRequest(generation=generation)
        return cast("Segment", self._connection.call(Frame(seal_segment=request)))

    def detach_segment(self, generation: int) -> None:
        """Detach without waiting: the next call on the socket comes after it."""
        self._connection.detach(generation)

    def delete_segment(self, request: pb.DeleteSegmentRequest) -> Segment:
        """Delete in one round trip."""
        return cast("Segment", self._connection.call(Frame(delete_segment=request)))


class GrpcTransport:
    """Calls by gRPC; descriptors on the handoff socket, under the call's request id."""

    def __init__(self, connection: Connection, calls: GrpcCalls) -> None:
        self._connection = connection
        self._calls = calls

    def allocate(self, request: pb.AllocateExtentsRequest, handler: DeliveryHandler) -> None:
        """Borrow extents: wait for the answer and for as many descriptors as it counts."""
        self._fetch("AllocateExtents", request, handler)

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back, and wait for the answers."""
        for first in range(0, len(extent_ids), MAX_IDS_PER_FRAME):
            some = extent_ids[first : first + MAX_IDS_PER_FRAME]
            self._call("ReleaseExtents", pb.ReleaseExtentsRequest(extent_ids=some))

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare by one call."""
        self._call("DeclareMemory", request)

    def create_segment(self, request: pb.CreateSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Make a segment: wait for the answer and for as many descriptors as it counts."""
        return cast("Segment", self._fetch("CreateSegment", request, handler))

    def attach_segment(self, request: pb.AttachSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Attach: wait for the answer and for as many descriptors as it counts."""
        return cast("Segment", self._fetch("AttachSegment", request, handler))

    def seal_segment(self, generation: int) -> Segment:
        """Seal by one call."""
        return cast("Segment", self._call("SealSegment", pb.SealSegmentRequest(generation=generation)))

    def detach_segment(self, generation: int) -> None:
        """Detach, and wait for the answer."""
        self._call("DetachSegment", pb.DetachSegmentRequest(generation=generation))

    def delete_segment(self, request: pb.DeleteSegmentRequest) -> Segment:
        """Delete by one call."""
        return cast("Segment", self._call("DeleteSegment", request))

    def _fetch(self, method: str, request: Any, handler: DeliveryHandler) -> Message:
        def start(request_id: int, finish: Callable[[Outcome], None]) -> None:
            request.request_id = request_id
            self._calls.start(method, request, finish)

        return self._connection.call_beside(start, handler)

    def _call(self, method: str, request: Any) -> Message:
        request.request_id = self._connection.new_request_id()
        response: Message = self._calls.call(method, request, CONTROL_SECONDS)
        return response
