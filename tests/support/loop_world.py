"""The loop with a real core and a real driver thread over the host driver; connections and stores are fakes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from membroker.vmm import Location
from membroker.vmm.host.driver import HostDriver
from membroker.wire.frames import close_all
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, SegmentName
from membrokerd.core.recount import recount
from membrokerd.device.executor import OWN, Executor
from membrokerd.restart.descriptor_store import Store
from membrokerd.runtime.loop import Loop
from tests.support.daemons import DEADLINE_SECONDS, until_async
from tests.support.processes import descriptors
from tests.support.sizes import MIB

MODEL = ModelName("t", "m")
WEIGHTS = SegmentName("t", "m", "weights")

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
        assert self.go_on.wait(DEADLINE_SECONDS)
        return super().lend(size, count, location, sealable=sealable)

    def seal(self, descriptor: int) -> None:
        if self.seal_failure is not None:
            failure, self.seal_failure = self.seal_failure, None
            raise failure
        super().seal(descriptor)

    def processes(self) -> list[tuple[int, int]]:
        self.asked_on.append(threading.current_thread().name)
        assert self.go_on.wait(DEADLINE_SECONDS)
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown


class Steady(Executor):
    """An executor that makes few extents at once, however long the last ones took: other processes have the cores."""

    _extent_seconds = property(lambda _: 50e-6, lambda _, measured: None)  # type: ignore[assignment]


class Queue:
    """A connection whose peer does not read: packets stay queued, and their descriptors open."""

    def __init__(self) -> None:
        self.packets: list[fx.Make | fx.Send] = []
        self.descriptors: list[int] = []
        self.heard = self.unread = 0

    def queued(self) -> int:
        return self.unread

    def read(self, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Read so many bytes in this turn and in each later one, until nothing is unread; `then` comes after each."""
        if self.unread:
            self.heard += count
            then()
            asyncio.get_running_loop().call_soon(self.read, count, then)

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
        self,
        tenant: str,
        segment: int,
        ids: Sequence[int],
        descriptors: Sequence[int],
        done: Callable[[OSError | None], None],
    ) -> None:
        def decide(error: OSError | None) -> None:
            if error is None:
                Store.keep(self, tenant, segment, ids, descriptors, done)
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

    async def open(self, model: ModelName = MODEL) -> int:
        """Open a session with a connection that queues, under the model."""
        process = str(self.request())
        opened = await self.ask(lambda call: ev.OpenSession(call, model.tenant, 1, 1, process, False, "test"))
        session: int = opened.session
        self.loop.connections[session] = self.queues[session] = Queue()
        await self.ask(lambda call: ev.RegisterModel(call, session, self.request(), model, None, {}, False))
        return session

    def allocate(
        self, session: int, count: int = 1, size: int = 2 * MIB, wait: float | None = None
    ) -> asyncio.Future[Any]:
        number, wait_ns = self.request(), None if wait is None else int(wait * 1e9)
        (model,) = self.loop.broker.ledger.sessions[session].models
        return self.ask(lambda call: ev.Allocate(call, session, number, model, "device", size, count, wait_ns))

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
        del self.loop.connections[session]
        self.loop.tell(ev.ConnectionLost(session))

    def used(self) -> int:
        info = self.driver.memory(Location.DEVICE)
        return info.used if info else -1

    def charged(self) -> int:
        return self.loop.broker.ledger.totals["device"].charged

    def keep_busy(self) -> None:
        """Give the driver's thread work, so that what is asked for next waits for its turn there."""
        self.loop.executor.close(OWN, [], lambda _: None)

    async def look(self) -> None:
        """Wait until the driver's thread has read what the device shows."""
        seen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.loop.executor.look(seen.set_result)
        await seen

    async def audit(self) -> None:
        """Wait until the device was audited once more."""
        before = self.loop.figures
        await self.until(lambda: self.loop.figures is not before)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for a state."""
        await until_async(true)


def play(
    story: Callable[[World], Awaitable[_T]],
    store: Store | None = None,
    stock: int = 0,
    context_bytes: int = 0,
    audit_seconds: float = 0.05,
    on_wait: Callable[[fx.Waited], None] = lambda waited: None,
) -> _T:
    """Tell a story in a world of 64 MiB whose segments are made of extents of 4 MiB; nothing of it stays open.

    `stock` is how many extents may be kept ready, `context_bytes` what a process may use beyond its charge.
    """

    async def main() -> _T:
        driver = Failing(64 * MIB, 64 * MIB)
        driver.release(driver.create(2 * MIB))  # the driver's inotify descriptor is made before anything is counted
        before = descriptors()
        executor = Steady(driver, 0)
        executor.start(asyncio.get_running_loop())
        rules = policy.Rules(2 * MIB, {"device": 64 * MIB}, segment_extent_bytes=4 * MIB)
        rules = dataclasses.replace(rules, stock_extents=stock, stock_bytes=64 * MIB if stock else 0)
        kept = store if store is not None else Store()
        loop = Loop(
            Broker(rules, epoch=1),
            executor,
            kept,
            audit_seconds=audit_seconds,
            context_bytes=context_bytes,
            on_wait=on_wait,
        )
        loop.start()
        world = World(loop, driver)
        try:
            told = await asyncio.wait_for(story(world), DEADLINE_SECONDS)
            await loop.stop(DEADLINE_SECONDS)
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


def stock(world: World) -> int:
    return world.loop.broker.ledger.totals["device"].stock
