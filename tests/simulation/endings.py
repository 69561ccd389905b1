"""How connections, sessions and processes of the world end, and how the broker hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.processes import Look, Process, Worker
from tests.simulation.sharing import blocks_of

from membrokerd.core import effects as fx
from membrokerd.core import events as ev

if TYPE_CHECKING:
    from tests.simulation.world import World

MILLISECOND = 1_000_000


class Endings:
    """Losses, goodbyes and deaths."""

    def __init__(self, world: World) -> None:
        self.world = world

    def lose_one(self) -> None:
        busy = self.world.random.random() < 0.8
        worker = self.world.pick(lambda one: one.resuming or (one.connected and (one.sent or not busy)))
        if worker:
            self.lose(worker)

    def lose(self, worker: Worker) -> None:
        """A connection breaks. What is queued is closed and will be told; what the socket held is read, or gone."""
        if worker.connected or worker.resuming:
            self.world.told += self.hang_up(worker)
            self.world.send(ev.ConnectionLost(worker.session))

    def hang_up(self, worker: Worker) -> list[ev.NotDelivered]:
        """A connection has ended; return what was still queued on it."""
        worker.connected, worker.resuming = False, ""
        unsent, unread = [], []
        for packet in worker.sent:
            make = packet.make
            if packet.place == "queue":
                self.world.drop(blocks_of(make), "word")
                unsent.append(ev.NotDelivered(make.session, make.request_id, make.part))
            elif packet.place == "socket" and worker.process.alive and self.world.random.random() < 0.5:
                self.world.take_in(worker, make)
                continue
            elif packet.place == "socket":
                self.world.drop(blocks_of(make), "word")
            if packet.place != "read" or self.world.random.random() < 0.3:
                unread.append(make.request_id)
        worker.sent.clear()
        self.world.resuming.cut(worker, unread)
        return unsent

    def goodbye(self) -> None:
        worker = self.world.pick(lambda one: one.connected and one.process.alive and self.world.state(one) == "open")
        if worker:
            self.say_goodbye(worker)

    def say_goodbye(self, worker: Worker) -> None:
        """Mostly with everything unmapped before; in the middle of a call or not."""
        if not worker.liar:
            self.world.drop(worker.held | set(worker.own.values()), "word")
            self.world.drop(self.world.sharing.take_mapped(worker), "word")
            worker.held.clear()
            worker.own.clear()
        answers = [
            effect
            for effect in self.world.send(ev.Goodbye(*self.world.ask(worker))).effects
            if isinstance(effect, fx.Answer)
        ]
        said = any(isinstance(answer.result, fx.Done) for answer in answers)
        if said and self.world.random.random() < 0.8:
            self.lose(worker)

    def die_one(self) -> None:
        """A process is killed: its memory goes a little later, or much later when a forked child keeps it."""
        busy = self.world.random.random() < 0.3
        worker = self.world.pick(lambda one: one.process.alive and (one.makes or not busy))
        if worker:
            if busy:
                self.world.driver.slow_down()  # so that its death is told before its packets are made
            self.die(worker.process, self.world.now + self.world.random.choice((0, 0, 0, 800, 8000)) * MILLISECOND)

    def die(self, process: Process, child_until: int) -> None:
        """Kill a process. A forked child lives until `child_until`, and keeps what was mapped."""
        process.alive = False
        self.world.processes = [one for one in self.world.processes if one is not process]
        exited = self.world.now + self.world.random.choice((0, 3, 60, 300)) * MILLISECOND
        mapped, own, shared = set(process.kept), set(), process.shared
        for worker in [one for one in self.world.workers.values() if one.process is process]:
            mapped |= worker.held
            own |= set(worker.own.values())
            worker.held = set()
            shared += self.world.sharing.haunt(worker)
            self.world.unnoticed.append((self.world.now, worker))
            if self.world.random.random() < 0.5:
                self.lose(worker)
            for packet in worker.sent:
                if packet.make.segment and not worker.connected:  # a dead daemon's: nobody else has its other end
                    self.world.sharing.haunted.add(packet.make.segment)
                    shared += blocks_of(packet.make)
                elif packet.make.segment and packet.place == "socket":  # the child has the socket, too
                    self.world.sharing.haunted.add(packet.make.segment)
                    self.world.sharing.share(blocks_of(packet.make))
                    shared += blocks_of(packet.make)
                elif packet.place != "queue" and not packet.make.segment:
                    mapped |= set(packet.make.ids)
            if not worker.connected:
                worker.sent.clear()
        process.shared = []
        self.world.doomed.append((max(exited, child_until), mapped))
        self.world.doomed.append((max(exited, child_until), shared))
        self.world.doomed.append((exited, own))

    def notice_one(self) -> None:
        if self.world.unnoticed:
            self.notice(*max(self.world.unnoticed, key=lambda one: hash((one[1].number, self.world.salt))))

    def notice(self, at: int, worker: Worker) -> None:
        """The broker hears of a death: it asks the device, and closes the connection."""
        self.world.unnoticed.remove((at, worker))
        self.world.jobs.append(Look(worker))
        if not (worker.resuming and self.world.random.random() < 0.5):  # or else its connection's end is told later
            self.lose(worker)
