"""The other numbers of a replay: a capacity, and limits, guarantees and weights in place of those in force then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..ext import Location, QuotaKey, misfit_sentences, policy
from ..ext import facts as ft

MAX_EXTENTS = 1 << 20
"""How many extents a replayed device may hold: 2 TiB of the smallest of a GPU."""

MANY = 1 << 20


class Unplayable(Exception):
    """What was asked for cannot be replayed. The message says what to change."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What is different at one location. `quotas` are by tenant and model: the numbers given, None for none at all."""

    location: Location = "device"
    capacity: int | None = None
    quotas: Mapping[tuple[str, str | None], Mapping[str, int | None]] = field(default_factory=dict)

    def rules(self, recorded: policy.Rules) -> policy.Rules:
        """Return the rules of a replay. Raises `Unplayable`."""
        capacities = dict(recorded.capacities)
        if self.location not in capacities:
            raise Unplayable(
                f"the recorded broker lends no {self.location} memory: leave out --location {self.location}"
            )
        if self.capacity is not None:
            capacities[self.location] = self.capacity
        tables = {"limit": recorded.limits, "guarantee": recorded.guarantees, "weight": recorded.weights}
        changed = {name: self._changed(name, table) for name, table in tables.items()}
        rules = replace(
            recorded,
            capacities=capacities,
            limits=changed["limit"],
            guarantees=changed["guarantee"],
            weights=changed["weight"],
            stock_extents=0,  # it never decides whether a request is granted
            stock_bytes=0,
            # These sessions and models were admitted, and a trace does not say which process opened a session.
            max_sessions=MANY,
            max_sessions_per_process=MANY,
            max_sessions_per_tenant=None,
            max_models_per_tenant=MANY,
            max_models=None,
        )
        self._check(recorded, rules)
        return rules

    @staticmethod
    def without_quotas(rules: policy.Rules) -> policy.Rules:
        """Return the rules with the capacity alone."""
        return replace(rules, limits={}, default_limits={}, guarantees={}, weights={}, unlent=frozenset())

    def _changed(self, name: str, table: Mapping[QuotaKey, int]) -> dict[QuotaKey, int]:
        found = dict(table)
        for (tenant, model), numbers in self.quotas.items():
            if name in numbers:
                key, number = (tenant, model, self.location), numbers[name]
                if number is None:
                    found.pop(key, None)
                else:
                    found[key] = number
        return found

    def _check(self, recorded: policy.Rules, rules: policy.Rules) -> None:
        for where, capacity in rules.capacities.items():
            if capacity > rules.granularity * MAX_EXTENTS:
                raise Unplayable(
                    f"a capacity of {capacity} bytes of {where} memory in extents of {rules.granularity} bytes is more "
                    f"than a replay holds, {MAX_EXTENTS} extents: give a smaller --capacity"
                )
        before = set(misfit_sentences({}, recorded))
        if problems := [sentence for sentence in misfit_sentences({}, rules) if sentence not in before]:
            raise Unplayable("; ".join(problems) + ": change one of these numbers")

    def left_of(self, row: ft.QuotaSet) -> ft.QuotaSet:
        """Return what a command of that time sets still, where it is not replaced."""
        given = self.quotas.get((row.tenant, row.model), {}) if row.location == self.location else {}
        return replace(
            row,
            limit=None if "limit" in given else row.limit,
            guarantee=None if "guarantee" in given else row.guarantee,
            weight=None if "weight" in given else row.weight,
        )
