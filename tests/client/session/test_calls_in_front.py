"""More calls than the broker lets a session have: the others wait in front of it, and none of them is refused."""

from __future__ import annotations

import time

import pytest
from tests.client.session.taking import Pair, Taker, allocate, granted
from tests.support.daemons import until
from tests.support.fake_broker import Caller, PlayedEnd

from membroker.errors import BrokerUnavailable
from membroker.session.connection import Connection
from membroker.session.places import MOST_PATIENT
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb


def in_front(connection: Connection) -> int:
    """Return how many calls wait for a place."""
    with connection._changed.lock:
        return len(connection._admitted.waiting)


def at_the_broker(pair: Pair, count: int = MOST_PATIENT) -> tuple[list[Caller], list[int]]:
    """Make calls that fill all places for those that may wait."""
    connection, broker = pair
    callers = [Caller(lambda: connection.call(allocate(), Taker())) for _ in range(count)]
    return callers, [broker.hear("allocate").request_id for _ in range(count)]


def grant(broker: PlayedEnd, request_id: int) -> None:
    """Grant a call of one extent."""
    broker.deliver(request_id, request_id, reply=pb.Reply(allocate=granted(1)))


def hear_allocate(broker: PlayedEnd) -> pb.Frame:
    """Return the next frame that is no acknowledgement."""
    while (frame := broker.hear_any()).WhichOneof("kind") == "ack":
        continue
    return frame


def test_the_next_ones_wait_in_their_order(pair: Pair) -> None:
    """Threads borrow while as many wait at the broker as may: they are sent in the order in which they came."""
    connection, broker = pair
    callers, ids = at_the_broker(pair)
    for number in range(3):
        callers.append(Caller(lambda: connection.call(allocate(), Taker())))
        until(lambda number=number: in_front(connection) == number + 1)
    assert broker.hears_nothing()
    sent = []
    for request_id in ids[:3]:
        grant(broker, request_id)
        sent.append(hear_allocate(broker).request_id)
    assert sent == sorted(sent)
    assert min(sent) > max(ids)
    for request_id in ids[3:] + sent:
        grant(broker, request_id)
    assert [caller.end().error for caller in callers] == [None] * len(callers)


def test_what_needs_no_place_is_not_held_up(pair: Pair) -> None:
    """A release, an answer to a recall and a registration go to the broker at once, beside calls that wait."""
    connection, broker = pair
    callers, ids = at_the_broker(pair)
    callers.append(Caller(lambda: connection.call(allocate(), Taker())))
    until(lambda: in_front(connection) == 1)
    connection.release([1])
    connection.answer_recall(1, 2)
    asker = Caller(lambda: connection.call(pb.Frame(register_model=broker_pb2.RegisterModelRequest(model_id="m"))))
    asked = [broker.hear_any() for _ in range(3)]
    assert [frame.WhichOneof("kind") for frame in asked] == ["release", "recall_answer", "register_model"]
    broker.reply(asked[2].request_id, model={})
    assert asker.end().error is None
    # One that does not wait for memory has a place, too.
    prompt = Caller(lambda: connection.call(allocate(), Taker(), until=time.monotonic()))
    last = broker.hear("allocate")
    assert last.allocate.wait.ToNanoseconds() == 0
    for request_id in [*ids, last.request_id]:
        grant(broker, request_id)
    grant(broker, hear_allocate(broker).request_id)
    assert [caller.end().error for caller in [*callers, prompt]] == [None] * (len(callers) + 1)


def test_the_time_runs_in_front(pair: Pair) -> None:
    """A call waited its whole time in front: the broker is still asked, with no time left, and says what lacks."""
    connection, broker = pair
    callers, ids = at_the_broker(pair)
    late = Caller(lambda: connection.call(allocate(), Taker(), until=time.monotonic() + 0.2))
    asked = broker.hear("allocate")
    assert asked.allocate.HasField("wait")
    assert asked.allocate.wait.ToNanoseconds() == 0
    broker.refuse(asked.request_id, "CAPACITY")
    assert late.end().error is not None
    assert late.error is not None
    assert type(late.error).__name__ == "OutOfMemory"
    for request_id in ids:
        grant(broker, request_id)
    assert [caller.end().error for caller in callers] == [None] * len(callers)


def test_the_connection_ends(pair: Pair) -> None:
    """Those in front are told at once, and may ask again over the next connection."""
    connection, broker = pair
    callers, _ = at_the_broker(pair)
    callers += [Caller(lambda: connection.call(allocate(), Taker())) for _ in range(5)]
    until(lambda: in_front(connection) == 5)
    broker.end.close()
    for caller in callers:
        assert isinstance(caller.end().error, BrokerUnavailable)
    connection.wait_until_idle()


def test_a_deadline_in_front(pair: Pair) -> None:
    """An attach whose answer must come soon does not wait longer for its place."""
    connection, broker = pair
    callers, ids = at_the_broker(pair)
    with pytest.raises(BrokerUnavailable, match="in time"):
        connection.call(allocate(), Taker(), timeout=0.1)
    for request_id in ids:
        grant(broker, request_id)
    assert [caller.end().error for caller in callers] == [None] * len(callers)


def test_only_the_thread_of_a_packet_wakes(pair: Pair) -> None:
    """Of many threads that wait for answers one reads, and an answer wakes the thread that it is for."""
    connection, broker = pair
    callers, ids = at_the_broker(pair)
    until(lambda: len(connection._changed.waiting) == MOST_PATIENT - 1)
    for request_id in reversed(ids):
        grant(broker, request_id)
    assert [caller.end().error for caller in callers] == [None] * len(callers)
    assert connection._reader is None
