"""Shares by their definition, in plain floating point: what `membrokerd.core.shares` divides in whole granules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.guarantees_referee import borrower

from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.referee import Referee

Item = tuple[int, float, float]
"""A weight, the least and the most."""
Part = tuple[float, Item, float]
"""What one has before the rest is divided, its part in that, and what it uses that is firm or guaranteed."""


def fill(room: float, items: Sequence[Item]) -> list[float]:
    """Divide `room`: each has its least, and those with a weight are raised to one level, as far as they want."""
    found = [low for _, low, _ in items]
    for group in ([i for i, one in enumerate(items) if one[0]], [i for i, one in enumerate(items) if not one[0]]):
        left = room - sum(found)
        if left <= 0 or not group:
            continue
        members = [(items[i][0] or 1, items[i][1], items[i][2]) for i in group]
        low, high = 0.0, max(most / weight for weight, _, most in members) + 1
        left += sum(least for _, least, _ in members)
        for _ in range(40):
            level = (low + high) / 2
            if sum([min(max(weight * level, least), most) for weight, least, most in members]) > left:
                high = level
            else:
                low = level
        for i, (weight, least, most) in zip(group, members, strict=True):
            found[i] = min(max(weight * low, least), most)
    return found


SLACK = 8 << 20
"""Bytes by which shares in whole granules may differ from these, and a little."""


def divide(
    referee: Referee,
    where: Location,
    beside: Iterable[Any] = (),
    undone: Any = None,
    keepers: Collection[ModelName] = (),
) -> dict[ModelName, float]:
    """Return the share of each model, if the requests `beside` waited, too, and `keepers` kept all that they have.

    The shares are those before the request `undone` was granted, which is in the books by now.
    """
    beside = tuple(beside)
    known = {} if beside or undone or keepers or referee.known is None else referee.known
    if ("shares", where) not in known:
        known["shares", where] = _divide(referee, where, beside, undone, keepers)
    return cast("dict[ModelName, float]", known["shares", where])


def _divide(
    referee: Referee, where: Location, beside: Iterable[Any], undone: Any, keepers: Collection[ModelName]
) -> dict[ModelName, float]:
    broker, guarantees = referee.world.broker, referee.guarantees
    ledger, total = broker.ledger, broker.ledger.totals[where]
    wanted: Counter[ModelName] = Counter()
    for one in [*broker.waiting._waiters.values(), *beside, *([undone] if undone else [])]:
        if one.event.location == where:
            wanted[one.name] += one.size
    given = {undone.name: undone.size} if undone else {}
    holds = referee.recalls.holds_at_grant if undone else broker.schedule.holds._holds
    for (name, at), hold in holds.items():
        if at == where:
            wanted[name] = max(wanted[name], hold.size - guarantees.lent(name, where) + given.get(name, 0))
    tenants: dict[str, list[ModelName]] = {tenant: [] for tenant in guarantees.tenants_with_guarantees(where)}
    for name in sorted({*ledger.models, *guarantees.guaranteed_anywhere(where), *wanted}):
        tenants.setdefault(name.tenant, []).append(name)
    parts = {
        tenant: [_part(referee, name, where, wanted[name], undone, keeps=name in keepers) for name in names]
        for tenant, names in sorted(tenants.items())
    }
    bases, items = {}, []
    for tenant, own in parts.items():
        bases[tenant], item = _tenant(referee, tenant, where, own)
        items.append(item)
    extra = fill(total.capacity - total.releasing - sum(bases.values()), items)
    shares: dict[ModelName, float] = {}
    for (tenant, own), more in zip(parts.items(), extra, strict=True):
        room = bases[tenant] + more
        if room < sum(base + low for base, (_, low, _), _ in own):  # its limit is below the guarantees of its models
            own = [(0.0, (weight, used, base + low), used) for base, (weight, low, _), used in own]
        sizes = fill(room - sum(base for base, *_ in own), [item for _, item, _ in own])
        shares.update({name: size + base for name, size, (base, *_) in zip(tenants[tenant], sizes, own, strict=True)})
    return shares


def _part(referee: Referee, name: ModelName, where: Location, wanted: int, undone: Any, *, keeps: bool) -> Part:
    """Return a model's part in the division."""
    guarantees, recalls = referee.guarantees, referee.recalls
    lent, firm = guarantees.lent(name, where), guarantees.firm(name, where)
    if keeps:
        firm = lent
    if undone and name == undone.name:
        lent -= undone.size
        firm -= 0 if recalls.is_trusted(borrower(undone), name, where) else undone.size
    row = referee.world.broker.ledger.models.get(name)
    releasing = row.charges[where].releasing if row else 0
    limits = [referee.set_for((*name, where)).limit, referee.asked.get(name, {}).get(where) if row else None]
    most = min([lent + wanted, *(one - releasing for one in limits if one is not None)])
    demand = max(firm, most)
    base = guarantees.guarantee(name, where)
    if recalls.is_possible:
        base = min(base, demand)
    low = max(0, firm - base)
    return base, (referee.weight((*name, where)), low, max(low, most - base)), max(firm, min(base, lent))


def _tenant(referee: Referee, tenant: str, where: Location, own: Sequence[Part]) -> tuple[float, Item]:
    """Return what a tenant has before the rest is divided, and its part in that."""
    ledger, guarantees = referee.world.broker.ledger, referee.guarantees
    least = sum(base + low for base, (_, low, _), _ in own)
    most = sum(base + high for base, (_, _, high), _ in own)
    limit = referee.set_for((tenant, None, where)).limit
    if limit is not None:
        charge = ledger.tenants.get((tenant, where))
        limit -= charge.releasing if charge else 0
        least = max(sum(used for *_, used in own), min(least, limit))
        most = min(most, limit)
    most = max(least, most)
    base: float = guarantees.usable_guarantee(tenant, where)
    if referee.recalls.is_possible and tenant not in referee.world.broker.books.rules.unlent:
        base = min(base, most)
    low = max(0, least - base)
    return base, (referee.weight((tenant, None, where)), low, max(low, most - base))
