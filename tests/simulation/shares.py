"""Shares by their definition, in plain floating point: what `membrokerd.core.shares` divides in whole granules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from membrokerd.core import events as ev

if TYPE_CHECKING:
    from tests.simulation.referee import Referee

Item = tuple[int, float, float]
"""A weight, the least and the most."""


def fill(room: float, items: Sequence[Item]) -> list[float]:
    """Divide `room`: each has its least, and those with a weight are raised to one level, as far as they want."""
    found = [low for _, low, _ in items]
    for group in ([i for i, one in enumerate(items) if one[0]], [i for i, one in enumerate(items) if not one[0]]):
        left = room - sum(found)
        if left <= 0 or not group:
            continue
        weights = {i: items[i][0] or 1 for i in group}
        low, high = 0.0, max(items[i][2] / weights[i] for i in group) + 1
        for _ in range(60):
            level = (low + high) / 2
            sizes = {i: min(max(weights[i] * level, items[i][1]), items[i][2]) for i in group}
            if sum(sizes.values()) - sum(found[i] for i in group) > left:
                high = level
            else:
                low = level
        for i in group:
            found[i] = min(max(weights[i] * low, items[i][1]), items[i][2])
    return found


def divide(referee: Referee, where: ev.Location, undone: Any) -> dict[ev.ModelName, float]:
    """Return the share of each model before the request `undone` was granted, which is in the books by now."""
    broker, guarantees = referee.world.broker, referee.guarantees
    ledger, total = broker.ledger, broker.ledger.totals[where]
    wanted: dict[ev.ModelName, int] = {undone.name: undone.size}
    for waiter in broker.waiting._waiters.values():
        if waiter.event.location == where:
            wanted[waiter.name] = wanted.get(waiter.name, 0) + waiter.size
    tenants: dict[str, list[ev.ModelName]] = {}
    for name in sorted({*ledger.models, *guarantees.guaranteed_anywhere(where), *wanted}):
        tenants.setdefault(name.tenant, []).append(name)
    for tenant in guarantees.tenants_with_guarantees(where):
        tenants.setdefault(tenant, [])
    parts: dict[str, list[Item]] = {}
    bases: dict[str, float] = {}
    items: list[Item] = []
    for tenant, names in tenants.items():
        own = []
        for name in names:
            lent = guarantees.lent(name, where) - (undone.size if name == undone.name else 0)
            row = ledger.models.get(name)
            releasing = row.charges[where].releasing if row else 0
            base = guarantees.guarantee(name, where)
            limits = [referee.set_for((*name, where)).limit, referee.asked.get(name, {}).get(where) if row else None]
            most = min([lent + wanted.get(name, 0), *(one - releasing for one in limits if one is not None)])
            low = max(0, lent - base)
            own.append((referee.weight((*name, where)), low, max(low, most - base)))
        limit, guarantee, _ = referee.set_for((tenant, None, where))
        models = [guarantees.guarantee(name, where) for name in names]
        base = max(guarantee or 0, sum(models))
        base = base if limit is None else min(base, limit)
        least = sum(size + item[1] for size, item in zip(models, own, strict=True))
        most = sum(size + item[2] for size, item in zip(models, own, strict=True))
        if limit is not None:
            charge = ledger.tenants.get((tenant, where))
            most = min(most, limit - (charge.releasing if charge else 0))
        low = max(0, least - base)
        parts[tenant], bases[tenant] = own, base
        items.append((referee.weight((tenant, None, where)), low, max(low, most - base)))
    extra = fill(total.capacity - total.releasing - sum(bases.values()), items)
    shares: dict[ev.ModelName, float] = {}
    for (tenant, names), more in zip(tenants.items(), extra, strict=True):
        models = [guarantees.guarantee(name, where) for name in names]
        sizes = fill(bases[tenant] + more - sum(models), parts[tenant])
        shares.update({name: size + base for name, size, base in zip(names, sizes, models, strict=True)})
    return shares
