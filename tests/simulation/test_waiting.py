"""A core that errs about requests that wait is found out, in worlds where many ask for more than there is."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulation.faults import Fault, around, instead_of, notice, replacing
from tests.simulation.world import is_crowded

from membrokerd.core import policy, schedule
from membrokerd.core.admission import Admission
from membrokerd.core.request_lines import call_of
from membrokerd.core.requests import Wait
from membrokerd.core.schedule import Schedule
from membrokerd.core.waiting import Waiting

pytestmark = pytest.mark.deep

SEEDS = [seed for seed in range(20_260, 20_310) if is_crowded(seed)][:6]
SHOWN_IN = {"the_newest_first": 20_279, "without_shares": 20_311}
"""The world in which a rare fault shows soon. It is played first."""


@instead_of(schedule, "_oldest")
def _the_newest_first(_was: Any, looks: Any, most: Any) -> Any:
    fitting = [
        request
        for look, size in zip(looks, most, strict=True)
        for request in look.line._requests.values()
        if request.size <= size
    ]
    return max(fitting, key=call_of, default=None)


@pytest.mark.parametrize(
    "fault",
    [
        around("for_ever", Waiting, "next", lambda following, self, now: following(self, -1)),
        replacing("not_at_all", Waiting, "_wait_ns", lambda *_: 0),
        around("twice_as_long", Waiting, "_wait_ns", lambda wait_ns, *of: 2 * wait_ns(*of)),
        replacing("whatever_is_released", Schedule, "next", lambda *_: None),
        _the_newest_first,
        replacing("without_guarantees", Admission, "is_guaranteed", lambda *_: False),
        replacing("without_shares", Schedule, "_within_share", lambda *_: -1),
        replacing("without_weights", policy, "weight_of", lambda *_: 1),
        replacing("after_the_connection", Waiting, "give_up", lambda self, session, now: None),
        replacing(
            "after_it_was_cancelled",
            Waiting,
            "cancel",
            lambda self, event, now: self._remove(self._waiters[event.call], "given up"),
        ),
        replacing(
            "for_a_limit",
            Waiting,
            "_wait",
            lambda self, one, why: Wait(self._wait_ns(one, guaranteed=False), False, why),
        ),
        replacing("and_is_not_counted", Waiting, "_report", lambda *_: None),
    ],
    ids=lambda one: one.__name__.strip("_"),
)
def test_a_core_with_a_fault_is_found_out(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits …, as the name of the fault goes on."""
    notice(fault, SEEDS, monkeypatch, SHOWN_IN)
