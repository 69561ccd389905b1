"""What a connection sends, and when: deliveries in order, and a call's reply in its last delivery, or after it.

The core is a fake lender: it delivers and answers as a test tells it to. Sockets and descriptors are real.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from tests.broker.coroutines import played_by
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, until_async
from tests.support.garbage import without_collections
from tests.support.processes import descriptors
from tests.support.raw import allocation
from tests.support.sizes import MIB, PAGE

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2 as rpb
from membroker.vmm.driver import DeviceInfo
from membroker.wire import frames as handoff
from membroker.wire import names
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.denied import Denied, Reason, deny
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName
from membrokerd.core.rows import SessionRow
from membrokerd.edge.convert import from_result
from membrokerd.edge.handoff import connection, outbox
from membrokerd.edge.handoff.connection import HandoffConnection
from membrokerd.edge.handoff.endpoint import HandoffEndpoint
from membrokerd.edge.handoff.outbox import OutboxCounters
from membrokerd.edge.handoff.peer import Peer
from membrokerd.runtime.loop import Reply
from membrokerd.system.retry import IN_FLIGHT_SECONDS

SESSION = 7


def _serve(_tenant: str, work: Callable[[], bool]) -> None:
    while work():
        pass


class Lender:
    """Stands in for the listener, the dispatcher and the loop, and does what a test tells it to."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.asked: dict[int, Reply] = {}
        """By request id: how a request is answered."""
        self.told: list[ev.Event] = []
        self.traffic = OutboxCounters()
        self.watched = -1
        self.ids = itertools.count(100)
        self.reads: list[Message] = []
        capacities = {"device": 64 * MIB}
        self.connections: dict[int, HandoffConnection] = {}
        self.resuming: dict[int, HandoffConnection] = {}
        self.drain: Any = None
        self.turns = SimpleNamespace(put=_serve)  # no loop begins turns here
        row = SessionRow(SESSION, "red", 1, 0, "pid:1", False, "", 0)
        self.broker = SimpleNamespace(
            books=SimpleNamespace(rules=policy.Rules(PAGE, cast(Any, capacities))),
            ledger=SimpleNamespace(sessions={SESSION: row}),
        )
        self.dispatcher = SimpleNamespace(
            loop=self,
            request=self._request,
            times_of=lambda *_: lambda seconds: None,
            refused=lambda *_: None,
            admit=lambda *_: None,
            response=from_result,
        )
        endpoint = SimpleNamespace(
            dispatcher=self.dispatcher,
            name="red",
            device=DeviceInfo("host", "host driver", "host", PAGE),
            buffer=bytearray(names.MAX_FRAME_BYTES),
            watch=SimpleNamespace(add=self._watch, look=lambda session: None),
            tenant_of=lambda peer: "red",
            refusals=SimpleNamespace(note=lambda reason, **fields: None),
            traffic=self.traffic,
            closed=None,
            views=SimpleNamespace(read=self._read),
        )
        pidfd, self._alive = os.pipe()
        peer = Peer(1, 0, pidfd, "pid:1")
        self.connection = HandoffConnection(
            cast(HandoffEndpoint, endpoint), self.ours, peer, socket.socket.close, lambda _: None, lambda _: None
        )

    def _watch(self, session: int, pidfd: int, pid: int) -> None:
        self.watched = pidfd

    def _request(self, session: int, tenant: str, number: int, message: Message, respond: Reply) -> None:
        self.asked[number] = respond

    def _read(self, message: Message, tenant: str, session: int) -> Message:
        """Answer a read at length: with the name that it has, 60,000 times, or shortly where it has none."""
        self.reads.append(message)
        name = getattr(message, "name", "")
        return rpb.Model(name=name * (60_000 // len(name))) if name else rpb.Device(uuid="host")

    def ask(self, make_event: Callable[[int], ev.Event], reply: Callable[[Any], None]) -> None:
        reply(fx.SessionOpened(SESSION))

    def tell(self, event: ev.Event) -> None:
        self.told.append(event)

    def process_died(self, session: int) -> None:
        raise AssertionError("nobody dies here")

    async def begin(self, *requests: int) -> None:
        """Say Hello, and ask for memory by each of these request ids."""
        handoff.send(self.theirs, handoff.encode(raw.hello()))
        (welcome,) = await self.receive(1)
        assert welcome.frame.HasField("welcome")
        handoff.close_all(welcome.descriptors)
        for number in requests:
            handoff.send(self.theirs, handoff.encode(pb.Frame(request_id=number, allocate=allocation("m", PAGE))))
        await until_async(lambda: len(self.asked) == len(requests))

    def deliver(self, number: int, part: int = 0, parts: int = 1, extents: int = 1) -> None:
        """Queue a packet, as the loop does before the core hears of it."""
        ids = range(first := next(self.ids), first + extents)
        packet = fx.Make("red", SESSION, number, part, parts, ids, PAGE, "device")
        descriptors = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in ids]
        self.connection.deliver(packet, descriptors)

    def answer(self, number: int, result: fx.Result | Denied | None = None) -> None:
        """Let the core answer."""
        self.asked.pop(number)(fx.Allocated(1, PAGE) if result is None else result)

    def flush(self) -> None:
        self.connection.flush()

    async def receive(self, count: int) -> list[handoff.Packet]:
        """Return so many packets, and find that there are no more."""
        packets: list[handoff.Packet] = []

        def read() -> bool:
            with suppress(BlockingIOError):
                packets.append(handoff.receive(self.theirs))
            return len(packets) >= count

        await until_async(read)
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            handoff.receive(self.theirs)
        return packets

    def fill(self) -> int:
        """Deliver to a peer that does not read until its socket is full; return the number of packets."""
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        for count in range(1, 200):
            self.deliver(1, part=count, parts=200, extents=2)
            self.flush()
            if self.connection._outgoing:
                return count
        raise AssertionError("a socket without end")

    def close(self) -> None:
        self.connection.close("the test is over")
        if self.watched >= 0:
            os.close(self.watched)
        self.theirs.close()
        os.close(self._alive)


def play(story: Callable[[Lender], Awaitable[None]]) -> None:
    """Run a story to the end of a connection; no descriptor of a delivery stays open here."""

    async def main() -> None:
        before = descriptors()
        lender = Lender()
        try:
            await asyncio.wait_for(story(lender), DEADLINE_SECONDS)
        finally:
            lender.close()
        assert lender.traffic.descriptors == 0
        assert descriptors() == before, "a descriptor has leaked"

    asyncio.run(main())


def kinds(packets: list[handoff.Packet]) -> list[str]:
    """Return what came, with its request id and part; a delivery that carries a reply says so. All is closed."""
    found = []
    for packet in packets:
        frame, delivery = packet.frame, packet.frame.delivery
        assert not packet.truncated
        if frame.HasField("delivery"):
            assert len(packet.descriptors) == len(delivery.extent_ids)
            reply = f" + {delivery.reply.WhichOneof('result')}" if delivery.HasField("reply") else ""
            found.append(f"{frame.request_id}: delivery {delivery.part}{reply}")
        else:
            assert not packet.descriptors
            assert frame.reply.error.message or not frame.reply.HasField("error")
            found.append(f"{frame.request_id}: {frame.reply.WhichOneof('result')}")
        handoff.close_all(packet.descriptors)
    return found


REFUSED = deny(Reason.DELIVERY_FAILED, model="tenants/red/models/m")


@pytest.mark.parametrize(
    ("story", "sent"),
    [
        pytest.param(
            "deliver 5 0/3; flush; deliver 5 1/3; flush; deliver 5 2/3; answer 5; flush",
            ["5: delivery 0", "5: delivery 1", "5: delivery 2 + allocate"],
            id="only the last delivery has the reply",
        ),
        pytest.param(
            "deliver 5; nothing; flush; answer 5; answer 6",
            ["5: delivery 0", "5: allocate", "6: allocate"],
            id="nothing is sent before the flush, so that an answer may still join",
        ),
        pytest.param(
            "deliver 5; refuse 5; flush; deliver 6; flush; refuse 6",
            ["5: delivery 0", "5: error", "6: delivery 0", "6: error"],
            id="a refusal comes alone: what was delivered stays charged",
        ),
        pytest.param(
            "deliver 5; released 6; flush; answer 5; deliver 7; flush; answer 7",
            ["5: delivery 0", "6: release", "5: allocate", "7: delivery 0", "7: allocate"],
            id="a reply never joins the delivery of another call",
        ),
        pytest.param(
            "deliver 5 0/2; deliver 6 0/2; deliver 5 1/2; deliver 6 1/2; answer 6; answer 5; flush",
            ["5: delivery 0", "6: delivery 0", "5: delivery 1", "6: delivery 1 + allocate", "5: allocate"],
            id="of two calls the last delivery carries its reply, and the other one follows",
        ),
        pytest.param(
            "deliver 5 0/2; deliver 6 0/2; deliver 5 1/2; deliver 6 1/2; answer 5; answer 6; flush",
            ["5: delivery 0", "6: delivery 0", "5: delivery 1", "6: delivery 1", "5: allocate", "6: allocate"],
            id="behind a reply, the last delivery is no longer the last that is queued",
        ),
    ],
)
def test_what_is_sent_and_when(story: str, sent: list[str]) -> None:
    """A story of deliveries and answers, each with its request's id, and what comes of it."""
    results = {"answer": None, "refuse": REFUSED, "released": fx.Released(PAGE)}

    async def tell(lender: Lender) -> None:
        steps = [step.split() for step in story.split("; ")]
        await lender.begin(*sorted({int(step[1]) for step in steps if len(step) > 1}))
        for what, *rest in steps:
            if what == "flush":
                lender.flush()
            elif what == "nothing":
                with pytest.raises(BlockingIOError):
                    handoff.receive(lender.theirs)
            elif what == "deliver":
                part, _, parts = rest[1].partition("/") if len(rest) > 1 else ("0", "/", "1")
                lender.deliver(int(rest[0]), int(part), int(parts), extents=64 if parts == "3" else 1)
            else:
                lender.answer(int(rest[0]), results[what])
        assert kinds(await lender.receive(len(sent))) == sent

    play(tell)


@played_by(play)
async def test_an_answer_of_the_same_number_later_is_another_calls(lender: Lender) -> None:
    """The id is free again when its packets are acknowledged: what is sent by then is never joined."""
    await lender.begin(5)
    lender.deliver(5)
    lender.answer(5)
    lender.flush()
    (packet,) = packets = await lender.receive(1)
    assert packet.frame.delivery.reply.allocate == bpb.AllocateExtentsResponse(count=1, extent_bytes=PAGE)
    assert kinds(packets) == ["5: delivery 0 + allocate"]
    handoff.send(lender.theirs, handoff.encode(pb.Frame(request_id=5, allocate=allocation("m", PAGE))))
    await until_async(lambda: lender.asked)
    lender.answer(5, REFUSED)
    assert kinds(await lender.receive(1)) == ["5: error"]


@played_by(play)
async def test_a_step_reads_one_frame_and_takes_the_time_of_the_peers_tenant(lender: Lender) -> None:
    """A peer that always has more to say is never served for longer than that while another tenant waits."""
    await lender.begin()
    steps = list[tuple[str, Callable[[], bool]]]()
    lender.turns.put = lambda *work: steps.append(work)
    for number in (1, 2, 3):
        handoff.send(lender.theirs, handoff.encode(pb.Frame(request_id=number, allocate=allocation("m", PAGE))))
    await until_async(lambda: steps)
    tenant, step = steps[0]
    assert tenant == "red"
    assert [(step(), len(lender.asked)) for _ in range(4)] == [(True, 1), (True, 2), (True, 3), (False, 3)]


@pytest.mark.parametrize("refused", [False, True])
@played_by(play)
async def test_a_full_socket(lender: Lender, refused: bool) -> None:
    """The peer does not read: answers wait inside their deliveries, and come in order. What it asks is not read."""
    await lender.begin(1, 2, 3)
    sent = lender.fill()
    handoff.send(lender.theirs, handoff.encode(pb.Frame(request_id=9, allocate=allocation("m", PAGE))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert 9 not in lender.asked
    lender.deliver(2)
    lender.answer(2, REFUSED if refused else None)
    lender.flush()
    lender.answer(3)
    lender.answer(1)
    assert lender.traffic.descriptors > 0
    expected = [f"1: delivery {part}" for part in range(1, sent + 1)]
    expected += ["2: delivery 0", "2: error"] if refused else ["2: delivery 0 + allocate"]
    expected += ["3: allocate", "1: allocate"]
    assert kinds(await lender.receive(len(expected))) == expected
    assert lender.traffic.descriptors == 0
    await until_async(lambda: 9 in lender.asked)
    lender.deliver(1, part=199, parts=200)
    lender.flush()
    assert kinds(await lender.receive(1)) == ["1: delivery 199"], "the socket has room, and the connection still waits"


@played_by(play)
async def test_a_connection_that_ends_while_too_many_descriptors_are_in_flight(
    lender: Lender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its delivery was to be sent again a little later. Nothing is sent then, and nothing fails."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")

    await lender.begin(1)
    with monkeypatch.context() as patch:
        patch.setattr(outbox.handoff, "send", refuse)
        lender.deliver(1)
        lender.flush()
    assert lender.connection._outgoing
    lender.connection.close("the test is over")
    await asyncio.sleep(2 * IN_FLIGHT_SECONDS)  # timers of one loop run in their order: the retry's has run
    assert not caplog.records


@played_by(play)
async def test_a_connection_that_ends_with_a_reply_in_its_queue(lender: Lender) -> None:
    """Neither the delivery nor the reply in it was sent: the core gets the failure, and every descriptor is closed."""
    await lender.begin(1, 2)
    sent = lender.fill()
    lender.deliver(2)
    lender.answer(2)
    lender.flush()
    lender.theirs.close()
    await until_async(lambda: ev.ConnectionLost(SESSION) in lender.told)
    await asyncio.sleep(0)
    undelivered = [event for event in lender.told if isinstance(event, ev.NotDelivered)]
    assert undelivered[-1] == ev.NotDelivered(SESSION, 2, 0)
    assert {event.part for event in undelivered[:-1]} <= set(range(1, sent + 1))
    assert SESSION not in lender.connections


@played_by(play)
async def test_an_answer_that_is_no_frame_ends_the_connection(lender: Lender, caplog: pytest.LogCaptureFixture) -> None:
    """It can never be sent, and at the head of the queue it would block everything else."""
    await lender.begin(1)
    models = tuple(ModelName("red", f"{number:063}") for number in range(1_000))
    lender.answer(1, fx.Reconciled((), (), models))
    assert ev.ConnectionLost(SESSION) in lender.told
    assert SESSION not in lender.connections
    with pytest.raises(handoff.EndOfConnection):
        handoff.receive(lender.theirs)
    assert "a fault of the broker" in caplog.text


def test_the_longest_answer_to_a_resume_is_a_frame() -> None:
    """As many unknown ids as Holds may state, as long as they get, and models of the longest names."""
    broker = Broker(policy.Rules(PAGE, {"device": 64 * MIB}, max_models_per_tenant=700), epoch=(1 << 24) - 1)

    def ask(event: ev.Event) -> Any:
        return next(one.result for one in broker.step(event, 0).effects if isinstance(one, fx.Answer))

    tenant = "t" * 63
    session = ask(ev.OpenSession(1, tenant, 1, 1, "p", False, "test")).session
    for number in range(700):
        ask(ev.RegisterModel(1, session, number, ModelName(tenant, f"{number:096}"), None, {}, False))
    broker.step(ev.ConnectionLost(session), 0)
    ask(ev.ResumeSession(1, session, "p"))
    most = (1 << 64) - 1
    ids = frozenset(range(most - 8_192, most))
    result = ask(ev.StateHolds(1, session, ids, dict.fromkeys(ids, 1), {}))
    assert len(result.unknown_extents) == len(result.unknown_segments) == 2_048
    assert len(result.models) == 128
    field, message = from_result(result)
    frame = pb.Frame(request_id=most)
    getattr(frame.reply, field).CopyFrom(message)
    assert len(handoff.encode(frame)) > 60_000


@played_by(play)
async def test_a_notice_that_nobody_reads_is_dropped_and_counted(lender: Lender) -> None:
    """A worker that is stopped does not read its notices. The daemon does not wait for it."""
    handoff.send(lender.theirs, handoff.encode(raw.hello()))
    (welcome,) = await lender.receive(1)
    assert not lender.connection._notices.getblocking()
    while not lender.traffic.notices_dropped:
        lender.connection.recall(fx.SendRecall(SESSION, 1, ModelName("red", "m"), "device", PAGE, 0))
    assert lender.traffic.notices_dropped == 1
    handoff.close_all(welcome.descriptors)


@played_by(play)
async def test_a_peer_that_does_not_take_the_last_answer_is_cut(lender: Lender) -> None:
    """It broke the protocol, and does not read what it is told of that."""
    await lender.begin(1)
    lender.fill()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "LINGER_SECONDS", 0.01)
        lender.connection.disconnect("it acknowledged what was not sent")
    assert not lender.connection._closed
    await until_async(lambda: ev.ConnectionLost(SESSION) in lender.told)


@played_by(play)
async def test_a_fault_in_a_request_is_told_to_its_sender(lender: Lender, caplog: pytest.LogCaptureFixture) -> None:
    """Else its call would wait for good."""

    def fail(*_: object) -> None:
        raise ValueError

    await lender.begin()
    lender.dispatcher.request = fail
    handoff.send(lender.theirs, handoff.encode(pb.Frame(request_id=5, allocate=allocation("m", PAGE))))
    await until_async(lambda: ev.ConnectionLost(SESSION) in lender.told)
    answer = handoff.receive(lender.theirs).frame
    assert (answer.request_id, raw.reason(answer.reply.error)) == (5, "INTERNAL")
    assert "a fault of the broker" in caplog.text


@played_by(play)
async def test_a_long_answer_is_not_kept_for_a_peer_that_does_not_read(lender: Lender) -> None:
    """A thousand sessions that list and never read would cost 64 KiB each. The read is kept, and is done again.

    Each is answered once, in the order in which they came, and a short answer waits as it is.
    """
    await lender.begin()
    lender.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 150_000)
    for number in range(2, 12):
        handoff.send(lender.theirs, handoff.encode(pb.Frame(request_id=number, get_model={"name": chr(95 + number)})))
    handoff.send(lender.theirs, handoff.encode(pb.Frame(request_id=12, get_device={})))
    await until_async(lambda: lender.connection._aside)
    assert not lender.connection._outgoing
    assert not lender.connection.queued()
    assert len(lender.reads) < 10
    aside = lender.connection._aside
    assert aside.ByteSize() < 20
    found: list[handoff.Packet] = []
    while len(found) < 11:
        with suppress(BlockingIOError):
            found.append(handoff.receive(lender.theirs))
        await asyncio.sleep(0)
    assert [packet.frame.request_id for packet in found] == list(range(2, 13))
    assert [packet.frame.reply.model.name[:1] for packet in found] == [*"abcdefghij", ""]
    assert not lender.connection._aside


@pytest.mark.parametrize("fills", [False, True])
def test_a_connection_that_has_ended_is_freed_with_its_last_reference(*, fills: bool) -> None:
    """No garbage collection is needed: those of the daemon exclude what lives long. `fills`: its socket is full."""

    async def story(lender: Lender) -> None:
        await lender.begin(1)
        if fills:
            lender.fill()
        lender.connection.close("the test is over")
        lender.answer(1)
        ended, lender.connection = weakref.ref(lender.connection), cast(Any, SimpleNamespace(close=lambda why: None))
        lender.connections.clear()
        await until_async(lambda: ended() is None)

    with without_collections():
        play(story)
