"""More calls than the broker lets a session have: the others wait in front of it, and none of them is refused."""

from __future__ import annotations

import time

import pytest
from tests.client.session.taking import Begun, Pair, Taker, allocate, granted
from tests.support.daemons import until
from tests.support.fake_broker import Caller, PlayedEnd

from membroker.errors import BrokerUnavailable, OutOfMemory
from membroker.session.connection import Connection
from membroker.session.machine import MOST_PATIENT, releases
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb


def in_front(connection: Connection) -> int:
    """Return how many calls wait for a place."""
    with connection._changed.lock:
        return len(connection._admitted.waiting)


def at_the_broker(pair: Pair) -> list[Begun]:
    """Make calls that fill all places for those that may wait."""
    return [Begun(pair) for _ in range(MOST_PATIENT)]


def later(connection: Connection) -> Caller:
    """Make one more call, which waits in front."""
    before = in_front(connection)
    caller = Caller(lambda: connection.call(allocate(), Taker()))
    until(lambda: in_front(connection) == before + 1)
    return caller


def grant(broker: PlayedEnd, request_id: int) -> None:
    """Grant a call of one extent."""
    broker.deliver(request_id, request_id, reply=pb.Reply(allocate=granted(1)))


def grant_all(broker: PlayedEnd, calls: list[Begun]) -> None:
    """Grant these calls, and wait for their end."""
    for call in calls:
        grant(broker, call.id)
    assert [call.error() for call in calls] == [None] * len(calls)


def hear_allocate(broker: PlayedEnd) -> pb.Frame:
    """Return the next frame that is no acknowledgement."""
    while (frame := broker.hear_any()).WhichOneof("kind") == "ack":
        continue
    return frame


def test_what_needs_no_place_is_not_held_up(pair: Pair) -> None:
    """A release, an answer to a recall and a registration go to the broker at once, beside calls that wait."""
    connection, broker = pair
    calls = at_the_broker(pair)
    waits = later(connection)
    connection.tell(releases([1]))
    connection.answer_recall(1, 2)
    asker = Caller(lambda: connection.call(pb.Frame(register_model=broker_pb2.RegisterModelRequest(model_id="m"))))
    asked = [broker.hear_any() for _ in range(3)]
    assert [frame.WhichOneof("kind") for frame in asked] == ["release", "recall_answer", "register_model"]
    broker.reply(asked[2].request_id, model={})
    assert asker.end().error is None
    grant_all(broker, calls)
    grant(broker, hear_allocate(broker).request_id)
    assert waits.end().error is None


def test_the_time_runs_in_front(pair: Pair) -> None:
    """A call waited its whole time in front: the broker is still asked, with no time left, and says what lacks."""
    connection, broker = pair
    calls = at_the_broker(pair)
    late = Caller(lambda: connection.call(allocate(), Taker(), until=time.monotonic() + 0.2))
    asked = broker.hear("allocate")
    assert asked.allocate.HasField("wait")
    assert asked.allocate.wait.ToNanoseconds() == 0
    broker.refuse(asked.request_id, "CAPACITY")
    assert isinstance(late.end().error, OutOfMemory)
    grant_all(broker, calls)


def test_the_connection_ends(pair: Pair) -> None:
    """Those in front are told at once, and may ask again over the next connection."""
    calls = at_the_broker(pair)
    callers = [later(pair[0]) for _ in range(5)]
    pair[1].end.close()
    for caller in (*callers, *(call.caller for call in calls)):
        assert isinstance(caller.end().error, BrokerUnavailable)
    pair[0].wait_until_idle()


def test_a_deadline_in_front(pair: Pair) -> None:
    """An attach whose answer must come soon does not wait longer for its place."""
    calls = at_the_broker(pair)
    with pytest.raises(BrokerUnavailable, match="in time"):
        pair[0].call(allocate(), Taker(), timeout=0.1)
    grant_all(pair[1], calls)


def test_only_the_thread_of_a_packet_wakes(pair: Pair) -> None:
    """Of many threads that wait for answers one reads, and an answer wakes the thread that it is for."""
    calls = at_the_broker(pair)
    until(lambda: len(pair[0]._changed.waiting) == MOST_PATIENT - 1)
    grant_all(pair[1], calls[::-1])
    assert pair[0]._reader is None
