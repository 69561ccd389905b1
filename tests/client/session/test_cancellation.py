"""A caller that gives up, with a broker that is played frame by frame: what it sends, and what it leaves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.client.session.taking import Pair, Taker, allocate, attach, granted
from tests.client.session.test_calls_in_front import at_the_broker, grant, in_front
from tests.support.daemons import until
from tests.support.fake_broker import Caller

from membroker.cancellation import CancelScope
from membroker.errors import Cancelled, OutOfMemory
from membroker.session.connection import Connection
from membroker.v1 import handoff_pb2 as pb


@pytest.fixture
def options() -> dict[str, Any]:
    return {"revision": 3}


def call_in(scope: CancelScope, connection: Connection, taker: Taker, frame: pb.Frame | None = None) -> Caller:
    """Make a call in a scope, in a thread of its own."""

    def call() -> object:
        with scope:
            return connection.call(frame or allocate(), taker)

    return Caller(call)


@pytest.mark.parametrize("frame", [allocate(), attach()], ids=["allocate", "attach"])
def test_a_wait_ends_at_the_broker(pair: Pair, frame: pb.Frame) -> None:
    """The broker hears of it, and its answer ends the call."""
    connection, broker = pair
    scope, taker = CancelScope(), Taker()
    caller = call_in(scope, connection, taker, frame)
    request_id = broker.hear_any().request_id
    scope.cancel()
    assert broker.hear("cancel").request_id == request_id
    broker.refuse(request_id, "DELIVERY_FAILED")
    assert isinstance(caller.end().error, Cancelled)
    assert broker.hears_nothing()
    assert not connection.has_calls


def test_what_was_granted_meanwhile_goes_back(pair: Pair) -> None:
    """The grant and the cancellation cross: nothing is mapped, and all of it is released."""
    connection, broker = pair
    scope, taker = CancelScope(), Taker()
    caller = call_in(scope, connection, taker)
    request_id = broker.hear("allocate").request_id
    scope.cancel()
    broker.hear("cancel")
    grant(broker, request_id)
    assert isinstance(caller.end().error, Cancelled)
    assert taker.taken == []
    release = broker.hear("release")
    assert list(release.release.extent_ids) == [request_id]
    assert not connection._inventory.held().extents


def test_a_call_that_is_complete_goes_back(pair: Pair) -> None:
    """It is cancelled while the last extent is being mapped: it is unmapped again, and released."""
    connection, broker = pair
    scope = CancelScope()

    class Slow(Taker):
        def place(self, *arguments: Any) -> None:
            super().place(*arguments)
            scope.cancel()

    taker = Slow()
    caller = call_in(scope, connection, taker)
    request_id = broker.hear("allocate").request_id
    grant(broker, request_id)
    assert isinstance(caller.end().error, Cancelled)
    assert (taker.taken, taker.undone) == ([], 1)
    assert list(broker.hear("release").release.extent_ids) == [request_id]


def test_a_call_in_front(pair: Pair) -> None:
    """It has no place at the broker, which never hears of it; the others go on."""
    connection, broker = pair
    callers, ids = at_the_broker(pair)
    scope = CancelScope()
    caller = call_in(scope, connection, Taker())
    until(lambda: in_front(connection) == 1)
    scope.cancel()
    assert isinstance(caller.end().error, Cancelled)
    assert broker.hears_nothing()
    for request_id in ids:
        grant(broker, request_id)
    assert [one.end().error for one in callers] == [None] * len(callers)


def test_a_call_that_begins_late(pair: Pair) -> None:
    """In a scope that was cancelled, or within one that was, no call that may wait begins. Others do."""
    connection, broker = pair
    with CancelScope() as outer, CancelScope() as inner:
        outer.cancel()
        assert inner.cancelled
        with pytest.raises(Cancelled):
            connection.call(allocate(), Taker())
        assert broker.hears_nothing()
        asker = Caller(lambda: connection.call(pb.Frame(get_device={})))
        broker.reply(broker.hear("get_device").request_id, device={})
        assert asker.end().error is None
    caller = Caller(lambda: connection.call(allocate(), Taker()))
    grant(broker, broker.hear("allocate").request_id)
    assert caller.end().error is None


def test_a_scope_of_another_thread(pair: Pair) -> None:
    """Threads have scopes of their own, and a cancellation ends nobody else's wait."""
    connection, broker = pair
    mine, other = CancelScope(), CancelScope()
    one = call_in(mine, connection, Taker())
    first = broker.hear("allocate").request_id
    two = call_in(other, connection, Taker())
    second = broker.hear("allocate").request_id
    mine.cancel()
    assert broker.hear("cancel").request_id == first
    broker.refuse(first, "DELIVERY_FAILED")
    assert isinstance(one.end().error, Cancelled)
    grant(broker, second)
    assert two.end().error is None


def test_a_refusal_comes_first(pair: Pair) -> None:
    """The call had its answer before it was cancelled: it ends with that."""
    connection, broker = pair
    scope = CancelScope()
    caller = call_in(scope, connection, Taker())
    broker.refuse(broker.hear("allocate").request_id, "CAPACITY")
    assert isinstance(caller.end().error, OutOfMemory)
    scope.cancel()
    assert broker.hears_nothing()


def test_the_socket_has_no_room(pair: Pair) -> None:
    """The broker reads nothing for a moment: `cancel` returns at once all the same, and is heard later."""
    connection, broker = pair
    scope = CancelScope()
    caller = call_in(scope, connection, Taker())
    request_id = broker.hear("allocate").request_id
    stuffing = Caller(lambda: [connection.release([number]) for number in range(4000)])
    until(lambda: _is_full(connection))
    scope.cancel()
    heard = broker.hear_any()
    while heard.WhichOneof("kind") == "release":
        heard = broker.hear_any()
    assert (heard.WhichOneof("kind"), heard.request_id) == ("cancel", request_id)
    broker.refuse(request_id, "DELIVERY_FAILED")
    assert isinstance(caller.end().error, Cancelled)
    while stuffing.is_alive():
        broker.hear_any()
    while not broker.hears_nothing():
        broker.hear_any()


def _is_full(connection: Connection) -> bool:
    import select

    return not select.select([], [connection._socket], [], 0)[1]


class TestOlderBroker:
    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"revision": 2}

    def test_the_connection_ends(self, pair: Pair) -> None:
        """It knows no Cancel: the wait ends with the connection, as after Ctrl-C, and the session resumes."""
        connection, broker = pair
        scope = CancelScope()
        caller = call_in(scope, connection, Taker())
        broker.hear("allocate")
        scope.cancel()
        assert caller.end().error is not None
        assert connection.interrupted


def test_any_thread_may_cancel_at_any_moment(pair: Pair) -> None:
    """Whatever crosses what, the call ends, and what it does not return is released."""
    connection, broker = pair
    for number in range(200):
        scope, taker = CancelScope(), Taker()
        caller = call_in(scope, connection, taker)
        request_id = None
        canceller = threading.Thread(target=scope.cancel)
        if number % 2:
            canceller.start()
        else:
            request_id = broker.hear("allocate").request_id
            canceller.start()
            grant(broker, request_id)
        canceller.join()
        if number % 2:
            # Either it was never sent, or the broker hears of both.
            while caller.is_alive():
                if not broker.hears_nothing():
                    frame = broker.hear_any()
                    if frame.WhichOneof("kind") == "cancel":
                        broker.refuse(frame.request_id, "DELIVERY_FAILED")
        caller.end()
        assert caller.error is None or isinstance(caller.error, Cancelled)
        assert len(connection._inventory.held().extents) == (caller.error is None)
        connection._inventory.strike_extents(list(connection._inventory.held().extents))
        while not broker.hears_nothing():
            broker.hear_any()


def test_granted(pair: Pair) -> None:
    """A scope that is not cancelled changes nothing."""
    connection, broker = pair
    caller = call_in(CancelScope(), connection, taker := Taker())
    request_id = broker.hear("allocate").request_id
    broker.deliver(request_id, 7, reply=pb.Reply(allocate=granted(1)))
    assert caller.end().error is None
    assert taker.taken == [7]
