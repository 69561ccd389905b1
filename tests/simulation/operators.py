"""The operator: quotas by command, and edits of the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.support.sizes import MIB

from membrokerd.core import events as ev
from membrokerd.core.admission import misfits
from membrokerd.core.names import Location, QuotaKey

if TYPE_CHECKING:
    from tests.simulation.world import World

SECOND = 1_000_000_000
CONFIGURED: tuple[QuotaKey, ...] = (
    ("t0", "m1", "device"),
    ("t1", None, "device"),
    ("t1", "m0", "device"),
    ("t2", None, "device"),
)
"""Whose limits a reload may change."""


class Operator:
    """Commands and reloads."""

    def __init__(self, world: World) -> None:
        self.world = world

    def set_quota(self) -> None:
        """Command a limit, a guarantee and a weight, or leave them to the configuration."""
        world, chance = self.world, self.world.random
        model = chance.choice((None, "m0", "m1"))
        limit = chance.choice((None, None, None, None, None, 0, 100, 400, 800))
        guarantee = chance.choice((None, None, None, 0, 40, 100, 300))
        sizes = [None if size is None else size * MIB for size in (limit, guarantee)]
        weight = chance.choice((None, None, 0, 1, 5, 1_000, 1_001))
        world.send(ev.SetQuota(world.call(-1), f"t{chance.randrange(3)}", model, world.where(), *sizes, weight))

    def lift_limits(self) -> None:
        """Set no limit any more, by command or in the configuration."""
        world = self.world
        for (tenant, model, where), quota in list(world.broker.ledger.quotas.items()):
            sizes = None, quota.guarantee, quota.weight
            world.send(ev.SetQuota(world.call(-1), tenant, model, where, *sizes))
        world.broker.change_rules(dataclasses.replace(world.broker.books.rules, limits={}, default_limits={}))

    def reload(self) -> None:
        """Edit the configuration and send SIGHUP. What is lent stays lent."""
        world, chance = self.world, self.world.random
        if world.daemons.dead:
            return
        limits = {key: chance.choice((0, 100, 400, 900)) * MIB for key in CONFIGURED if chance.random() < 0.6}
        default = chance.choice((None, None, 300, 900))
        defaults: dict[Location, int] = {} if default is None else {"device": default * MIB}
        guarantees = {key: chance.choice((40, 100, 200)) * MIB for key in CONFIGURED if chance.random() < 0.3}
        weights = {key: chance.choice((0, 1, 3)) for key in CONFIGURED if chance.random() < 0.3}
        unlent = frozenset(tenant for tenant in ("t0", "t1", "t2") if chance.random() < 0.2)
        rules = dataclasses.replace(
            world.broker.books.rules,
            limits=limits,
            default_limits=defaults,
            guarantees=guarantees,
            weights=weights,
            unlent=unlent,
            recall_ns=chance.choice((1, 1, 2)) * SECOND,
        )
        if any(True for where in rules.capacities for _ in misfits({}, rules, where)):  # the daemon refuses that
            rules, guarantees = dataclasses.replace(rules, guarantees={}), {}
        world.broker.change_rules(rules)
        named = {
            "limits": _named(limits),
            "guarantees": _named(guarantees),
            "weights": _named(weights, unit=1),
            "unlent": ",".join(sorted(unlent)),
            "default": "" if default is None else str(default),
        }
        options = [f"{key}={text}" for key, text in named.items() if text]
        world.events.append((world.now, " ".join(["reload", *options, f"recall={rules.recall_ns // SECOND}"])))
        world.steps["reload"] += 1


def _named(numbers: Mapping[QuotaKey, int], unit: int = MIB) -> str:
    return ",".join(
        f"{tenant}{'/' + model if model else ''}:{one // unit}" for (tenant, model, _), one in numbers.items()
    )
