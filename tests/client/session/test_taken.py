"""Acknowledging by a count in the next frame: two packets for a small allocation, and never a call that waits for ever.

First a broker that is played frame by frame, then a real one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.client.session.taking import Pair, Taker, allocate, attach, granted
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.fake_broker import Caller, PlayedEnd
from tests.support.processes import ends, heard, is_settled, worker

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
    more: Any = {"parts": 1, "reply": LAST}
    broker.deliver(request_id, extent, **more)


class Slow(Taker):
    """Takes a delivery when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        """Wait, then take it."""
        self.begun.set()
        assert self.go_on.wait(DEADLINE_SECONDS)
        super().place(extent_ids, descriptors, extent_bytes)


def test_the_next_frame_says_it(pair: Pair) -> None:
    """A page is borrowed and given back: the release has the count, and so has the next request; there is no Ack."""
    connection, broker = pair
    for turn in range(3):
        caller = Caller(lambda: connection.call(allocate(), Taker()))
        frame = broker.hear("allocate")
        assert frame.acknowledged == turn
        serve(broker, frame.request_id, turn)
        assert caller.end().error is None
        assert broker.hears_nothing()
        connection.release([turn])
        assert broker.hear("release").acknowledged == turn + 1


def test_a_long_call_is_acknowledged_at_once(pair: Pair) -> None:
    """Its next packet may wait for the window; behind the last one nothing waits."""
    connection, broker = pair
    caller = Caller(lambda: connection.call(allocate(3), Taker()))
    request_id = broker.hear("allocate").request_id
    for part in (0, 1):
        broker.deliver(request_id, part, part=part, parts=3)
        assert broker.hear("ack").acknowledged == part + 1
    more: Any = {"parts": 3, "reply": LAST}
    broker.deliver(request_id, 2, part=2, **more)
    assert caller.end().error is None
    assert broker.hears_nothing()


def test_another_call_may_wait_for_the_window(pair: Pair) -> None:
    """While another call is in flight the broker hears at once that there is room, for it may be that call's."""
    connection, broker = pair
    callers = [Caller(lambda: connection.call(allocate(), Taker())) for _ in range(2)]
    first, second = (broker.hear("allocate").request_id for _ in callers)
    serve(broker, first, 1)
    assert broker.hear("ack").acknowledged == 1
    until(lambda: not all(caller.is_alive() for caller in callers))
    serve(broker, second, 2)
    assert [caller.end().error for caller in callers] == [None, None]
    assert broker.hears_nothing()


def test_the_count_has_no_gap(pair: Pair) -> None:
    """A thread is slow to map the first packet, another maps the second: nothing is said before both are taken."""
    connection, broker = pair
    slow, other = Slow(), Taker()
    one = Caller(lambda: connection.call(allocate(), slow))
    first = broker.hear("allocate").request_id
    two = Caller(lambda: connection.call(attach(), other))
    second = broker.hear("attach_segment").request_id
    broker.deliver(first, 1, parts=1)
    assert slow.begun.wait(DEADLINE_SECONDS)
    broker.deliver(second, 7, parts=2, segment=77)
    until(lambda: other.taken == [7])
    assert broker.hears_nothing()
    slow.go_on.set()
    assert broker.hear("ack").acknowledged == 2
    broker.reply(first, allocate=granted(1))
    broker.refuse(second, "DEVICE_FULL")
    assert broker.hear("detach_segment").acknowledged == 2
    assert (one.end().error, two.end().error is None) == (None, False)


def test_what_nobody_waits_for(pair: Pair) -> None:
    """A delivery for an unknown call is counted too: the broker counts all that it sent."""
    connection, broker = pair
    caller = Caller(lambda: connection.call(allocate(), Taker()))
    request_id = broker.hear("allocate").request_id
    broker.deliver(request_id + 1000, 5)
    assert broker.hear("ack").acknowledged == 1
    assert broker.hear("release").acknowledged == 1
    serve(broker, request_id, 6)
    assert caller.end().error is None


def test_an_older_broker_gets_no_count(pair: Pair) -> None:
    """It would skip the count, and never send a third packet: it gets an Ack for each, by its id."""
    connection, broker = pair
    connection._counts = False
    caller = Caller(lambda: connection.call(allocate(), Taker()))
    request_id = broker.hear("allocate").request_id
    serve(broker, request_id, 1)
    ack = broker.hear("ack")
    assert (ack.request_id, ack.acknowledged) == (request_id, 0)
    assert caller.end().error is None


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
        model, connection = client.register_model("m"), client._session.connection
        counted: Any = Counted(connection._socket)
        connection._socket, sock = counted, connection._socket
        for _ in range(20):
            model.allocate(PAGE).close()
        assert counted.kinds == ["allocate", "release"] * 20
        connection._socket = sock
        until(lambda: is_settled(daemon))


def test_long_and_short_calls_share_the_window(daemon: Daemon) -> None:
    """Threads borrow one page or 150 at once, all through one window of two packets: every call ends."""
    errors: list[BaseException] = []

    def work(model: membroker.Model, pages: int) -> None:
        try:
            with model.pool(page_size=PAGE, virtual_capacity=150 * PAGE) as pool:
                for _ in range(30 if pages == 1 else 6):
                    pool.allocate(0, pages * PAGE)
                    pool.deallocate(0, pages * PAGE)
        except BaseException as error:  # noqa: BLE001 - a thread hands on what it raised
            errors.append(error)

    with membroker.connect(daemon.endpoint()) as client:
        model = client.register_model("m")
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
        client._session.connection._counts = False
        model = client.register_model("m")
        with model.pool(page_size=PAGE, virtual_capacity=120 * PAGE) as pool:
            for _ in range(3):
                pool.allocate(0, 120 * PAGE)
                pool.deallocate(0, 120 * PAGE)
        for _ in range(5):
            model.allocate(PAGE).close()
        until(lambda: is_settled(daemon))


def test_a_session_goes_on_counting_after_an_outage(daemon: Daemon) -> None:
    """The next connection has a count of its own: what was taken over the one before is not in it."""
    with membroker.connect(daemon.endpoint()) as client:
        model = client.register_model("m")
        kept = [model.allocate(PAGE) for _ in range(5)]
        before = client._session.connection
        daemon.kill()
        daemon.start_again()
        kept.append(model.allocate(PAGE))
        assert client._session.connection is not before
        assert client._session.connection._taken.count == 1
        with model.pool(page_size=PAGE, virtual_capacity=120 * PAGE) as pool:
            pool.allocate(0, 120 * PAGE)
        for one in kept:
            one.close()
        until(lambda: is_settled(daemon))


def test_borrowing_needs_no_grpc(daemon: Daemon) -> None:
    """A worker registers, borrows and leaves without a gRPC channel, whose import takes a tenth of a second."""
    script = """
client = connect()
model = client.register_model("m", limit="8MiB", exclusive=True)
assert (model.limit, model.name) == (8 << 20, "m")
with model.pool(page_size=PAGE) as pool:
    pool.allocate(0, 2 * PAGE)
model.unregister()
try:
    model.allocate(1)
except membroker.ModelNotFound:
    say("left")
client.close()
say(sorted(name for name in sys.modules if name == "grpc" or name.startswith("grpc.")))
"""
    with worker(script, daemon, "handoff") as process:
        assert heard(process) == "left"
        assert heard(process) == "[]"
        ends(process)
