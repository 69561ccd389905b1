"""The proof that a core which errs about resumes, restarts or an operator's orders is found out in the world.

Each fault is planted in the core, which is played from a few seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.simulation.faults import Fault, Faults, notice

from membrokerd.core import books, sessions, stock
from membrokerd.core import deaths as releasing
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.sessions import Sessions

pytestmark = pytest.mark.deep

SEEDS = [20_301, 20_308, 20_304, 20_353, 20_464, *range(20_302, 20_313), 20_272, 20_276, 20_317, *range(20_400, 20_424)]
"""The first three are of worlds in which most faults show."""
SHOWN_IN = {
    "declared_is_declared": 20_308,
    "nobody_drops_what_was_being_dropped": 20_260,
    "nobody_tells_who_gave_up": 20_304,
    "nothing_is_ever_lost": 20_260,
    "taken_up_in_the_middle_of_a_packet": 20_307,
    "the_dead_are_taken_up": 20_300,
    "who_was_leaving_stays": 20_316,
}
"""The world in which a rare fault shows soon. It is played first."""
FAULTS = Faults()


def _behind(monkeypatch: pytest.MonkeyPatch, name: str, more: Callable[[Any], None]) -> None:
    """Let the core do something more behind one of its methods."""
    method = getattr(Sessions, name)

    def and_more(self: Any, *arguments: Any) -> Any:
        result = method(self, *arguments)
        more(self)
        return result

    monkeypatch.setattr(Sessions, name, and_more)


def _states(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, ev.StateHolds], Mapping[str, Any]]) -> None:
    """Let the core take Holds for others than they are: `change` says which of their fields, from the session's row."""
    reconcile = Sessions._reconcile

    def bent(self: Any, row: Any, event: ev.StateHolds) -> Any:
        return reconcile(self, row, dataclasses.replace(event, **change(row, event)))

    monkeypatch.setattr(Sessions, "_reconcile", bent)


# --- a resume with a fault ---


@FAULTS.plant
def _not_credited(monkeypatch: pytest.MonkeyPatch) -> None:
    _states(monkeypatch, lambda row, event: {"extents": frozenset(row.extents)})


@FAULTS.plant
def _credited_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _states(monkeypatch, lambda row, event: {"extents": frozenset(sorted(event.extents)[1:])})


@FAULTS.plant
def _holds_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _states(monkeypatch, lambda row, event: {"segments": dict(row.segments)})


@FAULTS.plant
def _declared_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_booked(row: Any, event: ev.StateHolds) -> Mapping[str, Any]:
        return {"declarations": {key: charge.declared for key, charge in row.charges.items()}}

    _states(monkeypatch, as_booked)


@FAULTS.instead_of(Sessions, "resume")
def _anybody_may(resume: Any, self: Any, event: ev.ResumeSession, now: int) -> None:
    row = self._books.ledger.sessions.get(event.session)
    resume(self, dataclasses.replace(event, process=row.process if row else ""), now)


@FAULTS.instead_of(Sessions, "proceed")
def _taken_up_in_the_middle_of_a_packet(proceed: Any, self: Any, session: int, now: int) -> None:
    with pytest.MonkeyPatch.context() as bent:
        bent.setattr(self._lending, "making_of", lambda session: False)
        proceed(self, session, now)


@FAULTS.instead_of(releasing.Releasing, "process_died")
def _the_dead_are_taken_up(process_died: Any, self: Any, event: ev.ProcessDied, now: int) -> None:
    with pytest.MonkeyPatch.context() as bent:
        bent.setattr(Sessions, "give_up", lambda self, session: None)
        process_died(self, event, now)


# --- a restart with a fault ---


@FAULTS.plant
def _credited_by_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def credit(part: Any) -> None:
        for row in [row for row in part._books.ledger.sessions.values() if row.state == "detached" and row.extents]:
            part._books.record(ft.Credited(row.session, tuple(row.extents), "not held"))

    _behind(monkeypatch, "restarted", credit)


@FAULTS.instead_of(Sessions, "_take_over_session")
def _everybody_is_still_connected(take_over: Any, self: Any, row: Any, now: int) -> None:
    if row.state != "open":
        take_over(self, row, now)


@FAULTS.instead_of(Sessions, "_take_over_segment")
def _nobody_drops_what_was_being_dropped(method: Any, self: Any, row: Any, *, lost: bool) -> None:
    if row.state != "dropping":
        method(self, row, lost=lost)


@FAULTS.instead_of(releasing.Releasing, "restarted")
def _the_dead_are_forgotten_by_a_restart(restarted: Any, self: Any, seen: ev.Seen, now: int) -> None:
    restarted(self, seen, now)
    self.deaths.clear()


# --- orders that are not obeyed ---


FAULTS.replacing("unknown_is_not_told", sessions, "MAX_TOLD", 0)
FAULTS.replacing("nobody_tells_who_gave_up", Sessions, "give_up", lambda self, session: None)
FAULTS.replacing("who_was_leaving_stays", Sessions, "_take_over_session", lambda self, row, now: self.detach(row, now))
FAULTS.around(
    "nothing_is_ever_lost",
    Sessions,
    "_take_over_segment",
    lambda take_over, self, row, *, lost: take_over(self, row, lost=False),
)
FAULTS.replacing("lent_all_the_same", books.Books, "refuse_debit", lambda self: None)
FAULTS.replacing("made_ahead_all_the_same", stock.WarmPool, "_unwanted", property(lambda self: self._books.stopping))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS.each())
def test_a_core_with_a_fault_is_found_out(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of a few worlds. (That a story becomes short is `test_simulation`'s.)"""
    notice(fault, SEEDS, monkeypatch, SHOWN_IN)
