"""The core against a world of processes for tens of thousands of steps: it borrows, fails, forks, lies and dies.

The world is tests/simulation's, where each step is judged, and the end; `make sim` plays it for as long as one likes.
Here the story is held to be rich. The seed is printed.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tests.simulation.referee import EARLY_AT_MOST
from tests.simulation.shrink import run
from tests.simulation.world import World

from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import lifecycles, policy
from membrokerd.core.denied import Reason

STEPS = 64_000
SEEDS = [int(seed) for seed in os.environ.get("MEMBROKER_SEEDS", "22").split(",")]


@pytest.fixture(scope="module", params=[pytest.param(seed, marks=pytest.mark.deep) for seed in SEEDS])
def ended(request: pytest.FixtureRequest) -> World:
    """Return a world of a seed, played to its end once for the tests that look at it."""
    return run(request.param, STEPS)


def test_nothing_is_left_to_do(ended: World) -> None:
    """Nobody is charged any more, which the referee has seen, and the core does not want to be called again."""
    assert ended.broker.deadline is None
    assert ended.broker.releasing.shown("device") == 0


def test_the_world_is_rich(ended: World) -> None:
    """The run above is worth nothing if its steps are refused: each kind of event and of answer comes often."""
    classes = [kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event)]
    kinds = {kind.__name__ for kind in classes if not kind.__subclasses__()}
    assert len(kinds) > 30
    rare = {kind: ended.steps[kind] for kind in kinds if ended.steps[kind] < 8}
    assert not rare, f"hardly ever: {rare}"
    names = ("Registered", "Allocated", "Released", "Declared", "Done", "SessionOpened", "SegmentView", "Detached")
    for name in names:
        assert ended.answers[name] >= 50, (name, ended.answers)
    reasons = {Reason.CAPACITY, Reason.MODEL_LIMIT, Reason.TENANT_LIMIT, Reason.REQUEST_ID_IN_USE, Reason.MODEL_IN_USE}
    reasons |= {Reason.MODEL_CONFLICT, Reason.DELIVERY_FAILED, Reason.DRIVER_FAILED, Reason.EXTENT_NOT_FOUND}
    reasons |= {Reason.SEGMENT_NOT_FOUND, Reason.SEGMENT_EXISTS, Reason.SEGMENT_NOT_SEALED, Reason.WRITER_DIED}
    reasons |= {Reason.SEGMENT_NOT_WRITABLE, Reason.SEGMENT_AMBIGUOUS, Reason.TOO_MANY_SEGMENTS}
    assert reasons <= set(ended.answers), ended.answers
    referee = ended.referee
    assert referee.sessions > 200
    assert min(referee.proven // 5, referee.timed_out) > 10
    assert referee.early.total() <= EARLY_AT_MOST * referee.proven


def test_the_segments_of_the_world_are_rich(ended: World) -> None:
    """Segments come to each of their ends, by each way there; who waits for one is told each of the answers."""
    sharing = ended.referee.sharing
    assert sharing.attached >= 200
    assert min(sharing.ended[how] for how in ("certain", "proven", "in time")) >= 3, sharing.ended
    waits = ("sealed", "full device", Reason.WRITER_DIED, Reason.SEGMENT_NOT_SEALED, Reason.DELIVERY_FAILED)
    assert min(sharing.waits[how] for how in waits) >= 5, sharing.waits
    moved = Counter(fact.cause for fact in ended.history if isinstance(fact, ft.SegmentMoved))
    causes = {cause for causes in lifecycles.SEGMENT.values() for cause in causes} - {"dropped", "settled"}
    rare = {cause: moved[cause] for cause in causes if moved[cause] < 8}
    assert not rare, f"hardly ever: {rare}"
    left = Counter(fact.cause for fact in ended.history if isinstance(fact, ft.SegmentLeft))
    assert min(left[cause] for cause in ("detached", "not made", "goodbye", "holder died")) >= 8, left
    assert max(len(fact.ids) for fact in ended.history if isinstance(fact, ft.SegmentCredited)) > 1
    parts = Counter(
        -(-fact.count // policy.PACKET_EXTENTS) for fact in ended.history if isinstance(fact, ft.SegmentBegan)
    )
    assert parts[1] >= 50, parts
    assert parts.total() - parts[1] >= 15, parts


def test_the_stock_of_the_world_is_rich(ended: World) -> None:
    """Extents are made ahead and used, and let go of for each of the reasons that there are."""
    stock = ended.referee.stock
    assert min(stock.changes[cause] for cause in ("made", "used", "dropped")) >= 50, stock.report()
    assert min(stock.hits, stock.in_the_way, stock.failed) >= 20, stock.report()
    assert min(stock.again, stock.forgotten) >= 1, stock.report()
    assert max(-fact.change for fact in ended.history if isinstance(fact, ft.StockChanged)) > 1


def test_the_recalls_of_the_world_are_rich(ended: World) -> None:
    """Recalls end in each way, in time and late, and bytes are lent beside guarantees that are never lent."""
    referee = ended.referee
    assert min(referee.recalls.ends[how] for how in ("returned", "kept")) >= 10, referee.recalls.report()
    assert min(referee.recalls.ends[how] for how in ("late", "repeated")) >= 2, referee.recalls.report()
    assert referee.guarantees.beside_unlent >= 10, referee.guarantees.report()


def test_the_resumes_of_the_world_are_rich(ended: World) -> None:
    """Daemons die in a step, and in what they write; sessions are taken up, forged, forgotten and lost."""
    deaths, resuming = ended.daemons.deaths, ended.referee.resuming
    assert min(deaths[when] for when in ("between steps", "in a step", "in what it writes")) >= 2, deaths
    assert resuming.ends["agreed"] >= 200, resuming.report()
    assert min(resuming.waited, resuming.forgotten) >= 10, resuming.report()
    moved = Counter(fact.cause for fact in ended.history if isinstance(fact, ft.SessionMoved))
    assert min(moved[cause] for cause in ("resumed", "forgotten", "connection lost", "process died")) >= 10, moved
    credited = Counter(fact.cause for fact in ended.history if isinstance(fact, ft.Credited))
    assert min(credited[cause] for cause in ("not held", "not delivered", "released", "goodbye")) >= 10, credited
    assert any(isinstance(fact, ft.SegmentLeft) and fact.cause == "not held" for fact in ended.history)
    assert {Reason.TOKEN_REJECTED, Reason.PROTOCOL_VIOLATION, Reason.SESSION_NOT_DETACHED} <= set(ended.answers)
    assert {Reason.DRAINING, Reason.JOURNAL_FULL} <= set(ended.answers)


@pytest.mark.deep
def test_the_same_seed_gives_the_same_story() -> None:
    """No clock, no order of a set, no address decides anything: two runs give fact for fact the same."""
    assert run(5, 3_000).facts == run(5, 3_000).facts
