"""Coroutines borrow: nothing holds up their loop, and a task that is cancelled leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
from tests.support import daemons
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB, PAGE
from tests.system.library.test_waiting import waiting

import membroker
from membroker import aio
from membroker.errors import OutOfMemory
from membroker.session.machine import MOST_PATIENT

CAPACITY = 64 * MIB
LONG = 600
Run = Callable[[Coroutine[Any, Any, Any]], Any]
both_loops = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon. At the end nothing is lent, and nobody waits."""
    with running({"capacity": CAPACITY, "host_capacity": CAPACITY}) as one:
        yield one
        daemons.until(lambda: not one.books().lent_bytes and not waiting(one))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine in a loop of this kind; it must end."""
    uvloop = getattr(request, "param", "asyncio") == "uvloop"
    factory = pytest.importorskip("uvloop").new_event_loop if uvloop else None

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(main, DEADLINE_SECONDS))

    return run


async def until(what: Callable[[], object]) -> None:
    """Wait until something is true. The loop goes on."""
    await asyncio.to_thread(daemons.until, what)


async def ended(task: asyncio.Task[Any]) -> BaseException | None:
    """Cancel a task, wait for its end, and return how it ended."""
    task.cancel()
    await asyncio.wait((task,))
    return asyncio.CancelledError() if task.cancelled() else task.exception()


@both_loops
def test_a_program(daemon: Daemon, run: Run) -> None:
    """Connect, register, borrow in each way, read the books, close."""

    async def main() -> None:
        async with aio.connect(daemon.endpoint()) as client:
            model = await client.model("m", virtual_capacity=CAPACITY)
            async with model.allocate(PAGE) as buffer:
                assert isinstance(buffer, membroker.Buffer)
                assert (await model.stats()).name == model.sync.resource_name
                assert (await model.available()).now_bytes == CAPACITY - PAGE
                assert daemon.books().lent_bytes == PAGE
            assert buffer.closed
            async with model.pool(page_size=PAGE) as pool:
                address = await pool.grow(4 * PAGE)
                assert address == pool.sync.base_address
                assert await pool.offload() == 4 * PAGE
                assert await pool.restore() == 4 * PAGE
                await pool.free(address)
                async with pool.allocate_anywhere(PAGE):
                    assert daemon.books().lent_bytes == PAGE
                assert daemon.books().lent_bytes == 0
            async with client.model("other"):
                assert [one.sessions for one in await client.models()] == [1, 1]
            async with model.create_segment("weights", PAGE) as segment:
                await aio.run(segment.seal)
                async with client.attach("weights") as attached:
                    assert attached.size == PAGE
            await client.delete_segment("weights")
            async with model.growable_buffer(0, CAPACITY, PAGE) as grown:
                assert await aio.run(grown.grow, PAGE, timeout=1) == 0
            with pytest.raises(OutOfMemory):
                await model.allocate(2 * CAPACITY)
        assert client.sync.closed

    run(main())


def test_the_loop_goes_on_beside_waits(daemon: Daemon, run: Run) -> None:
    """64 tasks wait for memory. Meanwhile the loop reads the books and borrows; then all of them get some."""

    async def main() -> None:
        async with aio.connect(daemon.endpoint()) as client:
            model = await client.model("m")
            held = [await model.allocate(PAGE) for _ in range(CAPACITY // PAGE)]

            async def handle() -> None:
                async with model.allocate(PAGE, timeout=LONG):
                    pass

            handlers = [asyncio.create_task(handle()) for _ in range(64)]
            await until(lambda: waiting(daemon) == MOST_PATIENT)
            assert (await model.stats()).sessions == 1
            with pytest.raises(OutOfMemory):
                await model.allocate(PAGE, timeout=0)
            assert not any(task.done() for task in handlers)
            await aio.run(held.pop().close)
            await asyncio.gather(*handlers)
            for buffer in held:
                await aio.run(buffer.close)

    run(main())


WAITS: dict[str, Callable[[aio.AsyncModel, aio.AsyncPool], Awaitable[Any]]] = {
    "a buffer": lambda model, _: model.allocate(PAGE, timeout=LONG),
    "a growable buffer": lambda model, _: model.growable_buffer(PAGE, CAPACITY, PAGE, timeout=LONG),
    "a segment": lambda model, _: model.create_segment("s", PAGE, timeout=LONG),
    "pages": lambda _, pool: pool.allocate(0, PAGE, timeout=LONG),
    "pages anywhere": lambda _, pool: pool.allocate_anywhere(PAGE, timeout=LONG),
    "a pool that grows": lambda _, pool: pool.grow(PAGE, timeout=LONG),
}


async def _as_task(what: Awaitable[Any]) -> Any:
    return await what


@both_loops
def test_tasks_are_cancelled(daemon: Daemon, run: Run) -> None:
    """Each call that waits ends in the broker before its task does; so do many at once, and one whose time is over."""

    async def main() -> None:
        async with aio.connect(daemon.endpoint()) as client:
            model = await client.model("m", virtual_capacity=CAPACITY)
            pool = await model.pool(page_size=PAGE)
            for what in WAITS.values():
                async with model.allocate(CAPACITY):
                    task = asyncio.create_task(_as_task(what(model, pool)))
                    await until(lambda: waiting(daemon) == 1)
                    assert isinstance(await ended(task), asyncio.CancelledError)
                    assert waiting(daemon) == 0
                assert daemon.books().lent_bytes == 0
                await pool.free(await pool.allocate(0, CAPACITY))
            async with model.allocate(CAPACITY):
                tasks = [asyncio.create_task(_as_task(model.allocate(PAGE, timeout=LONG))) for _ in range(16)]
                await until(lambda: waiting(daemon) == MOST_PATIENT)
                assert [type(await ended(task)) for task in tasks] == [asyncio.CancelledError] * 16
                assert waiting(daemon) == 0
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await model.allocate(PAGE, timeout=LONG)
                assert waiting(daemon) == 0

    run(main())


@pytest.mark.deep
@both_loops
def test_tasks_are_cancelled_at_any_moment(daemon: Daemon, run: Run) -> None:
    """Memory is free: the call is made, or not, or taken back; nothing is lent for a result that nobody has."""
    seed = chosen_seed()
    chance = random.Random(seed)

    async def main() -> None:
        async with aio.connect(daemon.endpoint()) as client:
            model = await client.model("m", virtual_capacity=CAPACITY)
            pool = await model.pool(page_size=PAGE)
            for what in list(WAITS.values()) * 60:
                task = asyncio.create_task(_as_task(what(model, pool)))
                await asyncio.sleep(chance.uniform(0, 0.003))  # the moment
                error = await ended(task)
                if error is None:
                    result = task.result()
                    await (pool.free(result) if isinstance(result, int) else aio.run(result.close))
                else:
                    assert isinstance(error, asyncio.CancelledError)
                await until(lambda: daemon.books().lent_bytes == 0)  # a segment is dropped a moment later

    run(main())


def test_a_coroutine_answers_recalls(daemon: Daemon, run: Run) -> None:
    """Another model needs memory: the coroutine releases in the loop's thread, and the other goes on.

    If it raises, the broker has its answer all the same.
    """

    async def main() -> None:
        async with aio.connect(daemon.endpoint()) as client, aio.connect(daemon.endpoint()) as other:
            lender = await client.model("lender")
            needy = await other.model("needy")
            held = [await lender.allocate(PAGE) for _ in range(CAPACITY // PAGE)]
            threads = []

            async def release(recall: membroker.Recall) -> None:
                threads.append(threading.get_ident())
                while recall.remaining and held:
                    await aio.run(held.pop().close)
                if len(threads) > 1:
                    raise RuntimeError("no")

            await lender.on_recall(release)
            for _ in range(2):
                async with needy.allocate(4 * PAGE, timeout=LONG):
                    await until(lambda: lender.sync.pending_recall is None)
                held += [await lender.allocate(PAGE) for _ in range(4)]
            assert set(threads) == {threading.get_ident()}
            await lender.on_recall(None)
            for buffer in held:
                await aio.run(buffer.close)

    run(main())


def test_a_loop_that_ends_first(daemon: Daemon) -> None:
    """The program drops its loop while a call is under way: what it returns is closed."""
    with membroker.connect(daemon.endpoint()) as client:
        model = client.model("m")
        held = model.allocate(CAPACITY)
        loop = asyncio.new_event_loop()
        waits = loop.create_task(_as_task(aio.AsyncModel(model).allocate(PAGE, timeout=LONG)))
        loop.run_until_complete(until(lambda: waiting(daemon) == 1))
        loop.close()
        del waits
        held.close()
