"""The core in a world for many steps, and the proof that a core which errs is found out.

`make sim STEPS=… SEED=…` plays any number of steps, and CI 300,000. A seed that fails prints a transcript, which can be
put into tests/broker/core/transcripts.
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest
from tests.broker.core.test_transcripts import Script
from tests.simulation.driver_thread import loses_device
from tests.simulation.faults import STEPS, Fault, Faults, notice
from tests.simulation.shrink import Failed, commands, run
from tests.simulation.world import World

from membrokerd.core import attaches, books, ledger, lending, models, policy, stock
from membrokerd.core import deaths as releasing
from membrokerd.core import facts as ft
from membrokerd.core.admission import Admission
from membrokerd.core.denied import Reason
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location
from membrokerd.core.waiting import Waiting

pytestmark = pytest.mark.deep

SEED = 20_260
"""Of a world without stock; that of the next one has some."""
SHORT_STORY = 80
"""Commands of a transcript that have an outcome."""
FAULTS, OF_STOCK, OF_DEVICE = Faults(), Faults(), Faults()


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_turns_can_be_left_out(seed: int) -> None:
    """Whichever turns are left out, what remains is a world in which the core keeps its promises."""
    chance = random.Random(SEED)
    for _ in range(10):
        World(seed).play([number for number in range(1_500) if chance.random() < 0.5])


@pytest.mark.parametrize("seed", [SEED + 3, SEED + 4, SEED + 13])
def test_a_world_can_be_told_as_a_transcript(seed: int) -> None:
    """The commands of a transcript lead to the very facts that the world led to."""
    world = World(seed)
    for number in range(1_500):
        world.turn(number)
    script = Script(lambda ledger: (ledger.revision,))
    for line in commands(world):
        script.do(line)
    told = [(type(fact), getattr(fact, "session", None), getattr(fact, "ids", None)) for fact in script.facts]
    assert told == [(type(fact), getattr(fact, "session", None), getattr(fact, "ids", None)) for fact in world.facts]


# --- A core with a fault is found out, and the story of it is short ---


@FAULTS.instead_of(Admission, "admit")
def _no_capacity(admit: Any, *arguments: Any) -> Any:
    denied = admit(*arguments)
    return None if denied and denied.reason == "CAPACITY" else denied


@FAULTS.instead_of(books.Books, "take_ids")
def _ids_again(take_ids: Any, self: Any, count: int) -> range:
    ids = take_ids(self, count)
    self._next_id -= count > 100
    return ids


@FAULTS.plant
def _charge_per_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ledger.Ledger._segment_held

    def charge(self: Any, fact: ft.SegmentHeld) -> None:
        held(self, fact)
        row = self.segments[fact.segment]
        if row.state == "sealed":
            row.bytes += row.last_bytes
            self._sum_segment(row, row.last_bytes, 0)

    monkeypatch.setitem(ledger._APPLY, ft.SegmentHeld, charge)


@FAULTS.plant
def _no_death_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    left = ledger.Ledger._segment_left

    def forget(self: Any, fact: ft.SegmentLeft) -> None:
        left(self, fact)
        self.segments[fact.segment].uncertain = False

    monkeypatch.setitem(ledger._APPLY, ft.SegmentLeft, forget)


@FAULTS.instead_of(releasing.Releasing, "segment_dropped")
def _settle_on_an_old_figure(dropped: Any, self: Any, row: Any, now: int) -> None:
    dropped(self, row, now)
    self._settle(now)


@FAULTS.instead_of(models.Models, "_end_if_idle")
def _models_end_under_segments(_was: Any, self: Any, row: Any) -> None:
    if not row.sessions and not row.used():
        self._books.record(ft.ModelEnded(row.name))


# --- guarantees with a fault ---


@FAULTS.instead_of(Admission, "levels")
def _owners_may_not_use_it(levels: Any, self: Any, name: Any, location: Any, *rest: Any) -> Any:
    """What is kept for a tenant is kept from the tenant, too."""
    *lower, (*capacity, room) = levels(self, name, location, *rest)
    left = max(0, self._ledger.totals[location].free - self.reserved(location))
    return [*lower, (*capacity, min(room, left))]


# --- a stock with a fault ---


@OF_STOCK.instead_of(Admission, "admit")
def _refused_for_stock(admit: Any, self: Any, name: Any, location: Any, size: int, session: Any = None) -> Any:
    denied = admit(self, name, location, size, session)
    kept = self._ledger.totals[location].stock
    beside = admit(self, name, location, size + kept, session) if kept else None
    return denied or (beside if beside and beside.reason == "CAPACITY" else None)


@OF_STOCK.instead_of(lending.Lending, "_emit")
def _stock_for_segments(emit: Any, self: Any, session: int, call: Any, *packet: Any) -> None:
    if call.sends:
        emit(self, session, call, *packet)
        return
    generation, call.segment = call.segment, 0
    emit(self, session, call, *packet)
    call.segment = generation
    effects = self._books.emit.__self__
    effects[-1] = dataclasses.replace(effects[-1], segment=generation)


def _is_there(self: Any, location: Location, extent_bytes: int, count: int) -> bool:
    return bool(self._ready.get((location, extent_bytes), 0) >= count and not self._books.stopping)


@OF_STOCK.instead_of(stock.WarmPool, "fill")
def _made_while_others_wait(fill: Any, self: Any) -> None:
    making, self._books.making = self._books.making, {}
    fill(self)
    self._books.making = making


@OF_STOCK.plant
def _beyond_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def wants(self: Any, kind: Any) -> bool:
        rules = self._books.rules
        here = self._ready.get(kind, 0) < self._wishes[kind].count and sum(self._ready.values()) < rules.stock_extents
        return here and sum(size * count for (_, size), count in self._ready.items()) + kind[1] <= rules.stock_bytes

    monkeypatch.setattr(stock.WarmPool, "_wants", wants)
    monkeypatch.setattr(stock.WarmPool, "make_room", lambda self, location: None)


@OF_STOCK.plant
def _used_and_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ledger.Ledger._stock_changed

    def count(self: Any, fact: ft.StockChanged) -> None:
        if fact.cause != "used":
            changed(self, fact)

    monkeypatch.setitem(ledger._APPLY, ft.StockChanged, count)


FAULTS.replacing("refused_at_once", policy, "WANTS_OF_ROOM", frozenset((Reason.CAPACITY, Reason.TENANT_LIMIT)))
FAULTS.replacing("who_is_gone_is_decided", Waiting, "give_up", lambda self, session, now: None)
FAULTS.around("no_tenant_limit", policy, "limit_of", lambda limit_of, *of: limit_of(*of) if of[2][1] else None)
FAULTS.replacing("wide_window", policy, "WINDOW", 192)
FAULTS.replacing("everything_is_proof", releasing.Releasing, "_proven", lambda *_: True)
FAULTS.replacing("unanswered", lending.Lending, "give_up", lambda self, row, now: None)
FAULTS.replacing("the_lost_wait_on", attaches.Attaches, "give_up", lambda self, session: None)
FAULTS.replacing("drop_while_it_is_made", lending.Lending, "making_segment", lambda *_: False)
FAULTS.replacing("failed_calls_hold", lending.CallInFlight, "any_sent", True)
FAULTS.replacing("nothing_is_kept", Admission, "reserved", lambda self, location: 0)
# Memory that is releasing counts as the tenant's, so that its guarantee looks used.
FAULTS.replacing("the_dead_use_it", ledger.Ledger, "tenant_lent", ledger.Ledger.tenant_charged)


OF_STOCK.replacing("used_and_not_taken", stock.WarmPool, "take", _is_there)
OF_STOCK.replacing(
    "dropped_and_not_told", stock.WarmPool, "_drop", lambda self, kind, count: self._change(kind, -count, "dropped")
)
OF_STOCK.replacing("tried_again_beside_stock", stock.WarmPool, "drop_all", lambda self, location: bool(self._ready))
OF_STOCK.replacing("never_forgotten", stock.WarmPool, "forget_stale", lambda self, now: None)
OF_STOCK.replacing("made_all_the_same", stock.WarmPool, "take", lambda self, location, extent_bytes, count: False)


LOST = SEED + 13
"""Of a world whose device falls off the bus."""
OF_DEVICE.around(
    "lent_all_the_same", books.Books, "refuse_debit", lambda was, self: was(self) if self.cannot_write else None
)
OF_DEVICE.replacing("stock_of_a_lost_device", Broker, "_drop_stock", lambda self: None)


def test_a_device_that_is_lost_and_comes_back() -> None:
    """Dozens of times, under everything else that happens; told as a transcript, too."""
    assert loses_device(LOST)
    assert not any(loses_device(SEED + more) for more in range(11)), "the other stories stay as they were"
    world = run(LOST, 8_000)
    assert world.driver.losses > 10
    assert sum(isinstance(event, str) and event.startswith("device_lost G") for _, event in world.events) > 5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "seeds"),
    OF_DEVICE.each([LOST, LOST + 16])
    + FAULTS.each([SEED + more for more in range(4)])
    + OF_STOCK.each([SEED + more for more in (1, 6, 2, 3, 5, 7, 9, 10)]),
)
def test_a_core_with_a_fault_is_found_out(fault: Fault, seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of a few worlds: a fault of the stock shows at its bounds only."""
    notice(fault, seeds, monkeypatch)


@pytest.mark.timeout(300)  # a story can take a while to be shortened
@pytest.mark.parametrize("name", ["wide_window", "drop_while_it_is_made", "charge_per_attach", "made_all_the_same"])
def test_the_story_of_a_fault_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shrinker leaves of a run fits on a screen or two, and ends where the core fails."""
    (fault,) = [one for one in (*FAULTS, *OF_STOCK) if one.__name__.strip("_") == name]
    fault(monkeypatch)
    worlds = (run(SEED + more, STEPS) for more in (1, 0, 2, 3))
    with pytest.raises(Failed) as failed:
        list(worlds)
    assert len(re.findall(r"^    [=!]", str(failed.value), re.MULTILINE)) < SHORT_STORY, "the story is not short"
