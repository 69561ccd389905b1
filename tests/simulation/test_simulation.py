"""The core in a world for many steps, and the proof that a core which errs is found out.

10,000 steps each time; 200,000 are marked slow; `make sim STEPS=… SEED=…` plays any number. A failing seed prints a
transcript that can be put into tests/broker/core/transcripts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.broker.core.test_transcripts import Script
from tests.simulation.referee import EARLY_AT_MOST
from tests.simulation.shrink import Failed, commands, run
from tests.simulation.world import World

from membrokerd.core import broker as broker_module
from membrokerd.core import effects as fx
from membrokerd.core import facts as ft
from membrokerd.core import ledger, lending, policy, segments, settling

SEED = 20_260


def _hold(world: World) -> None:
    """A credit that the device is said to have proven is early now and then, and no oftener than that."""
    referee = world.referee
    print(referee.report())
    assert referee.proven > 50
    assert referee.timed_out > 10
    assert referee.early.total() <= EARLY_AT_MOST * referee.proven
    assert min(referee.sharing.ended[how] for how in ("certain", "proven", "in time")) >= 1


def test_10_000_steps() -> None:
    _hold(run(SEED, 10_000))


@pytest.mark.slow
def test_200_000_steps() -> None:
    """Thousands of sessions, most of which end in a way that nobody wished for."""
    world = run(SEED + 1, 200_000)
    _hold(world)
    assert world.referee.sessions > 2_000


def test_turns_can_be_left_out() -> None:
    """Whichever turns are left out, what remains is a world in which the core keeps its promises."""
    chance = random.Random(SEED)
    for _ in range(10):
        World(SEED).play([number for number in range(1_500) if chance.random() < 0.5])


def test_a_world_can_be_told_as_a_transcript() -> None:
    """The commands of a transcript lead to the very facts that the world led to."""
    world = World(SEED + 3)
    for number in range(1_500):
        world.turn(number)
    script = Script(lambda ledger: (ledger.revision,))
    for line in commands(world):
        script.do(line)
    told = [(type(fact), getattr(fact, "session", None), getattr(fact, "ids", None)) for fact in script.facts]
    assert told == [(type(fact), getattr(fact, "session", None), getattr(fact, "ids", None)) for fact in world.facts]


# --- A core with a fault is found out, and the story of it is short ---


def _no_tenant_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "tenant_limit", lambda *_: None)


def _no_commanded_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_ruled", lambda ledger, rules, *key: rules.limits.get(key))


def _no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = policy.admit

    def lax(*arguments: Any) -> Any:
        denied = admit(*arguments)
        return None if denied and denied.reason == "CAPACITY" else denied

    monkeypatch.setattr(policy, "admit", lax)


def _wide_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "WINDOW", 3)


def _everything_is_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling.Settling, "_proven", lambda *_: True)


def _nothing_is_ever_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling.Settling, "_is_due", lambda self, death, now: self._proven(death, 1))


def _ids_again(monkeypatch: pytest.MonkeyPatch) -> None:
    take_ids = broker_module.Broker.take_ids

    def again(self: Any, count: int) -> range:
        ids = take_ids(self, count)
        self._next_id -= count > 100
        return ids

    monkeypatch.setattr(broker_module.Broker, "take_ids", again)


def _forgetful_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending.Lending, "_abandon", lambda self, session, call: None)


def _unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending.Lending, "give_up", lambda self, row: None)


def _charge_per_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ledger.Ledger._segment_held

    def charge(self: Any, fact: ft.SegmentHeld) -> None:
        held(self, fact)
        row = self.segments[fact.segment]
        if row.state == "sealed":
            row.bytes += row.last_bytes
            self._sum_segment(row, row.last_bytes, 0)

    monkeypatch.setitem(ledger._APPLY, ft.SegmentHeld, charge)


def _credit_while_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(self: Any, row: Any) -> None:
        if row.state == "ending":
            self._broker.record(ft.SegmentMoved(row.segment, "last session left"))
            self._broker.emit(fx.Drop(row.segment))

    monkeypatch.setattr(segments.Segments, "_drop_if_left", drop)


def _no_death_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    left = ledger.Ledger._segment_left

    def forget(self: Any, fact: ft.SegmentLeft) -> None:
        left(self, fact)
        self.segments[fact.segment].uncertain = False

    monkeypatch.setitem(ledger._APPLY, ft.SegmentLeft, forget)


def _the_lost_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments.Segments, "give_up", lambda self, session: None)


def _no_word_of_a_dead_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_writing(self: Any, row: Any, cause: str) -> None:
        self._broker.record(ft.SegmentMoved(row.segment, cause))
        if row.segment in self._sealing:
            self._broker.answer(self._sealing.pop(row.segment), lending.deny(lending.Reason.WRITER_DIED))

    monkeypatch.setattr(segments.Segments, "_end_writing", end_writing)


def _deaf_to_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments.Segments, "elapsed", lambda self, now: None)


def _drop_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending.Lending, "making_segment", lambda *_: False)


def _failed_calls_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending.Call, "any_sent", True)


def _failed_calls_never_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending.Call, "any_sent", False)


def _sealed_is_said_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments.Segments, "not_sealed", segments.Segments.sealed)


def _nobody_drops_what_was_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    not_sealed, drop = segments.Segments.not_sealed, segments.Segments._drop_if_left

    def without_drop(self: Any, event: Any) -> None:
        monkeypatch.setattr(segments.Segments, "_drop_if_left", lambda self, row: None)
        not_sealed(self, event)
        monkeypatch.setattr(segments.Segments, "_drop_if_left", drop)

    monkeypatch.setattr(segments.Segments, "not_sealed", without_drop)


def _settle_on_an_old_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = settling.Settling.segment_dropped

    def settle(self: Any, row: Any, now: int) -> None:
        dropped(self, row, now)
        self._settle(now)

    monkeypatch.setattr(settling.Settling, "segment_dropped", settle)


def _models_end_under_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_model(self: Any, row: Any) -> None:
        if not row.sessions and not row.used():
            self.record(ft.ModelEnded(row.name))

    monkeypatch.setattr(broker_module.Broker, "end_model_if_idle", end_model)


FAULTS = (
    _no_tenant_limit,
    _no_commanded_limit,
    _no_capacity,
    _wide_window,
    _everything_is_proof,
    _nothing_is_ever_due,
    _ids_again,
    _forgetful_not_made,
    _unanswered,
    _charge_per_attach,
    _credit_while_attached,
    _no_death_is_a_doubt,
    _the_lost_wait_on,
    _no_word_of_a_dead_writer,
    _deaf_to_the_time,
    _drop_while_it_is_made,
    _failed_calls_hold,
    _failed_calls_never_hold,
    _sealed_is_said_too_early,
    _nobody_drops_what_was_not_sealed,
    _settle_on_an_old_figure,
    _models_end_under_segments,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_core_with_a_fault_is_found_out(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(Failed) as failed:
        run(SEED, 10_000)
    text = str(failed.value)
    print(text)
    assert text.count("\n----") < 80, "the story is not short"
