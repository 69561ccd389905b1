"""A caller that gives up, with a broker that is played frame by frame: what it sends, and what it leaves."""

from __future__ import annotations

import select
import socket
import struct
import threading
from functools import partial
from typing import Any

import pytest
from tests.client.session.taking import Begun, Pair, Taker, allocate
from tests.client.session.test_calls_in_front import grant
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import Caller

from membroker.cancellation import CancelScope
from membroker.errors import Cancelled
from membroker.session.machine import releases
from membroker.v1 import handoff_pb2 as pb


@pytest.fixture
def options() -> dict[str, Any]:
    return {"revision": 3}


def test_a_call_that_begins_late(pair: Pair) -> None:
    """In a scope that was cancelled, or within one that was, no call that may wait begins. Others do."""
    connection, broker = pair
    with CancelScope() as outer, CancelScope() as inner:
        outer.cancel()
        assert inner.cancelled
        with pytest.raises(Cancelled):
            connection.call(allocate(), Taker())
        assert broker.hears_nothing()
        asker = Begun(pair, pb.Frame(get_device={}))
        broker.reply(asker.id, device={})
        assert asker.error() is None
    call = Begun(pair)
    grant(broker, call.id)
    assert call.error() is None


def test_the_socket_has_no_room(pair: Pair) -> None:
    """The broker reads nothing for a moment: `cancel` returns at once all the same, and is heard later."""
    connection, broker = pair
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(DEADLINE_SECONDS), 0))
    call = Begun(pair, scope=(scope := CancelScope()))
    stuffing = Caller(lambda: [connection.tell(releases([number])) for number in range(4000)])
    until(lambda: not select.select([], [connection._socket], [], 0)[1])
    scope.cancel()
    heard = broker.hear_any()
    while heard.WhichOneof("kind") == "release":
        heard = broker.hear_any()
    assert (heard.WhichOneof("kind"), heard.request_id) == ("cancel", call.id)
    broker.refuse(call.id, "DELIVERY_FAILED")
    assert isinstance(call.error(), Cancelled)
    while stuffing.is_alive() or not broker.hears_nothing():
        if not broker.hears_nothing():  # the thread lives a moment longer than its last frame
            broker.hear_any()


def test_any_thread_may_cancel_at_any_moment(pair: Pair) -> None:
    """Whatever crosses what, the call ends, and what it does not return is released."""
    connection, broker = pair

    def call(scope: CancelScope) -> None:
        with scope:
            connection.call(allocate(), Taker())

    for number in range(200):
        scope = CancelScope()
        caller, canceller = Caller(partial(call, scope)), threading.Thread(target=scope.cancel)
        if number % 2:
            canceller.start()
        else:
            frame = broker.hear("allocate")
            canceller.start()
            grant(broker, frame.request_id)
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
        assert len(connection.calls.inventory.held().extents) == (caller.error is None)
        connection.calls.inventory.strike_extents(list(connection.calls.inventory.held().extents))
        while not broker.hears_nothing():
            broker.hear_any()
