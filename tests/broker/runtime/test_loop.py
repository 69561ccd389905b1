"""The loop carries out all effects of a step, in order and completely, also when a listener fails.

Its driver thread is real; the connections are fakes.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.loop_world import MODEL, World, play
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.denied import Denied, Reason
from membrokerd.runtime import deferrals
from membrokerd.runtime import loop as loop_module
from membrokerd.runtime import packets as packets_module


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


def test_waits_for_memory_end_when_their_time_has_come() -> None:
    """Nothing else happens meanwhile: the device is audited once an hour. The other request goes on waiting."""

    ended: list[fx.Waited] = []

    async def story(world: World) -> None:
        holder, waiter = await world.open(), await world.open()
        await world.allocate(holder, 32)
        long, short = world.allocate(waiter, wait=DEADLINE_SECONDS), world.allocate(waiter, 2, wait=0.02)
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

    play(story, audit_seconds=3_600, on_wait=ended.append)


@played_by(play)
async def test_an_answer_that_is_known_is_on_its_way_before_the_books_hear_of_the_packet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One packet is the whole of a small allocation. A large one's answer waits for the last of its packets."""
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


@played_by(play)
async def test_a_refusal_does_not_wait_for_ever_for_others(world: World) -> None:
    """Somebody always has more to say than one turn takes."""
    session, other = await world.open(), await world.open()
    world.queues[other].unread = 1
    refused = await asyncio.wait_for(world.allocate(session, size=1 << 40), DEADLINE_SECONDS)
    assert isinstance(refused, Denied)
    assert refused.reason is Reason.CAPACITY


@played_by(play)
async def test_a_refusal_waits_for_what_was_queued_and_no_longer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection has 100 bytes queued when 30 are read, and more come as they are read. Another one is silent."""
    monkeypatch.setattr(deferrals, "HEARING_SECONDS", 10)
    session, other = await world.open(), await world.open()
    talker = world.queues[other]
    talker.unread = 100
    refused = asyncio.ensure_future(world.allocate(session, size=1 << 40))
    await asyncio.sleep(0)
    talker.read(30)
    await refused
    assert 130 <= talker.heard < 130 + 2 * 30
    talker.unread, before = 0, talker.heard
    await world.allocate(session, size=1 << 40)
    assert talker.heard == before, "nobody had anything to say, and it was waited for"


@pytest.mark.parametrize("clock", ["perf_counter", "thread_time"])
@played_by(play)
async def test_a_refusal_waits_for_what_was_queued_where_the_machine_is_busy(
    world: World, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    """Each read takes twice as long as a call waits: others have the cores, or the virtual machine stands still."""
    passed, real = 0.0, getattr(time, clock)
    monkeypatch.setattr(time, clock, lambda: real() + passed)

    def stand_still() -> None:
        nonlocal passed
        passed += 2 * deferrals.HEARING_SECONDS

    session, other = await world.open(), await world.open()
    talker = world.queues[other]
    talker.unread = 100
    refused = asyncio.ensure_future(world.allocate(session, size=1 << 40))
    await asyncio.sleep(0)
    talker.read(30, stand_still)
    await refused
    assert talker.heard >= 130


@played_by(play)
async def test_a_seal_sends_to_those_who_wait_over_several_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand readers may wait for one seal. Here a turn has time for one packet of them; each gets its own."""
    monkeypatch.setattr(packets_module, "PORTION_SECONDS", 0)
    readers = 5
    writer = await world.open()
    made = await world.create(writer, 2 * MIB)
    sessions = [await world.open() for _ in range(readers)]
    waiting = [world.attach(session, wait=DEADLINE_SECONDS) for session in sessions]
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


@played_by(play, audit_seconds=3_600)
async def test_what_was_sent_before_a_deadline_is_heard_before_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon was stopped while a wait ended, and the release that ends it well lies in a socket."""
    monkeypatch.setattr(deferrals, "HEARING_SECONDS", DEADLINE_SECONDS)
    now = [loop_module.clock()]
    monkeypatch.setattr(loop_module, "clock", lambda: now[0])
    holder, waiter = await world.open(), await world.open()
    await world.allocate(holder, 32)
    asked = world.allocate(waiter, wait=0.02)
    await world.until(lambda: bool(world.loop.broker.waiting.waiters()))
    queue, read = world.queues[holder], asyncio.Event()

    def queued() -> int:
        read.set()
        return queue.unread

    queue.unread = 1
    monkeypatch.setattr(queue, "queued", queued)
    now[0] += 20_000_000
    await read.wait()
    assert not asked.done()
    await world.give_back(holder)
    queue.unread = 0
    assert (await asked).count == 1
    await world.give_back(waiter)


def test_no_deadline_passes_while_the_machine_sleeps() -> None:
    """Nobody can answer a recall in that time. In a time namespace, CLOCK_BOOTTIME says that it has slept for a day."""
    code = "import time; from membrokerd.runtime.loop import clock; print(abs(clock() - time.monotonic_ns()) // 10**9)"
    command = ["unshare", "--time", "--boottime", "86400", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"this user has no time namespaces: {done.stderr}")
    assert int(done.stdout) < 3_600, done.stderr


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


@pytest.mark.parametrize("fails", [False, True])
@played_by(play, audit_seconds=3600)
async def test_grants_and_failures_do_not_nest(world: World, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """A packet that is made at once is told to the core inside the step that granted it, which grants nothing more.

    One that fails at once makes room for the next that waits, whose packet fails as well.
    """

    def fail(*_: object, **__: object) -> list[int]:
        raise OSError("the driver has a defect")

    holder, waiters = await world.open(), [await world.open() for _ in range(32)]
    await world.allocate(holder, 32)
    count, size = 1, 2 * MIB
    if fails:
        count, size = 8, 8 * MIB
        monkeypatch.setattr(world.driver, "lend", fail)
    waits = [world.allocate(one, count, size=size, wait=DEADLINE_SECONDS) for one in waiters]
    given_back = asyncio.ensure_future(world.give_back(holder))
    await asyncio.sleep(0)
    assert sum(one.done() for one in waits) == 16, "they have had their turn in one step"
    await given_back
    for one in waits:
        assert isinstance(await one, Denied) == fails
    for session in waiters:
        await world.give_back(session)
