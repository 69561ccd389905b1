"""In which order calls are decided that were put aside, and that each is decided once."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.daemons import DEADLINE_SECONDS

from membrokerd.runtime import deferrals
from membrokerd.runtime.deferrals import Deferrals

FLOOD = 300


def decided_in_order(deferred: list[list[tuple[str, int]]]) -> list[list[int]]:
    """Return what was decided in each turn, when so many calls were put aside in each of the first turns."""

    async def scene() -> list[list[int]]:
        turns: list[list[int]] = [[]]
        calls = Deferrals(lambda call: turns[-1].append(call), list, first="own")
        async with asyncio.timeout(DEADLINE_SECONDS):
            for new in deferred:
                for tenant, call in new:
                    calls.add(tenant, call)
                await asyncio.sleep(0)
                turns.append([])
            while sum(map(len, turns)) < sum(map(len, deferred)):
                await asyncio.sleep(0)
                turns.append([])
        return turns

    return asyncio.run(scene())


def test_one_tenant_does_not_wait_for_all_calls_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn has time to decide one call. A deadline comes first, and then a tenant that has used no time yet."""
    monkeypatch.setattr(deferrals, "PORTION_SECONDS", 0.0)
    flood = [("red", call) for call in range(FLOOD)]
    turns = decided_in_order([flood, [("blue", FLOOD)], [("own", FLOOD + 1)]])
    assert max(map(len, turns)) == 1
    order = [call for turn in turns for call in turn]
    assert sorted(order) == list(range(FLOOD + 2))
    assert order.index(FLOOD) <= 3
    assert order.index(FLOOD + 1) <= 3
    assert [call for call in order if call < FLOOD] == list(range(FLOOD)), "those of a tenant are not in their order"


def test_a_fault_in_one_decision_loses_no_other() -> None:
    async def scene() -> None:
        decided: list[int] = []

        def decide(call: int) -> None:
            decided.append(call)
            if call == 1:
                raise RuntimeError("a fault of the broker")

        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
        calls = Deferrals(decide, list, first="own")
        for call in range(4):
            calls.add("red", call)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(decided) < 4:
                await asyncio.sleep(0)
        assert decided == [0, 1, 2, 3]
        assert len(faults) == 1

    asyncio.run(scene())
