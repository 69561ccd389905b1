"""A core that errs about recalls or about requests that wait is found out, in worlds where many ask for too much.

And a world that comes to rest leaves no entitled request waiting.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.simulation.faults import Fault, Faults, notice
from tests.simulation.recalling import is_deaf
from tests.simulation.world import World, is_crowded

from membrokerd.core import policy, schedule
from membrokerd.core.admission import Admission
from membrokerd.core.books import Books
from membrokerd.core.model_holds import ModelHolds
from membrokerd.core.recallable import Borrower, Recallable
from membrokerd.core.recalls import Recalls
from membrokerd.core.request_lines import BySize
from membrokerd.core.requests import DebitRequest, Wait
from membrokerd.core.schedule import Schedule
from membrokerd.core.shares import Shares
from membrokerd.core.waiting import Waiting

pytestmark = pytest.mark.deep

SEEDS = [seed for seed in range(20_260, 20_340) if is_crowded(seed) and not is_deaf(seed)][:6]
SEEDS.append(20_351)
SEEDS_OF_WAITING = [seed for seed in range(20_260, 20_310) if is_crowded(seed)][:6]
SHOWN_IN = {
    "a_lost_connection_ends_it": 20_261,
    "any_release_counts": 20_375,
    "any_session_may_answer": 20_279,
    "late_sessions_borrow_on": 20_285,
    "not_looked_at_again": 20_503,
    "without_shares": 20_311,
}
"""The world in which a rare fault shows soon. It is played first."""
REST = [
    97,
    *(seed for seed in range(20_260, 20_300) if not is_deaf(seed)),
    20_335,
    20_359,
    20_371,
    20_398,
    20_399,
    20_403,
    20_404,
]
FAULTS, OF_WAITING = Faults(), Faults()


# --- what can be recalled ---


@FAULTS.instead_of(Recallable, "extents_of")
def _declarations_can_be_recalled(_was: Any, self: Any, one: Borrower) -> int:
    charge = self._ledger.sessions[one.session].charges.get((one.name, one.location))
    return charge.bytes if charge else 0


@FAULTS.instead_of(Recallable, "borrowers")
def _lost_sessions_can_be_asked(_was: Any, self: Any, name: Any, location: Any) -> Any:
    return iter([Borrower(session, name, location) for session in self._answering.get(name, ())])


@FAULTS.instead_of(Books, "record")
def _debits_are_not_counted(record: Any, self: Any, fact: Any) -> None:
    possible, self.recallable.is_possible = self.recallable.is_possible, False
    record(self, fact)
    self.recallable.is_possible = self.recallable.is_possible or possible


# --- what is kept ---


@FAULTS.instead_of(Recalls, "elapsed")
def _kept_for_ever(elapsed: Any, self: Any, now: int) -> None:
    kept, self._state.kept = self._state.kept, {}
    elapsed(self, now)
    self._state.kept = kept


# --- questions and answers ---


@FAULTS.instead_of(Recalls, "released")
def _any_release_counts(released: Any, self: Any, session: int, loans: Any, now: int) -> None:
    name = next((one.name for one in self._state.recalls if one.session == session), None)
    released(self, session, [loan._replace(name=name or loan.name) for loan in loans], now)


@FAULTS.instead_of(Recalls, "answer")
def _any_session_may_answer(answer: Any, self: Any, event: Any, now: int) -> None:
    for one, recall in self._state.recalls.items():
        if recall.number == event.recall:
            answer(self, dataclasses.replace(event, session=one.session), now)
            return


@FAULTS.instead_of(Recalls, "elapsed")
def _never_late(elapsed: Any, self: Any, now: int) -> None:
    recalls, self._state.recalls = self._state.recalls, {}
    elapsed(self, now)
    self._state.recalls = recalls


@FAULTS.instead_of(Recalls, "_set_deadline")
def _not_woken_for_it(_was: Any, self: Any) -> None:
    self.deadline = None
    self._state.changed()


@FAULTS.instead_of(Recalls, "detached")
def _a_lost_connection_ends_it(detached: Any, self: Any, session: int) -> None:
    detached(self, session)
    self._state.away.clear()


# --- how much, and of which models ---


@FAULTS.instead_of(Shares, "_tenant")
def _unused_guarantees_have_a_share(tenant_part: Any, self: Any, tenant: str, where: Any, models: Any) -> Any:
    found = tenant_part(self, tenant, where, models)
    return found._replace(base=self._admission.usable_guarantee(tenant, where))


# --- holds, and whose turn it is ---


@FAULTS.plant
def _what_is_wanted_soon_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DebitRequest, "wanted", property(lambda self: self.size))


@FAULTS.instead_of(ModelHolds, "_begin")
def _a_hold_grows_by_the_same_step(
    hold: Any, self: Any, name: Any, location: Any, requested: int, wanted: int, now: int
) -> None:
    before = self._holds.get((name, location))
    hold(self, name, location, requested, wanted, now)
    if before is not None:
        self._holds[name, location] = self._holds[name, location]._replace(step=before.step)


@FAULTS.instead_of(Schedule, "_first")
def _beyond_its_share_in_turn(_was: Any, self: Any, location: Any, looks: Any, now: int) -> Any:
    return schedule._oldest([schedule.Reach(look.group, look.group, look.room) for look in looks])


@FAULTS.instead_of(Waiting, "_state")
def _not_looked_at_again(_was: Any, self: Any) -> object:
    return self._books.ledger.revision, self._books.admission, self._books.recallable.revision


FAULTS.replacing("nothing_becomes_urgent", Recalls, "make_urgent", lambda *_: None)
FAULTS.replacing(
    "segments_can_be_recalled",
    Admission,
    "firm",
    lambda self, name, where: 0 if self._recallable.is_possible else self.lent(name, where),
)
FAULTS.replacing("late_sessions_borrow_on", Recallable, "is_marked", lambda *_: False)
FAULTS.replacing("more_is_kept_than_there_is", Recallable, "bound_kept", lambda *_: None)
FAULTS.around(
    "never_raised",
    Recallable,
    "more_of",
    lambda more_of, self, one, *rest: 0 if one in self.recalls else more_of(self, one, *rest),
)
FAULTS.around(
    "answers_are_for_all_raises",
    Recalls,
    "answer",
    lambda answer, self, event, now: answer(self, dataclasses.replace(event, size=1 << 62), now),
)
FAULTS.around(
    "not_repeated",
    Recalls,
    "_say",
    lambda say, self, one, recall, *rest: None if recall.late else say(self, one, recall, *rest),
)
FAULTS.replacing("limits_are_not_recalled", Schedule, "recall_above_limits", lambda *_: None)
FAULTS.replacing("the_unlent_is_lent", Admission, "unlent", lambda *_: 0)
FAULTS.replacing("a_hold_never_ends", ModelHolds, "elapsed", lambda *_: False)
FAULTS.replacing("a_hold_keeps_nothing", Schedule, "_held_beside", lambda *_: 0)
FAULTS.replacing("refused_in_its_turn", Schedule, "leaves", lambda *_: 0)


# --- requests that wait: each name goes on behind "a request waits" ---


OF_WAITING.around("for_ever", Waiting, "next", lambda following, self, now: following(self, -1))
OF_WAITING.replacing("not_at_all", Waiting, "_wait_ns", lambda *_: 0)
OF_WAITING.replacing("without_shares", Schedule, "_entitled", lambda *_: BySize())
OF_WAITING.replacing("without_weights", policy, "weight_of", lambda *_: 1)
OF_WAITING.replacing("after_the_connection", Waiting, "give_up", lambda self, session, now: None)
OF_WAITING.replacing(
    "after_it_was_cancelled",
    Waiting,
    "cancel",
    lambda self, event, now: self._remove(self._waiters[event.call], "given up"),
)
OF_WAITING.replacing(
    "for_a_limit",
    Waiting,
    "_wait",
    lambda self, one, why: Wait(self._wait_ns(one, guaranteed=False), False, why),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "seeds"), FAULTS.each(SEEDS) + OF_WAITING.each(SEEDS_OF_WAITING))
def test_a_core_with_a_fault_is_found_out(fault: Fault, seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10,000 steps of one of a few crowded worlds."""
    notice(fault, seeds, monkeypatch, SHOWN_IN)


@pytest.mark.parametrize("unfair", ["", "t0"], ids=["all answer", "one tenant keeps everything"])
def test_at_rest_no_entitled_request_waits(unfair: str) -> None:
    """When all recalls are answered with bytes and no session asks for more, what is promised has been granted.

    One tenant may keep all that it is asked for, and ask with hints on and on: the others release what is lacking.
    """
    asked = 0
    for seed in REST:
        world = World(seed)
        for number in range(1_500):
            world.turn(number)
        asked += world.recalling.come_to_rest(unfair)
        world.referee.waiting.judge_rest(unfair)
        world.end()
    assert asked >= 10, "hardly anything was recalled"
