"""The story of the books: whatever they went through, a few facts make the same ones, and life goes on from there."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tests.simulation.world import CAPACITIES, World

from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.checkpoint import checkpoint_facts
from membrokerd.core.ledger import Ledger, replay
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, SegmentName
from membrokerd.core.recount import recount

NAME = ModelName("acme", "llama")
SEEDS = (31, 32)
TURNS = 6_000
EVERY = 23


def books(ledger: Ledger) -> dict[str, Any]:
    """Return all that a story tells of a ledger: every field of every row, and the totals without their stock."""
    left_out = ("revision", "touched", "quotas")
    told = {name: value for name, value in vars(ledger).items() if name not in left_out}
    return told | {"totals": {where: dataclasses.replace(total, stock=0) for where, total in ledger.totals.items()}}


def told(facts: Iterable[ft.Fact]) -> Ledger:
    """Return the ledger that a story makes, with its sums counted anew."""
    ledger = replay(CAPACITIES, facts)
    recount(ledger)
    return ledger


@pytest.mark.deep
def test_a_successor_has_the_same_books_at_any_time() -> None:
    """Worlds run wild; now and then their books are told, and each time the story makes every row and sum again."""
    states = Counter[str]()
    for seed in SEEDS:
        world = World(seed)
        for number in range(TURNS):
            world.turn(number)
            ledger = world.broker.ledger
            leaving = any(row.state == "leaving" for row in ledger.sessions.values())  # which they are hardly ever
            if leaving or number % EVERY == 0:
                assert books(told(checkpoint_facts(ledger))) == books(ledger), f"seed {seed}, turn {number}"
                states.update(what_there_is(ledger))
    wanted = {f"session {state}" for state in ("open", "leaving", "detached", "releasing")}
    wanted |= {
        f"segment {state}" for state in ("writing", "sealing", "sealed", "ending", "retired", "dropping", "releasing")
    }
    wanted |= {"made in part", "doubted", "held twice", "declared", "idle"}
    assert wanted <= set(states), f"the worlds were too quiet: {wanted - set(states)}"


def what_there_is(ledger: Ledger) -> Iterator[str]:
    """Yield what the books show that a story could forget."""
    for session in ledger.sessions.values():
        yield f"session {session.state}"
    for row in ledger.segments.values():
        yield f"segment {row.state}"
        if row.extents < len(row.ids):
            yield "made in part"
        if row.uncertain:
            yield "doubted"
        if max(row.holders.values(), default=0) > 1:
            yield "held twice"
    for model in ledger.models.values():
        if model.charges["device"].declared:
            yield "declared"
        if model.idle_since and not model.sessions:
            yield "idle"


@pytest.mark.deep
def test_a_story_is_of_the_moment_when_it_was_begun() -> None:
    """It is told while the world goes on, as when the journal is compacted: what comes later is not in it."""
    world = World(seed := 35)
    for number in range(2_000):
        world.turn(number)
    for number in range(2_000, 3_000):
        ledger = world.broker.ledger
        before, facts, seen = copy.deepcopy(books(ledger)), checkpoint_facts(ledger), len(world.history)
        world.turn(number)
        replayed = told(facts)
        assert books(replayed) == before, f"seed {seed}, turn {number}"
        for fact in world.history[seen:]:
            replayed.apply(fact)
        assert books(replayed) == books(world.daemons.books)


def test_a_story_is_as_short_as_the_books() -> None:
    """A worker borrows and gives back a million times, and keeps three pages, two of them side by side."""
    ledger = Ledger(CAPACITIES)
    began = ft.SessionBegan(1, "acme", 2, 3, "pidfd:4", False, "toy", 5)
    asked = ft.ModelBegan(NAME, 1 << 30, {"device": 1 << 29})
    for fact in (began, asked, ft.ModelJoined(NAME, 1)):
        ledger.apply(fact)
    for first in range(100, 600, 2):
        ledger.apply(ft.Debited(1, NAME, "device", 4, first, 2))
        ledger.apply(ft.Credited(1, range(first, first + 2), "released"))
    for first in (700, 701, 800):
        ledger.apply(ft.Debited(1, NAME, "device", 4, first, 1))
    assert list(checkpoint_facts(ledger)) == [
        asked,
        began,
        ft.ModelJoined(NAME, 1),
        ft.Debited(1, NAME, "device", 4, 700, 2),
        ft.Debited(1, NAME, "device", 4, 800, 1),
        ft.ModelCarried(NAME, {"device": 12, "host": 0}, 503, 500, 0),
    ]


def test_what_a_worker_attaches_again_and_again_is_told_once() -> None:
    """It never detaches: the journal, which begins anew with this, must not grow with it for ever."""
    ledger = Ledger(CAPACITIES)
    ledger.apply(ft.ModelBegan(NAME, None, {}))
    ledger.apply(ft.SessionBegan(1, "acme", 2, 3, "pidfd:4", False, "toy", 5))
    ledger.apply(ft.SegmentBegan(2, NAME, "s", "device", 4, 4, 3, 1, 1, 0))
    for _ in range(1_000):
        ledger.apply(ft.SegmentHeld(2, 1))
    facts = list(checkpoint_facts(ledger))
    assert len(facts) < 10
    assert books(told(facts)) == books(ledger)
    recount(told([*facts, ft.SegmentLeft(2, 1, 1_000, "detached")]))


def test_extents_side_by_side_of_different_sizes_are_told_apart() -> None:
    """One run has one size: else the sum of two that differ would be the sum of neither."""
    ledger = Ledger(CAPACITIES)
    for fact in (ft.SessionBegan(1, "acme", 2, 3, "p", False, "toy", 5), ft.ModelBegan(NAME, None, {})):
        ledger.apply(fact)
    ledger.apply(ft.Debited(1, NAME, "device", 4, 10, 2))
    ledger.apply(ft.Debited(1, NAME, "device", 6, 12, 2))
    assert books(told(checkpoint_facts(ledger))) == books(ledger)


@pytest.mark.parametrize("credited", [range(10, 12), range(12, 13), range(11, 13), range(10, 13)])
def test_what_a_segment_is_charged_no_more(credited: range) -> None:
    """A create failed in part, with the shorter last extent or without it: what is left adds up to the same."""
    ledger = Ledger(CAPACITIES)
    for fact in (
        ft.SessionBegan(1, "acme", 2, 3, "p", False, "toy", 5),
        ft.ModelBegan(NAME, None, {}),
        ft.SegmentBegan(9, NAME, "weights", "device", 8, 2, 10, 3, 1, 6),
        ft.SegmentCredited(9, credited),
    ):
        ledger.apply(fact)
    assert books(told(checkpoint_facts(ledger))) == books(ledger)


def test_a_successor_settles_by_proof_what_was_being_dropped() -> None:
    """A writer dies, and the broker dies amid the drop. Its memory goes while the next daemon finishes the drop.

    The figure from before the drop is that of the successor's own audit: it shows that the bytes have come back.
    """
    size, second = 2 << 20, 10**9
    rules = policy.Rules(granularity=size, capacities={"device": 64 * size}, segment_extent_bytes=size)
    first = Broker(rules, epoch=1)
    session = first.step(ev.OpenSession(1, "acme", 0, 0, "a process", False, "token"), 0).effects[0].result.session
    first.step(ev.RegisterModel(2, session, 2, NAME, None, {}, False, None), 0)
    first.step(ev.CreateSegment(3, session, 3, SegmentName(*NAME, "weights"), "device", 4 * size, 0), 0)
    first.step(ev.Made(session, 3, 0), 0)
    first.step(ev.Acknowledge(session, 3, 0), 0)
    first.step(ev.ProcessDied(session, {"device": 4 * size}), 1)
    (segment,) = first.ledger.segments
    second_daemon = Broker(rules, 2, list(checkpoint_facts(first.ledger)))
    second_daemon.step(ev.Restarted(lost=frozenset(), seen={"device": 4 * size}), second)
    second_daemon.step(ev.Audit({"device": 4 * size}), 2 * second)
    second_daemon.step(ev.Audit({"device": 0}), 3 * second)
    second_daemon.step(ev.Dropped(segment), 3 * second + 1)
    settled = second_daemon.step(ev.Audit({"device": 0}), 4 * second).facts
    assert [fact.proven for fact in settled if isinstance(fact, ft.SegmentEnded)] == [True]
