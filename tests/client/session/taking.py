"""What these tests share: two requests whose answer is extents, and what takes the extents."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.support.daemons import DEADLINE_SECONDS
from tests.support.fake_broker import Caller, PlayedBroker, PlayedEnd
from tests.support.processes import heard

from membroker.session.connection import Connection
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb

Pair = tuple[Connection, PlayedEnd]
"""A connection of the library, and its other end."""


class Taker:
    """A placement that notes what it took."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.undone = 0

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        assert [os.fstat(descriptor) for descriptor in descriptors]
        self.taken += extent_ids

    def undo(self) -> None:
        self.undone += 1
        self.taken.clear()


class Slow(Taker):
    """A placement that stands still until it may go on, or fail."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.entered, self.go_on, self._error = threading.Event(), threading.Event(), error

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        self.entered.set()
        assert self.go_on.wait(DEADLINE_SECONDS)
        if self._error is not None:
            raise self._error
        super().place(extent_ids, descriptors, extent_bytes)


def take_leave(broker: PlayedBroker) -> None:
    """Hear a goodbye, answer it, and end the connection."""
    broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
    broker.hang_up()


def enter(broker: PlayedBroker, process: subprocess.Popen[str]) -> None:
    """Let a worker begin its session; it says that it has."""
    broker.accept()
    broker.welcome()
    assert heard(process) == "connected"


class Begun:
    """A call in a thread of its own, which the broker has heard of."""

    def __init__(
        self,
        pair: Pair,
        frame: pb.Frame | None = None,
        taker: Taker | None = None,
        scope: AbstractContextManager[object] | None = None,
    ) -> None:
        connection, self._broker = pair
        asked = frame or allocate()
        self.taker = taker or Taker()

        def call() -> object:
            with scope or nullcontext():
                return connection.call(asked, self.taker)

        self.caller = Caller(call)
        self.id = self._broker.hear(str(asked.WhichOneof("kind"))).request_id

    def deliver(self, *extent_ids: int, **more: Any) -> pb.Frame:
        """Deliver a packet, and return what acknowledges it."""
        self._broker.deliver(self.id, *extent_ids, **more)
        return self._broker.hear("ack")

    def error(self) -> BaseException | None:
        """Wait for its end, and return what it raised."""
        return self.caller.end().error


def allocate(count: int = 1) -> pb.Frame:
    return pb.Frame(allocate=broker_pb2.AllocateExtentsRequest(count=count))


def attach() -> pb.Frame:
    return pb.Frame(attach_segment=broker_pb2.AttachSegmentRequest(name="weights"))


def granted(count: int) -> broker_pb2.AllocateExtentsResponse:
    return broker_pb2.AllocateExtentsResponse(count=count)


def segment(extents: int) -> resources_pb2.Segment:
    return resources_pb2.Segment(generation=77, extents=extents)
