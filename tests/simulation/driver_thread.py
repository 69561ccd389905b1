"""The driver's thread: what it makes, copies, looks at and closes, and how the event loop hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.processes import Closing, Found, Job, Look, Packet
from tests.simulation.sharing import Dropping, blocks_of
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.names import Location

if TYPE_CHECKING:
    from tests.simulation.world import World

MILLISECOND = 1_000_000
RESERVE = 60 * MIB
LOST = "GPU_IS_LOST"
"""What the driver says while the device does not answer."""


def loses_device(seed: int) -> bool:
    """Say whether the device falls off the bus now and then, in the world of this seed."""
    return seed % 16 == 1


class DriverThread:
    """One job at a time, and what the loop is told of each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lost_until = 0
        """Until when the device does not answer."""
        self.losses = 0

    def lose_device(self) -> None:
        """The device falls off the bus, for as long as a reset takes, or an operator."""
        if self.world.now >= self.lost_until:
            self.lost_until = self.world.now + self.world.random.choice((20, 900, 6_000)) * MILLISECOND
            self.losses += 1

    def take_state(self, lost: bool) -> None:
        """The loop tells the core whether the device answered, before what it showed."""
        books, says = self.world.broker.books, LOST if lost else ""
        if books.device_lost != says:
            books.device_lost = says
            self.world.events.append((self.world.now, f"device_lost {says}".rstrip()))

    def out_of_stock(self, where: Location, size: int, count: int) -> tuple[int, ...]:
        """Take blocks out of what is kept ready, the oldest first."""
        kept = self.world.stock.get((where, size), [])
        assert len(kept) >= count, f"{count} of {size} bytes are to go out of a stock of {len(kept)}"
        blocks = tuple(kept[:count])
        del kept[:count]
        assert all(self.world.exists[block] == (where, size) for block in blocks), "the stock is of another size"
        return blocks

    def take_stock(self, make: fx.Make) -> None:
        """A packet is of blocks that were never lent: from now on they are its extents."""
        assert not make.segment, "a segment is made of stock"
        for extent, block in zip(
            make.ids, self.out_of_stock(make.location, make.extent_bytes, len(make.ids)), strict=True
        ):
            assert extent not in self.world.exists, "an extent exists that was not made"
            self.world.exists[extent] = self.world.exists.pop(block)

    def stock_up(self, stock: fx.Stock) -> str | None:
        """Make an extent for the stock, or return why it cannot be made. It is the broker's when that is told."""
        failure = "DRIVER_FAILED" if self.world.random.random() < 0.15 else None
        failure = failure or self.refuse_to_make(stock.location, stock.extent_bytes)
        if failure is None:
            self.world.put(self.world.new_block(), stock.location, stock.extent_bytes)
        return failure

    def execute(self) -> None:
        """The driver takes some job: whose, and which of all that are asked, is not the core's to know."""
        if self.world.now >= self.world.slow_until or self.world.random.random() < 0.1:
            job = self.world.random.choice(self.world.jobs)
            if not isinstance(job, fx.Seal) or self.world.random.random() < 0.3:
                self.carry_out(job)

    def carry_out(self, job: Job) -> None:
        if isinstance(job, Dropping):  # what was asked before about a segment is done before
            job = next((one for one in self.world.jobs if one == fx.Seal(job.segment)), job)
        if isinstance(job, fx.Make | fx.Stock):  # what was let go of before is gone before
            before = self.world.jobs[: self.world.jobs.index(job)]
            job = next((one for one in before if isinstance(one, Closing)), job)
        self.world.jobs.remove(job)
        failure = None
        block = 0
        match job:
            case Closing(blocks):
                self.world.drop(blocks, "stock")
                return
            case fx.Stock():
                failure = self.stock_up(job)
                block = self.world.blocks
            case Look():
                lost = self.world.now < self.lost_until
                seen: ev.Seen = {"device": None, "host": None} if lost else self.world.seen()
                self.world.told.append(Found(job, self.world.now, seen=seen, lost=lost))
                return
            case fx.Make():
                failure = self.make(job)
            case fx.Send():
                failure = self.world.sharing.copy(job)
            case fx.Seal():
                failure = "DRIVER_FAILED" if self.world.random.random() < 0.3 else None
            case Dropping(_, blocks):
                self.world.drop(blocks, "segment")
        self.world.told.append(Found(job, self.world.now, failure=failure, block=block))

    def make(self, make: fx.Make) -> str | None:
        """Make a packet, or return why it cannot be made."""
        where, size = make.location, make.extent_bytes * len(make.ids)
        failure = self.refuse_to_make(where, size)
        if failure is not None:
            return failure
        if make.segment:
            self.world.put(make.ids.start, where, size)
        else:
            for extent in make.ids:
                self.world.put(extent, where, make.extent_bytes)
        return None

    def refuse_to_make(self, where: Location, size: int) -> str | None:
        """Return why the driver does not make so much, or None: the gate, or now and then a failure."""
        if self.world.now < self.lost_until:
            return "DRIVER_FAILED"
        free = self.world.device_free() if where == "device" else None
        if not policy.gate(free, size, RESERVE):
            return "DEVICE_FULL"
        if self.world.random.random() < 0.04:
            return self.world.random.choice(("DRIVER_FAILED", "DESCRIPTORS_EXHAUSTED", "INTERNAL"))
        return None

    def execute_and_hear(self) -> None:
        """The driver works on what it was asked for, and the event loop hears of it."""
        for _ in range(4):
            if self.world.jobs:
                self.execute()
            if self.world.told:
                self.hear()

    def hear(self) -> None:
        """The event loop takes what stands first in its queue."""
        found = self.world.told.popleft()
        if isinstance(found, ev.NotDelivered):
            self.world.send(found)
            return
        if isinstance(found, ev.InputsDrained):
            self.world.inputs_drained(found)
            return
        match found.job:
            case fx.Make() | fx.Send():
                self.hear_of_packet(found.job, found.failure)
            case fx.Seal(segment):
                done = ev.NotSealed(segment, found.failure, {}) if found.failure else ev.Sealed(segment)
                self.world.send(done)
            case fx.Stock(where, size):
                if found.failure is None:
                    self.world.stock.setdefault((where, size), []).append(found.block)
                self.world.send(ev.Stocked(where, size, made=found.failure is None))
            case Dropping(segment):
                self.world.sharing.dropping.discard(segment)
                self.world.send(ev.Dropped(segment))
            case Look(dead=worker) if worker is not None:
                assert found.seen is not None
                self.take_state(found.lost)
                self.world.send(ev.ProcessDied(worker.session, found.seen))
                self.world.resuming.say_last(worker)
                self.world.endings.lose(worker)
            case Look():
                assert found.seen is not None
                self.world.auditing = False
                self.world.audited_at = self.world.now
                self.take_state(found.lost)
                self.world.send(ev.Audit(found.seen))
                if not self.world.daemons.dead:
                    self.world.referee.audited(found.at, found.seen)

    def hear_of_packet(self, make: fx.Make | fx.Send, failure: str | None) -> None:
        """Queue a packet on its session's connection, if it could be made and there still is one."""
        worker = self.world.workers[make.session]
        worker.makes.remove(make)
        packet = (make.session, make.request_id, make.part)
        if failure is None:
            failure = "DELIVERY_FAILED" if not worker.connected else None
            if failure is None and isinstance(make, fx.Make) and make.segment:
                failure = self.world.sharing.keep(make)
            if failure is not None:
                self.world.drop(blocks_of(make), "word")
        if failure is not None:
            self.world.send(ev.NotMade(*packet, failure, {}))
            if isinstance(make, fx.Make) and make.segment and self.world.random.random() < 0.3:
                self.world.leave_model(worker)
            return
        queued = any(one.place == "queue" for one in worker.sent) or self.world.random.random() < 0.2
        worker.packets += 1
        worker.sent.append(Packet(make, "queue" if queued else "socket", worker.packets))
        if self.world.random.random() < 0.01:
            self.world.endings.lose(worker)
        self.world.send(ev.Made(*packet))

    def audit(self) -> None:
        if not self.world.auditing:
            self.world.auditing = True
            self.world.jobs.append(Look(None))

    def slow_down(self) -> None:
        self.world.slow_until = self.world.now + 800 * MILLISECOND
