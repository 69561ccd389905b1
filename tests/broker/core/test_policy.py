"""Which limit is in force. Who is refused at which level, and what is a legal shape, tell limits.txt and shapes.txt."""

from __future__ import annotations

import pytest

from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.ledger import Ledger
from membrokerd.core.names import ModelName

CAPACITIES: dict[str, int] = {"device": 100, "host": 0}
MODEL = ModelName("t", "m")
STRANGER = ModelName("u", "m")


def ledger_with(asked: dict[str, int] | None = None) -> Ledger:
    """Return books with two models: t/m, which asked for `asked`, and u/m."""
    ledger = Ledger(CAPACITIES)  # type: ignore[arg-type]
    for name in (MODEL, STRANGER):
        ledger.apply(ft.ModelBegan(name, None, asked or {} if name == MODEL else {}))  # type: ignore[arg-type]
    return ledger


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
    ledger.apply(ft.QuotaSet("t", None, "device", None, weight=3))
    assert policy.limit_of(ledger.quotas, rules_with(tenant=50), ("t", None, "device")) == 50
    assert policy.quota_of(ledger.quotas, rules_with(tenant=50), ("t", None, "device")) == (50, None, 3)


def test_a_limit_holds_for_its_location_and_its_owner_only() -> None:
    ledger = ledger_with({"device": 10})
    ledger.apply(ft.QuotaSet("t", "m", "device", 8))
    assert policy.model_limit(ledger, rules_with(), MODEL, "host") is None
    assert policy.model_limit(ledger, rules_with(), STRANGER, "device") is None
    assert policy.limit_of(ledger.quotas, rules_with(), ("t", None, "device")) is None
    assert policy.model_limit(ledger, rules_with(), ModelName("t", "never registered"), "device") is None
