"""The call socket, with a broker that is played frame by frame: what a real one does only on bad days.

The other end of a socket pair is in this process; frames, descriptors and the kernel between them are real.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.client.session.taking import Pair, Taker, allocate, attach, granted, segment
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import Caller

from membroker.errors import (
    BrokerUnavailable,
    ClosedError,
    DescriptorLimit,
    MembrokerError,
    OutOfMemory,
    ProtocolError,
    SegmentNotFound,
    WriterDied,
)
from membroker.session.inventory import HeldResources, Inventory, Kind
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff
from membroker.wire import names


class TestCall:
    def test_one_call(self, pair: Pair) -> None:
        """Two deliveries, each acknowledged when its descriptors are closed, then the answer."""
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(allocate(4), taker))
        request_id = broker.hear("allocate").request_id
        for part in (0, 1):
            broker.deliver(request_id, 2 * part, 2 * part + 1, part=part)
            ack = broker.hear("ack")
            assert (ack.request_id, ack.ack.part) == (request_id, part)
        broker.reply(request_id, allocate=granted(4))
        assert caller.end().error is None
        assert taker.taken == [0, 1, 2, 3]
        assert taker.undone == 0
        assert broker.hears_nothing()

    def test_refused(self, pair: Pair) -> None:
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(allocate(), taker))
        broker.refuse(broker.hear("allocate").request_id, "MODEL_LIMIT")
        assert isinstance(caller.end().error, OutOfMemory)
        assert broker.hears_nothing(), "nothing was delivered, so nothing is released"

    def test_refused_half_way(self, pair: Pair) -> None:
        """The card fills up between two packets: what came is unmapped, then released, then it raises."""
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(allocate(), taker))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id, 7, 8)
        broker.hear("ack")
        broker.refuse(request_id, "DEVICE_FULL")
        release = broker.hear("release")
        assert taker.undone == 1
        assert list(release.release.extent_ids) == [7, 8]
        assert release.release.no_reply
        assert isinstance(caller.end().error, OutOfMemory)

    def test_mapping_fails(self, pair: Pair) -> None:
        """The second packet cannot be mapped: the third is closed unused, and all is released at the answer."""
        connection, broker = pair
        taker = Taker(3, RuntimeError("no more mappings"))
        caller = Caller(lambda: connection.call(allocate(), taker))
        request_id = broker.hear("allocate").request_id
        for part in range(3):
            broker.deliver(request_id, 2 * part, 2 * part + 1, part=part)
            assert broker.hear("ack").ack.part == part
        assert taker.undone == 1
        assert broker.hears_nothing(), "released before the broker has said that the call is over"
        broker.reply(request_id, allocate=granted(6))
        assert list(broker.hear("release").release.extent_ids) == [0, 1, 2, 3, 4, 5]
        assert isinstance(caller.end().error, RuntimeError)

    def test_interrupted(self, pair: Pair) -> None:
        """Ctrl-C while mapping: what came is unmapped, and the connection ends, since the broker's books are ahead."""
        connection, broker = pair
        taker = Taker(1, KeyboardInterrupt())
        caller = Caller(lambda: connection.call(allocate(), taker))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id, 0)
        broker.hear("ack")
        broker.deliver(request_id, 1, part=1)
        assert isinstance(caller.end().error, KeyboardInterrupt)
        assert taker.undone == 1
        assert (connection.lost, connection.interrupted) == (True, True)
        connection.wait_until_idle()
        assert broker.hear_any().WhichOneof("kind") == "ack"
        with pytest.raises(handoff.EndOfConnection):
            broker.hear_any()

    def test_interrupted_after_its_answer(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extents are in the inventory already, and the caller never gets them: no resume may state them."""
        connection, broker = pair
        inventory = connection._inventory

        def borrowed(extent_ids: Sequence[int], kind: Kind) -> None:
            Inventory.borrowed(inventory, extent_ids, kind)
            raise KeyboardInterrupt

        monkeypatch.setattr(inventory, "borrowed", borrowed)
        taker = Taker()
        caller = Caller(lambda: connection.call(allocate(), taker))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id, 7)
        broker.hear("ack")
        broker.reply(request_id, allocate=granted(1))
        assert isinstance(caller.end().error, KeyboardInterrupt)
        assert taker.undone == 1
        assert inventory.held() == HeldResources()

    def test_packets_that_an_interrupted_call_left_are_closed(self, pair: Pair) -> None:
        """Another thread has read them for it: they end with the connection, or their memory would stay in use."""
        connection, broker = pair
        slow, go_on = threading.Event(), threading.Event()

        class Interrupted(Taker):
            def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
                slow.set()
                assert go_on.wait(DEADLINE_SECONDS)
                raise KeyboardInterrupt

        one = Caller(lambda: connection.call(allocate(), Interrupted()))
        first = broker.hear("allocate").request_id
        broker.deliver(first, 1)
        assert slow.wait(DEADLINE_SECONDS)
        other = Caller(lambda: connection.call(allocate(), Taker()))
        broker.hear("allocate")
        broker.deliver(first, 2, part=1)
        until(lambda: len(connection._unclosed) == 2)
        go_on.set()
        assert isinstance(one.end().error, KeyboardInterrupt)
        assert isinstance(other.end().error, BrokerUnavailable)
        connection.close()
        assert not connection._unclosed

    @pytest.mark.parametrize("in_mid_call", [False, True])
    def test_undo_fails(self, pair: Pair, in_mid_call: bool) -> None:
        """What could not be unmapped is not called given back.

        If more is to come, that is closed and acknowledged, so that the window stays open for others.
        """

        class Stuck(Taker):
            def undo(self) -> None:
                raise RuntimeError("the device is lost")

        connection, broker = pair
        stuck = Stuck(1, OutOfMemory("no more")) if in_mid_call else Stuck()
        caller = Caller(lambda: connection.call(allocate(), stuck))
        request_id = broker.hear("allocate").request_id
        for part in range(1 + in_mid_call):
            broker.deliver(request_id, part + 1, part=part)
            broker.hear("ack")
        if in_mid_call:
            broker.reply(request_id, allocate=granted(2))
        else:
            broker.refuse(request_id, "DEVICE_FULL")
        assert "lost" in str(caller.end().error)
        assert broker.hears_nothing()

    def test_fewer_descriptors_than_ids(self, pair: Pair) -> None:
        connection, broker = pair
        caller = Caller(lambda: connection.call(allocate(), Taker()))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id, 1, 2, descriptors=[os.memfd_create("extent", os.MFD_CLOEXEC)])
        broker.hear("ack")
        broker.reply(request_id, allocate=granted(2))
        assert list(broker.hear("release").release.extent_ids) == [1, 2]
        assert isinstance(caller.end().error, ProtocolError)

    @pytest.mark.parametrize(
        ("ids", "more"),
        [
            ((), {}),
            ((1,), {}),
            ((1, 2, 3), {}),
            ((1, 1), {}),
            ((1, 2), {"extent_bytes": 4096}),
            ((1, 2), {"segment": 77}),
        ],
        ids=["none", "too few", "too many", "one twice", "of another size", "a segment's"],
    )
    def test_a_broker_that_cannot_count(self, pair: Pair, ids: Sequence[int], more: dict[str, Any]) -> None:
        """The caller gets addresses for two extents, and an address without memory ends its program (SIGSEGV)."""
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(allocate(2), taker))
        request_id = broker.hear("allocate").request_id
        if ids:
            broker.deliver(request_id, *ids, **more)
            broker.hear("ack")
        broker.reply(request_id, allocate=granted(2))
        if "segment" in more:
            assert broker.hear("detach_segment").detach_segment.generation == 77
        elif ids:
            assert set(broker.hear("release").release.extent_ids) == set(ids)
        assert isinstance(caller.end().error, ProtocolError)
        assert taker.undone == 1
        assert not connection.has_calls
        assert broker.hears_nothing()

    @pytest.mark.parametrize("answer", [{"declare": broker_pb2.DeclareMemoryResponse()}, {}], ids=["another's", "none"])
    def test_an_answer_of_another_kind(self, pair: Pair, answer: dict[str, Any]) -> None:
        connection, broker = pair
        caller = Caller(lambda: connection.call(pb.Frame(register_model=broker_pb2.RegisterModelRequest())))
        broker.reply(broker.hear("register_model").request_id, **answer)
        assert isinstance(caller.end().error, ProtocolError)

    def test_what_nobody_waits_for(self, pair: Pair) -> None:
        """A delivery for an unknown call: closed, acknowledged, given back; the call that read it goes on."""
        connection, broker = pair
        caller = Caller(lambda: connection.call(allocate(0), Taker()))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id + 1000, 5)
        assert broker.hear("ack").request_id == request_id + 1000
        assert list(broker.hear("release").release.extent_ids) == [5]
        broker.reply(request_id, allocate=granted(0))
        assert caller.end().error is None

    def test_release_in_frames(self, pair: Pair) -> None:
        """Ten thousand pages are given back: no frame has more ids than the broker takes, and none comes twice."""
        connection, broker = pair
        connection.release([*range(10_000), 5, 6])
        frames = [broker.hear("release").release.extent_ids for _ in range(3)]
        assert [len(ids) for ids in frames] == [4096, 4096, 1808]
        assert sorted(extent_id for ids in frames for extent_id in ids) == list(range(10_000))


class TestSegment:
    """A segment is held as a whole: whatever happens behind its first delivery, it is let go of once."""

    def test_attached(self, pair: Pair) -> None:
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(attach(), taker))
        request_id = broker.hear("attach_segment").request_id
        for part in (0, 1):
            broker.deliver(request_id, part, part=part, parts=2, segment=77)
            broker.hear("ack")
        broker.reply(request_id, segment=segment(2))
        assert caller.end().error is None
        assert taker.taken == [0, 1]
        assert broker.hears_nothing(), "it let go of what it has just got"

    @pytest.mark.parametrize(
        "lie",
        [{"extents": 3}, {"size_bytes": 4096}, {"generation": 78}],
        ids=["of more extents", "of another size", "another one"],
    )
    def test_an_answer_about_more_than_came(self, pair: Pair, lie: dict[str, int]) -> None:
        """A reader would be given addresses for all that the answer names."""
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(attach(), taker))
        request_id = broker.hear("attach_segment").request_id
        broker.deliver(request_id, 0, 1, segment=77)
        broker.hear("ack")
        answer = segment(2)
        for name, value in lie.items():
            setattr(answer, name, value)
        broker.reply(request_id, segment=answer)
        assert broker.hear("detach_segment").detach_segment.generation == 77
        assert isinstance(caller.end().error, ProtocolError)
        assert taker.undone == 1
        assert broker.hears_nothing()

    def test_refused_half_way(self, pair: Pair) -> None:
        """The second packet could not be sent: what came is undone, then one word lets go of all of it."""
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(attach(), taker))
        request_id = broker.hear("attach_segment").request_id
        broker.deliver(request_id, 7, 8, parts=2, segment=77)
        broker.hear("ack")
        broker.refuse(request_id, "DESCRIPTORS_EXHAUSTED")
        detach = broker.hear("detach_segment").detach_segment
        assert (detach.generation, detach.no_reply) == (77, True)
        assert taker.undone == 1
        assert isinstance(caller.end().error, DescriptorLimit)
        assert broker.hears_nothing(), "its extents were released, or it let go twice"

    def test_refused_before_any_delivery(self, pair: Pair) -> None:
        connection, broker = pair
        caller = Caller(lambda: connection.call(attach(), Taker()))
        broker.refuse(broker.hear("attach_segment").request_id, "WRITER_DIED")
        assert isinstance(caller.end().error, WriterDied)
        assert broker.hears_nothing(), "it let go of what it never held"

    def test_mapping_fails(self, pair: Pair) -> None:
        """The rest of the packets still come: closed, acknowledged, and let go of when the broker has answered."""
        connection, broker = pair
        caller = Caller(lambda: connection.call(attach(), Taker(0, RuntimeError("no more mappings"))))
        request_id = broker.hear("attach_segment").request_id
        for part in range(3):
            broker.deliver(request_id, part, part=part, parts=3, segment=77)
            assert broker.hear("ack").ack.part == part
        assert broker.hears_nothing(), "let go before the broker has said that the call is over"
        broker.reply(request_id, segment=segment(3))
        assert broker.hear("detach_segment").detach_segment.generation == 77
        assert isinstance(caller.end().error, RuntimeError)
        assert broker.hears_nothing()

    def test_what_nobody_waits_for(self, pair: Pair) -> None:
        """Both packets of a call that nobody knows are acknowledged, and the segment is let go of behind the last."""
        connection, broker = pair
        caller = Caller(lambda: connection.call(attach(), Taker()))
        request_id = broker.hear("attach_segment").request_id
        for part in (0, 1):
            broker.deliver(request_id + 1000, part, part=part, parts=2, segment=77)
            assert broker.hear("ack").request_id == request_id + 1000
        assert broker.hear("detach_segment").detach_segment.generation == 77
        broker.refuse(request_id, "SEGMENT_NOT_FOUND")
        assert isinstance(caller.end().error, SegmentNotFound)
        assert broker.hears_nothing()


class TestThreads:
    def test_replies_overtake(self, pair: Pair) -> None:
        """Eight threads call at once and are answered in reverse: each gets its own answer and descriptors."""
        connection, broker = pair
        takers = [Taker() for _ in range(8)]
        callers = [Caller(lambda taker=taker: connection.call(allocate(), taker)) for taker in takers]
        ids = [broker.hear("allocate").request_id for _ in callers]
        for request_id in reversed(ids):
            broker.deliver(request_id, request_id)
            broker.hear("ack")
            broker.reply(request_id, allocate=granted(1))
        assert [caller.end().error for caller in callers] == [None] * 8
        assert sorted(taker.taken[0] for taker in takers) == sorted(ids)

    def test_a_slow_mapper_holds_up_nobody(self, pair: Pair) -> None:
        """One thread maps for a long time; the others read the socket meanwhile."""
        connection, broker = pair
        entered, go_on = threading.Event(), threading.Event()

        class Slow(Taker):
            def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
                entered.set()
                assert go_on.wait(DEADLINE_SECONDS)

        slow = Caller(lambda: connection.call(allocate(), Slow()))
        slow_id = broker.hear("allocate").request_id
        broker.deliver(slow_id, 1)
        assert entered.wait(DEADLINE_SECONDS)
        quick = Caller(lambda: connection.call(allocate(0), Taker()))
        quick_id = broker.hear("allocate").request_id
        broker.reply(slow_id, allocate=granted(1))
        broker.reply(quick_id, allocate=granted(0))
        assert quick.end().error is None
        go_on.set()
        assert slow.end().error is None
        broker.hear("ack")

    def test_the_broker_dies(self, pair: Pair) -> None:
        """Every thread that waits is told, and so is whoever calls later."""
        connection, broker = pair
        callers = [Caller(lambda: connection.call(allocate(), Taker())) for _ in range(4)]
        for _ in callers:
            broker.hear("allocate")
        broker.end.close()
        for caller in callers:
            assert isinstance(caller.end().error, BrokerUnavailable)
        with pytest.raises(BrokerUnavailable):
            connection.call(allocate(), Taker())
        with pytest.raises(BrokerUnavailable):
            connection.release([1])

    def test_the_broker_said_so(self, pair: Pair) -> None:
        connection, broker = pair
        connection.heard_stopping()
        broker.end.close()
        with pytest.raises(BrokerUnavailable, match="it had said that it stops"):
            connection.call(allocate(), Taker())

    def test_the_broker_dies_half_way(self, pair: Pair) -> None:
        """What was mapped of an unfinished call is unmapped; there is nobody to release it to."""
        connection, broker = pair
        taker = Taker()
        caller = Caller(lambda: connection.call(allocate(), taker))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id, 1)
        broker.hear("ack")
        broker.end.close()
        assert isinstance(caller.end().error, BrokerUnavailable)
        assert taker.undone == 1

    @pytest.mark.parametrize("garbage", [b"\xff\xff", b"\x08\x01", b"x" * (names.MAX_FRAME_BYTES + 1)])
    def test_garbage(self, pair: Pair, garbage: bytes) -> None:
        """What is no frame ends the connection: nothing behind it could be trusted."""
        connection, broker = pair
        caller = Caller(lambda: connection.call(allocate(), Taker()))
        broker.hear("allocate")
        broker.end.send(garbage)
        assert isinstance(caller.end().error, ProtocolError)
        with pytest.raises(MembrokerError):
            connection.call(allocate(), Taker())

    def test_closed_by_another_thread(self, pair: Pair) -> None:
        connection, broker = pair
        callers = [Caller(lambda: connection.call(allocate(), Taker())) for _ in range(3)]
        for _ in callers:
            broker.hear("allocate")
        connection.close()
        for caller in callers:
            assert isinstance(caller.end().error, ClosedError)
        with pytest.raises(ClosedError):
            connection.call(allocate())

    def test_a_goodbye_to_a_stopped_broker(self, pair: Pair) -> None:
        """A client that closes does not wait for ever for a daemon under SIGSTOP."""
        connection, broker = pair
        connection.say_goodbye(0.01)
        broker.hear("goodbye")
