"""Acknowledging by a count in the next frame: two packets for a small allocation, and never a call that waits for ever.

First a broker that is played frame by frame, then a real one.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import Any

import pytest
from tests.client.session.taking import Begun, Pair, Slow, attach, granted
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.fake_broker import PlayedEnd
from tests.support.processes import is_settled

import membroker
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

PAGE = 2 << 20
LAST = pb.Reply(allocate=broker_pb2.AllocateExtentsResponse(count=1))


@pytest.fixture
def options() -> dict[str, Any]:
    """The broker is of revision 1, which counts."""
    return {"revision": 1}


def serve(broker: PlayedEnd, request_id: int, extent: int) -> None:
    """Answer a call in its only delivery."""
    broker.deliver(request_id, extent, parts=1, reply=LAST)


def test_the_count_has_no_gap(pair: Pair) -> None:
    """A thread is slow to map the first packet, another maps the second: nothing is said before both are taken."""
    broker, slow = pair[1], Slow()
    one, two = Begun(pair, taker=slow), Begun(pair, attach())
    broker.deliver(one.id, 1, parts=1)
    assert slow.entered.wait(DEADLINE_SECONDS)
    broker.deliver(two.id, 7, parts=2, segment=77)
    until(lambda: two.taker.taken == [7])
    until(lambda: len(pair[0]._unclosed) == 1)  # it is closed and counted under one lock
    assert broker.hears_nothing()
    slow.go_on.set()
    assert broker.hear("ack").acknowledged == 2
    broker.reply(one.id, allocate=granted(1))
    broker.refuse(two.id, "DEVICE_FULL")
    assert broker.hear("detach_segment").acknowledged == 2
    assert (one.error(), two.error() is None) == (None, False)


def test_an_older_broker_gets_no_count(pair: Pair) -> None:
    """It would skip the count, and never send a third packet: it gets an Ack for each, by its id."""
    pair[0].calls.counts = False
    call = Begun(pair)
    serve(pair[1], call.id, 1)
    ack = pair[1].hear("ack")
    assert (ack.request_id, ack.acknowledged) == (call.id, 0)
    assert call.error() is None


class Counted:
    """A socket that counts what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.kinds: list[str | None] = []

    def send(self, data: bytes, flags: int = 0) -> int:
        """Send, and note the kind of the frame."""
        self.kinds.append(handoff.decode(data).WhichOneof("kind"))
        return self._sock.send(data, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_a_small_allocation_costs_two_packets(daemon: Daemon) -> None:
    """Request and release, with a real broker; a third for each was the Ack."""
    with membroker.connect(daemon.endpoint()) as client:
        model, connection = client.model("m"), client._session.connection
        counted: Any = Counted(connection._socket)
        connection._socket, sock = counted, connection._socket
        for _ in range(20):
            model.allocate(PAGE).close()
        assert counted.kinds == ["allocate", "release"] * 20
        connection._socket = sock
        until(lambda: is_settled(daemon))


def test_threads_send_two_packets_a_page(daemon: Daemon) -> None:
    """Each borrows and releases pages. Its next frame carries the count of all, so none sends an Ack."""
    with membroker.connect(daemon.endpoint()) as client:
        model, connection = client.model("m"), client._session.connection
        counted: Any = Counted(connection._socket)
        connection._socket, sock = counted, connection._socket

        def work() -> None:
            for _ in range(20):
                model.allocate(PAGE).close()

        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        # But for one when so many extents have come that one more packet might not fit.
        assert Counter(counted.kinds) - Counter(ack=160 // 64) == {"allocate": 160, "release": 160}
        connection._socket = sock
        until(lambda: is_settled(daemon))


def test_long_and_short_calls_share_the_window(daemon: Daemon) -> None:
    """Threads borrow one page or 150 at once, all through one window of 128 extents: every call ends."""
    errors: list[BaseException] = []

    def work(model: membroker.Model, pages: int) -> None:
        try:
            with model.pool(page_size=PAGE, virtual_capacity=150 * PAGE) as pool:
                for _ in range(30 if pages == 1 else 6):
                    pool.allocate(0, pages * PAGE)
                    pool.free(0, pages * PAGE)
        except BaseException as error:  # noqa: BLE001 - a thread hands on what it raised
            errors.append(error)

    with membroker.connect(daemon.endpoint()) as client:
        model = client.model("m")
        threads = [threading.Thread(target=work, args=(model, pages), daemon=True) for pages in (1, 1, 1, 20, 70)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert errors == []
        until(lambda: is_settled(daemon))


def test_an_old_client_is_served_as_before(daemon: Daemon) -> None:
    """A library of before the count was there acknowledges by ids: 300 pages, and small ones."""
    with membroker.connect(daemon.endpoint()) as client:
        client._session.connection.calls.counts = False
        model = client.model("m")
        with model.pool(page_size=PAGE, virtual_capacity=120 * PAGE) as pool:
            for _ in range(3):
                pool.allocate(0, 120 * PAGE)
                pool.free(0, 120 * PAGE)
        for _ in range(5):
            model.allocate(PAGE).close()
        until(lambda: is_settled(daemon))


def test_a_session_goes_on_counting_after_an_outage(daemon: Daemon) -> None:
    """The next connection has a count of its own: what was taken over the one before is not in it."""
    with membroker.connect(daemon.endpoint()) as client:
        model = client.model("m")
        kept = [model.allocate(PAGE) for _ in range(5)]
        before = client._session.connection
        daemon.kill()
        daemon.start_again()
        kept.append(model.allocate(PAGE))
        assert client._session.connection is not before
        assert client._session.connection.calls.acknowledged == 1
        with model.pool(page_size=PAGE, virtual_capacity=120 * PAGE) as pool:
            pool.allocate(0, 120 * PAGE)
        for one in kept:
            one.close()
        until(lambda: is_settled(daemon))
