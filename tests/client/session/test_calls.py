"""The call socket, with a broker that is played frame by frame: what a real one does only on bad days.

The other end of a socket pair is in this process; frames, descriptors and the kernel between them are real.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.client.session.taking import Begun, Pair, Slow, Taker, allocate, attach, granted, segment
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import Caller

from membroker.errors import BrokerUnavailable, ClosedError, MembrokerError, ProtocolError
from membroker.session.inventory import HeldResources, Inventory, Kind
from membroker.session.machine import releases
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import names


class TestDeliveries:
    """What `transcripts/calls.txt` says of packets, with descriptors."""

    @pytest.mark.parametrize("packet", [{}, {"segment": 77, "parts": 3}], ids=["extents", "segment"])
    def test_one_call(self, pair: Pair, packet: dict[str, int]) -> None:
        """Packets, each acknowledged when its descriptors are closed, then the answer. Nothing is let go of."""
        call = Begun(pair, attach() if packet else allocate(6))
        for part in range(3):
            ack = call.deliver(2 * part, 2 * part + 1, part=part, **packet)
            assert (ack.request_id, ack.ack.part) == (call.id, part)
        pair[1].reply(call.id, **({"segment": segment(6)} if packet else {"allocate": granted(6)}))
        assert (call.error(), call.taker.taken, call.taker.undone) == (None, [0, 1, 2, 3, 4, 5], 0)
        assert pair[1].hears_nothing()


class TestInterrupted:
    def test_after_its_answer(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extents are in the inventory already, and the caller never gets them: no resume may state them."""
        inventory = pair[0].calls.inventory

        def borrowed(extent_ids: Sequence[int], kind: Kind) -> None:
            Inventory.borrowed(inventory, extent_ids, kind)
            raise KeyboardInterrupt

        monkeypatch.setattr(inventory, "borrowed", borrowed)
        call = Begun(pair)
        call.deliver(7)
        pair[1].reply(call.id, allocate=granted(1))
        assert isinstance(call.error(), KeyboardInterrupt)
        assert (call.taker.undone, inventory.held()) == (1, HeldResources())

    def test_packets_that_another_thread_has_read_for_it_are_closed(self, pair: Pair) -> None:
        """They end with the connection, or their memory would stay in use."""
        connection, broker = pair
        slow = Slow(KeyboardInterrupt())
        one = Begun(pair, taker=slow)
        broker.deliver(one.id, 1)
        assert slow.entered.wait(DEADLINE_SECONDS)
        other = Begun(pair)
        broker.deliver(one.id, 2, part=1)
        until(lambda: len(connection._unclosed) == 2)
        slow.go_on.set()
        assert isinstance(one.error(), KeyboardInterrupt)
        assert isinstance(other.error(), BrokerUnavailable)
        connection.close()
        assert not connection._unclosed


def test_release_in_frames(pair: Pair) -> None:
    """Ten thousand pages are given back: no frame has more ids than the broker takes, and none comes twice."""
    connection, broker = pair
    connection.tell(releases([*range(10_000), 5, 6]))
    frames = [broker.hear("release").release.extent_ids for _ in range(3)]
    assert [len(ids) for ids in frames] == [4096, 4096, 1808]
    assert sorted(extent_id for ids in frames for extent_id in ids) == list(range(10_000))


class TestThreads:
    def test_a_slow_mapper_holds_up_nobody(self, pair: Pair) -> None:
        """One thread maps for a long time; the others read the socket meanwhile."""
        broker, taker = pair[1], Slow()
        slow = Begun(pair, taker=taker)
        broker.deliver(slow.id, 1)
        assert taker.entered.wait(DEADLINE_SECONDS)
        quick = Begun(pair, allocate(0))
        broker.reply(slow.id, allocate=granted(1))
        broker.reply(quick.id, allocate=granted(0))
        assert quick.error() is None
        taker.go_on.set()
        assert slow.error() is None
        broker.hear("ack")

    def test_the_broker_dies(self, pair: Pair) -> None:
        """Every call that waits ends with BrokerUnavailable, and so does every later one, a release included."""
        connection, broker = pair
        calls = [Begun(pair) for _ in range(4)]
        calls[0].deliver(1)
        broker.end.close()
        assert all(isinstance(call.error(), BrokerUnavailable) for call in calls)
        assert calls[0].taker.undone == 1
        with pytest.raises(BrokerUnavailable):
            connection.call(allocate(), Taker())
        with pytest.raises(BrokerUnavailable):
            connection.tell(releases([1]))

    @pytest.mark.parametrize("garbage", [b"\xff\xff", b"\x08\x01", b"x" * (names.MAX_FRAME_BYTES + 1)])
    def test_garbage(self, pair: Pair, garbage: bytes) -> None:
        """What is no frame ends the connection: nothing behind it could be trusted."""
        call = Begun(pair)
        pair[1].end.send(garbage)
        assert isinstance(call.error(), ProtocolError)
        with pytest.raises(MembrokerError):
            pair[0].call(allocate(), Taker())

    def test_closed_by_another_thread(self, pair: Pair) -> None:
        calls = [Begun(pair) for _ in range(3)]
        pair[0].close()
        assert all(isinstance(call.error(), ClosedError) for call in calls)
        with pytest.raises(ClosedError):
            pair[0].call(allocate())

    def test_a_goodbye_to_a_stopped_broker(self, pair: Pair) -> None:
        """A client that closes does not wait for ever for a daemon under SIGSTOP."""
        pair[0].say_goodbye(0.01)
        pair[1].hear("goodbye")


def test_the_end_is_noticed_behind_a_last_answer(pair: Pair) -> None:
    """A thread reads its answer, and nobody reads on: the session has to be taken up again all the same."""
    connection, broker = pair
    call = Begun(pair, pb.Frame(declare=broker_pb2.DeclareMemoryRequest()))
    until(lambda: connection._reader is not None)
    end = Caller(connection.read_to_the_end)
    until(lambda: connection._changed.waiting)
    broker.reply(call.id, declare={})
    assert call.error() is None
    broker.end.close()
    end.value()
    assert connection.calls.is_lost
