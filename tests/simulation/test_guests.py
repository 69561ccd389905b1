"""Guests beside programs that release pieces: random demands for hours, and what the core promises of guests.

A world of its own, small enough that the rules can be held to their definitions at each step: a guest is asked for all
that it has, never in its slice, never below a guarantee, and the sums are what one walk adds up to. Once guests are
alone and nothing is guaranteed, each has its turn.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.denied import Denied
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName
from membrokerd.core.recallable import Borrower
from membrokerd.core.recount import recount

SECOND = 1_000_000_000
CAPACITY = 64 * MIB
SLICE = 60 * SECOND
SEEDS = 8
GUARANTEES = {("t1", "guest3", "device"): 12 * MIB, ("t0", None, "device"): 8 * MIB}


@dataclass(slots=True)
class Program:
    session: int
    name: ModelName
    size: int
    """Of a guest; 0: this one borrows extents."""
    awake_since: int = -1
    asks: bool = False
    runs: int = 0
    recalls: list[fx.SendRecall] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = self.calls = 0
        rules = policy.Rules(2 * MIB, {"device": CAPACITY}, guarantees=GUARANTEES, slice_ns=SLICE)
        self.broker = Broker(rules, 1)
        self.programs: dict[int, Program] = {}
        self.asking: dict[int, Program] = {}
        self.seen: Counter[str] = Counter()
        for number in range(4):
            self.open(f"t{number % 2}", f"guest{number}", 2 * MIB * self.random.randrange(4, 14))
        for number in range(2):
            self.open(f"t{number}", f"pieces{number}", 0)

    def call(self) -> int:
        self.calls += 1
        return self.calls

    def open(self, tenant: str, model: str, size: int) -> None:
        call = self.call()
        (opened,) = self.step(ev.OpenSession(call, tenant, call, 1, model, observer=False, client=""))
        assert isinstance(opened, fx.Answer)
        assert isinstance(opened.result, fx.SessionOpened)
        program = Program(opened.result.session, ModelName(tenant, model), size)
        self.programs[program.session] = program
        call = self.call()
        self.step(ev.RegisterModel(call, program.session, call, program.name, None, {}, exclusive=False, answers=True))

    # --- one step, and what it must keep ---

    def step(self, event: ev.Event) -> list[fx.Effect]:
        state = self.broker.books.recallable
        before = {one: state.extents_of(one) for one in state.guests}
        effects = self.broker.step(event, self.now).effects
        for effect in effects:
            match effect:
                case fx.DrainInputs(call):
                    self.step(ev.InputsDrained(call))
                case fx.Make():
                    self.step(ev.Made(effect.session, effect.request_id, effect.part))
                    self.step(ev.Acknowledge(effect.session, effect.request_id, effect.part))
                case fx.SendRecall():
                    self.asked(effect, before)
                case fx.Answer(call, result) if call in self.asking:
                    self.answered(self.asking.pop(call), result)
        self.check()
        return effects

    def asked(self, recall: fx.SendRecall, before: dict[Borrower, int]) -> None:
        program = self.programs[recall.session]
        program.recalls.append(recall)
        if program.size:
            self.seen["guest recalls"] += 1
            assert recall.size == before[Borrower(recall.session, recall.name, "device")], "a guest is asked for a part"
            assert self.now - program.awake_since >= SLICE, "a guest is asked in its slice"
            left = self.broker.books.admission.lent(recall.name, "device") - recall.size
            assert left >= self.broker.books.rules.guarantees.get((*recall.name, "device"), 0), (
                "a model is asked for what it is guaranteed"
            )

    def answered(self, program: Program, result: fx.Result | Denied) -> None:
        program.asks = False
        self.seen["granted" if isinstance(result, fx.Declared) else "refused"] += 1
        if isinstance(result, fx.Declared):
            program.awake_since = self.now
            program.runs += 1

    def check(self) -> None:
        recount(self.broker.ledger)
        state, total = self.broker.books.recallable, self.broker.ledger.totals["device"]
        assert total.lent <= total.capacity
        for name in self.broker.ledger.models:
            assert state.of_model(name, "device") == sum(map(state.bytes_of, state.borrowers(name, "device")))
        if not self.broker.books.admission.shortfall("device"):
            shares = self.broker.schedule.divide("device")
            assert sum(shares.values()) <= total.capacity
            for name, size in shares.items():
                excess = self.broker.books.admission.lent(name, "device") - size
                assert excess <= state.of_model(name, "device"), f"{name} has beyond its share what cannot be recalled"

    # --- what the programs do ---

    def declare(self, program: Program, size: int, *, wait: int | None = None) -> None:
        call = self.call()
        if size:
            program.asks = True
            self.asking[call] = program
        else:
            program.awake_since = -1
        self.step(ev.Declare(call, program.session, call, program.name, "device", size, True, wait))

    def act(self) -> None:
        program = self.random.choice(list(self.programs.values()))
        if program.recalls:
            self.answer(program)
        elif program.size and program.awake_since < 0 and not program.asks:
            self.declare(program, program.size, wait=self.random.choice((0, 100, 3_000)) * SECOND)
        elif program.size and program.awake_since >= 0:
            if self.random.random() < 0.2:
                self.declare(program, 0)  # it has nothing to do
            else:
                self.seen["used"] += 1
                call = self.call()
                self.step(
                    ev.Declare(call, program.session, call, program.name, "device", program.size, recallable=True)
                )
        elif not program.size:
            self.borrow_or_release(program)

    def borrow_or_release(self, program: Program) -> None:
        extents = list(self.broker.ledger.sessions[program.session].extents)
        call = self.call()
        if extents and self.random.random() < 0.4:
            self.step(ev.Release(call, program.session, call, tuple(extents[: self.random.randrange(1, 12)])))
        else:
            count, wait = self.random.randrange(1, 10), self.random.choice((0, 0, 5, 100)) * SECOND
            self.step(ev.Allocate(call, program.session, call, program.name, "device", 2 * MIB, count, wait))

    def answer(self, program: Program) -> None:
        recall = program.recalls[-1]
        program.recalls.clear()
        if program.size:
            self.declare(program, 0)
        else:
            extents = list(self.broker.ledger.sessions[program.session].extents)[: recall.size // (2 * MIB)]
            call = self.call()
            if extents:
                self.step(ev.Release(call, program.session, call, tuple(extents)))
        self.step(ev.AnswerRecall(program.session, recall.recall, recall.size))

    def pass_time(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)
        while (deadline := self.broker.deadline) is not None and deadline <= self.now:
            self.step(ev.Elapsed())

    def settle(self) -> None:
        """Guests alone remain, nothing is guaranteed any more, everybody answers, and each wants its turn."""
        self.broker.change_rules(dataclasses.replace(self.broker.books.rules, guarantees={}))
        for program in [one for one in self.programs.values() if not one.size]:
            call = self.call()
            self.step(ev.Goodbye(call, program.session, call))
            del self.programs[program.session]
        for program in self.programs.values():
            program.runs = 0
        for _ in range(40):
            for program in self.programs.values():
                if program.recalls:
                    self.answer(program)
                if program.awake_since < 0 and not program.asks:
                    self.declare(program, program.size, wait=3_600 * SECOND)
            self.pass_time(20)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_guests(seed: int) -> None:
    world = World(seed)
    for _ in range(700):
        world.act()
        if world.random.random() < 0.5:
            world.pass_time(world.random.choice((0.2, 3, 25)))
    assert world.seen["granted"] > 5
    assert world.seen["guest recalls"], world.seen
    world.settle()
    starved = [one.name for one in world.programs.values() if not one.runs and one.awake_since < 0]
    assert not starved, f"never had their turn: {starved}"
