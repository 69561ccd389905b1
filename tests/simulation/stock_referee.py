"""What every step must keep of the stock, by books of the referee's own: what is ready, of which size, and since when.

These books are kept from the facts; the world, which has the blocks, is held to them, and the core's total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.simulation.parts import Counting

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.names import LOCATIONS, Location

if TYPE_CHECKING:
    from tests.simulation.world import World

FORGOTTEN_NS = 10_000_000_000
SIZES = 8
"""Stated here, not taken from the core."""

Kind = tuple[Location, int]


class StockReferee(Counting):
    """Judges what a step did to the stock."""

    COUNTED = ("changes", "hits", "again", "forgotten", "failed", "in_the_way")

    def __init__(self, world: World) -> None:
        self.world = world
        self.ready: Counter[Kind] = Counter()
        self.asked: dict[Kind, int] = {}
        """When somebody borrowed extents of a kind last."""
        self.changes: Counter[str] = Counter()
        self.hits = 0
        """Packets that were of the stock."""
        self.again = 0
        """Packets that were tried once more."""
        self.forgotten = 0
        self.failed = 0
        self.in_the_way = 0
        """Calls that needed room of the stock."""
        self._before: dict[Location, int] = {}
        """Bytes that were ready, and what was charged, before the step."""
        self._charged: dict[Location, int] = {}

    def before(self) -> None:
        """Take down what a step may be refused for."""
        self._before = {where: self._bytes(where) for where in LOCATIONS}
        self._charged = {where: total.charged for where, total in self.world.broker.ledger.totals.items()}

    def judge(self, event: ev.Event, decided: Iterable[ev.Event], step: Step) -> None:
        """Hold one step to all that is known of the stock; `decided` are requests that waited until then."""
        for fact in step.facts:
            self._take_down(fact)
        for one in (event, *decided):
            self._judge_event(one, step)
        for effect in step.effects:
            self._judge_effect(effect)
        world, rules = self.world, self.world.broker.books.rules
        kept = {kind: len(blocks) for kind, blocks in world.stock.items() if blocks}
        assert kept == +self.ready, f"the books have {dict(+self.ready)} ready, and there is {kept}"
        for where, total in world.broker.ledger.totals.items():
            assert total.stock == self._bytes(where), "the total of the stock is wrong"
        assert self.ready.total() <= rules.stock_extents
        assert sum(map(self._bytes, LOCATIONS)) <= rules.stock_bytes
        assert len(+self.ready) <= SIZES

    def _bytes(self, where: Location) -> int:
        return sum(size * count for (at, size), count in self.ready.items() if at == where)

    def _take_down(self, fact: ft.Fact) -> None:
        match fact:
            case ft.Debited():
                self.asked[fact.location, fact.extent_bytes] = self.world.now
            case ft.StockChanged(where, size, change, cause):
                assert (change > 0) == (cause == "made"), fact
                self.ready[where, size] += change
                self.changes[cause] += abs(change)
                assert self.ready[where, size] >= 0, "more goes out of the stock than is in it"

    def _judge_event(self, event: ev.Event, step: Step) -> None:
        dropped = [effect for effect in step.effects if isinstance(effect, fx.DropStock)]
        match event:
            case ev.Audit():
                self.forgotten += bool(dropped)
                for kind in +self.ready:
                    assert self.world.now - self.asked[kind] <= FORGOTTEN_NS, f"{kind} is kept, and nobody asks for it"
            case ev.NotMade(reason=Reason.DEVICE_FULL):
                again = [one for one in step.effects if isinstance(one, fx.Make) and self._is(one, event)]
                # The world's host is never full.
                assert bool(again) == bool(self._before["device"]), "refused beside stock, or tried again without any"
                assert not self._bytes("device"), "a device is full, and the stock of it stays"
                self.again += bool(again)
            case ev.Stocked(made=False):
                self.failed += 1
            case ev.Allocate():
                self.in_the_way += bool(dropped)
                self._judge_refusal(event.call, step, event.location, event.extent_bytes * event.count)
            case ev.CreateSegment():
                self.in_the_way += bool(dropped)
                self._judge_refusal(event.call, step, event.location, event.size)
            case ev.Declare():
                self.in_the_way += bool(dropped)

    @staticmethod
    def _is(make: fx.Make, event: ev.NotMade) -> bool:
        return (make.session, make.request_id, make.part) == (event.session, event.request_id, event.part)

    def _judge_refusal(self, call: int, step: Step, where: Location, size: int) -> None:
        """Nobody is refused for what is free: the capacity is exceeded by what is charged, without any stock."""
        for effect in step.effects:
            if isinstance(effect, fx.Answer) and effect.call == call and isinstance(effect.result, Denied):
                kept = int(effect.result.numbers.get("reserved_bytes", 0))  # the referee of guarantees judges these
                charged = max(self._charged[where], self.world.broker.ledger.totals[where].charged)
                fits = charged + kept + size <= self.world.broker.books.rules.capacities[where]
                assert not (fits and effect.result.reason is Reason.CAPACITY), (
                    f"refused for what is free: {effect.result}"
                )

    def _judge_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Make(stocked=True):
                self.hits += 1
            case fx.Make(segment=0) if not self.world.broker.books.stopping:
                ready = self.ready[effect.location, effect.extent_bytes]
                assert ready < len(effect.ids), "a packet is made, and the stock has it"
            case fx.Stock(where, size):
                making = [job for job in self.world.jobs if isinstance(job, fx.Stock)]
                told = [one for one in self.world.told if isinstance(getattr(one, "job", None), fx.Stock)]
                assert len(making) + len(told) == 1, "more than one extent of the stock is being made"
                waits = any(self.world.broker.books.making.values()) and not self.world.referee.waiting.decided()
                assert not waits, "it is made while a packet is to be made"  # those decided now came later in the step
                assert self.asked.get((where, size)) is not None, "nobody ever asked for it"

    def inherit(self) -> None:
        """The stock ends with its daemon."""
        self.ready.clear()

    def at_the_end(self) -> None:
        """Nothing is kept ready."""
        assert not +self.ready
        assert not any(self.world.stock.values())
