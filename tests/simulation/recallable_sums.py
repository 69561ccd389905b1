"""Holds the core's sums of what can be recalled, and of what recalls will bring, to a walk over all sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.recalls_referee import RecallsReferee

    from membrokerd.core.machine import Broker


def check(broker: Broker, mine: RecallsReferee) -> None:
    """Assert that each sum is what the books of the referee add up to."""
    core, models = broker.books.recallable, broker.ledger.models
    asked = [(place[1:], one) for place, one in mine.asked.items()]
    for where in broker.ledger.totals:
        tenants = {name.tenant: core.of_tenant(name.tenant, where) for name in models}
        assert tenants == {tenant: mine.of_tenant(tenant, where) for tenant in tenants}, f"of each tenant: {tenants}"
        assert core.total(where) == sum(tenants.values()), "of all tenants"
        assert core.coming(where) == mine.coming(where), "what recalls will bring"
        urgent = sum(one.left for place, one in mine.asked.items() if place[2] == where and mine.is_urgent(place))
        assert core.urgent(where) == urgent, "what urgent recalls will bring"
        for tenant in tenants:
            left = sum(one.left for (name, at), one in asked if (name.tenant, at, one.late) == (tenant, where, False))
            assert core.asked_of_tenant(tenant, where) == left, f"asked of {tenant}"
        for name in models:
            assert core.of_model(name, where) == mine.of_model(name, where), f"of {name}"
            for late in (False, True):
                left = sum(one.left for place, one in asked if place == (name, where) and one.late == late)
                assert core.asked_of_model(name, where, late=late) == left, f"asked of {name}, late: {late}"
    wanted_by = {one.wanted_by for one in core.recalls.values() if not one.late}
    for name in models:
        assert core.is_coming_for(name) == (name in wanted_by), f"whether something will come for {name}"


def check_nothing_is_left(broker: Broker) -> None:
    """Assert that all sums have gone with the sessions."""
    core = broker.books.recallable
    assert not any(
        (core.recalls, core.kept, core._counted, core._bytes, core._coming, core._coming_for, core._urgent, core._late)
    )
