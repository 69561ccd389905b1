"""What a step costs, and what the core keeps, beside what other tenants hold: lines are counted.

A step may look once at each thing that others hold. Here it does something many times, and must not look as often.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.support.calls import lines_of

from membrokerd.core import deadlines, policy
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.denied import Denied
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, SegmentName

GRANULE = 2 << 20
PAGES = 4_096
TIMES = 48
"""How often the step that is counted does something."""
HOUR = 3_600 * 10**9


class Beside:
    """A core whose packets are made and taken at once. All names are made up, and no time passes but `now`."""

    def __init__(self) -> None:
        rules = policy.Rules(
            granularity=GRANULE,
            capacities={"device": PAGES * GRANULE, "host": PAGES * GRANULE},
            max_sessions=PAGES,
            max_models_per_tenant=PAGES,
            max_segments_per_tenant=PAGES,
            max_segment_extents=PAGES,
            model_grace_ns=0,
        )
        self.broker = Broker(rules, epoch=1)
        self.numbers, self.now = itertools.count(1), 0

    @property
    def seen(self) -> ev.Seen:
        """What the device shows, while nobody has freed anything."""
        return {where: total.charged + total.stock for where, total in self.broker.ledger.totals.items()}

    def ask(self, make: Callable[..., ev.Event], session: int, *what: Any) -> Any:
        """Put a request to the core, and return its answer; None if it waits."""
        call = next(self.numbers)
        answers = [one for one in self.step(make(call, session, call, *what)) if isinstance(one, fx.Answer)]
        return next((one.result for one in answers if one.call == call), None)

    def step(self, event: ev.Event) -> list[Any]:
        effects = list(self.broker.step(event, self.now).effects)
        for one in tuple(effects):
            if isinstance(one, fx.Make | fx.Send):
                effects += self.step(ev.Made(one.session, one.request_id, one.part))
                effects += self.step(ev.Acknowledge(one.session, one.request_id, one.part))
        return effects

    def counted(self, event: ev.Event) -> int:
        """Return how many lines of Python a step runs."""
        return lines_of(partial(self.broker.step, event, self.now)).total()

    def joined(self, tenant: str, *models: str, answers: bool | None = None) -> tuple[int, list[ModelName]]:
        """Open a session with these models."""
        call = next(self.numbers)
        opened = self.step(ev.OpenSession(call, tenant, call, 0, f"process {call}", False, ""))[0]
        names = [ModelName(tenant, model) for model in models]
        for name in names:
            self.ask(ev.RegisterModel, opened.result.session, name, None, {}, False, answers)
        return opened.result.session, names


def segments(world: Beside, count: int) -> None:
    session, (name,) = world.joined("other", "m")
    for number in range(count):
        world.ask(ev.CreateSegment, session, SegmentName(*name, f"s{number}"), "device", GRANULE)


def models(world: Beside, count: int) -> None:
    world.joined("other", *(f"m{number}" for number in range(count)))


def guests(world: Beside, count: int) -> None:
    for number in range(count):
        session, (name,) = world.joined(f"other{number % 16}", "m", answers=True)
        world.ask(ev.Declare, session, name, "device", GRANULE, True)


def many_models(world: Beside) -> tuple[int, list[ModelName]]:
    """Join many models. One has been a guest's: its tenant has had a turn."""
    session, names = world.joined("many", *(f"m{number}" for number in range(TIMES)), answers=True)
    world.ask(ev.Declare, session, names[0], "device", GRANULE, True)
    world.ask(ev.Declare, session, names[0], "device", 0, True)
    return session, names


def models_end(world: Beside) -> ev.Event:
    session, _ = many_models(world)
    world.ask(ev.Goodbye, session)
    return ev.Audit(world.seen)


def declared(world: Beside) -> int:
    session, names = many_models(world)
    for name, where in itertools.product(names, ("device", "host")):
        world.ask(ev.Declare, session, name, where, GRANULE)
    return session


def session_ends(world: Beside) -> ev.Event:
    session = declared(world)
    return ev.Goodbye(next(world.numbers), session, next(world.numbers))


def nothing_is_held(world: Beside) -> ev.Event:
    session = declared(world)
    world.step(ev.ConnectionLost(session))
    process = world.broker.ledger.sessions[session].process
    world.step(ev.ResumeSession(next(world.numbers), session, process))
    return ev.StateHolds(next(world.numbers), session, frozenset(), {}, {})


@pytest.mark.parametrize(("other", "most"), [(segments, 4), (models, 4), (guests, 300)])
@pytest.mark.parametrize("event", [models_end, session_ends, nothing_is_held])
def test_a_step_that_ends_many_things_looks_once_at_what_others_hold(
    event: Callable[[Beside], ev.Event], other: Callable[[Beside, int], None], most: int
) -> None:
    """48 models end, or 97 declarations, beside 32 things of another tenant, and beside 128 of them."""
    costs = []
    for count in (32, 128):
        world = Beside()
        other(world, count)
        costs.append(world.counted(event(world)))
    assert (costs[1] - costs[0]) / 96 <= most, costs


def test_deaths_that_are_due_cost_one_look_at_each_that_is_not() -> None:
    """48 processes died ten seconds ago and hold on to their memory. Since then 32 others have died, or 128.

    Each has 8 models: the dead are looked at by their sums, or a tenant whose sessions have 256 would stop the broker.
    """
    costs = []
    for count in (32, 128):
        world = Beside()
        for number in range(TIMES + count):
            if number == TIMES:
                world.now += 5 * 10**9
            session, names = world.joined(f"t{number}", *"abcdefgh")
            for name in names:
                world.ask(ev.Allocate, session, name, "device", GRANULE, 1)
            world.step(ev.ProcessDied(session, world.seen))
        world.now += 5 * 10**9
        costs.append(world.counted(ev.Audit(world.seen)))
        assert len(world.broker.releasing.deaths) == count
    assert (costs[1] - costs[0]) / 96 <= 30 + TIMES, costs


def full(world: Beside) -> tuple[int, ModelName]:
    session, (name,) = world.joined("t", "m")
    world.ask(ev.Allocate, session, name, "device", GRANULE, PAGES)
    return session, name


def cancelled_requests(world: Beside) -> Any:
    session, name = full(world)
    world.ask(ev.Allocate, session, name, "device", GRANULE, 1, HOUR)
    for _ in range(20 * deadlines.LEAST):
        call = next(world.numbers)
        world.step(ev.Allocate(call, session, call, name, "device", GRANULE, 1, 2 * HOUR))
        world.step(ev.CancelWait(call))
    return world.broker.waiting


def cancelled_attaches(world: Beside) -> Any:
    session, (name,) = world.joined("t", "m")
    label = SegmentName(*name, "s")
    world.ask(ev.CreateSegment, session, label, "device", GRANULE)
    world.ask(ev.AttachSegment, session, label, HOUR)
    for _ in range(20 * deadlines.LEAST):
        call = next(world.numbers)
        world.step(ev.AttachSegment(call, session, call, label, 2 * HOUR))
        world.step(ev.CancelWait(call))
    return world.broker.segments.attaches


def guests_that_never_stay(world: Beside) -> Any:
    for slept in (False, True):
        session, (name,) = world.joined("t", "m", answers=True)
        for _ in range(20 * deadlines.LEAST if slept else 1):
            world.now += 1
            assert not isinstance(world.ask(ev.Declare, session, name, "device", GRANULE, True), Denied)
            if slept:
                world.ask(ev.Declare, session, name, "device", 0, True)
    return world.broker.recalls


@pytest.mark.parametrize("rounds", [cancelled_requests, cancelled_attaches, guests_that_never_stay])
def test_what_ends_early_leaves_no_deadlines_behind(rounds: Callable[[Beside], Any]) -> None:
    """The first deadline is an hour away, and what comes behind it begins and ends over and over."""
    assert len(rounds(Beside()).ends) <= 3 * deadlines.LEAST
