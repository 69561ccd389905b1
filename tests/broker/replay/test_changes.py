"""The numbers of a replay: they take the place of those that were configured, and of those that were commanded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.sizes import MIB

from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.replay.changes import MAX_EXTENTS, Changes, Unplayable

RULES = policy.Rules(
    granularity=2 * MIB,
    capacities={"device": 64 * MIB},
    limits={("red", None, "device"): 32 * MIB},
    guarantees={("red", "m", "device"): 8 * MIB},
)


def changed(**numbers: int | None) -> Changes:
    return Changes(quotas={("red", None): numbers})


def test_a_number_takes_the_place_of_a_commanded_one() -> None:
    row = ft.QuotaSet("red", None, "device", 4 * MIB, 2 * MIB, 3)
    assert changed(limit=16 * MIB).left_of(row) == replace(row, limit=None)
    assert changed(guarantee=MIB).left_of(row) == replace(row, guarantee=None)
    assert changed(weight=None).left_of(row) == replace(row, weight=None)
    assert Changes().left_of(row) == row


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (Changes(capacity=4 * MIB), "more than the capacity, 4.0 MiB: change one of these numbers"),
        (changed(guarantee=128 * MIB), "more than the limit of the tenant"),
        (Changes(location="host"), "lends no host memory: leave out --location host"),
        (Changes(capacity=2 * MIB * (MAX_EXTENTS + 1)), "give a smaller --capacity"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: Changes, sentence: str) -> None:
    with pytest.raises(Unplayable, match=sentence):
        changes.rules(RULES)
