"""The core against a world of processes for tens of thousands of steps: it borrows, fails, forks, lies and dies.

The world is tests/simulation's, where each step is judged, and the end; `make sim` plays it for as long as one likes.
Here the story is held to be rich. The seed is printed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from tests.simulation.referee import EARLY_AT_MOST
from tests.simulation.shrink import run
from tests.simulation.world import World

from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import lifecycles, policy

STEPS = 64_000
ANSWERS = ("Registered", "Allocated", "Released", "Declared", "Done", "SessionOpened", "SegmentView", "Detached")
REASONS = """
    CAPACITY MODEL_LIMIT TENANT_LIMIT REQUEST_ID_IN_USE MODEL_IN_USE MODEL_CONFLICT DELIVERY_FAILED DRIVER_FAILED
    EXTENT_NOT_FOUND SEGMENT_NOT_FOUND SEGMENT_EXISTS SEGMENT_NOT_SEALED WRITER_DIED SEGMENT_NOT_WRITABLE
    SEGMENT_AMBIGUOUS TOO_MANY_SEGMENTS TOKEN_REJECTED PROTOCOL_VIOLATION SESSION_NOT_DETACHED DRAINING JOURNAL_FULL
"""
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
    """The run above is worth nothing if its steps are refused: each event, answer, move and end comes often."""
    classes = [kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event)]
    events = {kind.__name__ for kind in classes if not kind.__subclasses__()}
    assert len(events) > 30
    referee, history = ended.referee, ended.history
    sharing, stock, recalls, resuming = referee.sharing, referee.stock, referee.recalls, referee.resuming
    moves = {cause for causes in lifecycles.SEGMENT.values() for cause in causes} - {"dropped", "settled"}

    def causes(kind: Any) -> Counter[str]:
        return Counter(fact.cause for fact in history if isinstance(fact, kind))

    enough: list[tuple[Counter[Any], Iterable[str], int]] = [
        (ended.steps, events, 8),
        (
            ended.answers,
            ANSWERS,
            50,
        ),
        (ended.answers, REASONS.split(), 1),
        (sharing.ended, ("certain", "proven", "in time"), 3),
        (sharing.waits, ("sealed", "full device", "WRITER_DIED", "SEGMENT_NOT_SEALED", "DELIVERY_FAILED"), 5),
        (stock.changes, ("made", "used", "dropped"), 50),
        (recalls.ends, ("returned", "kept"), 10),
        (recalls.ends, ("late", "repeated"), 2),
        (ended.daemons.deaths, ("between steps", "in a step", "in what it writes"), 2),
        (resuming.ends, ("agreed",), 200),
        (causes(ft.SessionMoved), ("resumed", "forgotten", "connection lost", "process died"), 10),
        (causes(ft.Credited), ("not held", "not delivered", "released", "goodbye"), 10),
        (causes(ft.SegmentMoved), moves, 8),
        (causes(ft.SegmentLeft), ("detached", "not made", "goodbye", "holder died"), 8),
        (causes(ft.SegmentLeft), ("not held",), 1),
    ]
    rare = {what: counts[what] for counts, keys, least in enough for what in keys if counts[what] < least}
    assert not rare, f"hardly ever: {rare}"
    assert min(referee.sessions, sharing.attached) >= 200
    assert min(referee.proven // 5, referee.timed_out, referee.guarantees.beside_unlent) >= 10
    assert referee.early.total() <= EARLY_AT_MOST * referee.proven
    assert min(stock.hits, stock.in_the_way, stock.failed) >= 20, stock.report()
    assert min(stock.again, stock.forgotten) >= 1, stock.report()
    assert min(resuming.waited, resuming.forgotten) >= 10, resuming.report()
    assert max(-fact.change for fact in history if isinstance(fact, ft.StockChanged)) > 1
    assert max(len(fact.ids) for fact in history if isinstance(fact, ft.SegmentCredited)) > 1
    packets = [-(-fact.count // policy.PACKET_EXTENTS) for fact in history if isinstance(fact, ft.SegmentBegan)]
    assert packets.count(1) >= 50
    assert len(packets) - packets.count(1) >= 15


@pytest.mark.deep
def test_the_same_seed_gives_the_same_story() -> None:
    """No clock, no order of a set, no address decides anything: two runs give fact for fact the same."""
    assert run(5, 3_000).facts == run(5, 3_000).facts
