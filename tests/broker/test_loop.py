"""The loop carries out all that a step led to: in order, whole, and also when one of its listeners has a defect.

Here it has a real driver thread over the host driver; the connections, and where it matters the store, are fakes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import pytest
from tests.support.sizes import MIB

from membroker.v1 import admin_pb2
from membroker.vmm import DriverError, Location
from membroker.vmm.host.driver import HostDriver
from membroker.wire.frames import close_all
from membrokerd import loop as loop_module
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.machine import Broker
from membrokerd.core.recount import recount
from membrokerd.edge.convert import Refused
from membrokerd.edge.rpc.admin_service import AdminService
from membrokerd.executor import Executor
from membrokerd.loop import Loop
from membrokerd.restart.descriptor_store import Store

MODEL = ev.ModelName("t", "m")
WEIGHTS = ev.SegmentName("t", "m", "weights")
SECONDS = 10
"""So long a test waits for what must come."""
SEALED = 0x0010
"""F_SEAL_FUTURE_WRITE, for which Python 3.11 has no name."""

_T = TypeVar("_T")


class Failing(HostDriver):
    """The host driver. A test can make its next seal fail, and say which processes it sees."""

    seal_failure: Exception | None = None
    shown: list[tuple[int, int]] | Exception = []  # noqa: RUF012 - never changed in place
    lent = 0
    """Extents that were made, or are being made."""

    def __init__(self, total_bytes: int, host_bytes: int) -> None:
        super().__init__(total_bytes, host_bytes)
        self.asked_on: list[str] = []
        """The threads on which it was asked for processes."""
        self.go_on = threading.Event()
        self.go_on.set()

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        self.lent += count
        assert self.go_on.wait(SECONDS)
        return super().lend(size, count, location, sealable=sealable)

    def seal(self, descriptor: int) -> None:
        if self.seal_failure is not None:
            failure, self.seal_failure = self.seal_failure, None
            raise failure
        super().seal(descriptor)

    def processes(self) -> list[tuple[int, int]]:
        self.asked_on.append(threading.current_thread().name)
        assert self.go_on.wait(SECONDS)
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown


class Queue:
    """A connection whose peer does not read: packets stay queued, and their descriptors open."""

    def __init__(self) -> None:
        self.packets: list[fx.Make | fx.Send] = []
        self.descriptors: list[int] = []

    def deliver(self, packet: fx.Make | fx.Send, descriptors: list[int]) -> None:
        self.packets.append(packet)
        self.descriptors += descriptors

    def flush(self) -> None:
        """Nothing is ever sent."""

    def disconnect(self, why: str) -> None:
        raise AssertionError(why)

    def close(self) -> None:
        close_all(self.descriptors)
        self.descriptors = []


class Late(Store):
    """A store that says later whether it has taken something over, as another process would."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Callable[[OSError | None], None]] = []

    def keep(
        self, segment: int, ids: Sequence[int], descriptors: Sequence[int], done: Callable[[OSError | None], None]
    ) -> None:
        def decide(error: OSError | None) -> None:
            if error is None:
                Store.keep(self, segment, ids, descriptors, done)
            else:
                done(error)

        self.asked.append(decide)


class World:
    """A loop in motion: what it was asked, and what came of it."""

    def __init__(self, loop: Loop, driver: Failing) -> None:
        self.loop = loop
        self.driver = driver
        self.queues: dict[int, Queue] = {}
        self._requests = 100

    def ask(self, make_event: Callable[[int], ev.Event]) -> asyncio.Future[Any]:
        """Put a question; the future gets its answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.loop.ask(make_event, answer.set_result)
        return answer

    def request(self) -> int:
        self._requests += 1
        return self._requests

    async def open(self) -> int:
        """Open a session with a connection that queues, under the model."""
        process = str(self.request())
        opened = await self.ask(lambda call: ev.OpenSession(call, "t", 1, 1, process, False, "test"))
        session: int = opened.session
        self.loop.links[session] = self.queues[session] = Queue()
        await self.ask(lambda call: ev.RegisterModel(call, session, self.request(), MODEL, None, {}, False))
        return session

    def allocate(
        self, session: int, count: int = 1, size: int = 2 * MIB, wait: float | None = None
    ) -> asyncio.Future[Any]:
        number, wait_ns = self.request(), None if wait is None else int(wait * 1e9)
        return self.ask(lambda call: ev.Allocate(call, session, number, MODEL, "device", size, count, wait_ns))

    async def give_back(self, session: int) -> None:
        """Close all that was delivered, and release it."""
        self.queues[session].close()
        ids = tuple(self.loop.broker.ledger.sessions[session].extents)
        await self.ask(lambda call: ev.Release(call, session, self.request(), ids))
        for packet in self.queues[session].packets:
            self.loop.tell(ev.Acknowledge(session, packet.request_id, packet.part))
        self.queues[session].packets.clear()

    def create(self, session: int, size: int) -> asyncio.Future[Any]:
        number = self.request()
        return self.ask(lambda call: ev.CreateSegment(call, session, number, WEIGHTS, "device", size))

    def seal(self, session: int, segment: int) -> asyncio.Future[Any]:
        return self.ask(lambda call: ev.SealSegment(call, session, self.request(), segment))

    def attach(self, session: int, wait: float = 0) -> asyncio.Future[Any]:
        number, wait_ns = self.request(), int(wait * 1e9)
        return self.ask(lambda call: ev.AttachSegment(call, session, number, WEIGHTS, wait_ns))

    def detach(self, session: int, segment: int) -> asyncio.Future[Any]:
        return self.ask(lambda call: ev.DetachSegment(call, session, self.request(), segment))

    def delete(self) -> asyncio.Future[Any]:
        return self.ask(lambda call: ev.DeleteSegment(call, None, 0, WEIGHTS, 0))

    def lose(self, session: int) -> None:
        """The session's connection breaks."""
        del self.loop.links[session]
        self.loop.tell(ev.ConnectionLost(session))

    def used(self) -> int:
        info = self.driver.memory(Location.DEVICE)
        return info.used if info else -1

    def charged(self) -> int:
        return self.loop.broker.ledger.totals["device"].charged

    def keep_busy(self) -> None:
        """Give the driver's thread work, so that what is asked for next waits for its turn there."""
        self.loop.executor.close([], lambda _: None)

    async def look(self) -> None:
        """Wait until the driver's thread has done all that it was asked."""
        seen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.loop.executor.look(seen.set_result)
        await seen

    async def audit(self) -> None:
        """Wait until the device was audited once more."""
        before = self.loop.figures
        await self.until(lambda: self.loop.figures is not before)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for a state."""

        async def wait() -> None:
            while not true():
                await asyncio.sleep(0.001)

        await asyncio.wait_for(wait(), SECONDS)


def play(
    story: Callable[[World], Awaitable[_T]],
    store: Store | None = None,
    stock: int = 0,
    context_bytes: int = 0,
    audit_seconds: float = 0.05,
) -> _T:
    """Tell a story in a world of 64 MiB whose segments are made of extents of 4 MiB; nothing of it stays open.

    `stock` is how many extents may be kept ready, `context_bytes` what a process may use beyond its charge.
    """

    async def main() -> _T:
        driver = Failing(64 * MIB, 64 * MIB)
        driver.release(driver.create(2 * MIB))  # the driver's inotify descriptor is made before anything is counted
        before = descriptors()
        executor = Executor(driver, 0)
        executor.start(asyncio.get_running_loop())
        rules = policy.Rules(2 * MIB, {"device": 64 * MIB}, segment_extent_bytes=4 * MIB)
        rules = dataclasses.replace(rules, stock_extents=stock, stock_bytes=64 * MIB if stock else 0)
        kept = store if store is not None else Store()
        loop = Loop(Broker(rules, epoch=1), executor, kept, audit_seconds, context_bytes=context_bytes)
        loop.start()
        world = World(loop, driver)
        try:
            told = await asyncio.wait_for(story(world), SECONDS)
            await loop.stop(SECONDS)
            for queue in world.queues.values():
                queue.close()
            recount(loop.broker.ledger)
            assert len(kept) == 0
            assert world.used() - driver.stranger_bytes == world.charged() == 0
            assert descriptors() == before, "a descriptor is lost"
            return told
        finally:
            executor.stop()
            driver.close()

    return asyncio.run(main())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_reply_that_fails_does_not_lose_the_effects_behind_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books have changed by then: a session whose Goodbye cannot be answered must still be forgotten."""
    forgotten: list[int] = []

    def broken(result: object) -> None:
        raise RuntimeError("the connection has a defect")

    async def story(world: World) -> int:
        world.loop.on_forget.append(forgotten.append)
        session = await world.open()
        world.loop.ask(lambda call: ev.Goodbye(call, session, world.request()), broken)
        return session

    monkeypatch.setattr(logging.getLogger("membrokerd"), "propagate", True)
    with caplog.at_level(logging.ERROR, logger="membrokerd"):
        assert forgotten == [play(story)]
    assert "a fault of the broker" in caplog.text


# --- segments ---


def test_a_segment_is_written_sealed_attached_and_dropped() -> None:
    """Writer and reader get descriptors of their own; the memory is there once, freed with the last descriptor."""

    async def story(world: World) -> None:
        writer, reader = await world.open(), await world.open()
        made = await world.create(writer, 6 * MIB)
        assert (made.state, made.extents, made.size) == ("writing", 2, 6 * MIB)
        store = world.loop.store
        mine = world.queues[writer].descriptors
        assert [os.fstat(one).st_size for one in mine] == [4 * MIB, 2 * MIB]
        assert [packet.segment for packet in world.queues[writer].packets] == [made.segment] * 2
        waiting = world.attach(reader, wait=SECONDS)
        assert (await world.seal(writer, made.segment)).state == "sealed"
        assert all(fcntl.fcntl(one, fcntl.F_GET_SEALS) & SEALED for one in mine)
        assert (await waiting).sessions == 2
        theirs = world.queues[reader].descriptors
        assert [os.fstat(one).st_ino for one in theirs] == [os.fstat(one).st_ino for one in mine]
        assert not {*mine, *theirs} & {*store.lend(made.segment, range(made.segment + 1, made.segment + 3))}
        assert not any(os.get_inheritable(one) for one in (*mine, *theirs))
        assert (len(store), world.used(), world.charged()) == (2, 6 * MIB, 6 * MIB)
        for session in (writer, reader):
            world.queues[session].close()
            await world.detach(session, made.segment)
        assert world.used() == 6 * MIB, "the broker keeps it"
        assert (await world.delete()).state == "ending"
        await world.until(lambda: not world.charged())
        assert world.used() == 0

    play(story)


def test_nothing_is_delivered_before_the_store_has_it() -> None:
    """Who got a segment's descriptors must not be left with one that ends with this process."""
    store = Late()

    async def story(world: World) -> None:
        writer = await world.open()
        created = world.create(writer, 6 * MIB)
        await world.until(lambda: len(store.asked) == 2)
        assert not world.queues[writer].packets
        assert not created.done()
        store.asked[0](None)
        assert [packet.part for packet in world.queues[writer].packets] == [0]
        assert not created.done()
        store.asked[1](None)
        assert [packet.part for packet in world.queues[writer].packets] == [0, 1]
        made = await created
        await world.detach(writer, made.segment)
        await world.until(lambda: not world.charged())

    play(story, store)


@pytest.mark.parametrize("second", [None, OSError(errno.EMFILE, "Too many open files")], ids=["second held", "neither"])
def test_a_packet_that_the_store_does_not_take_is_not_made(second: OSError | None) -> None:
    """It is credited, its descriptors are closed, the writer is told why; what was taken ends with the rest."""
    store = Late()

    async def story(world: World) -> None:
        writer = await world.open()
        created = world.create(writer, 6 * MIB)
        await world.until(lambda: len(store.asked) == 2)
        store.asked[0](OSError(errno.ENOSPC, "No space left on device"))
        assert world.charged() == world.used() == 2 * MIB
        store.asked[1](second)
        refused = await created
        assert refused.reason is Reason.DESCRIPTORS_EXHAUSTED
        assert "No space left" in refused.numbers["driver_says"]
        (segment,) = world.loop.broker.ledger.segments
        if second is None:
            assert [packet.part for packet in world.queues[writer].packets] == [1]
            world.queues[writer].close()
            await world.detach(writer, segment)
        else:
            assert not world.queues[writer].packets
            assert isinstance(await world.detach(writer, segment), Denied), "it never held it"
        await world.until(lambda: not world.loop.broker.ledger.segments)

    play(story, store)


def test_a_connection_that_ends_while_the_store_takes_over_loses_nothing() -> None:
    """The store has the packet and the writer is gone: nothing is sent, and the store gives it up again."""
    store = Late()

    async def story(world: World) -> None:
        writer = await world.open()
        created = world.create(writer, 4 * MIB)
        await world.until(lambda: len(store.asked) == 1)
        world.lose(writer)
        store.asked[0](None)
        assert (await created).reason is Reason.DELIVERY_FAILED
        assert not world.queues[writer].packets
        await world.until(lambda: not world.loop.broker.ledger.segments)

    play(story, store)


def test_a_connection_that_ends_before_the_packet_is_made_loses_nothing() -> None:
    store = Late()

    async def story(world: World) -> None:
        writer = await world.open()
        world.keep_busy()
        created = world.create(writer, 6 * MIB)
        world.lose(writer)
        assert (await created).reason is Reason.DELIVERY_FAILED
        assert not store.asked, "nobody would ever have it"
        await world.until(lambda: not world.loop.broker.ledger.segments)

    play(story, store)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets the k-th copy of a descriptor from now on fail."""
    left = 0
    copy = os.dup

    def dup(descriptor: int) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return copy(descriptor)

    def fail(at: int) -> None:
        nonlocal left
        left = at

    monkeypatch.setattr(loop_module.os, "dup", dup)
    return fail


@pytest.mark.parametrize("at", [1, 2])
def test_a_create_without_descriptors_for_its_copies_leaves_nothing(scarce: Callable[[int], None], at: int) -> None:
    """The broker has the memory and no descriptor left to pass on: the create fails, and all of it goes back."""

    async def story(world: World) -> None:
        writer = await world.open()
        scarce(at)
        assert (await world.create(writer, 8 * MIB)).reason is Reason.DESCRIPTORS_EXHAUSTED
        assert not world.queues[writer].packets
        await world.until(lambda: not world.loop.broker.ledger.segments)

    play(story)


def test_a_packet_that_could_not_be_copied_is_not_kept(scarce: Callable[[int], None]) -> None:
    """The first packet was delivered, the second could not be copied and is credited: then it must not exist."""

    async def story(world: World) -> tuple[int, int]:
        writer = await world.open()
        scarce(2)
        assert (await world.create(writer, 6 * MIB)).reason is Reason.DESCRIPTORS_EXHAUSTED
        await world.look()
        told = world.used(), world.charged()
        (segment,) = world.loop.broker.ledger.segments
        world.queues[writer].close()
        await world.detach(writer, segment)
        await world.until(lambda: not world.loop.broker.ledger.segments)
        return told

    used, charged = play(story)
    assert used == charged


@pytest.mark.parametrize("at", [1, 2])
def test_an_attach_without_descriptors_for_its_copies_holds_nothing(scarce: Callable[[int], None], at: int) -> None:
    """The segment stays as it was, and the next attach gets it."""

    async def story(world: World) -> None:
        writer, reader = await world.open(), await world.open()
        made = await world.create(writer, 8 * MIB)
        await world.seal(writer, made.segment)
        scarce(at)
        assert (await world.attach(reader)).reason is Reason.DESCRIPTORS_EXHAUSTED
        assert not world.queues[reader].packets
        assert isinstance(await world.detach(reader, made.segment), Denied)
        assert (await world.attach(reader)).sessions == 2
        for session in (writer, reader):
            await world.detach(session, made.segment)
        await world.delete()
        await world.until(lambda: not world.charged())

    play(story)


def test_a_segment_that_ends_while_copies_are_queued_leaks_nothing() -> None:
    """The reader said that it has let go, and its packet still waits for a full socket: the copies are its link's."""

    async def story(world: World) -> None:
        writer, reader = await world.open(), await world.open()
        made = await world.create(writer, 8 * MIB)
        world.queues[writer].close()
        await world.seal(writer, made.segment)
        await world.attach(reader)
        for session in (writer, reader):
            await world.detach(session, made.segment)
        await world.delete()
        await world.until(lambda: not world.charged())
        assert len(world.loop.store) == 0
        assert [os.fstat(one).st_size for one in world.queues[reader].descriptors] == [4 * MIB] * 2
        assert world.used() == 8 * MIB
        world.queues[reader].close()

    play(story)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (DriverError("fcntl", "EIO", errno.EIO), Reason.DRIVER_FAILED),
        (ValueError("a bug of the driver's own"), Reason.INTERNAL),
    ],
    ids=str,
)
def test_a_seal_that_fails_can_be_asked_for_again(failure: Exception, why: Reason) -> None:
    """Attaches that wait for the seal wait on; the second seal serves them."""

    async def story(world: World) -> None:
        writer, reader = await world.open(), await world.open()
        made = await world.create(writer, 8 * MIB)
        waiting = world.attach(reader, wait=SECONDS)
        world.driver.seal_failure = failure
        assert (await world.seal(writer, made.segment)).reason is why
        assert not waiting.done()
        assert (await world.seal(writer, made.segment)).state == "sealed"
        assert (await waiting).state == "sealed"
        for session in (writer, reader):
            await world.detach(session, made.segment)
        await world.delete()
        await world.until(lambda: not world.charged())

    play(story)


def test_a_segment_that_is_deleted_while_it_is_sealed_is_closed_behind_the_seal() -> None:
    """The driver thread still has its descriptors in hand: they are closed after it, not under it."""

    async def story(world: World) -> None:
        writer = await world.open()
        made = await world.create(writer, 8 * MIB)
        sealing = world.seal(writer, made.segment)
        deleted, left = world.delete(), world.detach(writer, made.segment)
        assert (await sealing).reason is Reason.WRITER_DIED
        assert (await deleted).state == "ending"
        await left
        await world.until(lambda: not world.loop.broker.ledger.segments)

    play(story)


def test_waits_end_when_their_time_has_come() -> None:
    """The first to end comes second; it is told without anybody's doing, and the other waits on."""

    async def story(world: World) -> None:
        writer, patient, hasty = await world.open(), await world.open(), await world.open()
        made = await world.create(writer, 2 * MIB)
        long, short = world.attach(patient, wait=SECONDS), world.attach(hasty, wait=0.02)
        assert (await short).reason is Reason.SEGMENT_NOT_SEALED
        assert not long.done()
        again = world.attach(hasty, wait=0.02)
        assert (await again).reason is Reason.SEGMENT_NOT_SEALED
        await world.seal(writer, made.segment)
        assert (await long).sessions == 2
        for session in (writer, patient):
            await world.detach(session, made.segment)
        await world.delete()
        await world.until(lambda: not world.charged())

    play(story)


def test_waits_for_memory_end_when_their_time_has_come() -> None:
    """Nothing else happens meanwhile: the device is audited once an hour. The other request goes on waiting."""

    async def story(world: World) -> None:
        ended: list[fx.Waited] = []
        world.loop.observe_wait = ended.append
        holder, waiter = await world.open(), await world.open()
        await world.allocate(holder, 32)
        long, short = world.allocate(waiter, wait=SECONDS), world.allocate(waiter, 2, wait=0.02)
        refused = await short
        assert refused.reason is Reason.CAPACITY
        assert refused.numbers["waited_ms"] >= 20
        assert not long.done()
        await world.give_back(holder)
        assert (await long).count == 1
        await world.give_back(waiter)
        assert [(one.name, one.size, one.result) for one in ended] == [
            (MODEL, 4 * MIB, "refused"),
            (MODEL, 2 * MIB, "granted"),
        ]
        assert ended[0].waited_ns >= 20_000_000

    play(story, audit_seconds=3_600)


def test_an_answer_that_is_known_is_on_its_way_before_the_books_hear_of_the_packet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One packet is the whole of a small allocation. A large one's answer waits for the last of its packets."""

    async def story(world: World) -> None:
        session = await world.open()
        queue = world.queues[session]
        made: list[bool] = []

        def flush() -> None:
            making = world.loop.broker.books.making["device"]
            made.append(not making)

        queue.flush = flush  # type: ignore[method-assign]
        await world.allocate(session)
        assert made == [False], "it was flushed after the books had heard of it"
        assert [packet.answer for packet in queue.packets] == [fx.Allocated(1, 2 * MIB)]  # type: ignore[union-attr]
        (small,) = queue.packets
        world.loop.tell(ev.Acknowledge(session, small.request_id, 0))
        queue.packets.clear()
        monkeypatch.setattr(policy, "PACKET_EXTENTS", 2)
        await world.allocate(session, 4)
        assert [packet.answer for packet in queue.packets] == [None, None]  # type: ignore[union-attr]
        await world.give_back(session)

    play(story)


def test_a_refusal_does_not_wait_for_ever_for_others() -> None:
    """Somebody always has more to say than one turn takes."""

    async def story(world: World) -> None:
        session, io = await world.open(), asyncio.get_running_loop()

        def talk() -> None:
            world.loop.deferrals.cut_short += 1
            io.call_soon(talk)

        talk()
        refused = await asyncio.wait_for(world.allocate(session, size=1 << 40), 10)
        assert isinstance(refused, Denied)
        assert refused.reason is Reason.CAPACITY

    play(story)


def test_a_seal_sends_to_those_who_wait_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand readers may wait for one seal. Here a turn has time for one packet of them; each gets its own."""
    monkeypatch.setattr(loop_module, "SHARE_SECONDS", 0)
    readers = 5

    async def story(world: World) -> None:
        writer = await world.open()
        made = await world.create(writer, 2 * MIB)
        sessions = [await world.open() for _ in range(readers)]
        waiting = [world.attach(session, wait=SECONDS) for session in sessions]
        sealed = world.seal(writer, made.segment)
        served = [0]

        def look() -> None:
            now = sum(bool(world.queues[session].packets) for session in sessions)
            if now != served[-1]:
                served.append(now)
            if now < readers:
                asyncio.get_running_loop().call_soon(look)

        look()
        await sealed
        for answer in waiting:
            assert (await answer).state == "sealed"
        assert served == list(range(readers + 1))
        for session in (writer, *sessions):
            world.queues[session].close()
            await world.detach(session, made.segment)
        await world.delete()
        await world.until(lambda: world.charged() == 0)

    play(story)


def test_a_timer_that_comes_early_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's clock is not the core's: here the core's runs at half the speed."""
    true, began = loop_module.clock, loop_module.clock()
    monkeypatch.setattr(loop_module, "clock", lambda: began + (true() - began) // 2)

    async def story(world: World) -> None:
        writer, reader = await world.open(), await world.open()
        made = await world.create(writer, 2 * MIB)
        assert (await world.attach(reader, wait=0.02)).reason is Reason.SEGMENT_NOT_SEALED
        await world.detach(writer, made.segment)
        await world.until(lambda: not world.charged())

    play(story)


def test_a_dead_holders_segment_is_settled_by_the_device() -> None:
    """The packet lay in the dead reader's socket: it is charged until that is closed, and the device shows it."""

    async def story(world: World) -> None:
        writer, reader = await world.open(), await world.open()
        made = await world.create(writer, 8 * MIB)
        await world.seal(writer, made.segment)
        await world.attach(reader)
        world.queues[writer].close()
        await world.detach(writer, made.segment)
        await world.delete()
        world.lose(reader)
        world.loop.process_died(reader)
        totals = world.loop.broker.ledger.totals["device"]
        await world.until(lambda: totals.releasing == 8 * MIB)
        assert len(world.loop.store) == 0
        revision = world.loop.broker.ledger.revision
        for _ in range(3):
            await world.audit()
        assert (totals.releasing, world.loop.broker.ledger.revision) == (8 * MIB, revision)
        world.queues[reader].close()
        await world.until(lambda: not totals.releasing)

    play(story)


# --- the stock ---


async def filled(world: World, count: int) -> None:
    """Wait until so many extents are ready, and no more are to come."""
    await world.until(lambda: world.loop.stocked == count)
    await world.look()
    assert world.loop.stocked == count


def stock(world: World) -> int:
    return world.loop.broker.ledger.totals["device"].stock


def test_the_second_of_a_size_is_there_already() -> None:
    """Nothing is made when it is asked for: it was, and what is given out is new, zero, and nobody else's."""

    async def story(world: World) -> None:
        session = await world.open()
        await world.allocate(session)
        await filled(world, 2)
        assert (stock(world), world.used(), world.charged()) == (4 * MIB, 6 * MIB, 2 * MIB)
        before = world.driver.lent
        answer = world.allocate(session, count=2)
        assert answer.done(), "it was not there"
        assert (world.driver.lent, world.loop.stocked, stock(world)) == (before, 0, 0)
        mine = world.queues[session].descriptors
        assert len({os.fstat(one).st_ino for one in mine}) == 3
        assert not any(os.get_inheritable(one) for one in mine)
        assert all(os.pread(one, 2 * MIB, 0) == bytes(2 * MIB) for one in mine)
        await filled(world, 4)
        await world.give_back(session)
        assert world.used() == stock(world) == 8 * MIB

    play(story, stock=4)


def test_what_is_in_the_way_is_closed_before_more_is_made() -> None:
    """All of the device is wanted at once: the stock goes first, in the very order of the effects."""

    async def story(world: World) -> None:
        session = await world.open()
        await world.allocate(session)
        await filled(world, 2)
        made = await world.allocate(session, count=31)
        assert made.count == 31
        assert (world.charged(), world.used(), world.loop.stocked) == (64 * MIB, 64 * MIB, 0)
        await world.give_back(session)
        await world.look()

    play(story, stock=2)


@pytest.mark.parametrize("count", [1, 12])
def test_a_full_device_gets_what_the_stock_holds(count: int) -> None:
    """Another program took the GPU; the books have room, and what is ready, of another size, is what is missing."""

    async def story(world: World) -> None:
        session = await world.open()
        await world.allocate(session, size=4 * MIB)
        await filled(world, 2)
        world.driver.stranger_bytes = 64 * MIB - 12 * MIB - count * 2 * MIB + 2 * MIB
        made = await world.allocate(session, count=count)
        assert made.count == count
        assert world.loop.stocked == 0 or stock(world) == world.loop.stocked * 2 * MIB
        world.driver.stranger_bytes = 0
        await world.give_back(session)

    play(story, stock=2)


def test_stock_for_a_connection_that_is_gone_is_closed() -> None:
    """It left the stock for a session that nobody can reach by now: credited, closed, and not given to another."""

    async def story(world: World) -> None:
        session = await world.open()
        await world.allocate(session)
        await filled(world, 2)
        queue, world.loop.links = world.loop.links[session], {}
        refused = await world.allocate(session)
        assert refused.reason is Reason.DELIVERY_FAILED
        assert (world.charged(), world.loop.stocked, stock(world)) == (2 * MIB, 1, 2 * MIB)
        assert world.used() == 4 * MIB
        world.loop.links[session] = queue
        await world.give_back(session)

    play(story, stock=2)


def test_a_stop_closes_what_is_ready_and_what_comes_to_it_late() -> None:
    """The thread was at one for the stock when the daemon was told to stop."""

    async def story(world: World) -> None:
        session = await world.open()
        await world.allocate(session)
        world.driver.go_on.clear()
        world.keep_busy()
        await world.until(lambda: world.driver.lent == 2)  # the first for the stock, on the thread
        await world.loop.stop(SECONDS)
        world.driver.go_on.set()
        await world.look()
        assert stock(world) == world.loop.stocked == 0
        await world.look()
        await world.give_back(session)

    play(story, stock=4)


def test_what_is_forgotten_after_a_stop_is_no_fault(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look comes in behind the stop, ten seconds after anybody asked: what it lets go of is closed by then."""
    ahead = 0
    true = loop_module.clock
    monkeypatch.setattr(loop_module, "clock", lambda: true() + ahead)

    async def story(world: World) -> None:
        nonlocal ahead
        session = await world.open()
        await world.allocate(session)
        await filled(world, 2)
        await world.loop.stop(SECONDS)
        ahead = 11_000_000_000
        world.loop.tell(ev.Audit({"device": 2 * MIB}))
        assert stock(world) == world.loop.stocked == 0
        await world.give_back(session)

    monkeypatch.setattr(logging.getLogger("membrokerd"), "propagate", True)
    with caplog.at_level(logging.ERROR, logger="membrokerd"):
        play(story, stock=2)
    assert "a fault of the broker" not in caplog.text


def test_what_nobody_asks_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 0
    true = loop_module.clock
    monkeypatch.setattr(loop_module, "clock", lambda: true() + ahead)

    async def story(world: World) -> None:
        nonlocal ahead
        session = await world.open()
        before = descriptors()
        await world.allocate(session)
        await filled(world, 2)
        await world.give_back(session)
        assert descriptors() == before + 2
        ahead = 10_500_000_000
        await world.until(lambda: not stock(world))
        await world.look()
        assert descriptors() == before
        assert world.used() == 0

    play(story, stock=2)


# --- suspects ---


def named(story: Callable[[World], Awaitable[None]], caplog: pytest.LogCaptureFixture, context_bytes: int) -> list[Any]:
    """Tell a story and return the warnings that came of it, as (event, fields)."""
    with caplog.at_level(logging.WARNING, logger="membrokerd"):
        play(story, context_bytes=context_bytes)
    return [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]


async def rise(world: World) -> None:
    """Somebody takes 32 MiB of the device, and the driver is asked who."""
    await world.audit()
    await world.audit()
    world.driver.stranger_bytes = 32 * MIB
    await world.until(lambda: bool(world.driver.asked_on))
    await world.look()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's log comes to pytest's."""
    monkeypatch.setattr(logging.getLogger("membrokerd"), "propagate", True)


@pytest.mark.usefixtures("heard")
def test_the_largest_suspects_are_named_and_no_more_than_eight(caplog: pytest.LogCaptureFixture) -> None:
    """A machine of many processes: the log names the first of them. A process with only a context is not a suspect."""

    async def story(world: World) -> None:
        world.driver.shown = [(100 + number, number * 100 * MIB) for number in range(20)]
        await rise(world)
        assert world.driver.asked_on == ["membrokerd-driver"]

    said = named(story, caplog, context_bytes=500 * MIB)
    assert {event for event, _ in said} == {"a process uses more of the device than it is charged"}
    assert [fields["pid"] for _, fields in said] == [*range(119, 111, -1)]
    assert said[0][1] == {
        "pid": 119,
        "command": said[0][1]["command"],
        "uses": "1.9 GiB",
        "charged": "0 B",
        "segments": "0 B",
        "sessions": "none",
        "models": "none",
    }


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("uses", "lines"), [([20], 1), ([], 1), ([20, 20], 0), ([600], 0)])
def test_a_rise_that_nobody_shows_is_said_and_one_of_contexts_is_not(
    caplog: pytest.LogCaptureFixture, uses: list[int], lines: int
) -> None:
    """32 MiB more are in use. A process with only a context is not a suspect, but its context may be the reason."""

    async def story(world: World) -> None:
        world.driver.shown = [(1 << 22 | number, size * MIB) for number, size in enumerate(uses)]
        await rise(world)

    said = named(story, caplog, context_bytes=600 * MIB)
    assert len(said) == lines
    for event, fields in said:
        assert "no process can be named" in event
        assert fields == {"risen": "32.0 MiB", "unaccounted": "32.0 MiB"}


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("failure", "event"),
    [
        (DriverError("nvmlDeviceGetComputeRunningProcesses", "NVML_ERROR_NOT_SUPPORTED", 3), "the driver does not say"),
        (ValueError("a defect"), "a fault of the broker"),
    ],
)
def test_a_driver_that_cannot_list_processes_is_told_and_serves_on(
    caplog: pytest.LogCaptureFixture, failure: Exception, event: str
) -> None:
    async def story(world: World) -> None:
        world.driver.shown = failure
        await rise(world)
        session = await world.open()
        assert (await world.allocate(session, count=8)).count == 8
        await world.give_back(session)

    ((said, fields),) = named(story, caplog, context_bytes=0)
    assert said.startswith(event)
    assert str(failure) in fields["error"]


def ask_who(world: World) -> asyncio.Task[Any]:
    """Ask as an operator does."""
    service = AdminService(world.loop, cast(Any, None), frozenset, lambda: None, cast(Any, None))
    return asyncio.create_task(service.ListProcesses(admin_pb2.ListProcessesRequest(), None))


@pytest.mark.usefixtures("heard")
def test_an_operator_is_told_why_the_driver_names_nobody() -> None:
    """No processes and no answer are two things."""

    async def story(world: World) -> None:
        assert not (await ask_who(world)).processes
        world.driver.shown = DriverError("scandir", "EMFILE", errno.EMFILE)
        with pytest.raises(Refused) as refused:
            await ask_who(world)
        assert refused.value.denied.reason is Reason.DRIVER_FAILED
        assert "EMFILE" in str(refused.value.denied.numbers["driver_says"])

    play(story)


def test_an_operator_that_leaves_before_the_driver_answers_harms_nothing() -> None:
    """Ctrl-C while the driver is asked: its answer comes and is nobody's."""

    async def story(world: World) -> None:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        world.driver.go_on.clear()
        asked = ask_who(world)
        await world.until(lambda: bool(world.driver.asked_on))
        asked.cancel()
        await asyncio.wait([asked])
        world.driver.go_on.set()
        await world.look()
        assert faults == []

    play(story)
