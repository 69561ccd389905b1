"""The calls that move memory, as typed requests over the connection of a session.

Whether a request travels as a frame or by gRPC is the connection's business (`rpc.METHODS`), and nothing that a pool
could see. A call that loses its broker is repeated over the next connection; a release goes over the present one, or
over none.
"""

from __future__ import annotations

import time
from typing import cast

from google.protobuf.message import Message

from ..errors import SegmentNotFound
from ..memory.lender import Placement
from ..v1 import broker_pb2 as pb
from ..v1.handoff_pb2 import Frame
from ..v1.resources_pb2 import Location, Segment
from ..wire.names import MAX_WAIT_SECONDS
from .connection import Connection
from .reconnecting import ReconnectingConnection


class Transport:
    """How a session asks for memory, and releases it."""

    def __init__(self, connection: ReconnectingConnection) -> None:
        self._connection = connection
        self.release = connection.release
        self.detach_segment = connection.detach
        self.declare_less = connection.declare_less

    def allocate(
        self,
        model: str,
        location: Location.ValueType,
        extent_bytes: int,
        count: int,
        placement: Placement,
        until: float | None,
        ahead: bool = False,
        wanted_bytes: int = 0,
    ) -> None:
        """Borrow `count` extents for a model, whose descriptors `placement` takes. All or nothing.

        The broker lets it wait for memory `until` then, on the monotonic clock; None: as long as its rules say. It
        lends `ahead` of need only what nobody waits for, and asks others for `wanted_bytes` if it has to ask.
        """
        frame = Frame()
        request = frame.allocate
        request.model, request.location = model, location
        request.extent_bytes, request.count = extent_bytes, count
        request.ahead, request.wanted_bytes = ahead, wanted_bytes
        if until is None:
            self._connection.call(frame, placement)
        else:
            self._wait(frame, request, placement, until)

    def _wait(
        self,
        frame: Frame,
        request: pb.AllocateExtentsRequest | pb.CreateSegmentRequest,
        placement: Placement,
        until: float,
    ) -> Message:
        """Make a call that waits. What is repeated over the next connection waits for the rest of the time."""

        def state(_: Connection | None = None) -> None:
            left = max(0.0, until - time.monotonic())
            request.wait.FromNanoseconds(min(int(left * 1e9), MAX_WAIT_SECONDS * 10**9))

        state()
        return self._connection.call(frame, placement, before_repeat=state)

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare memory that this process allocates itself."""
        inventory = self._connection.inventory
        self._connection.call(Frame(declare=request), note=lambda: inventory.declared(request))

    def create_segment(self, request: pb.CreateSegmentRequest, placement: Placement, until: float | None) -> Segment:
        """Create a segment, whose descriptors `placement` takes. All or nothing; waits as `allocate` does."""
        frame = Frame(create_segment=request)
        if until is None:
            return cast("Segment", self._connection.call(frame, placement))
        return cast("Segment", self._wait(frame, frame.create_segment, placement, until))

    def attach_segment(self, request: pb.AttachSegmentRequest, placement: Placement) -> Segment:
        """Attach a segment, whose descriptors `placement` takes. All or nothing; waits as long as the writer writes."""
        return cast("Segment", self._connection.call(Frame(attach_segment=request), placement))

    def seal_segment(self, generation: int) -> Segment:
        """End the writing of a segment."""
        request = pb.SealSegmentRequest(generation=generation)
        return cast("Segment", self._connection.call(Frame(seal_segment=request)))

    def delete_segment(self, request: pb.DeleteSegmentRequest) -> Segment:
        """End a segment."""
        repeated: list[Connection] = []
        try:
            answer = self._connection.call(Frame(delete_segment=request), before_repeat=repeated.append)
        except SegmentNotFound:
            if not repeated:
                raise
            # The first attempt had deleted it, and its answer was lost.
            return Segment(name=request.name, generation=request.generation, state=Segment.ENDING)
        return cast("Segment", answer)
