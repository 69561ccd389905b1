"""Segments in the world: what the broker keeps of them, who has them mapped, and what sessions do with them.

A block of a segment is one packet of it. It exists as long as anybody has a reference: the broker's store, a packet
that is queued or in a socket, a mapping, the forked child of a dead process. So a segment's memory goes when the last
of them lets go, whatever the books say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.ledger import SegmentRow
from membrokerd.core.names import ANY_MODEL, SegmentName

if TYPE_CHECKING:
    from tests.simulation.processes import Worker
    from tests.simulation.world import World

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
SIZES_MIB = (2, 8, 8, 10, 10, 10, 128, 256, 258, 262, 390)
"""Extents are of 4 MiB: one that is smaller, some that are alike, a last one of its own size, several packets."""
WRONG_SIZES_MIB = (0, -2, 3, 4000)
WAITS = (0, 0, 0, 60 * MILLISECOND, 600 * MILLISECOND, 600 * MILLISECOND, 4 * SECOND, 4 * SECOND)
WRONG_WAITS = (-1, 25 * 3600 * SECOND)
LABELS = ("a", "b", "c")


@dataclass(frozen=True, slots=True)
class Dropping:
    """The driver's thread closes what the broker kept of a segment."""

    segment: int
    blocks: tuple[int, ...]


def blocks_of(packet: fx.Make | fx.Send) -> Iterable[int]:
    """Return the blocks of the world that a packet is made of."""
    return packet.ids[:1] if packet.segment else packet.ids


class Sharing:
    """What the world knows of segments."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store: dict[int, list[int]] = {}
        """What the broker keeps, by segment."""
        self.dropping: set[int] = set()
        """Segments of which the broker has not heard yet that its descriptors are closed."""
        self.more: dict[int, int] = {}
        """By block: how many references there are beside the first."""
        self.haunted: set[int] = set()
        """Segments that somebody has had mapped of whom their books know nothing: a liar, or a dead process's child."""
        self.began: dict[int, int] = {}
        """By segment: the turn that began it."""

    # --- references ---

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference of each block."""
        for block in blocks:
            self.more[block] = self.more.get(block, 0) + 1

    def let_go(self, block: int) -> bool:
        """Give one reference up; say whether it was the last."""
        left = self.more.get(block, 0)
        if not left:
            return True
        if left == 1:
            del self.more[block]
        else:
            self.more[block] = left - 1
        return False

    def take_mapped(self, worker: Worker) -> list[int]:
        """Take all that a worker has mapped of segments from it."""
        blocks = [block for mapped in worker.maps.values() for block in mapped]
        worker.maps.clear()
        return blocks

    def haunt(self, worker: Worker) -> list[int]:
        """Take all that a worker has mapped of segments from it, for somebody whom the books do not know."""
        self.haunted.update(segment for segment, _ in worker.maps)
        return self.take_mapped(worker)

    # --- effects ---

    def drop(self, segment: int) -> None:
        """The store gives a segment up; its descriptors are closed by the driver's thread, some time."""
        self.dropping.add(segment)
        self.world.referee.drop_begins(segment)
        self.world.jobs.append(Dropping(segment, tuple(self.store.pop(segment, ()))))

    def copy(self, send: fx.Send) -> str | None:
        """Copy the descriptors of a packet that is to be sent; return why it cannot be."""
        if send.segment not in self.store:
            return "DELIVERY_FAILED"  # its last session died while the packet was on its way
        if self.world.random.random() < 0.04:
            return "DESCRIPTORS_EXHAUSTED"
        self.share(blocks_of(send))
        return None

    def keep(self, make: fx.Make) -> str | None:
        """The store takes a packet that was made, and copies go on; return why it does not."""
        if self.world.random.random() < 0.02:
            return "DESCRIPTORS_EXHAUSTED"
        self.store.setdefault(make.segment, []).extend(blocks_of(make))
        self.share(blocks_of(make))
        return None

    # --- what sessions do ---

    def create(self) -> None:
        world = self.world
        worker = world.borrowing.borrower()
        if worker:
            where, chance = world.where(), world.random.random()
            size = world.random.choice(WRONG_SIZES_MIB if chance < 0.03 else SIZES_MIB) * MIB
            name, label = world.model(worker), world.random.choice(LABELS) if chance < 0.98 else "A"
            asked = SegmentName(name.tenant, name.model, label)
            world.send(ev.CreateSegment(*world.ask(worker), asked, where, size, world.borrowing.wait_ns()))
            if chance < 0.08 and worker.makes and worker.process.alive:
                world.driver.slow_down()  # so that its death is told before its packets are made
                world.endings.die(worker.process, world.now)

    def seal(self) -> None:
        """A writer is done: mostly with all that it was sent, now and then it asks for what it may not."""
        world, holds = self.world, self.world.referee.sharing.holds
        writer = world.pick(lambda one: one.settled and self.written(one))
        segment = self.written(writer)[0] if writer else 77
        if world.random.random() < 0.1:
            writer = world.pick(lambda one: one.settled and holds.get(one.session))
            segment = next(iter(holds[writer.session])) if writer else 77
            segment = 77 if world.random.random() < 0.2 else segment
        if writer:
            world.send(ev.SealSegment(*world.ask(writer), segment))
            if world.random.random() < 0.25 and holds.get(writer.session, {}).get(segment):
                self.end_somehow(writer, segment)

    def end_somehow(self, writer: Worker, segment: int) -> None:
        """A writer does not wait for its seal."""
        world, chance = self.world, self.world.random.random()
        if chance < 0.6 or not writer.connected or world.state(writer) != "open":
            self.leave(writer, segment)
        elif chance < 0.85:
            world.endings.say_goodbye(writer)
        else:
            world.endings.die(writer.process, world.now)

    def written(self, worker: Worker) -> list[int]:
        """Return what a worker writes and has not sealed, once it was told that its create is done."""
        rows = self.world.broker.ledger.segments
        held = self.world.referee.sharing.holds.get(worker.session, {})
        known = [one for one, requests in held.items() if not worker.undone.issuperset(requests)]
        return [one for one in known if rows[one].writer == worker.session and rows[one].state == "writing"]

    def attach(self) -> None:
        """By its full name or by its own alone; at once, or waiting; mostly something that is there."""
        world = self.world
        chance = world.random.random()
        row = self.some(lambda row: row.state in ("writing", "sealing", "sealed"))
        if row and chance < 0.95:
            name = row.full_name()
        elif chance < 0.2 or chance >= 0.95:
            name = SegmentName(f"t{world.random.randrange(4)}", f"m{world.random.randrange(4)}", "a")
        else:
            return
        worker = world.pick(
            lambda one: one.process.alive and one.connected and not one.is_guest and one.tenant == name.tenant
        )
        if not worker or world.random.random() < 0.08:
            worker = world.asker()
        if not worker:
            return
        if world.random.random() < 0.3:
            name = SegmentName(name.tenant, ANY_MODEL, name.label)
        waits = WRONG_WAITS if world.random.random() < 0.01 else WAITS
        world.send(ev.AttachSegment(*world.ask(worker), name, world.random.choice(waits)))

    def detach(self) -> None:
        world = self.world
        holds = world.referee.sharing.holds
        worker = world.pick(lambda one: one.settled and holds.get(one.session))
        if not worker or world.random.random() < 0.03:
            self.detach_nothing()
            return
        self.leave(worker, next(iter(holds[worker.session])))

    def leave(self, worker: Worker, segment: int) -> None:
        """Unmap what one call brought, then say so. A liar says so and keeps it; some say so twice."""
        world, requests = self.world, self.world.referee.sharing.holds[worker.session][segment]
        request_id = requests[-1]
        lies = worker.liar and world.random.random() < 0.5
        if not lies and any(packet.make.request_id == request_id for packet in worker.sent):
            return
        if lies:
            self.haunted.add(segment)
            worker.lied.add(segment)
            worker.process.shared += worker.maps.pop((segment, request_id), ())
        else:
            world.drop(worker.maps.pop((segment, request_id), ()), "word")
        last = len(requests) == 1
        world.send(ev.DetachSegment(*world.ask(worker), segment))
        if last and world.random.random() < 0.2:
            world.send(ev.DetachSegment(*world.ask(worker), segment))

    def detach_nothing(self) -> None:
        """Let go of what one does not hold."""
        worker, row = self.world.asker(), self.some(lambda row: True)
        if worker and (row is None or row.segment not in self.world.referee.sharing.holds.get(worker.session, {})):
            self.world.send(ev.DetachSegment(*self.world.ask(worker), row.segment if row else 77))

    def delete(self) -> None:
        """Somebody of the tenant ends a segment, or the operator does: by its name, or this one of that name only."""
        world = self.world
        row = self.some(lambda row: row.state != "writing" or world.random.random() < 0.3)
        name = row.full_name() if row else SegmentName("t0", "m0", "a")
        if world.random.random() < 0.15:
            name = SegmentName(name.tenant, ANY_MODEL, name.label)
        generation = world.random.choice((0, 0, row.segment, row.segment, row.segment + 1)) if row else 0
        if world.random.random() < 0.25:
            world.send(ev.DeleteSegment(world.call(-1), None, 1, name, generation))
            return
        mine = world.random.random() < 0.95
        worker = world.pick(lambda one: one.process.alive and (one.tenant == name.tenant or not mine))
        if worker:
            left = bool(row and row.segment % 3 == 0)  # no draw of its own
            world.send(ev.DeleteSegment(*world.ask(worker), name, generation, left))

    def delete_all(self) -> None:
        """The operator ends every segment."""
        for row in list(self.world.broker.ledger.segments.values()):
            if row.state in ("writing", "sealing", "sealed"):
                name = row.full_name()
                self.world.send(ev.DeleteSegment(self.world.call(-1), None, 1, name, row.segment))

    def some(self, fits: Callable[[SegmentRow], bool]) -> SegmentRow | None:
        """Choose a segment; which others there are does not change which of two is preferred."""
        salt = self.world.salt
        fitting = [row for row in self.world.broker.ledger.segments.values() if fits(row)]
        key = self.began.get
        return max(fitting, key=lambda row: hash((key(row.segment, 0), salt))) if fitting else None
