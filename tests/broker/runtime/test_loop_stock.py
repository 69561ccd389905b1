"""How the loop fills the stock, lends from it, and closes it."""

from __future__ import annotations

import os

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.loop_world import World, play, stock
from tests.support.processes import descriptors
from tests.support.sizes import MIB

from membrokerd.core.denied import Reason
from membrokerd.runtime import loop as loop_module


async def filled(world: World, count: int) -> None:
    """Wait until so many extents are ready, and no more are to come."""
    await world.until(lambda: world.loop.packets.stocked == count)
    await world.look()
    assert world.loop.packets.stocked == count


@played_by(play, stock=4)
async def test_the_second_of_a_size_is_there_already(world: World) -> None:
    """Nothing is made when it is asked for: it was, and what is given out is new, zero, and nobody else's."""
    session = await world.open()
    await world.allocate(session)
    await filled(world, 2)
    assert (stock(world), world.used(), world.charged()) == (4 * MIB, 6 * MIB, 2 * MIB)
    before = world.driver.lent
    answer = world.allocate(session, count=2)
    assert answer.done(), "it was not there"
    assert (world.driver.lent, world.loop.packets.stocked, stock(world)) == (before, 0, 0)
    mine = world.queues[session].descriptors
    assert len({os.fstat(one).st_ino for one in mine}) == 3
    assert not any(os.get_inheritable(one) for one in mine)
    assert all(os.pread(one, 2 * MIB, 0) == bytes(2 * MIB) for one in mine)
    await filled(world, 4)
    await world.give_back(session)
    assert world.used() == stock(world) == 8 * MIB


@pytest.mark.parametrize("count", [1, 12])
@played_by(play, stock=2)
async def test_a_full_device_gets_what_the_stock_holds(world: World, count: int) -> None:
    """Another program took the GPU; the books have room, and what is ready, of another size, is what is missing."""
    session = await world.open()
    await world.allocate(session, size=4 * MIB)
    await filled(world, 2)
    world.driver.stranger_bytes = 64 * MIB - 12 * MIB - count * 2 * MIB + 2 * MIB
    made = await world.allocate(session, count=count)
    assert made.count == count
    assert world.loop.packets.stocked == 0 or stock(world) == world.loop.packets.stocked * 2 * MIB
    world.driver.stranger_bytes = 0
    await world.give_back(session)


@played_by(play, stock=2)
async def test_stock_for_a_connection_that_is_gone_is_closed(world: World) -> None:
    """It left the stock for a session that nobody can reach by now: credited, closed, and not given to another."""
    session = await world.open()
    await world.allocate(session)
    await filled(world, 2)
    queue = world.loop.connections.pop(session)
    refused = await world.allocate(session)
    assert refused.reason is Reason.DELIVERY_FAILED
    assert (world.charged(), world.loop.packets.stocked, stock(world)) == (2 * MIB, 1, 2 * MIB)
    assert world.used() == 4 * MIB
    world.loop.connections[session] = queue
    await world.give_back(session)


@played_by(play, stock=4)
async def test_a_stop_closes_what_is_ready_and_what_comes_to_it_late(world: World) -> None:
    """The thread was at one for the stock when the daemon was told to stop."""
    session = await world.open()
    await world.allocate(session)
    world.driver.go_on.clear()
    world.keep_busy()
    await world.until(lambda: world.driver.lent == 2)  # the first for the stock, on the thread
    await world.loop.stop(DEADLINE_SECONDS)
    world.driver.go_on.set()
    await world.look()
    assert stock(world) == world.loop.packets.stocked == 0
    await world.look()
    await world.give_back(session)


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
