"""The rules alone: which limit is in force, who is refused at which level, and what is a legal shape."""

from __future__ import annotations

import pytest

from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.admission import Admission
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.ledger import Ledger
from membrokerd.core.names import ModelName
from membrokerd.core.recallable import Recallable

CAPACITIES: dict[str, int] = {"device": 100, "host": 0}
MODEL = ModelName("t", "m")
OTHER = ModelName("t", "other")
STRANGER = ModelName("u", "m")


def ledger_with(asked: dict[str, int] | None = None, **charged: int) -> Ledger:
    """Return books with three models: t/m, which asked for `asked`, t/other and u/m, charged so many bytes."""
    ledger = Ledger(CAPACITIES)  # type: ignore[arg-type]
    for number, name in enumerate((MODEL, OTHER, STRANGER), start=1):
        ledger.apply(ft.SessionBegan(number, name.tenant, number, 0, str(number), False, "test", 0))
        ledger.apply(ft.ModelBegan(name, None, asked or {} if name == MODEL else {}))  # type: ignore[arg-type]
        ledger.apply(ft.ModelJoined(name, number))
        size = charged.get(f"{name.tenant}_{name.model}", 0)
        ledger.apply(ft.DeclarationSet(number, name, "device", size))
    return ledger


def admission(ledger: Ledger, rules: policy.Rules) -> Admission:
    return Admission(ledger, rules, Recallable(ledger))


def rules_with(model: int | None = None, tenant: int | None = None) -> policy.Rules:
    configured = {("t", "m", "device"): model, ("t", None, "device"): tenant}
    limits = {key: limit for key, limit in configured.items() if limit is not None}
    return policy.Rules(granularity=2, capacities=CAPACITIES, limits=limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "configured", "commanded", "in_force"),
    [
        (None, None, None, None),
        (40, None, None, 40),
        (None, 50, None, 50),
        (40, 50, None, 40),
        (60, 50, None, 50),
        (None, 50, 70, 70),
        (None, 50, 30, 30),
        (40, 50, 70, 40),
        (40, None, 30, 30),
        (0, 50, 70, 0),
        (None, 50, 0, 0),
    ],
)
def test_the_smaller_of_asked_and_commanded_or_else_configured(
    asked: int | None, configured: int | None, commanded: int | None, in_force: int | None
) -> None:
    """A worker may lower what it is allowed and never raise it; an operator's command replaces the configuration."""
    ledger = ledger_with(None if asked is None else {"device": asked})
    if commanded is not None:
        ledger.apply(ft.QuotaSet("t", "m", "device", commanded))
    assert policy.model_limit(ledger, rules_with(configured), MODEL, "device") == in_force


def test_a_command_that_ends_leaves_the_configuration() -> None:
    ledger = ledger_with()
    ledger.apply(ft.QuotaSet("t", None, "device", 10))
    assert policy.limit_of(ledger.quotas, rules_with(tenant=50), ("t", None, "device")) == 10
    ledger.apply(ft.QuotaSet("t", None, "device", None))
    assert policy.limit_of(ledger.quotas, rules_with(tenant=50), ("t", None, "device")) == 50


def test_a_limit_holds_for_its_location_and_its_owner_only() -> None:
    ledger = ledger_with({"device": 10})
    ledger.apply(ft.QuotaSet("t", "m", "device", 8))
    assert policy.model_limit(ledger, rules_with(), MODEL, "host") is None
    assert policy.model_limit(ledger, rules_with(), STRANGER, "device") is None
    assert policy.limit_of(ledger.quotas, rules_with(), ("t", None, "device")) is None
    assert policy.model_limit(ledger, rules_with(), ModelName("t", "never registered"), "device") is None


@pytest.mark.parametrize(
    ("charged", "size", "reason", "available"),
    [
        ({"t_m": 10}, 11, Reason.MODEL_LIMIT, 10),
        ({"t_m": 10, "t_other": 25}, 8, Reason.TENANT_LIMIT, 5),
        ({"t_m": 10, "u_m": 87}, 4, Reason.CAPACITY, 3),
        ({"t_m": 10, "t_other": 30, "u_m": 60}, 11, Reason.MODEL_LIMIT, 10),
        ({"t_m": 10, "t_other": 35}, 1, Reason.TENANT_LIMIT, 0),
    ],
)
def test_the_narrowest_level_is_named_first(charged: dict[str, int], size: int, reason: Reason, available: int) -> None:
    """A refusal names the model before the tenant before the device, and what was still there at that level."""
    denied = admission(ledger_with(**charged), rules_with(model=20, tenant=40)).admit(MODEL, "device", size)
    assert isinstance(denied, Denied)
    assert denied.reason is reason
    assert denied.numbers["available_bytes"] == available
    assert denied.numbers["requested_bytes"] == size


@pytest.mark.parametrize(("size", "granted"), [(10, True), (11, False)])
def test_a_limit_may_be_reached_and_not_passed(size: int, granted: bool) -> None:
    denied = admission(ledger_with(t_m=10), rules_with(model=20)).admit(MODEL, "device", size)
    assert (denied is None) is granted


def test_nothing_available_is_never_negative() -> None:
    """A limit that was set below what is used takes nothing back, and shows nothing available."""
    denied = admission(ledger_with(t_m=30), rules_with(model=20)).admit(MODEL, "device", 1)
    assert denied is not None
    assert denied.numbers["available_bytes"] == 0
    assert denied.numbers["used_bytes"] == 30


@pytest.mark.parametrize(
    ("location", "extent_bytes", "count", "reason"),
    [
        ("device", 2, 1, None),
        ("device", 2, policy.MAX_COUNT, None),
        ("device", policy.MAX_BYTES - 1, 1, None),
        ("host", 2, 1, Reason.LOCATION_UNAVAILABLE),
        ("moon", 2, 1, Reason.LOCATION_UNAVAILABLE),
        ("device", 0, 1, Reason.INVALID_SIZE),
        ("device", -2, 1, Reason.INVALID_SIZE),
        ("device", 3, 1, Reason.INVALID_SIZE),
        ("device", policy.MAX_BYTES + 1, 1, Reason.INVALID_SIZE),
        ("device", 2, 0, Reason.INVALID_COUNT),
        ("device", 2, -1, Reason.INVALID_COUNT),
        ("device", 2, policy.MAX_COUNT + 1, Reason.INVALID_COUNT),
    ],
)
def test_the_shape_of_an_allocate(location: str, extent_bytes: int, count: int, reason: Reason | None) -> None:
    denied = policy.check_extents(rules_with(), location, extent_bytes, count)  # type: ignore[arg-type]
    assert (denied.reason if denied else None) is reason


@pytest.mark.parametrize(
    ("free", "size", "reserve", "passes"),
    [(10, 6, 4, True), (10, 7, 4, False), (0, 0, 0, True), (None, 1 << 60, 4, True), (3, 0, 4, False)],
)
def test_the_gate(free: int | None, size: int, reserve: int, passes: bool) -> None:
    """What the card cannot hold is not created, whatever the books say; who cannot say lets the books decide."""
    assert policy.gate(free, size, reserve) is passes
