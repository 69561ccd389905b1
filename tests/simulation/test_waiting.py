"""A core that errs about requests that wait is found out, in worlds where many ask for more than there is."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulation.faults import Fault, notice
from tests.simulation.world import is_crowded

from membrokerd.core import policy, schedule
from membrokerd.core.admission import Admission
from membrokerd.core.lines import call_of
from membrokerd.core.requests import Wait
from membrokerd.core.schedule import Schedule
from membrokerd.core.waiting import Waiting

pytestmark = pytest.mark.deep

SEEDS = [seed for seed in range(20_260, 20_310) if is_crowded(seed)][:6]
SHOWN_IN = {"the_newest_first": 20_279, "without_shares": 20_311}
"""The world in which a rare fault shows soon. It is played first."""


def _for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    following = Waiting.next
    monkeypatch.setattr(Waiting, "next", lambda self, now: following(self, -1))


def _not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "_wait_ns", lambda *_: 0)


def _twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_ns = Waiting._wait_ns
    monkeypatch.setattr(Waiting, "_wait_ns", lambda *of: 2 * wait_ns(*of))


def _whatever_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "next", lambda *_: None)


def _the_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(looks: Any, most: Any) -> Any:
        fitting = [
            request
            for look, size in zip(looks, most, strict=True)
            for request in look.line._requests.values()
            if request.size <= size
        ]
        return max(fitting, key=call_of, default=None)

    monkeypatch.setattr(schedule, "_oldest", newest)


def _without_guarantees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "is_guaranteed", lambda *_: False)


def _without_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "_within_share", lambda *_: -1)


def _without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "weight_of", lambda *_: 1)


def _after_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "give_up", lambda self, session, now: None)


def _after_it_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "cancel", lambda self, event, now: self._remove(self._waiters[event.call], "given up"))


def _for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "_wait", lambda self, one, why: Wait(self._wait_ns(one, guaranteed=False), False, why))


def _and_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "_report", lambda *_: None)


@pytest.mark.parametrize(
    "fault",
    [
        _for_ever,
        _not_at_all,
        _twice_as_long,
        _whatever_is_released,
        _the_newest_first,
        _without_guarantees,
        _without_shares,
        _without_weights,
        _after_the_connection,
        _after_it_was_cancelled,
        _for_a_limit,
        _and_is_not_counted,
    ],
    ids=lambda one: one.__name__.strip("_"),
)
def test_a_core_with_a_fault_is_found_out(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits …, as the name of the fault goes on."""
    notice(fault, SEEDS, monkeypatch, SHOWN_IN)
