"""What the loop does for segments: seals, copies in the store, and descriptors when they are scarce."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from tests.broker.coroutines import played_by
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.loop_world import Late, World, play
from tests.support.sizes import MIB

from membrokerd.core.denied import Denied, Reason
from membrokerd.runtime import packets as packets_module


def play_late(story: Callable[[World], Awaitable[None]]) -> None:
    """Play a story beside a store that keeps nothing before the test says so."""
    play(story, Late())


async def ended(world: World, segment: int, *holders: int) -> None:
    """Let the holders go, delete the segment, and wait until its memory is free."""
    for session in holders:
        await world.detach(session, segment)
    await world.delete()
    await world.until(lambda: not world.charged())


@played_by(play_late)
async def test_nothing_is_delivered_before_the_store_has_it(world: World) -> None:
    """Who got a segment's descriptors must not be left with one that ends with this process."""
    store, writer = cast(Late, world.loop.store), await world.open()
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


@pytest.mark.parametrize("second", [None, OSError(errno.EMFILE, "Too many open files")], ids=["second held", "neither"])
@played_by(play_late)
async def test_a_packet_that_the_store_does_not_take_is_not_made(world: World, second: OSError | None) -> None:
    """It is credited, its descriptors are closed, the writer is told why; what was taken ends with the rest."""
    store, writer = cast(Late, world.loop.store), await world.open()
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


@played_by(play_late)
async def test_a_connection_that_ends_while_the_store_takes_over_loses_nothing(world: World) -> None:
    """The store has the packet and the writer is gone: nothing is sent, and the store gives it up again."""
    store, writer = cast(Late, world.loop.store), await world.open()
    created = world.create(writer, 4 * MIB)
    await world.until(lambda: len(store.asked) == 1)
    world.lose(writer)
    store.asked[0](None)
    assert (await created).reason is Reason.DELIVERY_FAILED
    assert not world.queues[writer].packets
    await world.until(lambda: not world.loop.broker.ledger.segments)


@played_by(play_late)
async def test_a_connection_that_ends_before_the_packet_is_made_loses_nothing(world: World) -> None:
    store, writer = cast(Late, world.loop.store), await world.open()
    world.keep_busy()
    created = world.create(writer, 6 * MIB)
    world.lose(writer)
    assert (await created).reason is Reason.DELIVERY_FAILED
    assert not store.asked, "nobody would ever have it"
    await world.until(lambda: not world.loop.broker.ledger.segments)


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

    monkeypatch.setattr(os, "dup", dup)
    return fail


@pytest.mark.parametrize("at", [1, 2])
@played_by(play)
async def test_a_create_without_descriptors_for_its_copies_leaves_nothing(
    world: World, scarce: Callable[[int], None], at: int
) -> None:
    """The broker has the memory and no descriptor left to pass on: the create fails, and all of it goes back."""
    writer = await world.open()
    scarce(at)
    assert (await world.create(writer, 8 * MIB)).reason is Reason.DESCRIPTORS_EXHAUSTED
    assert not world.queues[writer].packets
    await world.until(lambda: not world.loop.broker.ledger.segments)


@played_by(play)
async def test_a_packet_that_could_not_be_copied_is_not_kept(world: World, scarce: Callable[[int], None]) -> None:
    """The first packet was delivered, the second could not be copied and is credited: then it must not exist."""
    writer = await world.open()
    scarce(2)
    assert (await world.create(writer, 6 * MIB)).reason is Reason.DESCRIPTORS_EXHAUSTED
    await world.until(lambda: world.used() == world.charged())
    (segment,) = world.loop.broker.ledger.segments
    world.queues[writer].close()
    await world.detach(writer, segment)
    await world.until(lambda: not world.loop.broker.ledger.segments)


@pytest.mark.parametrize("at", [1, 2])
@played_by(play)
async def test_an_attach_without_descriptors_for_its_copies_holds_nothing(
    world: World, scarce: Callable[[int], None], at: int
) -> None:
    """The segment stays as it was, and the next attach gets it."""
    writer, reader = await world.open(), await world.open()
    made = await world.create(writer, 8 * MIB)
    await world.seal(writer, made.segment)
    scarce(at)
    assert (await world.attach(reader)).reason is Reason.DESCRIPTORS_EXHAUSTED
    assert not world.queues[reader].packets
    assert isinstance(await world.detach(reader, made.segment), Denied)
    assert (await world.attach(reader)).sessions == 2
    await ended(world, made.segment, writer, reader)


@played_by(play)
async def test_a_segment_that_ends_while_copies_are_queued_leaks_nothing(world: World) -> None:
    """The reader said that it has let go, and its packet waits for a full socket: the copies are its connection's."""
    writer, reader = await world.open(), await world.open()
    made = await world.create(writer, 8 * MIB)
    world.queues[writer].close()
    await world.seal(writer, made.segment)
    await world.attach(reader)
    await ended(world, made.segment, writer, reader)
    assert len(world.loop.store) == 0
    assert [os.fstat(one).st_size for one in world.queues[reader].descriptors] == [4 * MIB] * 2
    assert world.used() == 8 * MIB
    world.queues[reader].close()


@played_by(play)
async def test_a_segment_that_ends_while_its_packet_is_queued_holds_no_dead_session(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last session that held it dies between two turns, each of which has time for one packet."""
    monkeypatch.setattr(packets_module, "PORTION_SECONDS", 0)
    writer, other, reader = await world.open(), await world.open(), await world.open()
    made = await world.create(writer, 8 * MIB)
    await world.allocate(reader)
    world.attach(other, wait=DEADLINE_SECONDS)
    attached = world.attach(reader, wait=DEADLINE_SECONDS)
    await world.seal(writer, made.segment)
    assert len(world.loop.packets.unsent) == 1, "the reader's packet is to be sent in the next turn"
    for session in (writer, other):
        world.detach(session, made.segment)
    world.delete()
    world.lose(reader)
    world.loop.process_died(reader)
    for queue in world.queues.values():
        queue.close()
    assert (await attached).reason is Reason.DELIVERY_FAILED
    await world.until(lambda: reader not in world.loop.broker.ledger.sessions and not world.charged())


@played_by(play)
async def test_a_segment_that_is_deleted_while_it_is_sealed_is_closed_behind_the_seal(world: World) -> None:
    """The driver thread still has its descriptors in hand: they are closed after it, not under it."""
    writer = await world.open()
    made = await world.create(writer, 8 * MIB)
    sealing = world.seal(writer, made.segment)
    deleted, left = world.delete(), world.detach(writer, made.segment)
    assert (await sealing).reason is Reason.WRITER_DIED
    assert (await deleted).state == "ending"
    await left
    await world.until(lambda: not world.loop.broker.ledger.segments)
