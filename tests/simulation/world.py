"""A world around the real core: processes, their memory, a driver thread, sockets that break, and the lies.

The device is dumb: it keeps each block that was made until its last holder drops it, and shows a sum. Around it are
processes that crash, fork children that keep a dead parent's memory, say that they released what they still map, or
lose their connection with packets queued on it, that share segments (`sharing`), and that take their sessions up again
(`resuming`), or that are guests (`hosting`, in every other seed); a driver that is slow and fails; strangers that take
memory and give it back; an operator that moves quotas; a device that falls off the bus, in one seed of 16; and daemons
that die (`daemon_deaths`). In three seeds of four the broker keeps a stock. As in the daemon, the driver works on one
job at a time, and what it found is told later, in the order in which it was found, behind whatever else was queued by
then: so figures are stale when the core hears them, and never ahead of an outcome.

Everything follows from a seed and the numbers of the turns. A turn has its own random numbers, and chooses among
workers in a way that the absence of others does not change: so turns can be left out, and the rest is still a story
that could happen. `tests.simulation.shrink` lives on that. What every step must keep is in `referee`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.borrowing import Borrowing
from tests.simulation.daemon_deaths import DaemonDeaths
from tests.simulation.driver_thread import RESERVE, DriverThread, loses_device
from tests.simulation.endings import Endings
from tests.simulation.hosting import SLICES, Hosting, hosts_guests
from tests.simulation.operators import Operator
from tests.simulation.processes import Closing, Found, Job, Look, Process, Worker
from tests.simulation.recalling import Recalling, is_deaf
from tests.simulation.referee import Referee
from tests.simulation.resuming import Resuming
from tests.simulation.sharing import Dropping, Sharing, blocks_of
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied
from membrokerd.core.machine import Broker
from membrokerd.core.names import LOCATIONS, Location, ModelName

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
CAPACITIES: dict[Location, int] = {"device": 1600 * MIB, "host": 200 * MIB}
RULES = policy.Rules(
    granularity=2 * MIB,
    capacities=CAPACITIES,
    limits={("t1", None, "device"): 900 * MIB, ("t0", "m1", "device"): 500 * MIB},
    settle_ns=3 * SECOND,
    model_grace_ns=2 * SECOND,
    guarantee_wait_ns=SECOND,
    max_sessions=14,
    max_sessions_per_process=3,
    max_models_per_tenant=3,
    max_calls_per_session=4,
    segment_extent_bytes=4 * MIB,
    max_segments_per_tenant=4,
    max_segment_extents=250,
)
STOCKED_RULES = dataclasses.replace(RULES, stock_extents=12, stock_bytes=40 * MIB)
"""What the device gate leaves free."""
DEVICE_TOTAL = CAPACITIES["device"] + 300 * MIB
NOTICE = 400 * MILLISECOND
"""A death is told at most so late."""
UNKNOWN_ID = (1 << 40) + 10_000_000


def is_crowded(seed: int) -> bool:
    """Say whether many ask for more than there is, in the world of this seed."""
    return seed % 8 == 7


class World:
    """A device, its processes, and the broker between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.host_shows = bool(seed % 2)
        self.stocks = bool(seed % 4)
        self.rules = STOCKED_RULES if self.stocks else RULES
        """As the first daemon began with."""
        if hosts_guests(seed):
            self.rules = dataclasses.replace(self.rules, slice_ns=SLICES[seed // 2 % len(SLICES)])
        self.broker = Broker(self.rules, epoch=1)
        self.referee = Referee(self)
        self.now = 0
        self.turn_number = 0
        self.salt = 0
        self.processes: list[Process] = []
        self.workers: dict[int, Worker] = {}
        self.past: deque[Worker] = deque(maxlen=5)
        """Sessions that ended: some go on asking."""
        self.exists: dict[int, tuple[Location, int]] = {}
        """What the device holds, by block: extents by id, and what workers allocated themselves, and what of the stock
        was never lent, by negative numbers."""
        self.stock: dict[tuple[Location, int], list[int]] = {}
        """The blocks that the broker keeps ready, by location and size."""
        self.used: dict[Location, int] = {"device": 0, "host": 0}
        self.stranger: dict[Location, int] = {"device": 0, "host": 0}
        self.blocks = 0
        self.doomed: list[tuple[int, Iterable[int]]] = []
        """Memory of the dead that goes at a time: a slow exit, or a forked child that ends later."""
        self.unnoticed: list[tuple[int, Worker]] = []
        """Sessions of dead processes of which the broker has not heard, with the time of the death."""
        self.sharing = Sharing(self)
        self.resuming = Resuming(self)
        self.borrowing = Borrowing(self)
        self.recalling = Recalling(self)
        self.hosting = Hosting(self)
        self.operator = Operator(self)
        self.endings = Endings(self)
        self.driver = DriverThread(self)
        self.daemons = DaemonDeaths(self)
        self.jobs: list[Job] = []
        self.sends: deque[fx.Make | fx.Send] = deque()
        """Packets that are queued at once: of segments, which are copied, and of the stock."""
        self.told: deque[Found | ev.NotDelivered | ev.InputsDrained] = deque()
        self.put_aside: dict[int, ev.Allocate | ev.Declare | ev.CreateSegment] = {}
        """By call: what is not refused before others were heard."""
        self.declaring: dict[int, ev.Declare] = {}
        """Declarations that have no answer yet, by call."""
        self.auditing = False
        self.audited_at = 0
        self.slow_until = 0
        self.calls = 0
        self.unanswered: dict[int, int] = {}
        """Calls by number: whose they are."""
        self.opened: dict[int, int] = {}
        """Sessions by the call that opened them."""
        self.events: list[tuple[int, ev.Event | str]] = []
        """What was told when; some of it is no event, and stands here as the command of a transcript."""
        self.facts: list[ft.Fact] = []
        """What a daemon that begins now would be told."""
        self.history: list[ft.Fact] = []
        """All facts there ever were."""
        self.answers: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.deeds: dict[Callable[[], None], float] = {
            self.driver.audit: 5,
            self.open: 4,
            self.flush: 6,
            self.acknowledge: 20,
            self.register: 7,
            self.unregister: 1,
            self.borrowing.allocate: 20,
            self.borrowing.release: 14,
            self.borrowing.declare: 4,
            self.endings.lose_one: 0.8,
            self.endings.goodbye: 1.0,
            self.endings.die_one: 1.6,
            self.endings.notice_one: 2,
            self.come_clean: 0.5,
            self.operator.set_quota: 1,
            self.operator.reload: 0.2,
            self.play_the_stranger: 0.6,
            self.driver.slow_down: 0.1,
            self.sharing.create: 6,
            self.sharing.seal: 8,
            self.sharing.attach: 10,
            self.sharing.detach: 6,
            self.sharing.delete: 3,
            self.elapse: 0.3,
            self.borrowing.cancel: 0.4,
            self.borrowing.crowd: 20 if is_crowded(seed) else 1,
            self.recalling.answer_one: 0 if is_deaf(seed) else 20,
            self.recalling.change: 1,
            self.resuming.resume_one: 6,
            self.resuming.state_one: 8,
            self.resuming.ask_anew: 4,
            self.resuming.forge: 0.5,
            self.resuming.forget: 0.6,
            self.resuming.drain: 0.3,
            self.resuming.fill_the_disk: 0.2,
            self.daemons.strike: 0.2,
        }
        if self.stocks:
            self.deeds |= {self.borrowing.allocate_little: 20, self.rest: 0.2, self.squeeze: 0.2}
        if loses_device(seed):
            self.deeds |= {self.driver.lose_device: 1.5}
        if hosts_guests(seed):
            self.deeds |= {self.hosting.open: 4, self.hosting.declare: 20}
        self._choices = list(self.deeds)
        self._weights = list(itertools.accumulate(self.deeds.values()))

    # --- the run ---

    def play(self, turns: Iterable[int]) -> World:
        """Take these turns, and then everybody goes."""
        for number in turns:
            self.turn(number)
        self.end()
        return self

    def play_steps(self, steps: int) -> World:
        """Take as many turns as give the core this many steps, and then everybody goes."""
        return self.play(itertools.takewhile(lambda _: self.referee.judged < steps, itertools.count()))

    def turn(self, number: int) -> None:
        """Do one random thing, and whatever is overdue by then."""
        self.turn_number = number
        self.random.seed(self.seed << 40 | number)
        self.salt = self.random.getrandbits(30)
        self.pass_time(self.random.choice((0, 0, 1, 10, 50)) * MILLISECOND)
        if self.jobs and self.random.random() < 0.5:
            self.driver.execute()
        if self.told and self.random.random() < 0.6:
            self.driver.hear()
        self.choose()()

    def choose(self) -> Callable[[], None]:
        """Return what is done next."""
        return self.random.choices(self._choices, cum_weights=self._weights)[0]

    def pass_time(self, change: int) -> None:
        """Let the clock go on; memory of the dead goes, deaths are noticed, and the audit comes in time."""
        self.now += change
        for at, blocks in [one for one in self.doomed if one[0] <= self.now]:
            self.doomed.remove((at, blocks))
            self.drop(blocks, "death")
        if self.daemons.dead:
            return
        self.resuming.end_orders()
        for at, worker in [one for one in self.unnoticed if one[0] + NOTICE <= self.now]:
            self.endings.notice(at, worker)
        if self.now - self.audited_at >= SECOND:
            self.driver.audit()
            while any(isinstance(job, Look) for job in self.jobs):
                self.driver.carry_out(next(job for job in self.jobs if isinstance(job, Look)))
            while self.told:
                self.driver.hear()
        deadline = self.broker.deadline
        if deadline is not None and deadline <= self.now and self.random.random() < 0.8:
            self.elapse()

    def elapse(self) -> None:
        """The core hears that time has passed: what it waits for has come, or not yet."""
        self.send(ev.Elapsed())

    def end(self) -> None:
        """Everybody goes, in one way or another; the driver finishes, and the device shows it all gone."""
        for worker in list(self.workers.values()):
            if worker.connected and self.state(worker) == "open" and worker.number % 2:
                self.endings.say_goodbye(worker)
        self.broker.books.stopping = True
        self.elapse()
        for process in self.processes:
            if process.alive:
                self.endings.die(process, child_until=0)
        self.sharing.delete_all()
        self.stranger_leaves()
        for _ in range(3):
            self.pass_time(600 * SECOND)
            while self.jobs:
                self.driver.carry_out(self.jobs[0])
            while self.told:
                self.driver.hear()
        self.referee.at_the_end()

    # --- the broker ---

    def send(self, event: ev.Event) -> Step:
        """Give the broker one event, obey its effects, and hold it to what every step must keep."""
        self.resuming.asked(event)
        if self.daemons.dead:
            return Step([], [], None)
        before = self.broker.ledger.revision
        self.events.append((self.now, event))
        self.steps[type(event).__name__] += 1
        if isinstance(event, ev.Declare) and event.session in self.workers and self.workers[event.session].is_guest:
            self.declaring[event.call] = event
        self.referee.before(event)
        self.daemons.before()
        step = self.broker.step(event, self.now)
        if self.daemons.dies_now(step):
            return self.daemons.die_in(step)
        self.daemons.file(step.facts)
        for effect in step.effects:
            self.obey(effect)
        self.referee.judge(event, step, before)
        for effect in step.effects:
            if isinstance(effect, fx.Disconnect) and effect.session in self.workers:
                self.endings.lose(self.workers[effect.session])
        for effect in step.effects:
            if isinstance(effect, fx.Answer) and effect.call in self.declaring:
                self.declaration_answered(self.declaring.pop(effect.call), effect.result)
        while self.sends:
            send = self.sends.popleft()
            self.driver.hear_of_packet(send, self.sharing.copy(send) if isinstance(send, fx.Send) else None)
        return step

    def declaration_answered(self, event: ev.Declare, result: fx.Result | Denied) -> None:
        worker = self.workers.get(event.session)
        if isinstance(result, fx.Declared) and worker is not None:
            self.borrowing.declared(worker, event.location, event.declared_bytes)

    def obey(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Answer(call, result):
                assert call in self.unanswered, "a call is answered twice"
                self.resuming.answered(self.workers.get(self.unanswered.pop(call)), call, result)
                self.answers[result.reason if isinstance(result, Denied) else type(result).__name__] += 1
            case fx.Make(session=session):
                if effect.stocked:
                    self.driver.take_stock(effect)
                    self.sends.append(effect)
                else:
                    self.jobs.append(effect)
                self.workers[session].makes.append(effect)
                if effect.segment:
                    self.sharing.began.setdefault(effect.segment, self.turn_number)
            case fx.DrainInputs():
                asked = self.events[-1][1]
                assert isinstance(asked, ev.Allocate | ev.Declare | ev.CreateSegment)
                self.put_aside[effect.call] = asked
                self.told.append(ev.InputsDrained(effect.call))
            case fx.Stock():
                self.jobs.append(effect)
            case fx.DropStock(where, size, count):
                self.jobs.append(Closing(self.driver.out_of_stock(where, size, count)))
            case fx.SendRecall():
                self.recalling.ask(effect)
            case fx.Send(session=session):
                (self.sends if self.random.random() < 0.7 else self.jobs).append(effect)
                self.workers[session].makes.append(effect)
            case fx.Seal():
                self.jobs.append(effect)
            case fx.Drop(segment):
                self.sharing.drop(segment)
            case fx.Forget(session):
                worker = self.workers.pop(session)
                assert not worker.makes, "a session is forgotten whose packets are being made"
                self.past.append(worker)
                worker.process.kept |= worker.held | set(worker.own.values())
                worker.process.shared += self.sharing.haunt(worker)
                for packet in worker.sent:
                    if packet.place != "read":
                        self.drop(blocks_of(packet.make), "word")
                worker.sent.clear()

    @staticmethod
    def answer(step: Step) -> fx.Result | Denied | None:
        """Return the answer that stands first among the effects; None: the daemon died before it."""
        return next((effect.result for effect in step.effects if isinstance(effect, fx.Answer)), None)

    def ask(self, worker: Worker) -> tuple[int, int, int]:
        """Return (call, session, request id) of a new request; now and then with an id that is in use."""
        worker.requests += 1
        request_id = worker.requests
        busy = [make.request_id for make in worker.makes] + [packet.make.request_id for packet in worker.sent]
        if worker.connected and busy and self.random.random() < 0.02:
            request_id = self.random.choice(busy)
        return self.call(worker.session), worker.session, request_id

    def call(self, session: int) -> int:
        self.calls += 1
        self.unanswered[self.calls] = session
        return self.calls

    def state(self, worker: Worker) -> str:
        row = self.broker.ledger.sessions.get(worker.session)
        return row.state if row else "ended"

    # --- the device ---

    def new_block(self) -> int:
        """Return the number of a block that is no extent."""
        self.blocks -= 1
        return self.blocks

    def put(self, block: int, where: Location, size: int) -> None:
        self.exists[block] = (where, size)
        self.used[where] += size

    def drop(self, blocks: Iterable[int], why: str) -> None:
        """Let blocks go; `why` is how it looks to the books: somebody's word, a death, or none of their business."""
        more = self.sharing.more
        for block in blocks:
            if block in more and not self.sharing.let_go(block):
                continue
            found = self.exists.pop(block, None)
            if found is not None:
                self.used[found[0]] -= found[1]
                self.referee.fell(found[0], found[1], why, block)

    def device_free(self) -> int:
        """Return what is free on the device, in bytes."""
        return DEVICE_TOTAL - self.used["device"] - self.stranger["device"]

    def seen(self) -> ev.Seen:
        """Return what the device shows now. Now and then it cannot say; of the host a card never can."""
        if self.random.random() < 0.01:
            return {"device": None, "host": None}
        host = self.used["host"] + self.stranger["host"] if self.host_shows else None
        return {"device": self.used["device"] + self.stranger["device"], "host": host}

    # --- what processes and the kernel do, one thing at a time ---

    def pick(self, fits: Callable[[Worker], Any]) -> Worker | None:
        """Choose a worker; who else there is does not change which of two is preferred."""
        salt = self.salt
        fitting = [worker for worker in self.workers.values() if fits(worker)]
        return max(fitting, key=lambda worker: hash((worker.number, salt))) if fitting else None

    def asker(self) -> Worker | None:
        """Return who asks next: mostly somebody who may, now and then the leaving and those that have ended."""
        if self.past and self.random.random() < 0.01:
            return self.random.choice(self.past)
        anybody = self.random.random() < 0.05
        states = ("open", "detached")
        return self.pick(lambda one: one.process.alive and not one.is_guest and (anybody or self.state(one) in states))

    def model(self, worker: Worker) -> ModelName:
        """Return a model to ask for: mostly one that the worker registered."""
        row = self.broker.ledger.sessions.get(worker.session)
        registered = sorted(row.models) if row else []
        if registered and self.random.random() < 0.9:
            return self.random.choice(registered)
        tenant = worker.tenant if self.random.random() < 0.97 else "t9"
        return ModelName(tenant, f"m{self.random.randrange(4)}")

    def where(self) -> Location:
        return "host" if self.random.random() < 0.2 else "device"

    def open(self) -> None:
        alive = [one for one in self.processes if one.alive]
        if alive and self.random.random() < 0.4:
            process = max(alive, key=lambda one: hash((one.number, self.salt)))
        else:
            process = Process(f"p{self.turn_number}", self.turn_number)
        tenant = f"t{self.random.randrange(3)}"
        observer, liar = self.random.random() < 0.02, self.random.random() < 0.1
        event = ev.OpenSession(self.call(-1), tenant, 1, 1, process.name, observer, "toy")
        worker = Worker(0, tenant, process, self.turn_number, liar, manner=self.recalling.manner())
        opened = self.begin(event, worker)
        if opened and process not in self.processes:
            self.processes.append(process)

    def begin(self, event: ev.OpenSession, worker: Worker) -> bool:
        self.daemons.beginning = (event, worker)
        answer = self.answer(self.send(event))
        if not isinstance(answer, fx.SessionOpened):
            return False
        self.opened[event.call] = worker.session = answer.session
        self.workers[worker.session] = worker
        return True

    def register(self) -> None:
        worker = self.asker()
        if worker:
            asks = self.random.random() < 0.1
            limits: dict[Location, int] = {self.where(): self.random.choice((60, 300, 600)) * MIB} if asks else {}
            exclusive = self.random.random() < 0.05
            self.recalling.register(worker, self.model(worker), limits, exclusive=exclusive)

    def unregister(self) -> None:
        worker = self.asker()
        if worker:
            self.send(ev.UnregisterModel(*self.ask(worker), self.model(worker)))

    def leave_model(self, worker: Worker) -> None:
        """A worker whose segment could not be made has no more use for a model."""
        row = self.broker.ledger.sessions.get(worker.session)
        if worker.process.alive and row and row.models:
            self.send(ev.UnregisterModel(*self.ask(worker), self.random.choice(sorted(row.models))))

    def execute_next(self) -> None:
        """The driver takes the job that was asked for first, of those that are not for later."""
        self.driver.carry_out(next(job for job in self.jobs if not isinstance(job, Look | fx.Seal | Dropping)))

    def rest(self) -> None:
        """Nobody asks for anything for a while."""
        for _ in range(11):
            self.pass_time(SECOND)

    def flush(self) -> None:
        """A socket takes what was queued for it."""
        worker = self.pick(lambda one: any(packet.place == "queue" for packet in one.sent))
        if worker:
            for packet in worker.sent:
                packet.place = "socket" if packet.place == "queue" else packet.place

    def acknowledge(self) -> None:
        """A worker imports a packet, and says so: at once, or later."""
        worker = self.pick(lambda one: one.process.alive and any(packet.place != "queue" for packet in one.sent))
        if not worker or not worker.connected:
            return
        if self.random.random() < 0.003:
            self.send(ev.Acknowledge(worker.session, worker.requests + 5, 0))
            return
        if self.random.random() < 0.4:
            self.acknowledge_by_count(worker)
            return
        packet = self.random.choice([packet for packet in worker.sent if packet.place != "queue"])
        if packet.place == "socket":
            packet.place = "read"
            self.take_in(worker, packet.make)
            if self.random.random() < 0.2:
                return
        worker.sent.remove(packet)
        self.send(ev.Acknowledge(worker.session, packet.make.request_id, packet.make.part))

    def acknowledge_by_count(self, worker: Worker) -> None:
        """A worker imports the oldest packets, and its next frame says how many it has taken by now."""
        if self.random.random() < 0.01:
            self.send(ev.AcknowledgeUpTo(worker.session, worker.packets + 1))
            return
        self.read_packets(worker, 0.8)

    def read_packets(self, worker: Worker, chance: float) -> None:
        """A worker reads one packet after the other, each with this chance, and says how many it has taken."""
        count = worker.sent[0].number - 1
        while worker.sent and worker.sent[0].place != "queue" and self.random.random() < chance:
            packet = worker.sent.pop(0)
            if packet.place == "socket":
                self.take_in(worker, packet.make)
            count = packet.number
        self.send(ev.AcknowledgeUpTo(worker.session, count))

    def take_in(self, worker: Worker, make: fx.Make | fx.Send) -> None:
        """A worker maps what came in a packet."""
        if make.segment:
            worker.maps.setdefault((make.segment, make.request_id), []).extend(blocks_of(make))
        else:
            worker.held.update(make.ids)
            worker.brought.setdefault(make.request_id, set()).update(make.ids)

    def come_clean(self) -> None:
        """A process unmaps what it said it had released long ago."""
        liars = [one for one in self.processes if (one.kept or one.shared) and one.alive]
        if liars:
            process = max(liars, key=lambda one: hash((one.number, self.salt)))
            self.drop(process.kept, "stranger")
            self.drop(process.shared, "stranger")
            process.kept, process.shared = set(), []

    def inputs_drained(self, event: ev.InputsDrained) -> None:
        """The broker has read what others said; a request that had no room before is decided."""
        self.send(event)
        self.put_aside.pop(event.call, None)  # once admitted, an Allocate is a call in flight

    def squeeze(self) -> None:
        """The stranger takes nearly all that the device has left: the books have room, and the gate has none."""
        more = max(0, self.device_free() - RESERVE - self.random.choice((0, 2, 20)) * MIB)
        self.stranger_has("device", self.stranger["device"] + more)

    def play_the_stranger(self) -> None:
        where = self.where()
        size = self.random.choice((0, 0, 0, 50, 100, 600)) * MIB
        self.stranger_has(where, size)

    def stranger_has(self, where: Location, size: int) -> None:
        """The stranger takes memory or gives it back, until it has so much."""
        self.referee.fell(where, max(0, self.stranger[where] - size), "stranger", 0)
        self.stranger[where] = size

    def stranger_leaves(self) -> None:
        for where in LOCATIONS:
            self.stranger_has(where, 0)
