"""Guests in the world: sessions that declare memory as recallable, are asked for all of it, and declare it again.

Each is a session of its own, with one model and no extents. Its manner is that of the other workers (`recalling`):
`partial` ones give half back, which does not help, `keeping` ones nothing, `silent` ones never answer, `broken` ones
answer first and give back later. Its memory is a block of the world, like that of any declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.processes import Process, Worker
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.names import ModelName

if TYPE_CHECKING:
    from tests.simulation.world import World

SECOND = 1_000_000_000
SLICES = (0, SECOND, 20 * SECOND)
MANNERS = ("honest",) * 6 + ("slow", "stalling", "partial", "keeping", "silent", "broken")


def hosts_guests(seed: int) -> bool:
    """Say whether there are guests in the world of this seed. Not in those that tests play: their stories stay."""
    return seed % 2 == 1 and not 20_000 <= seed < 21_000


class Hosting:
    """What guests do, but for what all sessions do."""

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self) -> None:
        """A guest begins, and asks for its memory."""
        world = self.world
        process = Process(f"p{world.turn_number}", world.turn_number)
        tenant, model = f"t{world.random.randrange(3)}", f"m{world.random.randrange(4)}"
        event = ev.OpenSession(world.call(-1), tenant, 1, 1, process.name, False, "guest")
        guest = Worker(0, tenant, process, world.turn_number, liar=False, manner=world.random.choice(MANNERS))
        guest.is_guest = True
        if world.begin(event, guest):
            world.processes.append(process)
            world.recalling.register(guest, ModelName(tenant, model), {}, exclusive=False)
            self._declare(guest, world.random.choice((20, 100, 300, 700)) * MIB)

    def declare(self) -> None:
        """A guest wants to run again, is used, grows, shrinks, or has nothing to do; now and then it becomes firm."""
        world = self.world
        guest = world.pick(lambda one: one.is_guest and one.process.alive and not one.resuming)
        if guest:
            had = sum(guest.declared.values())
            size = world.random.choice((had, had, had, 0, had + 20 * MIB, had // 2, 100 * MIB, 500 * MIB))
            self._declare(guest, size, recallable=world.random.random() < 0.97)

    def _declare(self, guest: Worker, size: int, *, recallable: bool = True) -> None:
        world = self.world
        row = world.broker.ledger.sessions.get(guest.session)
        if row is None or not row.models:
            return
        wait = world.random.choice((None, SECOND, 5 * SECOND, 60 * SECOND))
        name = sorted(row.models)[0]
        world.send(ev.Declare(*world.ask(guest), name, "device", size, recallable, wait))

    def answer(self, guest: Worker, recall: fx.SendRecall) -> None:
        """Give all back, or what its manner says, and answer."""
        world = self.world
        first = guest.manner == "broken"
        if first:
            world.send(ev.AnswerRecall(guest.session, recall.recall, recall.size))
        if guest.manner != "keeping":
            left = recall.size // 2 if guest.manner == "partial" else 0
            world.send(ev.Declare(*world.ask(guest), recall.name, recall.location, left, True))
        if not first and world.random.random() < 0.95:
            world.send(ev.AnswerRecall(guest.session, recall.recall, recall.size))
