"""The library's real machine of calls joined to the real core: real frames between them, and no socket or thread.

Some sessions borrow, release, declare, share segments, give up and fail to map; a driver makes packets, late or not at
all; connections break, with frames and packets on their way, and sessions resume. Everything follows from a seed.
`Joined.judge` holds both sides to what they promise each other.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.pure_client import Asked, PureClient
from tests.support.sizes import MIB

from membroker.session.inventory import HeldResources
from membroker.session.messages import LOCATION_NUMBERS
from membroker.v1 import broker_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.v1.resources_pb2 import Model, Segment
from membroker.vmm.driver import Location
from membroker.wire import frames as handoff
from membroker.wire.frames import Packet
from membroker.wire.names import MAX_CALLS_PER_SESSION
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.denied import Denied
from membrokerd.core.machine import Broker
from membrokerd.core.policy import Rules
from membrokerd.core.recount import recount
from membrokerd.edge import convert
from membrokerd.edge.errors import to_status

SECOND = 1_000_000_000
PAGE = 2 * MIB
RULES = Rules(
    granularity=PAGE,
    capacities={"device": 400 * PAGE, "host": 100 * PAGE},
    limits={("t", "m1", "device"): 200 * PAGE},
    guarantee_wait_ns=SECOND,
    segment_extent_bytes=PAGE,
)
OUTAGES = (30.0, 2.0, 0.0)
"""How many seconds the calls of each session wait for a connection: at least 5 after an interrupt."""
LABELS = ("a", "b", "c")
WINDOW = 128
"""How many extents of a session may be in packets that are made and not acknowledged."""
STEPS_TO_CROWD = 5
"""After a play there is one crowd for every so many steps of it."""


@dataclass(eq=False)
class Peer:
    """A session: the library on one end, and what the daemon's edge knows of its connection on the other."""

    number: int
    session: int
    client: PureClient = field(default_factory=PureClient)
    connected: bool = True
    stated: tuple[int, HeldResources] | None = None
    """What it has stated on a new connection, and in which call, until that is answered."""
    to_client: deque[Packet] = field(default_factory=deque)
    calls: dict[int, int | None] = field(default_factory=dict)
    """The calls of the core for requests that have no answer, by request."""
    sent_answer: int | None = None
    delivered: list[int] = field(default_factory=list)
    """The extents of each packet that was delivered on this connection."""
    acknowledged: int = 0
    results: list[Asked] = field(default_factory=list)
    """What the program has borrowed and not released."""
    segments: list[Asked] = field(default_factory=list)
    """What it has of segments, and writes or asks for."""

    def mapped(self) -> set[int]:
        """Return the extents that are its own, and mapped."""
        return {extent for asked in self.results for extent in asked.placed}

    def attached(self) -> list[Asked]:
        """Return its holds of segments."""
        return [asked for asked in self.segments if asked not in self.client.asked and asked.error is None]


class Joined:
    """A few sessions and their broker. `steps` counts what the core has decided."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = Broker(RULES, epoch=1)
        self.now = 0
        self.steps = 0
        self.core_calls = 0
        self.requests: dict[int, tuple[Peer, int, Any]] = {}
        """Whose request each call of the core is, and its message."""
        self.answers: dict[int, fx.Result | Denied] = {}
        self.jobs: list[fx.Make | fx.Send | fx.Seal | fx.Drop] = []
        self.drains: list[int] = []
        self.ended: dict[str, int] = {}
        """How many calls have ended in each way."""
        self.peers: dict[int, Peer] = {}
        for number, outage in enumerate(OUTAGES):
            opened = self.ask(lambda call, name=f"p{number}": ev.OpenSession(call, "t", 1, 1, name, False, "toy"))
            assert isinstance(opened, fx.SessionOpened)
            # Every second one is made as for a broker whose window counts packets.
            client = PureClient(4 - number % 2, outage=outage)
            peer = self.peers[opened.session] = Peer(number, opened.session, client)
            for model in ("m0", "m1"):
                frame = pb.Frame(register_model=broker_pb2.RegisterModelRequest(model_id=model))
                note = partial(peer.client.inventory.registered, f"tenants/t/models/{model}")
                peer.client.ask(Asked(frame, note=note))
            self.carry(peer)
        self.deeds = {
            self.allocate: 20,
            self.release: 14,
            self.declare: 3,
            self.create: 4,
            self.seal: 5,
            self.attach: 8,
            self.detach: 5,
            self.to_broker: 40,
            self.to_client: 40,
            self.take: 20,
            self.make: 40,
            self.cancel: 3,
            self.hurry: 2,
            self.fail: 2,
            self.interrupt: 0.5,
            self.lose: 1,
            self.resume: 4,
            self.drain: 20,
            self.pass_time: 10,
        }

    def play(self, steps: int) -> Joined:
        """Play until the core has decided so often; then everything comes to rest, and again after each of many crowds.

        What one side forgets, such as an Ack, is hidden by the next frame of a program that goes on.
        """
        deeds, weights = list(self.deeds), list(self.deeds.values())
        while self.steps < steps:
            self.random.choices(deeds, weights)[0]()
            for peer in self.peers.values():
                self.judge(peer)
        self.rest()
        for _ in range(steps // STEPS_TO_CROWD):
            self.crowd()
            self.rest()
        return self

    # The program

    def peer(self) -> Peer:
        return self.random.choice(list(self.peers.values()))

    def allocate(self) -> None:
        """Borrow, mostly more calls at a time than the broker takes of a session."""
        peer = self.peer()
        if len(peer.client.asked) > 30:
            return
        request = broker_pb2.AllocateExtentsRequest(
            model=f"tenants/t/models/{self.random.choice(('m0', 'm1'))}",
            location=LOCATION_NUMBERS[self.random.choice((Location.DEVICE, Location.DEVICE, Location.HOST))],
            extent_bytes=PAGE,
            count=self.random.choice((1, 1, 5, 64, 65, 129, 150)),
            ahead=self.random.random() < 0.1,
        )
        patient = None
        if not request.ahead and self.random.random() < 0.6:
            seconds = self.random.choice((0, 1, 5, 60))
            request.wait.FromSeconds(seconds)
            patient = bool(seconds)
        peer.results.append(peer.client.ask(Asked(pb.Frame(allocate=request), patient=patient)))

    def crowd(self) -> None:
        """A few threads of one program borrow at once: more than the window has, and nothing else happens."""
        for peer in self.peers.values():
            while any(asked.placed for asked in peer.results):
                self.release(peer)
        peer = self.peer()
        for _ in range(self.random.randint(3, 5)):
            model, count = "tenants/t/models/m0", self.random.choice((1, 64))
            request = broker_pb2.AllocateExtentsRequest(model=model, location=1, extent_bytes=PAGE, count=count)
            peer.results.append(peer.client.ask(Asked(pb.Frame(allocate=request))))

    def declare(self) -> None:
        peer = self.peer()
        size = self.random.choice((0, 1, 20)) * PAGE
        request = broker_pb2.DeclareMemoryRequest(model="tenants/t/models/m0", location=2, declared_bytes=size)
        if not any(asked.frame.HasField("declare") for asked in peer.client.asked):  # as `Declarations` makes sure
            note = partial(peer.client.inventory.declared, request)
            peer.client.ask(Asked(pb.Frame(declare=request), note=note))

    def release(self, peer: Peer | None = None) -> None:
        """Unmap what a call has brought, or a part of it, then say so."""
        peer = peer or self.peer()
        done = [asked for asked in peer.results if asked not in peer.client.asked and asked.placed]
        if done:
            asked = self.random.choice(done)
            gone = self.random.sample(asked.placed, self.random.randint(1, len(asked.placed)))
            asked.placed = [extent for extent in asked.placed if extent not in gone]
            peer.client.release(gone)

    def name(self) -> str:
        return self.random.choice(LABELS)

    def create(self) -> None:
        peer, size = self.peer(), self.random.choice((1, 3, 70)) * PAGE
        request = broker_pb2.CreateSegmentRequest(
            model="tenants/t/models/m0", segment_id=self.name(), size_bytes=size, location=1, delete_when_left=True
        )
        if len(peer.client.asked) < 30:
            peer.segments.append(peer.client.ask(Asked(pb.Frame(create_segment=request))))

    def attach(self) -> None:
        peer = self.peer()
        request = broker_pb2.AttachSegmentRequest(name=f"tenants/t/models/m0/segments/{self.name()}")
        request.wait.FromSeconds(self.random.choice((0, 1, 5)))
        if len(peer.client.asked) < 30:
            patient = bool(request.wait.seconds)
            peer.segments.append(peer.client.ask(Asked(pb.Frame(attach_segment=request), patient=patient)))

    def seal(self) -> None:
        peer = self.peer()
        written = [asked for asked in peer.attached() if asked.frame.HasField("create_segment")]
        if written and len(peer.client.asked) < 30:
            request = broker_pb2.SealSegmentRequest(generation=generation_of(self.random.choice(written)))
            peer.client.ask(Asked(pb.Frame(seal_segment=request)))

    def detach(self, peer: Peer | None = None) -> None:
        """Unmap a segment, then say so."""
        peer = peer or self.peer()
        if attached := peer.attached():
            asked = self.random.choice(attached)
            peer.segments.remove(asked)
            peer.client.detach(generation_of(asked))

    def of_a_call(self) -> tuple[Peer, Asked | None]:
        peer = self.peer()
        open_calls = [asked for asked in peer.client.asked if asked in peer.results or asked in peer.segments]
        return peer, self.random.choice(open_calls) if open_calls else None

    def cancel(self) -> None:
        peer, asked = self.of_a_call()
        if asked is not None and not asked.is_cancelled:
            peer.client.cancel(asked)

    def hurry(self) -> None:
        peer, asked = self.of_a_call()
        if asked is not None and asked.call is not None and asked.call.state == "waiting":
            getattr(asked.frame, asked.call.kind).wait.FromSeconds(0)
            peer.client.hurry(asked)

    def fail(self) -> None:
        _, asked = self.of_a_call()
        if asked is not None:
            asked.fails_next = RuntimeError("no more mappings")

    def interrupt(self) -> None:
        """Ctrl-C in a call; the edge finds the connection ended."""
        peer, asked = self.of_a_call()
        if asked is not None and peer.connected and asked.call is not None and asked.call.sent:
            peer.client.interrupt(asked)
            self.hang_up(peer)

    def take(self) -> None:
        peer = self.peer()
        calls = [(asked, asked.call) for asked in peer.client.asked if asked.call is not None]
        if ready := [asked for asked, call in calls if call.inbox or call.outcome is not None]:
            peer.client.take(self.random.choice(ready))

    # What travels

    def to_broker(self) -> None:
        """The edge reads a frame of a session."""
        peer = self.peer()
        if peer.connected and peer.client.sent:
            self.read(peer, handoff.decode(handoff.encode(peer.client.sent.popleft())))

    def read(self, peer: Peer, frame: pb.Frame) -> None:
        kind = frame.WhichOneof("kind")
        if frame.acknowledged > peer.acknowledged:
            assert frame.acknowledged <= len(peer.delivered), "the client acknowledges what was not sent"
            peer.acknowledged = frame.acknowledged
            self.tell(ev.AcknowledgeUpTo(peer.session, frame.acknowledged))
        if kind == "cancel":
            call = peer.calls.get(frame.request_id)
            if call is not None:
                self.tell(ev.CancelWait(call))
        elif kind != "ack":
            assert kind is not None
            peer.calls[frame.request_id] = call = self.call()
            self.requests[call] = peer, frame.request_id, getattr(frame, kind)
            self.tell(convert.to_event(call, peer.session, "t", frame.request_id, getattr(frame, kind)))

    def to_client(self) -> None:
        """A client reads a packet; its call takes it at once, or later."""
        peer = self.peer()
        if peer.connected and peer.to_client:
            asked = peer.client.hear(peer.to_client.popleft())
            if asked is not None and self.random.random() < 0.5:
                peer.client.take(asked)

    def deliver(self, peer: Peer, frame: pb.Frame) -> None:
        ids = frame.delivery.extent_ids if frame.HasField("delivery") else ()
        peer.to_client.append(Packet(handoff.decode(handoff.encode(frame)), list(range(len(ids))), False))

    # The broker

    def call(self) -> int:
        self.core_calls += 1
        return self.core_calls

    def ask(self, event: Any) -> fx.Result | Denied:
        """Put a question of the edge itself; return the answer, which comes at once."""
        call = self.call()
        self.tell(event(call))
        return self.answers.pop(call)

    def tell(self, event: ev.Event) -> None:
        self.steps += 1
        step = self.broker.step(event, self.now)
        for fact in step.facts:
            if isinstance(fact, ft.Credited) and fact.session in self.peers:
                mapped = self.peers[fact.session].mapped()
                assert mapped.isdisjoint(fact.ids), f"credited while it is mapped: {fact}"
        for effect in step.effects:
            self.obey(effect)

    def obey(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Answer(call, result):
                peer, request_id, message = self.requests.pop(call, (None, 0, None))
                if peer is None:
                    self.answers[call] = result
                else:
                    self.answer(peer, request_id, message, call, result)
            case fx.Make() | fx.Send() | fx.Seal() | fx.Drop():
                self.jobs.append(effect)
            case fx.DrainInputs(call):
                self.drains.append(call)
            case fx.Disconnect(session, why):
                raise AssertionError(f"the core ends the connection of {session}: {why}")

    def answer(self, peer: Peer, request_id: int, message: Any, call: int, result: fx.Result | Denied) -> None:
        """Send an answer, unless it went with its packet, or nobody wants it, or the connection is another one."""
        if peer.calls.get(request_id) != call:
            return
        del peer.calls[request_id]
        name = result.reason if isinstance(result, Denied) else type(result).__name__
        self.ended[name] = self.ended.get(name, 0) + 1
        assert name != "TOO_MANY_CALLS", "the client has more calls at the broker than that takes"
        if peer.sent_answer == request_id:
            peer.sent_answer = None
        elif getattr(message, "no_reply", False):
            assert not isinstance(result, Denied), f"a release is refused: {result}"
        elif isinstance(result, Denied):
            self.deliver(peer, pb.Frame(request_id=request_id, reply=pb.Reply(error=to_status(result))))
        elif isinstance(result, fx.Registered):
            self.deliver(peer, pb.Frame(request_id=request_id, reply=pb.Reply(model=Model(name=str(result.name)))))
        else:
            kind, response = convert.from_result(result)
            frame = pb.Frame(request_id=request_id)
            getattr(frame.reply, kind).CopyFrom(response)
            self.deliver(peer, frame)

    def make(self) -> None:
        """The driver seals or drops a segment, or makes a packet, or fails."""
        if not self.jobs:
            return
        job = self.jobs.pop(self.random.randrange(len(self.jobs)))
        if isinstance(job, fx.Drop):
            self.tell(ev.Dropped(job.segment))
        elif isinstance(job, fx.Seal):
            fails = self.random.random() < 0.1
            self.tell(ev.NotSealed(job.segment, "DRIVER_FAILED", {}) if fails else ev.Sealed(job.segment))
        else:
            self.send(job)

    def send(self, make: fx.Make | fx.Send) -> None:
        """Send a packet, if it could be made and there still is a connection."""
        peer, packet = self.peers[make.session], (make.session, make.request_id, make.part)
        failure = "DRIVER_FAILED" if self.random.random() < 0.03 else "" if peer.connected else "DELIVERY_FAILED"
        if failure:
            self.tell(ev.NotMade(*packet, failure, {}))
            return
        frame = pb.Frame(request_id=make.request_id)
        delivery = frame.delivery
        delivery.part, delivery.parts, delivery.extent_bytes = make.part, make.parts, make.extent_bytes
        delivery.extent_ids.extend(make.ids)
        delivery.segment = make.segment
        if isinstance(make, fx.Make) and make.answer is not None and make.request_id in peer.calls:
            delivery.reply.allocate.count, delivery.reply.allocate.extent_bytes = make.answer.count, PAGE
            peer.sent_answer = make.request_id
        peer.delivered.append(len(make.ids))
        assert sum(peer.delivered[peer.acknowledged :]) <= WINDOW, "more extents than the window has"
        self.deliver(peer, frame)
        self.tell(ev.Made(*packet))

    def drain(self) -> None:
        """The edge has read what was queued."""
        if self.drains:
            for peer in self.peers.values():
                self.carry(peer)
            self.tell(ev.InputsDrained(self.drains.pop(0)))

    def carry(self, peer: Peer) -> None:
        while peer.connected and peer.client.sent:
            self.read(peer, handoff.decode(handoff.encode(peer.client.sent.popleft())))

    def pass_time(self) -> None:
        self.later(self.random.choice((1_000_000, 50_000_000, SECOND)))
        if self.broker.deadline is not None and self.broker.deadline <= self.now:
            self.tell(ev.Elapsed())

    def later(self, passed: int) -> None:
        self.now += passed
        for peer in self.peers.values():
            peer.client.pass_time(passed / SECOND)

    # Outages

    def lose(self) -> None:
        peer = self.peer()
        if peer.connected:
            peer.client.lose()
            self.hang_up(peer)

    def hang_up(self, peer: Peer) -> None:
        peer.connected = False
        peer.to_client.clear()
        peer.calls.clear()
        peer.sent_answer = None
        self.tell(ev.ConnectionLost(peer.session))

    def resume(self) -> None:
        """A session states what it holds. While the broker thinks, its program may release some of that."""
        peer = self.peer()
        if peer.stated is not None:
            self.agree(peer)
            return
        makes = [job for job in self.jobs if isinstance(job, fx.Make | fx.Send)]
        if peer.connected or any(make.session == peer.session for make in makes):
            return
        resumed = self.ask(lambda call: ev.ResumeSession(call, peer.session, f"p{peer.number}"))
        assert isinstance(resumed, fx.SessionResumed), resumed
        stated, call = peer.client.resume(), self.call()
        peer.stated = call, stated
        self.tell(self.holds(call, peer, stated))
        self.release(peer)
        self.detach(peer)
        self.agree(peer)

    def agree(self, peer: Peer) -> None:
        """Go on, if the broker has answered what was stated: it may wait until a segment is dropped."""
        if peer.stated is None or peer.stated[0] not in self.answers:
            return
        (call, stated), peer.stated = peer.stated, None
        answer = self.answers.pop(call)
        assert isinstance(answer, fx.Reconciled), answer
        assert not answer.unknown_extents, "the client states what it does not hold"
        assert not answer.unknown_segments, "the client states what it does not hold"
        peer.connected, peer.delivered, peer.acknowledged = True, [], 0
        peer.client.agree(stated)

    def holds(self, call: int, peer: Peer, stated: HeldResources) -> ev.StateHolds:
        """Return what a client has stated, by the frames that it would send."""
        extents: set[int] = set()
        declared: dict[Any, int] = {}
        segments: dict[int, int] = {}
        for frame in stated.frames():
            extents.update(frame.extent_ids)
            segments.update((each.generation, each.times) for each in frame.segments)
            for each in frame.declarations:
                where = convert.parse_location(each.location)
                declared[convert.parse_model(each.model), where] = each.declared_bytes
        return ev.StateHolds(call, peer.session, frozenset(extents), segments, declared)

    # What both sides promise

    def judge(self, peer: Peer) -> None:
        """What the program was given is held; what is held is in the books; calls wait for no connection too long."""
        held = peer.client.inventory.held()
        given = {extent for asked in peer.results if asked not in peer.client.asked for extent in asked.placed}
        assert given == held.extents, f"{given ^ held.extents} are mapped or held, and not both"
        attached = Counter(map(generation_of, peer.attached()))
        assert attached == held.segments, f"{attached} are attached, and {held.segments} held"
        books = self.broker.ledger.sessions[peer.session].extents
        assert held.extents <= books.keys(), "held, and not in the books"
        # A second seal of a segment lets the broker give up the first, as if its connection were lost.
        longest = 1.0 if peer.connected else max(OUTAGES[peer.number], 5.0)
        waits = [peer.client.now - asked.failure[2] for asked in peer.client.asked if asked.failure is not None]
        assert max(waits, default=0.0) < longest, "a call waits too long for a connection, or is not repeated"
        at_broker = [call for call in peer.client.calls.at_broker.values() if call.needs_place]
        assert len(at_broker) <= MAX_CALLS_PER_SESSION
        peer.results = [asked for asked in peer.results if asked in peer.client.asked or asked.placed]
        peer.segments = [asked for asked in peer.segments if asked in peer.client.asked or asked.error is None]

    def rest(self) -> None:
        """Nothing new comes: every call ends, and then both sides agree."""
        while self.jobs or self.drains or any(self.is_busy(peer) for peer in self.peers.values()):
            before = self.steps
            for deed in (self.make, self.drain, self.resume, self.to_broker, self.to_client, self.take):
                for _ in range(20):
                    deed()
            if self.steps == before:
                self.later(10 * SECOND)
                self.tell(ev.Elapsed())
            assert self.now < 10**6 * SECOND, "a call does not end"
        for peer in self.peers.values():
            self.judge(peer)
            row = self.broker.ledger.sessions[peer.session]
            held = peer.client.inventory.held()
            assert set(row.extents) == held.extents, "in the books, and not held"
            segments = {one.segment: one.holders.get(peer.session, 0) for one in self.broker.ledger.segments.values()}
            assert +Counter(segments) == held.segments, "the client does not have a hold that is in the books"
            assert not peer.client.calls.at_broker
        recount(self.broker.ledger)

    @staticmethod
    def is_busy(peer: Peer) -> bool:
        return bool(not peer.connected or peer.client.asked or peer.client.sent or peer.to_client)


def generation_of(asked: Asked) -> int:
    """Return the generation of a segment that a call has brought."""
    assert isinstance(asked.result, Segment)
    return asked.result.generation
