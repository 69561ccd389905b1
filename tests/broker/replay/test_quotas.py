"""What commands have set, in a replay: many rows of it at one time, and when they are in force."""

from __future__ import annotations

import pytest
from tests.support.sizes import GIB, MIB

from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.names import ModelName
from membrokerd.replay import trace
from membrokerd.replay.changes import Changes
from membrokerd.replay.figures import Tally
from membrokerd.replay.reading import TracePart
from membrokerd.replay.recording import Recording
from membrokerd.replay.replayer import Replayer

RULES = policy.Rules(granularity=2 * MIB, capacities={"device": 64 * GIB})


def replayer_of(rows: list[tuple[int, trace.Row]]) -> Replayer:
    part = TracePart(trace.Begin("the daemon started", 0, 0, RULES))
    for at, row in rows:
        part.add(at, row)
    return Replayer(part, Recording(part, Tally()), Changes(), Tally())


def quota(number: int, guarantee: int = 2 * MIB) -> ft.QuotaSet:
    return ft.QuotaSet("red", f"m{number}", "device", None, guarantee, None)


def test_a_quota_is_in_force_before_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those of one time the last number of a model counts. Each drain, and the end, sees all that was set before."""
    rows: list[tuple[int, trace.Row]] = [(5, quota(1)), (5, quota(2)), (5, quota(1, 4 * MIB))]
    rows += [(5, ev.SetDraining(0, draining=True)), (6, quota(2, 6 * MIB)), (7, quota(1, 8 * MIB))]
    rows += [(7, ev.SetDraining(0, draining=False)), (8, quota(2, 10 * MIB))]
    replayer, tell, seen = replayer_of(rows), Replayer.tell, list[tuple[int, ...]]()

    def in_force() -> tuple[int, ...]:
        guarantee = replayer.broker.books.admission.model_guarantee
        return tuple(guarantee(ModelName("red", f"m{number}"), "device") // MIB for number in (1, 2))

    def look(self: Replayer, event: ev.Event) -> None:
        if isinstance(event, ev.SetDraining):
            seen.append((self.now, *in_force()))
        tell(self, event)

    monkeypatch.setattr(Replayer, "tell", look)
    replayer.run(lambda _: None)
    assert [*seen, in_force()] == [(5, 4, 2), (7, 8, 6), (8, 10)]
