"""Time is shared by tenants, however many pieces of work each has, and however long one takes."""

from __future__ import annotations

from collections import Counter

import pytest

from membrokerd.system.tenant_queues import MAX_REMEMBERED, TenantQueues


def _order(queues: TenantQueues[str], seconds: dict[str, float]) -> list[str]:
    """Take all that waits, each for as long as its tenant's work takes."""
    order = []
    while queues:
        tenant, work = queues.take()
        queues.charge(tenant, seconds.get(tenant, 1.0))
        order.append(work)
    return order


def test_tenants_come_in_turn_and_within_one_the_oldest() -> None:
    queues: TenantQueues[str] = TenantQueues()
    for tenant, count in (("red", 4), ("blue", 2), ("green", 1)):
        for number in range(count):
            queues.put(tenant, f"{tenant} {number}")
    queues.put("red", "red 0")  # it waits already, and keeps its place
    assert _order(queues, {}) == ["red 0", "blue 0", "green 0", "red 1", "blue 1", "red 2", "red 3"]


def test_long_work_is_paid_by_its_tenant() -> None:
    """Red's steps take four times as long as blue's, so it gets a quarter as many."""
    queues: TenantQueues[str] = TenantQueues()
    for number in range(20):
        queues.put("red", f"red {number}")
        queues.put("blue", f"blue {number}")
    first = _order(queues, {"red": 4.0})[:20]
    assert Counter(work.split()[0] for work in first) == {"red": 4, "blue": 16}


def test_a_debt_outlives_an_empty_queue() -> None:
    """Red had nothing waiting for a moment. What it used still counts in the next turn."""
    queues: TenantQueues[str] = TenantQueues()
    queues.put("red", "red 0")
    assert _order(queues, {}) == ["red 0"]
    queues.put("red", "red 1")
    queues.put("blue", "blue")
    assert _order(queues, {}) == ["blue", "red 1"]


def test_nobody_saves_time_by_waiting_for_nothing() -> None:
    """Red has worked alone for an hour. Blue comes and is first, once; then they take turns."""
    queues: TenantQueues[str] = TenantQueues()
    for _ in range(3_600):
        queues.put("red", "red")
        assert _order(queues, {}) == ["red"]
    for number in range(3):
        queues.put("red", f"red {number}")
        queues.put("blue", f"blue {number}")
    assert _order(queues, {}) == ["blue 0", "red 0", "blue 1", "red 1", "blue 2", "red 2"]


@pytest.mark.parametrize("first", [None, "red"])
def test_who_goes_on_alone_has_used_as_much_as_if_it_had_waited(first: str | None) -> None:
    """Red is alone for three steps. Blue and green come then, each with less used than red, and a debt of green's."""
    orders = []
    for goes_on in (True, False):
        queues: TenantQueues[str] = TenantQueues(first)
        queues.put("green", "green")
        queues.take()
        queues.charge("green", 2.5)
        queues.put("red", "red")
        queues.take()
        for _ in range(3):
            queues.charge("red", 1.0)
            if goes_on:
                assert queues.go_on("red")
            else:
                queues.put("red", "red")
                queues.take()
        queues.put("blue", "blue 0")
        assert not queues.go_on("red"), "blue waits"
        for work in ("blue 1", "blue 2"):
            queues.put("blue", work)
        for number in range(3):
            queues.put("red", f"red {number}")
            queues.put("green", f"green {number}")
        orders.append(_order(queues, {}))
    assert orders[0] == orders[1]


def test_the_first_comes_before_all_others() -> None:
    queues: TenantQueues[str] = TenantQueues(first="")
    for number in range(3):
        queues.put("red", f"red {number}")
    queues.put("", "own 0")
    queues.put("", "own 1")
    assert queues.take() == ("", "own 0")
    queues.charge("", 9.0)
    assert queues.take() == ("", "own 1")
    queues.charge("", 9.0)
    assert queues.take() == ("red", "red 0")
    queues.charge("red", 1.0)
    queues.put("", "own 2")
    assert _order(queues, {}) == ["own 2", "red 1", "red 2"]


@pytest.mark.parametrize("waits", [0, 2_000])
def test_tenants_that_are_gone_are_forgotten(waits: int) -> None:
    queues: TenantQueues[str] = TenantQueues()
    for number in range(waits):
        queues.put(f"waits {number}", "work")
    for number in range(10_000):
        queues.charge(f"uid-{number}", 1.0)
    assert len(queues._used) <= 2 * waits + MAX_REMEMBERED
    assert len(_order(queues, {})) == waits
