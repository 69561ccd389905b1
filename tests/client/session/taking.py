"""What these tests share: two requests whose answer is extents, and what takes the extents."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.support.fake_broker import PlayedEnd

from membroker.session.connection import Connection
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb

Pair = tuple[Connection, PlayedEnd]
"""A connection of the library, and its other end."""


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


def allocate(count: int = 1) -> pb.Frame:
    return pb.Frame(allocate=broker_pb2.AllocateExtentsRequest(count=count))


def attach() -> pb.Frame:
    return pb.Frame(attach_segment=broker_pb2.AttachSegmentRequest(name="weights"))


def granted(count: int) -> broker_pb2.AllocateExtentsResponse:
    return broker_pb2.AllocateExtentsResponse(count=count)


def segment(extents: int) -> resources_pb2.Segment:
    return resources_pb2.Segment(generation=77, extents=extents)
