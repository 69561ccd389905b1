"""Workers that are asked for memory: how they answer, or fail to.

The manner of a worker is for life. `deaf` ones never say that they answer. `honest` ones release what they are asked
for and answer at once, `slow` ones a little later, and `stalling` ones after 8 seconds. `partial` ones release half,
`keeping` ones nothing. `silent` ones never answer. `broken` ones answer what they were not asked, answer twice, and
release something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.processes import Worker
    from tests.simulation.world import World

MILLISECOND = 1_000_000
MANNERS = ("deaf",) * 5 + ("honest",) * 6 + ("slow", "slow", "stalling", "partial", "keeping", "silent", "broken")
DELAYS = {"slow": 200 * MILLISECOND, "stalling": 8_000 * MILLISECOND}
UNKNOWN_RECALL = 9_999_999


def is_deaf(seed: int) -> bool:
    """Say whether no session answers recalls in the world of this seed."""
    return seed // 8 % 3 == 1


class Recalling:
    """What workers do about recalls."""

    def __init__(self, world: World) -> None:
        self.world = world

    def manner(self) -> str:
        """Return how a new worker answers."""
        return "deaf" if is_deaf(self.world.seed) else self.world.random.choice(MANNERS)

    # --- which models ---

    def register(self, worker: Worker, name: ModelName, limits: Mapping[Location, int], *, exclusive: bool) -> None:
        """Register a model; most of the workers that can answer say so at once."""
        answers = None if worker.manner == "deaf" or self.world.random.random() < 0.2 else True
        self._register(worker, name, limits, exclusive, answers)

    def change(self) -> None:
        """A worker answers recalls of one of its models from now on, or does not any more."""
        able = self.world.pick(lambda one: one.manner != "deaf" and one.process.alive and one.connected)
        worker = None if able and able.is_guest else able
        if worker:
            self._register(worker, self.world.model(worker), {}, False, self.world.random.random() < 0.6)

    def _register(
        self,
        worker: Worker,
        name: ModelName,
        limits: Mapping[Location, int],
        exclusive: bool,
        answers: bool | None,
    ) -> None:
        if answers is not None:
            (worker.answers.add if answers else worker.answers.discard)(name)
        replaces = bool(limits) and self.world.random.random() < 0.3
        self.world.send(ev.RegisterModel(*self.world.ask(worker), name, None, limits, exclusive, answers, replaces))

    def state(self, worker: Worker) -> frozenset[ModelName]:
        """Return the models of which a worker says that it answers when it is back. Some have forgotten."""
        if self.world.random.random() < 0.2:
            worker.answers.clear()
        return frozenset(worker.answers)

    # --- questions and answers ---

    def ask(self, recall: fx.SendRecall) -> None:
        """A worker that is connected is asked for memory, or asked again."""
        world = self.world
        worker = world.workers.get(recall.session)
        if worker is None or not worker.connected or not worker.process.alive:
            return
        known, due = worker.recalls.get(recall.recall, (recall, world.now + DELAYS.get(worker.manner, 0)))
        if recall.size > known.size and world.random.random() < 0.3:
            recall = known  # its answer is on the way, or the notice has found a full socket
        worker.recalls[recall.recall] = recall, due

    def answer_one(self) -> None:
        """A worker answers a recall; or it dies, leaves or loses its connection instead."""
        world, chance = self.world, self.world.random.random()
        worker = world.pick(lambda one: one.process.alive and one.connected and self._due(one))
        if worker is None:
            self._answer_nothing()
        elif chance < 0.02:
            world.endings.lose(worker)
        elif chance < 0.03:
            world.endings.say_goodbye(worker)
        elif chance < 0.04:
            world.endings.die(worker.process, world.now)
        elif worker.is_guest:
            world.hosting.answer(worker, worker.recalls.pop(self._due(worker)[0])[0])
        else:
            self.answer(worker, worker.recalls.pop(self._due(worker)[0])[0])

    def _due(self, worker: Worker) -> list[int]:
        if worker.manner == "silent":
            return []
        return [number for number, (_, due) in worker.recalls.items() if due <= self.world.now]

    def _answer_nothing(self) -> None:
        """A silent worker loses its connection, or a broken one answers what it or another one was not asked."""
        world = self.world
        silent = world.pick(lambda one: one.manner == "silent" and one.recalls and one.connected)
        if silent and world.random.random() < 0.05:
            world.endings.lose(silent)
            return
        worker = world.pick(lambda one: one.manner == "broken" and one.process.alive and one.connected)
        others = [number for one in world.workers.values() if one is not worker for number in one.recalls]
        if worker and world.random.random() < 0.5:
            world.send(ev.AnswerRecall(worker.session, world.random.choice([UNKNOWN_RECALL, *sorted(others)])))

    def answer(self, worker: Worker, recall: fx.SendRecall) -> None:
        """Release as much as the worker's manner says, then answer. A few leave it at the release."""
        world, chance = self.world, self.world.random.random()
        if worker.sent and worker.sent[0].place != "queue":
            world.read_packets(worker, chance=1)
        heard = recall.size
        if worker.manner == "broken":
            heard = world.random.choice((0, 1, heard // 2, heard, 2 * heard, 1 << 62))
        if worker.manner == "broken" and chance < 0.3:
            world.send(ev.AnswerRecall(worker.session, recall.recall, heard))
        part = {"partial": 2, "keeping": 0, "broken": world.random.choice((0, 1))}.get(worker.manner, 1)
        self.give_back(worker, recall, recall.size // part if part else 0)
        if chance > 0.95:
            return
        world.send(ev.AnswerRecall(worker.session, recall.recall, heard))
        if worker.manner == "broken" and chance > 0.6:
            world.send(ev.AnswerRecall(worker.session, recall.recall, heard))

    def give_back(self, worker: Worker, recall: fx.SendRecall, size: int) -> None:
        """Release at least `size` bytes of what a recall asks for, if the worker has so much."""
        world = self.world
        row = world.broker.ledger.sessions.get(worker.session)
        if row is None or worker.resuming:
            return
        ids = set()
        for extent in sorted(worker.held):
            loan = row.extents.get(extent)
            wrong = worker.manner == "broken" and world.random.random() < 0.3
            if size > 0 and loan and (wrong or (loan.name, loan.location) == (recall.name, recall.location)):
                ids.add(extent)
                size -= loan.extent_bytes
        world.borrowing.unmap(worker, ids)
        if worker.unmapped:
            world.borrowing.say_released(worker)

    # --- rest ---

    def come_to_rest(self, unfair: str = "") -> int:
        """Let all workers answer with bytes until nothing moves. Return how many requests waited for a recall.

        First limits are lifted, and the workers that answer take all that is free; then every worker asks for more, and
        has time. After that they ask for nothing. Only those of the tenant `unfair` keep all that they are asked for,
        and go on to ask for a little with the hint that they want everything, and to give that back.
        """
        world, granule = self.world, self.world.rules.granularity
        world.stranger_leaves()
        world.operator.lift_limits()
        for _ in range(6):
            world.open()
        for worker in list(world.workers.values()):
            if worker.process.alive and worker.connected:
                self.register(worker, ModelName(worker.tenant, f"m{world.random.randrange(3)}"), {}, exclusive=False)
        for worker in self._borrowers():
            worker.manner = "honest" if worker.manner != "deaf" else "deaf"
            for part in (1, 2, 4) if worker.answers else ():
                free = world.broker.ledger.totals["device"].free // part // granule
                if free:
                    self._allocate(worker, free, 0)
        self._work()
        for worker in self._borrowers():
            world.salt = world.random.getrandbits(30)
            self._allocate(worker, world.random.choice((10, 40, 100, 200)), 60_000 * MILLISECOND)
        waited = world.referee.recalls.ends["asked"]
        for _ in range(120):
            world.pass_time(50 * MILLISECOND)
            for worker in list(world.workers.values()):
                self._settle(worker, keeps=worker.tenant == unfair)
            self._work()
            for worker in [one for one in self._borrowers() if one.tenant == unfair]:
                self._churn(worker)
            self._work()
            if world.broker.deadline is not None and world.broker.deadline <= world.now:
                world.elapse()
        return world.referee.recalls.ends["asked"] - waited

    def _borrowers(self) -> list[Worker]:
        workers, sessions = self.world.workers.values(), self.world.broker.ledger.sessions
        able = [one for one in workers if one.process.alive and one.connected and one.session in sessions]
        return [one for one in able if sessions[one.session].models]

    def _allocate(self, worker: Worker, granules: int, wait_ns: int) -> None:
        name = self.world.random.choice(sorted(self.world.broker.ledger.sessions[worker.session].models))
        size = granules * self.world.rules.granularity
        request = ev.Allocate(*self.world.ask(worker), name, "device", size, 1, wait_ns)
        self.world.send(self.world.borrowing.hinted(request))

    def _work(self) -> None:
        """Do all that was asked of the driver, and hear of it."""
        while self.world.jobs or self.world.told:
            if self.world.jobs:
                self.world.driver.carry_out(self.world.jobs[0])
            if self.world.told:
                self.world.driver.hear()

    def _churn(self, worker: Worker) -> None:
        """Ask for a granule, with the hint of much more, and give back what such a request has brought before."""
        granule, world = self.world.rules.granularity, self.world
        extents = world.broker.ledger.sessions[worker.session].extents
        small = {one for one in worker.held if one in extents and extents[one].extent_bytes == granule}
        world.borrowing.unmap(worker, small)
        if worker.unmapped:
            world.borrowing.say_released(worker)
        name = sorted(world.broker.ledger.sessions[worker.session].models)[0]
        request = ev.Allocate(*world.ask(worker), name, "device", granule, 1, 0)
        world.send(dataclasses.replace(request, wanted_bytes=1_000 * granule))

    def _settle(self, worker: Worker, *, keeps: bool) -> None:
        """Read everything, release what is unmapped, and answer."""
        for packet in worker.sent:
            packet.place = "socket" if packet.place == "queue" else packet.place
        if not worker.process.alive or not worker.connected:
            return
        if worker.sent:
            self.world.read_packets(worker, chance=1)
        if worker.unmapped:
            self.world.borrowing.say_released(worker)
        for number in list(worker.recalls):
            recall, _ = worker.recalls.pop(number)
            self.give_back(worker, recall, 0 if keeps else recall.size)
            self.world.send(ev.AnswerRecall(worker.session, number, recall.size))
