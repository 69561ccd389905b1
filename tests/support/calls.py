"""A connection's other end in the test's hands, and a taker of what it delivers."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Sequence

from membroker.session.rpc import Outcome
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff
from membroker.wire import names
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.fake_broker import refusal

Finish = Callable[[Outcome, int], None]


def descriptors() -> set[str]:
    """Return this process's open descriptors, after garbage of earlier tests has closed its own."""
    gc.collect()
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


class Broker:
    """The other end. Each answer is said by the test."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.end.settimeout(DEADLINE_SECONDS)
        self._buffer = bytearray(names.MAX_FRAME_BYTES)

    def hear(self, kind: str) -> pb.Frame:
        """Return the next frame, which must be of this kind."""
        frame, _ = handoff.receive_without_descriptors(self.end, self._buffer)
        assert frame.WhichOneof("kind") == kind, frame
        return frame

    def hear_any(self) -> pb.Frame:
        return handoff.receive_without_descriptors(self.end, self._buffer)[0]

    def hears_nothing(self) -> bool:
        self.end.setblocking(False)
        try:
            handoff.receive_without_descriptors(self.end, self._buffer)
        except BlockingIOError:
            return True
        finally:
            self.end.settimeout(DEADLINE_SECONDS)
        return False

    def deliver(
        self, request_id: int, *extent_ids: int, descriptors: int | None = None, part: int = 0, **more: int
    ) -> None:
        count = len(extent_ids) if descriptors is None else descriptors
        made = [os.memfd_create("extent", os.MFD_CLOEXEC) for _ in range(count)]
        frame = pb.Frame(request_id=request_id, delivery=pb.Delivery(part=part, extent_ids=extent_ids, **more))
        handoff.send(self.end, handoff.encode(frame), made)
        handoff.close_all(made)

    def reply(self, request_id: int, count: int) -> None:
        response = broker_pb2.AllocateExtentsResponse(count=count)
        self.end.send(handoff.encode(pb.Frame(request_id=request_id, reply=pb.Reply(allocate=response))))

    def reply_segment(self, request_id: int, extents: int) -> None:
        segment = resources_pb2.Segment(generation=77, extents=extents)
        self.end.send(handoff.encode(pb.Frame(request_id=request_id, reply=pb.Reply(segment=segment))))

    def refuse(self, request_id: int, reason: str) -> None:
        self.end.send(handoff.encode(pb.Frame(request_id=request_id, reply=pb.Reply(error=refusal(reason)))))


class Taker:
    """A placement that notes what it took; `fails_at` extent it raises."""

    def __init__(self, fails_at: int | None = None, failure: BaseException | None = None) -> None:
        self.taken: list[int] = []
        self.undone = 0
        self._fails_at, self._failure = fails_at, failure

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        assert [os.fstat(descriptor) for descriptor in descriptors]
        if self._failure is not None and self._fails_at in extent_ids:
            raise self._failure
        self.taken += extent_ids

    def undo(self) -> None:
        self.undone += 1
        self.taken.clear()


def allocate() -> pb.Frame:
    return pb.Frame(allocate=broker_pb2.AllocateExtentsRequest(count=1))


def attach() -> pb.Frame:
    return pb.Frame(attach_segment=broker_pb2.AttachSegmentRequest(name="weights"))
