"""More calls than the broker lets a session have: the others wait in front of it, and none of them is refused."""

from __future__ import annotations

import pytest
from tests.client.session.taking import Begun, Pair, Taker, allocate, granted
from tests.support.daemons import until
from tests.support.fake_broker import Caller, PlayedEnd

from membroker.errors import BrokerUnavailable
from membroker.session.machine import MOST_PATIENT, releases
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb


def at_the_broker(pair: Pair) -> list[Begun]:
    """Make calls that fill all places for those that may wait."""
    return [Begun(pair) for _ in range(MOST_PATIENT)]


def grant(broker: PlayedEnd, request_id: int) -> None:
    """Grant a call of one extent."""
    broker.deliver(request_id, request_id, reply=pb.Reply(allocate=granted(1)))


def grant_all(broker: PlayedEnd, calls: list[Begun]) -> None:
    """Grant these calls, and wait for their end."""
    for call in calls:
        grant(broker, call.id)
    assert [call.error() for call in calls] == [None] * len(calls)


def test_what_needs_no_place_is_not_held_up(pair: Pair) -> None:
    """A release, an answer to a recall and a registration go to the broker at once, beside calls that wait."""
    connection, broker = pair
    calls = at_the_broker(pair)
    waits = Caller(lambda: connection.call(allocate(), Taker()))
    until(lambda: connection._admitted.waiting)
    connection.tell(releases([1]))
    connection.answer_recall(1, 2)
    asker = Caller(lambda: connection.call(pb.Frame(register_model=broker_pb2.RegisterModelRequest(model_id="m"))))
    asked = [broker.hear_any() for _ in range(3)]
    assert [frame.WhichOneof("kind") for frame in asked] == ["release", "recall_answer", "register_model"]
    broker.reply(asked[2].request_id, model={})
    assert asker.end().error is None
    grant_all(broker, calls)
    while (frame := broker.hear_any()).WhichOneof("kind") == "ack":
        continue
    grant(broker, frame.request_id)
    assert waits.end().error is None


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
