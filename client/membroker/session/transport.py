"""The calls that move memory, over either transport.

Owns `HandoffTransport`, one packet and its answer, and `GrpcTransport`, gRPC calls whose descriptors come on the
handoff socket. They differ in nothing that a pool could see. Both ask over a session's line, so that a call that
loses its broker is made anew over the next connection, and give back over the one there is, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast

from google.protobuf.message import Message

from ..errors import AccessDenied, BrokerUnavailable, ClosedError, SegmentNotFound
from ..v1 import broker_pb2 as pb
from ..v1.handoff_pb2 import Frame
from ..v1.resources_pb2 import Location, Segment
from ..wire.names import MAX_IDS_PER_FRAME
from .call import DeliveryHandler, Outcome
from .connection import Connection
from .reconnecting import Line
from .rpc import CONTROL_SECONDS


class _BrokerMayBeGone:
    """A block whose errors of a broker that is gone are none. No generator: it stands around each free."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, AccessDenied):
            # Another broker has taken its place, and answers by gRPC: it never lent this.
            return error.reason == "TOKEN_REJECTED"
        return isinstance(error, (BrokerUnavailable, ClosedError))


_broker_may_be_gone = _BrokerMayBeGone()


def broker_may_be_gone() -> _BrokerMayBeGone:
    """Give something back. A broker that is gone needs no telling: the next one is told what is held still."""
    return _broker_may_be_gone


class Transport(Protocol):
    """How a session asks for memory, and gives it back."""

    def allocate(
        self, model: str, location: Location.ValueType, extent_bytes: int, count: int, handler: DeliveryHandler
    ) -> None:
        """Borrow `count` extents for a model, whose descriptors `handler` takes. All or nothing."""
        ...

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back."""
        ...

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Say what is allocated beside the broker."""
        ...

    def declare_less(self, request: pb.DeclareMemoryRequest) -> None:
        """Say that it is no more than what was declared before. A broker that is gone is told when it is back."""
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

    def __init__(self, line: Line) -> None:
        self._line = line

    def allocate(
        self, model: str, location: Location.ValueType, extent_bytes: int, count: int, handler: DeliveryHandler
    ) -> None:
        """Borrow extents in one round trip."""
        frame = Frame()
        request = frame.allocate
        request.model, request.location = model, location
        request.extent_bytes, request.count = extent_bytes, count
        self._line.conduct(lambda connection, _again: connection.call(frame, handler))

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back without waiting: the next call on the socket comes after it."""
        connection, known = self._line.give_back(extent_ids)
        connection.release(known)

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare in one round trip."""
        self._call(Frame(declare=request), note=lambda: self._line.registry.declared(request))

    def declare_less(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare in one round trip, over the connection there is."""
        self._line.declare_less(request).tell(Frame(declare=request), CONTROL_SECONDS)

    def create_segment(self, request: pb.CreateSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Make a segment in one round trip."""
        return cast("Segment", self._call(Frame(create_segment=request), handler))

    def attach_segment(self, request: pb.AttachSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Attach in one round trip, which lasts as long as the writer writes."""
        return cast("Segment", self._call(Frame(attach_segment=request), handler))

    def seal_segment(self, generation: int) -> Segment:
        """Seal in one round trip."""
        request = pb.SealSegmentRequest(generation=generation)
        return cast("Segment", self._call(Frame(seal_segment=request)))

    def detach_segment(self, generation: int) -> None:
        """Detach without waiting: the next call on the socket comes after it."""
        connection, known = self._line.let_go(generation)
        if known:
            connection.detach(generation)

    def delete_segment(self, request: pb.DeleteSegmentRequest) -> Segment:
        """Delete in one round trip."""
        return _delete(self._line, request, lambda connection: connection.call(Frame(delete_segment=request)))

    def _call(
        self, frame: Frame, handler: DeliveryHandler | None = None, note: Callable[[], None] | None = None
    ) -> Message:
        return self._line.conduct(lambda connection, _again: connection.call(frame, handler, note=note))


class GrpcTransport:
    """Calls by gRPC; descriptors on the handoff socket, under the call's request id."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def allocate(
        self, model: str, location: Location.ValueType, extent_bytes: int, count: int, handler: DeliveryHandler
    ) -> None:
        """Borrow extents: wait for the answer and for as many descriptors as it counts."""
        request = pb.AllocateExtentsRequest(model=model, location=location, extent_bytes=extent_bytes, count=count)
        self._fetch("AllocateExtents", request, handler)

    def release(self, extent_ids: Sequence[int]) -> None:
        """Give extents back, and wait for the answers."""
        connection, known = self._line.give_back(extent_ids)
        for first in range(0, len(known), MAX_IDS_PER_FRAME):
            some = known[first : first + MAX_IDS_PER_FRAME]
            try:
                self._call(connection, "ReleaseExtents", pb.ReleaseExtentsRequest(extent_ids=some))
            except BrokerUnavailable:
                # One that was silent for too long never hears of it: what is sent here waits until it reads again.
                connection.release(known[first:])
                raise

    def declare(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare by one call."""
        note = partial(self._line.registry.declared, request)
        self._line.conduct(lambda connection, _again: self._call(connection, "DeclareMemory", request, note))

    def declare_less(self, request: pb.DeclareMemoryRequest) -> None:
        """Declare on the handoff socket: one that is silent for too long hears of it when it reads again."""
        self._line.declare_less(request).tell(Frame(declare=request), CONTROL_SECONDS)

    def create_segment(self, request: pb.CreateSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Make a segment: wait for the answer and for as many descriptors as it counts."""
        return cast("Segment", self._fetch("CreateSegment", request, handler))

    def attach_segment(self, request: pb.AttachSegmentRequest, handler: DeliveryHandler) -> Segment:
        """Attach: wait for the answer and for as many descriptors as it counts."""
        return cast("Segment", self._fetch("AttachSegment", request, handler))

    def seal_segment(self, generation: int) -> Segment:
        """Seal by one call."""
        request = pb.SealSegmentRequest(generation=generation)
        answer = self._line.conduct(lambda connection, _again: self._call(connection, "SealSegment", request))
        return cast("Segment", answer)

    def detach_segment(self, generation: int) -> None:
        """Detach, and wait for the answer."""
        connection, known = self._line.let_go(generation)
        if known:
            # On the handoff socket, as `declare_less`: told there only after a call that ran out of time, it could be
            # done twice, and a segment may be held twice.
            frame = Frame(detach_segment=pb.DetachSegmentRequest(generation=generation))
            connection.tell(frame, CONTROL_SECONDS)

    def delete_segment(self, request: pb.DeleteSegmentRequest) -> Segment:
        """Delete by one call."""
        return _delete(self._line, request, lambda connection: self._call(connection, "DeleteSegment", request))

    def _fetch(self, method: str, request: Any, handler: DeliveryHandler) -> Message:
        def start(request_id: int, finish: Callable[[Outcome], None]) -> None:
            request.request_id = request_id
            self._line.calls.start(method, request, finish)

        return self._line.conduct(lambda connection, _again: connection.call_beside(start, handler))

    def _call(self, connection: Connection, method: str, request: Any, note: Callable[[], None] | None = None) -> Any:
        """Make a call in the time of one connection: it would undo what was agreed at the beginning of the next."""
        with connection.busy() as request.request_id:
            response = self._line.calls.call(method, request, CONTROL_SECONDS)
            if note is not None:
                note()
        return response


def _delete(line: Line, request: pb.DeleteSegmentRequest, ask: Callable[[Connection], Message]) -> Segment:
    def attempt(connection: Connection, again: bool) -> Segment:
        try:
            return cast("Segment", ask(connection))
        except SegmentNotFound:
            if not again:
                raise
            # The call before this one had deleted it, and its answer was lost.
            return Segment(name=request.name, generation=request.generation, state=Segment.ENDING)

    return line.conduct(attempt)
