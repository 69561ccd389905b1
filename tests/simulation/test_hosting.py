"""Guests among everything else: deaths, lost connections, daemons that die, quotas that move, segments, the stock.

The referee follows each guest beside all others: what can be recalled of it, when, and that its model and tenant keep
what they are guaranteed. That each has its turn is asked where guests are alone.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from tests.simulation.faults import Fault, Faults, notice
from tests.simulation.hosting import hosts_guests
from tests.simulation.world import SECOND, World
from tests.support.sizes import MIB

from membrokerd.core import admission, policy, recallable, recalls, waiting
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName

SEEDS = [seed for seed in range(21_000, 21_020) if hosts_guests(seed)]
DEEP = [pytest.param(seed, 4_000, marks=pytest.mark.deep) for seed in (*SEEDS[:2], *SEEDS[3:5])]
"""In the third world no guest is asked."""
FAULTS = Faults()


@pytest.mark.parametrize(("seed", "steps"), [(SEEDS[0], 800), *DEEP])
def test_guests_among_everything_else(seed: int, steps: int) -> None:
    world = World(seed).play_steps(steps)
    assert world.referee.recalls.ends["guests asked"] > 0


@FAULTS.instead_of(recallable.Recallable, "bytes_of")
def _asked_without_a_connection(was, self, borrower, can_go=None):  # type: ignore[no-untyped-def]
    if borrower in self.guests and not self.answers(*borrower[:2]):
        return self.extents_of(borrower)
    return was(self, borrower, can_go)


@FAULTS.instead_of(recallable.Recallable, "that_can_go")
def _asked_in_its_slice(was, self, *arguments, **named):  # type: ignore[no-untyped-def]
    slices = {one: guest.slice_until for one, guest in self.guests.items()}
    for guest in self.guests.values():
        guest.slice_until = None
    try:
        return was(self, *arguments, **named)
    finally:
        for one, until in slices.items():
            self.guests[one].slice_until = until


@FAULTS.instead_of(recalls.Recalls, "resumed")
def _forgotten_by_a_resume(was, self, session, answering, guests, gone, now):  # type: ignore[no-untyped-def]
    return was(self, session, answering, (), gone, now)


FAULTS.around("below_a_guarantee", admission.Admission, "hold_without", lambda was, *_: True)
FAULTS.replacing("no_longer_for_more", recalls, "GUEST_NS_PER_GIB", 0)
FAULTS.around(
    "granted_without_a_word", waiting.Waiting, "declared", lambda was, self, request: request.move("answered")
)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS.each())
def test_a_core_with_a_fault_in_its_guests_is_found_out(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    notice(fault, SEEDS, monkeypatch)


# --- guests alone ---


class FourGuests:
    """Four guests of two tenants that do not fit together, answer each recall at once, and always want to run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.broker = Broker(policy.Rules(2 * MIB, {"device": 64 * MIB}, slice_ns=60 * SECOND), 1)
        self.now, self.calls = 0, itertools.count(1)
        self.sizes: dict[int, tuple[ModelName, int]] = {}
        self.runs: dict[int, int] = {}
        self.asking: dict[int, int] = {}
        self.awake: set[int] = set()
        self.recalled: dict[int, fx.SendRecall] = {}
        for number in range(4):
            name, call = ModelName(f"t{number % 2}", f"guest{number}"), next(self.calls)
            opened: Any = self.step(ev.OpenSession(call, name.tenant, call, 1, name.model, observer=False, client=""))
            session, call = opened[0].result.session, next(self.calls)
            self.step(ev.RegisterModel(call, session, call, name, None, {}, exclusive=False, answers=True))
            self.sizes[session] = name, 2 * MIB * self.random.randrange(4, 30)
            self.runs[session] = 0

    def step(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.broker.step(event, self.now).effects
        for effect in effects:
            match effect:
                case fx.DrainInputs(call):
                    self.step(ev.InputsDrained(call))
                case fx.SendRecall():
                    self.recalled[effect.session] = effect
                case fx.Answer(call, result) if call in self.asking:
                    session = self.asking.pop(call)
                    if isinstance(result, fx.Declared):
                        self.awake.add(session)
                        self.runs[session] += 1
        return effects

    def declare(self, session: int, *, wants: bool) -> None:
        (name, size), call = self.sizes[session], next(self.calls)
        if wants:
            self.asking[call] = session
        self.awake.discard(session)
        wait = 3_600 * SECOND if wants else None
        self.step(ev.Declare(call, session, call, name, "device", size if wants else 0, True, wait))

    def go_on(self, seconds: float) -> None:
        """Each one that is asked gives back, and each one that sleeps asks; then time passes."""
        for session in self.sizes:
            if session in self.recalled:
                recall = self.recalled.pop(session)
                self.declare(session, wants=False)
                self.step(ev.AnswerRecall(session, recall.recall, recall.size))
            if session not in self.awake and session not in self.asking.values():
                self.declare(session, wants=True)
        self.now += int(seconds * SECOND)
        while (deadline := self.broker.deadline) is not None and deadline <= self.now:
            self.step(ev.Elapsed())


@pytest.mark.parametrize("seed", range(8))
def test_each_guest_has_its_turn(seed: int) -> None:
    guests = FourGuests(seed)
    for _ in range(60):
        guests.go_on(guests.random.choice((0.2, 3, 25)))
        idle = guests.random.choice(sorted(guests.sizes))
        if idle in guests.awake and guests.random.random() < 0.2:
            guests.declare(idle, wants=False)
    before = dict(guests.runs)
    for _ in range(40):
        guests.go_on(20)
    had = {session for session, runs in guests.runs.items() if runs > before[session]} | guests.awake
    starved = [name for session, (name, _) in guests.sizes.items() if session not in had]
    assert not starved, f"never had their turn: {starved}"
