"""What workers borrow, declare and give back, one thing at a time."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

from tests.simulation.processes import Look
from tests.simulation.sharing import Dropping
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.names import LOCATIONS, Location

if TYPE_CHECKING:
    from tests.simulation.processes import Worker
    from tests.simulation.world import World

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
UNKNOWN_ID = (1 << 40) + 10_000_000
WANTED = (0,) * 12 + (0.5, 2, 3, 10, 1_000_000)
"""How many times its size a request says that its session will want soon."""


class Borrowing:
    """The requests for extents, and declarations."""

    def __init__(self, world: World) -> None:
        self.world = world

    def allocate(self) -> None:
        world = self.world
        worker = self.borrower()
        if worker:
            size = world.random.choice((2, 2, 2, 4, 8, 3)) * MIB
            count = world.random.choice((1, 5, 64, 65, 130, 200, 300))
            own = (*world.ask(worker), world.model(worker), world.where())
            world.send(self.hinted(ev.Allocate(*own, size, count, self.wait_ns())))

    def hinted(self, event: ev.Allocate) -> ev.Allocate:
        """Say in a request what its session will want soon: mostly it does not know, now and then absurdly much.

        The turn's dice are not thrown for it, so nothing else is chosen otherwise than without it.
        """
        times = random.Random(self.world.salt).choice(WANTED)
        return dataclasses.replace(event, wanted_bytes=int(times * event.count) * event.extent_bytes)

    def wait_ns(self) -> int | None:
        """Return how long a request waits for room: mostly not at all, now and then too long."""
        world = self.world
        if world.random.random() < 0.02:
            return world.random.choice((-1, 25 * 3600 * SECOND))
        return world.random.choice((None, None, None, 0, 20 * MILLISECOND, 300 * MILLISECOND, 2 * SECOND))

    def crowd(self) -> None:
        """Several ask for a little more than is free, and have time; then memory is released, or a rule changes."""
        world = self.world
        if world.random.random() < 0.3:
            world.operator.set_quota()
        where, size = world.where(), world.random.choice((2, 10, 40)) * MIB
        more = world.random.choice((0, 2, 40)) * MIB
        count = max(1, min(300, (world.broker.ledger.totals[where].free + more) // size + 1))
        for _ in range(world.random.randint(2, 6)):
            world.salt = world.random.getrandbits(30)
            worker = self.borrower()
            if worker:
                wait = world.random.choice((None, 500 * MILLISECOND, 2 * SECOND, 5 * SECOND))
                request = ev.Allocate(*world.ask(worker), world.model(worker), where, size, count, wait)
                world.send(self.hinted(request))
        for _ in range(world.random.choice((0, 1, 3))):
            world.salt = world.random.getrandbits(30)
            world.random.choice((self.release, self.release, world.operator.set_quota, world.operator.reload))()

    def cancel(self) -> None:
        """A caller that waits gives up; or one whose answer is on its way."""
        world = self.world
        waiting = sorted(world.broker.waiting._waiters)
        call = world.random.choice(waiting) if waiting else world.calls
        world.send(ev.CancelWait(call))

    def allocate_little(self) -> None:
        """What a stock is for: a few extents, of sizes that come again, one after the other, and all else is done."""
        world = self.world
        worker = self.borrower()
        if worker:
            size = world.random.choice((2, 2, 4, 4, 6, 8, 10)) * MIB
            name, where = world.model(worker), world.random.choice(LOCATIONS)
            for _ in range(world.random.choice((1, 2, 4))):
                while any(not isinstance(job, Look | fx.Seal | Dropping) for job in world.jobs):
                    world.execute_next()
                while world.told:
                    world.driver.hear()
                if worker.session not in world.workers or not worker.process.alive:
                    return
                own, count = (*world.ask(worker), name, where), world.random.choice((1, 1, 2, 5))
                world.send(self.hinted(ev.Allocate(*own, size, count)))

    def release(self) -> None:
        """Unmap some extents, then say so: at once or a little later. A liar says so and keeps them."""
        world = self.world
        worker = world.pick(lambda one: one.process.alive and not one.resuming and (one.held or one.unmapped))
        if not worker:
            return
        if worker.held:
            held = sorted(worker.held)
            self.unmap(worker, set(world.random.sample(held, world.random.randint(1, len(held)))))
            if world.random.random() < 0.05:
                return
        self.say_released(worker)

    def unmap(self, worker: Worker, ids: set[int]) -> None:
        """Unmap extents, which are to be released. A liar keeps some."""
        worker.held -= ids
        worker.unmapped |= ids
        if worker.liar and self.world.random.random() < 0.5:
            worker.process.kept |= ids
        else:
            self.world.drop(ids, "word")

    def say_released(self, worker: Worker) -> None:
        """Release all that is unmapped. Now and then an id is wrong."""
        world, asked = self.world, sorted(worker.unmapped)
        if world.random.random() < 0.05:
            asked.append(world.random.choice((asked[0], UNKNOWN_ID, self.extent_of_another(worker))))
        row = world.broker.ledger.sessions.get(worker.session)
        extents = row.extents if row else {}  # its session has ended, and the daemon died before it said so
        size = sum(extents[extent].extent_bytes for extent in asked if extent in extents)
        answer = world.answer(world.send(ev.Release(*world.ask(worker), tuple(asked))))
        if isinstance(answer, fx.Released):
            assert answer.released_bytes == size
            worker.unmapped.clear()

    def extent_of_another(self, worker: Worker) -> int:
        """Return an extent of another worker, or an id that was never used."""
        world = self.world
        held = [sorted(one.held)[0] for one in world.workers.values() if one.held and one is not worker]
        return world.random.choice(held) if held else UNKNOWN_ID

    def declare(self) -> None:
        """Say what one allocates oneself; some of that is true."""
        world = self.world
        worker = world.asker()
        if not worker:
            return
        where, size = world.where(), world.random.choice((0, 10, 40, 40, -1, 3000)) * MIB
        event = ev.Declare(*world.ask(worker), world.model(worker), where, size)
        world.declaring[event.call] = event
        world.send(event)

    def declared(self, worker: Worker, where: Location, size: int) -> None:
        """A worker that has declared does it: what it had is gone, and something else is there, or less, or more."""
        world = self.world
        world.referee.fell(where, size, "declaration", 0)
        if where in worker.own:
            world.drop([worker.own.pop(where)], "word")
        actual = world.random.choice((size, size, size // 2, size + 30 * MIB))
        if actual and worker.process.alive and worker.session in world.workers:
            worker.own[where] = world.new_block()
            world.put(worker.own[where], where, actual)

    def borrower(self) -> Worker | None:
        """Return the worker that borrows next: mostly one that can, with a model."""
        world = self.world
        worker = world.asker()
        if worker and not worker.connected and world.random.random() < 0.8:
            worker = world.pick(lambda one: one.connected and one.process.alive and not one.is_guest)
        if worker:
            row = world.broker.ledger.sessions.get(worker.session)
            if row and not row.models and world.random.random() < 0.8:
                world.recalling.register(worker, world.model(worker), {}, exclusive=False)
        return worker
