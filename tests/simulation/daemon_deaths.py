"""The daemon dies at any step, and another one takes its books over.

What is on file is what the loop writes: the facts of each step, before any of its effects happens. So a death in a step
leaves some of its effects undone, the last ones; and only where none of them happened may the file break off before the
end of its facts. With a daemon go its queue of packets, its stock, and what it was making. What is in the kernel stays
until the worker closes its socket, and the keeper of segments' descriptors lives on, as a rule.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.processes import Closing, Found, Packet, Worker
from tests.simulation.sharing import Dropping, blocks_of

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.books import Step
from membrokerd.core.ledger import Ledger, SegmentRow
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location
from membrokerd.core.recount import check

if TYPE_CHECKING:
    from tests.simulation.world import World

MILLISECOND = 1_000_000
WHOLE_STORY = 5_000
"""Facts on file from which a successor makes its books itself. Of more, they are copied, or no long run would end."""


class DaemonDeaths:
    """The daemons of a world, one after the other, and the file between them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = 1
        self.dead = False
        self.dies_in = 0
        """In so many steps; 0: not soon."""
        self.books = Ledger(world.broker.books.rules.capacities)
        """What the file says."""
        self.epoch_begins = 0
        self.torn = 0
        self.all_torn: list[int] = []
        self.torn_facts: tuple[ft.Fact, ...] = ()
        """Of the step in which the daemon died: what is on file of it."""
        self.unmade: dict[Location, int] = {}
        """Bytes that are booked, and that the dead daemon was still to make."""
        self.beginning: tuple[ev.OpenSession, Worker] | None = None
        self.deaths: Counter[str] = Counter()

    # --- the file ---

    def file(self, facts: list[ft.Fact]) -> None:
        """Write facts down, but for those of the stock, which nobody inherits."""
        self.world.facts += facts
        self.world.history += facts
        for fact in facts:
            if not isinstance(fact, ft.StockChanged):
                self.books.apply(fact)

    # --- a death ---

    def strike(self) -> None:
        """A daemon dies in the next steps, or after them; one or several successors begin, and die as well."""
        world = self.world
        self.dies_in = world.random.choice((1, 1, 1, 2, 3, 5))
        self.do_something()
        self.between_daemons()
        while world.random.random() < 0.25:
            self.dies_in = world.random.choice((1, 2, 3, 5))
            self.succeed()
            self.do_something()
            self.between_daemons()
        self.dies_in = 0
        self.succeed()

    def do_something(self) -> None:
        """Let this and that happen, and most times the daemon's death within it."""
        world = self.world
        for _ in range(world.random.choice((2, 5, 9))):
            deed = world.random.choice((world.choose(), world.driver.execute_and_hear))
            if not self.dead and deed != self.strike:
                deed()

    def before(self) -> None:
        """Take down what the daemon is still to make."""
        self.unmade = dict(self.world.broker.books.making)

    def dies_now(self, step: Step) -> bool:
        """Say whether the daemon dies in this step: rather in one that changes the books."""
        if not self.dies_in or (self.dies_in == 1 and not step.facts and self.world.random.random() < 0.7):
            return False
        self.dies_in -= 1
        return not self.dies_in

    def die_in(self, step: Step) -> Step:
        """Let the daemon die in a step: its facts are on file, and the first of its effects happen, or none."""
        world = self.world
        check(world.broker.ledger)
        happen = world.random.choice((0, world.random.randint(0, len(step.effects))))
        self.torn = world.random.randint(0, len(step.facts)) if not happen and world.random.random() < 0.7 else 0
        self.torn_facts = tuple(step.facts[: len(step.facts) - self.torn])
        self.file(list(self.torn_facts))
        for where, size in world.broker.books.making.items():
            self.unmade[where] += size
        self.dead = True
        for effect in step.effects[:happen]:
            world.obey(effect)
        self.deaths["in a step" if not self.torn else "in what it writes"] += 1
        self.bury()
        return Step(step.effects[:happen], [], None)

    def bury(self) -> None:
        """With the daemon goes what it had open: what it made, its stock, what it was about to close."""
        world = self.world
        for packet in world.sends:
            if isinstance(packet, fx.Make):
                self.send_last(packet)
        for found in [one for one in world.told if isinstance(one, Found) and one.failure is None]:
            if isinstance(found.job, fx.Make | fx.Send):
                world.drop(blocks_of(found.job), "daemon")
            elif isinstance(found.job, fx.Stock):
                world.drop([found.block], "stock")
        for job in world.jobs:
            if isinstance(job, Dropping | Closing):
                world.drop(job.blocks, "segment" if isinstance(job, Dropping) else "stock")
        for kept in world.stock.values():
            world.drop(kept, "stock")
        world.stock.clear()
        world.sharing.dropping.clear()
        self.forget_work()

    def send_last(self, make: fx.Make) -> None:
        """A packet of the stock was sent before the daemon died, or not any more."""
        worker = self.world.workers[make.session]
        if worker.connected and self.world.random.random() < 0.5:
            worker.sent.append(Packet(make, "socket"))
        else:
            self.world.drop(make.ids, "daemon")

    def forget_work(self) -> None:
        """Nobody works for a dead daemon, or hears what it asked for."""
        world = self.world
        world.jobs.clear()
        world.told.clear()
        world.put_aside.clear()
        world.sends.clear()
        world.unanswered.clear()
        world.unnoticed.clear()
        world.auditing = False

    # --- no daemon ---

    def between_daemons(self) -> None:
        """The world goes on without a daemon: processes die, unmap, and wait. At last the keeper may be gone, too."""
        world = self.world
        if not self.dead:  # it dies between two steps
            self.dead, self.torn, self.torn_facts = True, 0, ()
            self.unmade = dict(world.broker.books.making)
            self.deaths["between steps"] += 1
            self.bury()
        for worker in world.workers.values():
            self.cut_off(worker)
        for _ in range(world.random.choice((0, 1, 3))):
            world.pass_time(world.random.choice((0, 3, 60, 400, 2000)) * MILLISECOND)
            world.random.choice(
                (world.endings.die_one, world.play_the_stranger, world.come_clean, world.borrowing.release)
            )()
        if world.random.random() < 0.3:
            self.lose_descriptors()

    def cut_off(self, worker: Worker) -> None:
        """A worker's connection has no other end any more. What is in the kernel is there until it closes its own."""
        world = self.world
        for packet in worker.sent:
            if packet.place == "queue":
                world.drop(blocks_of(packet.make), "daemon")
        world.resuming.cut(worker, [packet.make.request_id for packet in worker.sent if packet.place != "read"])
        worker.sent = [packet for packet in worker.sent if packet.place == "socket"]
        worker.connected, worker.resuming, worker.inherited = False, "", True
        worker.makes.clear()

    def lose_descriptors(self) -> None:
        """The keeper of the descriptors is gone as well, with all of them, or it lost some."""
        world, chance = self.world, self.world.random.random()
        for segment, blocks in list(world.sharing.store.items()):
            if chance < 0.5 or world.random.random() < 0.5:
                lost = blocks if chance < 0.7 else blocks[:1]
                world.drop(lost, "segment")
                world.sharing.store[segment] = [block for block in blocks if block not in lost]

    # --- the successor ---

    def succeed(self) -> None:
        """A daemon begins with what is on file, and is told what the device shows and what the store has lost."""
        world = self.world
        self.forget_work()  # what was asked of nobody
        story = [fact for fact in world.facts[self.epoch_begins :] if not isinstance(fact, ft.StockChanged)]
        world.facts[self.epoch_begins :] = story
        self.epoch_begins = len(world.facts)
        self.epoch += 1
        dead, rules = world.broker, world.broker.books.rules
        if len(world.facts) < WHOLE_STORY:
            world.broker = Broker(rules, self.epoch, world.facts)
        else:
            world.broker = Broker(rules, self.epoch)
            world.broker.ledger = world.broker.books.ledger = copy.deepcopy(self.books)
            world.broker.books.recallable._ledger = world.broker.books.ledger
            world.broker.books.change_rules(world.broker.books.rules)  # it decides over that ledger
        world.referee.inherit(dead, torn=bool(self.torn))
        world.resuming.inherit()
        world.driver.lost_until = 0  # none begins on a device that does not answer
        self.take_stock_of_workers()
        self.dead, world.audited_at = False, world.now
        ledger, store = world.broker.ledger, world.sharing.store
        lost = frozenset(row.segment for row in ledger.segments.values() if not whole(row, store.get(row.segment, [])))
        assert store.keys() <= ledger.segments.keys(), "descriptors are kept that nobody will ever close"
        self.all_torn.append(self.torn)
        world.send(ev.Restarted(lost, world.seen()))
        for worker in world.workers.values():
            dead_process = not worker.process.alive and world.state(worker) != "releasing"
            if dead_process and all(worker is not other for _, other in world.unnoticed):
                world.unnoticed.append((world.now, worker))

    def take_stock_of_workers(self) -> None:
        """Find out who has a session on file: one may not know its own, and one may have none any more."""
        world, sessions = self.world, self.world.broker.ledger.sessions
        for session in sessions.keys() - world.workers.keys():
            assert self.beginning is not None
            event, worker = self.beginning
            worker.session, worker.connected, worker.knows_token = session, False, False
            world.opened[event.call] = session
            world.workers[session] = worker
            if worker.process.alive and worker.process not in world.processes:
                world.processes.append(worker.process)
        self.beginning = None
        for session in list(world.workers.keys() - sessions.keys()):
            world.obey(fx.Forget(session))


def whole(row: SegmentRow, kept: list[int]) -> bool:
    """Say whether the store has every packet of a segment."""
    alone = row.last_bytes != row.extent_bytes
    packets = set(row.ids[: len(row.ids) - alone : policy.PACKET_EXTENTS])
    return packets | ({row.ids[-1]} if alone else set()) == set(kept)
