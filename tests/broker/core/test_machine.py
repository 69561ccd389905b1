"""The core against a toy world for tens of thousands of steps: sessions of a few tenants borrow, fail, fork and die.

The world is a dumb device and its processes: it keeps each extent that was made until its last holder drops it, sends
and loses packets, answers makes in any order, and now and then a stranger takes memory. The books have to keep their
invariants at every step, and to be empty when all are dead and the device shows it. The seed is printed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.broker import Broker, Step
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.ledger import replay

STEPS = 20_000
SEEDS = [int(seed) for seed in os.environ.get("MEMBROKER_SEEDS", "1,2,3").split(",")]
MILLISECOND = 1_000_000
CAPACITIES: dict[ev.Location, int] = {"device": 1600, "host": 200}
RULES = policy.Rules(
    granularity=2,
    capacities=CAPACITIES,
    limits={("t1", None, "device"): 900, ("t0", "m1", "device"): 500},
    settle_ns=300 * MILLISECOND,
    model_grace_ns=200 * MILLISECOND,
    max_sessions=12,
    max_sessions_per_process=3,
    max_models_per_tenant=3,
    max_calls_per_session=4,
)
PROCESSES = tuple(f"p{number}" for number in range(8))


@dataclass
class Worker:
    """A session as its world sees it. `makes` are the executor's, `sent` wait for an acknowledgement."""

    session: int
    tenant: str
    connected: bool = True
    makes: list[fx.Make] = field(default_factory=list)
    sent: list[fx.Make] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    requests: int = 0


class World:
    """A device, its processes, and the broker between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = Broker(RULES, epoch=1)
        self.now = 0
        self.workers: dict[int, Worker] = {}
        self.exists: dict[int, tuple[ev.Location, int]] = {}
        """What the device holds: every extent that was made and not dropped by its last holder."""
        self.doomed: list[tuple[int, set[int]]] = []
        """Memory of the dead that goes at a time: a slow exit, or a forked child that ends later."""
        self.stranger = 0
        self.facts: list[ft.Fact] = []
        self.calls = 0
        self.unanswered: dict[int, int] = {}
        """Calls by number: whose they are."""
        self.answers: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.ids: set[int] = set()

    # --- one step ---

    def send(self, event: ev.Event) -> Step:
        """Give the broker one event, obey its effects, and hold it to what every step must keep."""
        ledger = self.broker.ledger
        before = ledger.revision
        step = self.broker.step(event, self.now)
        self.facts += step.facts
        self.steps[type(event).__name__] += 1
        for effect in step.effects:
            self.obey(effect)
        ledger.check()
        assert ledger.revision == before + len(step.facts)
        if self.was_refused(event, step):
            assert not step.facts, f"{event} was refused and changed {step.facts}"
        assert all(size >= 0 for size in self.broker.lending.making.values())
        for worker in self.workers.values():
            assert len(worker.makes) + len(worker.sent) <= policy.WINDOW, "more than two packets on their way"
        for effect in step.effects:
            if isinstance(effect, fx.Disconnect):
                self.lose(self.workers[effect.session])
        return step

    @staticmethod
    def was_refused(event: ev.Event, step: Step) -> bool:
        """Say whether this very question was refused (outcomes may end other calls with a refusal)."""
        answers = {effect.call: effect.result for effect in step.effects if isinstance(effect, fx.Answer)}
        return isinstance(answers.get(getattr(event, "call", -1)), Denied)

    def obey(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Answer(call, result):
                assert call in self.unanswered, "a call is answered twice"
                del self.unanswered[call]
                self.answers[result.reason if isinstance(result, Denied) else type(result).__name__] += 1
            case fx.Make(session=session, ids=ids):
                assert self.ids.isdisjoint(ids), "an id is used twice"
                self.ids.update(ids)
                self.workers[session].makes.append(effect)
            case fx.Forget(session):
                worker = self.workers.pop(session)
                assert not worker.makes, "a session is forgotten whose packets are being made"
                for packet in worker.sent:
                    self.drop(set(packet.ids))

    def call(self, session: int) -> int:
        self.calls += 1
        self.unanswered[self.calls] = session
        return self.calls

    # --- the device ---

    def used(self, where: ev.Location) -> int:
        stranger = self.stranger if where == "device" else 0
        return stranger + sum(size for there, size in self.exists.values() if there == where)

    def seen(self) -> ev.Seen:
        """Return what the device shows; of the host it can never say."""
        for at, extents in list(self.doomed):
            if at <= self.now:
                self.doomed.remove((at, extents))
                self.drop(extents)
        return {"device": self.used("device"), "host": None}

    def drop(self, extents: set[int]) -> None:
        for extent in extents:
            self.exists.pop(extent, None)

    # --- what processes and the kernel do, one thing at a time ---

    def turn(self) -> None:
        """Do one random thing."""
        self.now += self.random.choice((0, 0, MILLISECOND, 7 * MILLISECOND))
        deeds: list[tuple[Callable[[], None], float]] = [
            (self.audit, 6),
            (self.open, 4),
            (self.outcome, 35),
            (self.acknowledge, 18),
            (self.register, 6),
            (self.unregister, 1),
            (self.allocate, 22),
            (self.release, 16),
            (self.declare, 5),
            (self.lose_one, 0.7),
            (self.goodbye, 0.7),
            (self.die_one, 1.2),
            (self.set_quota, 1),
            (self.play_the_stranger, 1),
        ]
        self.random.choices([deed for deed, _ in deeds], [weight for _, weight in deeds])[0]()

    def asker(self) -> Worker | None:
        """Return who asks next: mostly somebody who may, now and then the dead, the leaving and the observers."""
        anybody = self.random.random() < 0.05
        return self.any_worker(lambda worker: anybody or self.state(worker) in ("open", "detached"))

    def any_worker(self, fits: Callable[[Worker], Any] = lambda worker: True) -> Worker | None:
        fitting = [worker for worker in self.workers.values() if fits(worker)]
        return self.random.choice(fitting) if fitting else None

    def request(self, worker: Worker) -> tuple[int, int, int]:
        """Return (call, session, request id) of a new request; now and then with an id that is in use."""
        worker.requests += 1
        request_id = worker.requests
        if (worker.makes or worker.sent) and self.random.random() < 0.02:
            request_id = self.random.choice(worker.makes + worker.sent).request_id
        return self.call(worker.session), worker.session, request_id

    def model(self, worker: Worker) -> ev.ModelName:
        """Return a model to ask for: mostly one that the worker registered."""
        registered = sorted(self.broker.ledger.sessions[worker.session].models)
        if registered and self.random.random() < 0.9:
            return self.random.choice(registered)
        tenant = worker.tenant if self.random.random() < 0.97 else "t9"
        return ev.ModelName(tenant, f"m{self.random.randrange(4)}")

    def where(self) -> ev.Location:
        return "host" if self.random.random() < 0.2 else "device"

    def audit(self) -> None:
        self.send(ev.Audit(self.seen()))

    def open(self) -> None:
        process = self.random.choice(PROCESSES)
        tenant = f"t{self.random.randrange(3)}"
        observer = self.random.random() < 0.02
        call = self.call(-1)
        step = self.broker.step(ev.OpenSession(call, tenant, 1, 1, process, observer, "toy"), self.now)
        self.facts += step.facts
        (answer,) = step.effects
        if isinstance(answer, fx.Answer) and isinstance(answer.result, fx.SessionOpened):
            self.workers[answer.result.session] = Worker(answer.result.session, tenant)
        self.obey(answer)

    def register(self) -> None:
        worker = self.asker()
        if worker:
            asks = self.random.random() < 0.1
            limits: dict[ev.Location, int] = {"device": self.random.choice((300, 600))} if asks else {}
            exclusive = self.random.random() < 0.05
            self.send(ev.RegisterModel(*self.request(worker), self.model(worker), None, limits, exclusive))

    def unregister(self) -> None:
        worker = self.asker()
        if worker:
            self.send(ev.UnregisterModel(*self.request(worker), self.model(worker)))

    def allocate(self) -> None:
        worker = self.asker()
        if worker:
            size = self.random.choice((2, 2, 2, 4, 8, 3))
            count = self.random.choice((1, 5, 64, 65, 130, 200, 300))
            shape = (self.where(), size, count)
            self.send(ev.Allocate(*self.request(worker), self.model(worker), *shape))

    def outcome(self) -> None:
        """The executor finishes some packet, in any order: made, refused half way, or nobody is there to take it."""
        worker = self.any_worker(lambda worker: worker.makes)
        if not worker:
            return
        make = self.random.choice(worker.makes)
        packet = (make.session, make.request_id, make.part)
        if make.ids.start not in self.exists and self.random.random() < 0.3:
            half = make.ids[: len(make.ids) // 2 + 1]
            self.exists.update(dict.fromkeys(half, (make.location, make.extent_bytes)))
            return
        worker.makes.remove(make)
        size = make.extent_bytes * len(make.ids)
        fits = make.location == "host" or self.used("device") + size <= CAPACITIES["device"] + 100
        if not fits or not worker.connected or self.random.random() < 0.05:
            self.drop(set(make.ids))
            reason = "DELIVERY_FAILED" if not worker.connected else "DRIVER_FAILED" if fits else "DEVICE_FULL"
            self.send(ev.NotMade(*packet, reason, {}))
            return
        self.exists.update(dict.fromkeys(make.ids, (make.location, make.extent_bytes)))
        worker.sent.append(make)
        self.send(ev.Made(*packet))

    def acknowledge(self) -> None:
        worker = self.any_worker(lambda worker: worker.connected and worker.sent)
        if not worker:
            return
        if self.random.random() < 0.005:
            self.send(ev.Acknowledge(worker.session, worker.requests + 5, 0))
            return
        packet = self.random.choice(worker.sent)
        worker.sent.remove(packet)
        worker.held.update(set(packet.ids) & set(self.exists))
        self.send(ev.Acknowledge(worker.session, packet.request_id, packet.part))

    def release(self) -> None:
        worker = self.any_worker(lambda worker: worker.held)
        if not worker:
            return
        ids = self.random.sample(sorted(worker.held), self.random.randint(1, len(worker.held)))
        if self.random.random() < 0.05:
            ids.append(self.random.choice((ids[0], 7, *self.ids)))
        lent = self.broker.ledger.sessions[worker.session].extents
        size = sum(lent[extent].extent_bytes for extent in ids if extent in lent)
        step = self.send(ev.Release(*self.request(worker), tuple(ids)))
        (answer,) = (effect for effect in step.effects if isinstance(effect, fx.Answer))
        if isinstance(answer.result, fx.Released):
            assert answer.result.released_bytes == size
            worker.held -= set(ids)
            self.drop(set(ids))

    def declare(self) -> None:
        worker = self.asker()
        if worker:
            size = self.random.choice((0, 10, 40, -1, 3000))
            self.send(ev.Declare(*self.request(worker), self.model(worker), self.where(), size))

    def lose_one(self) -> None:
        busy = self.random.random() < 0.8
        worker = self.any_worker(lambda worker: worker.connected and (worker.sent or not busy))
        if worker:
            self.lose(worker)

    def lose(self, worker: Worker) -> None:
        """A connection breaks: each packet on it was read by the worker, or it is closed and reported."""
        worker.connected = False
        for packet in list(worker.sent):
            if self.random.random() < 0.5:
                worker.held.update(set(packet.ids) & set(self.exists))
            else:
                worker.sent.remove(packet)
                self.drop(set(packet.ids))
                self.send(ev.NotDelivered(packet.session, packet.request_id, packet.part))
        self.send(ev.ConnectionLost(worker.session))

    def goodbye(self) -> None:
        worker = self.any_worker(lambda worker: worker.connected and self.state(worker) == "open")
        if not worker:
            return
        self.drop(worker.held)
        event = ev.Goodbye(*self.request(worker))
        if not self.was_refused(event, self.send(event)):
            worker.held.clear()
            worker.connected = False

    def die_one(self) -> None:
        gone = self.random.random() < 0.5
        worker = self.any_worker(lambda worker: self.state(worker) != "releasing" and not (gone and worker.connected))
        if worker:
            self.die(worker)

    def die(self, worker: Worker, at_most: int = 60) -> None:
        """A process dies: its memory goes a little later, or much later when a forked child keeps it."""
        delay = self.random.choice((0, 3, 60, 500)) if at_most else 0
        self.doomed.append((self.now + min(delay, at_most * 10) * MILLISECOND, set(worker.held)))
        worker.held.clear()
        if worker.connected:
            self.lose(worker)
        for packet in worker.sent:
            self.doomed.append((self.now, set(packet.ids)))
        worker.sent.clear()
        self.send(ev.ProcessDied(worker.session, self.seen()))

    def state(self, worker: Worker) -> str:
        return self.broker.ledger.sessions[worker.session].state

    def set_quota(self) -> None:
        model = self.random.choice((None, "m0", "m1"))
        limit = self.random.choice((None, None, None, None, None, 0, 100, 400, 800))
        self.send(ev.SetQuota(self.call(-1), f"t{self.random.randrange(3)}", model, self.where(), limit))

    def play_the_stranger(self) -> None:
        self.stranger = self.random.choice((0, 0, 0, 50, 100, 600))

    # --- the end ---

    def end(self) -> None:
        """Everybody dies, the executor finishes, and the device shows it all gone."""
        for worker in list(self.workers.values()):
            if worker.session in self.workers and self.state(worker) != "releasing":
                self.die(worker, at_most=0)
        while any(worker.makes for worker in self.workers.values()):
            self.outcome()
        self.stranger = 0
        self.now += RULES.settle_ns + RULES.model_grace_ns
        for _ in range(3):
            self.now += RULES.model_grace_ns
            self.audit()


def play(seed: int, steps: int = STEPS) -> World:
    """Run a world from a seed to its end."""
    print(f"seed {seed}: MEMBROKER_SEEDS={seed} pytest tests/broker/core/test_machine.py runs it again")
    world = World(seed)
    for number in range(steps):
        world.turn()
        if number % 100 == 0:
            world.broker.ledger.recount()
    world.end()
    return world


@pytest.fixture(scope="module", params=SEEDS)
def ended(request: pytest.FixtureRequest) -> World:
    """Return a world of a seed, played to its end once for the tests that look at it."""
    return play(request.param)


def test_the_books_hold_whatever_happens(ended: World, books: Callable[[Any], Any]) -> None:
    """Every step kept the invariants, the facts alone tell the same story, and in the end nobody is charged."""
    broker = ended.broker
    broker.ledger.recount()
    assert books(replay(CAPACITIES, ended.facts)) == books(broker.ledger)
    for where, total in broker.ledger.totals.items():
        assert (total.lent, total.releasing, total.free) == (0, 0, CAPACITIES[where])
        assert broker.lending.making[where] == 0
    assert not broker.ledger.sessions
    assert not broker.ledger.models
    assert not broker.ledger.tenants
    assert not broker.denials
    assert not broker.settling.waiting
    assert broker.settling.shown("device") == 0
    assert not ended.workers
    assert not ended.exists


def test_the_world_is_rich(ended: World) -> None:
    """The run above is worth nothing if its steps are refused: each kind of event and of answer comes often."""
    kinds = {kind.__name__ for kind in ev.Event.__args__} - {"OpenSession"}
    rare = {kind: ended.steps[kind] for kind in kinds if ended.steps[kind] < 8}
    assert not rare, f"hardly ever: {rare}"
    for name in ("Registered", "Allocated", "Released", "Declared", "Done", "SessionOpened"):
        assert ended.answers[name] >= 50, (name, ended.answers)
    reasons = {Reason.CAPACITY, Reason.MODEL_LIMIT, Reason.TENANT_LIMIT, Reason.REQUEST_ID_IN_USE, Reason.MODEL_IN_USE}
    reasons |= {Reason.MODEL_CONFLICT, Reason.DELIVERY_FAILED, Reason.DRIVER_FAILED, Reason.EXTENT_NOT_FOUND}
    assert reasons <= set(ended.answers), ended.answers
    settled = [fact for fact in ended.facts if isinstance(fact, ft.LocationSettled)]
    assert {fact.proven for fact in settled} == {True, False}


def test_the_same_seed_gives_the_same_story() -> None:
    """No clock, no order of a set, no address decides anything: two runs give fact for fact the same."""
    assert play(5, steps=3_000).facts == play(5, steps=3_000).facts


def test_every_call_is_answered(ended: World) -> None:
    """A caller waits for its answer until it comes: every call has one, also of a session that ends."""
    assert not ended.unanswered
