"""Calls by gRPC, whose descriptors come on the handoff socket."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
from tests.client.session.taking import Pair, Taker, allocate, attach
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import Caller

from membroker.errors import OutOfMemory, ProtocolError
from membroker.session.machine import releases
from membroker.session.rpc import METHODS, Outcome
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb

Finish = Callable[[Outcome, int], None]


class Service:
    """The broker's gRPC. A test answers with `finish`, as `GrpcCalls` does, in a thread of its own."""

    def __init__(self) -> None:
        self.asked: queue.Queue[tuple[int, Finish]] = queue.Queue()

    def start(self, frame: pb.Frame, finish: Finish, timeout: float | None) -> None:
        self.asked.put((frame.request_id, finish))


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def options(service: Service) -> dict[str, Any]:
    """Every call that can goes by gRPC."""
    return {"grpc": service, "by_grpc": METHODS}


@pytest.fixture
def start(pair: Pair, service: Service) -> Callable[..., Any]:
    def start(taker: Taker, frame: pb.Frame | None = None) -> tuple[Caller, int, Finish]:
        caller = Caller(lambda: pair[0].call(frame or allocate(), taker))
        return (caller, *service.asked.get(timeout=DEADLINE_SECONDS))

    return start


@pytest.mark.parametrize("answer_first", [True, False])
@pytest.mark.parametrize(
    ("frame", "response", "packet"),
    [
        (allocate(3), broker_pb2.AllocateExtentsResponse(count=3), {}),
        (attach(), resources_pb2.Segment(generation=77, extents=3), {"parts": 2, "segment": 77}),
    ],
    ids=["allocate", "attach"],
)
def test_waits_for_both(
    pair: Pair, start: Callable[..., Any], frame: pb.Frame, response: Any, packet: dict[str, int], answer_first: bool
) -> None:
    """The answer and the descriptors come on two sockets, in either order. The answer says how many come."""
    _, broker = pair
    taker = Taker()
    caller, request_id, finish = start(taker, frame)
    if answer_first:
        finish(response, 3)
    for part, ids in enumerate(((1, 2), (3,))):
        assert caller.is_alive()
        broker.deliver(request_id, *ids, part=part, **packet)
        broker.hear("ack")
    if not answer_first:
        finish(response, 3)
    assert caller.end().error is None
    assert taker.taken == [1, 2, 3]
    assert broker.hears_nothing()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_answer_about_another_number(pair: Pair, start: Callable[..., Any], count: int) -> None:
    """The caller neither waits for ever for what does not come, nor takes too few for all."""
    _, broker = pair
    taker = Taker()
    caller, request_id, finish = start(taker, allocate(2))
    broker.deliver(request_id, 1)
    broker.hear("ack")
    finish(broker_pb2.AllocateExtentsResponse(count=count), count)
    assert isinstance(caller.end().error, ProtocolError)
    assert list(broker.hear("release").release.extent_ids) == [1]
    assert taker.undone == 1


def test_a_segment_fails_after_deliveries(pair: Pair, start: Callable[..., Any]) -> None:
    """What was delivered before the refusal is still in the socket: it is read first, or no hold would end."""
    _, broker = pair
    caller, request_id, finish = start(Taker())
    broker.deliver(request_id, 1, 2, parts=3, segment=77)
    finish(OutOfMemory("the GPU filled up"), 0)
    broker.hear("ack")
    assert broker.hear("detach_segment").detach_segment.generation == 77
    assert isinstance(caller.end().error, OutOfMemory)
    assert broker.hears_nothing()


@pytest.mark.parametrize("refused_first", [True, False])
def test_fails_after_deliveries(pair: Pair, start: Callable[..., Any], refused_first: bool) -> None:
    """The answer is an error; what was delivered before it is released, however late it is read."""
    connection, broker = pair
    taker = Taker()
    caller, request_id, finish = start(taker)
    if refused_first:
        finish(OutOfMemory("the GPU filled up"), 0)
        assert isinstance(caller.end().error, OutOfMemory)
    broker.deliver(request_id, 1, 2)
    broker.deliver(request_id, 3, part=1)
    if not refused_first:
        until(lambda: taker.taken == [1, 2, 3])
        finish(OutOfMemory("the GPU filled up"), 0)
        assert isinstance(caller.end().error, OutOfMemory)
    acknowledged, released = [], []
    while released != [1, 2, 3]:
        frame = broker.hear_any()
        acknowledged += [frame.ack.part] if frame.HasField("ack") else []
        released += frame.release.extent_ids
    assert acknowledged == [0, 1]
    assert taker.undone == 1
    until(lambda: not connection._unclosed)


def test_a_release_waits_for_its_answer(pair: Pair) -> None:
    """The next call goes another way, and must not overtake it: it could be refused for want of these bytes."""
    connection, broker = pair
    caller = Caller(lambda: connection.tell(releases([1, 2], no_reply=False), 30))
    frame = broker.hear("release")
    assert (list(frame.release.extent_ids), frame.release.no_reply) == ([1, 2], False)
    assert caller.is_alive()
    broker.reply(frame.request_id, release=broker_pb2.ReleaseExtentsResponse())
    assert caller.end().error is None
