"""Shares: how a location's memory is divided among the models that borrow there, by weighted max-min fairness.

A model's share is what it could have now: its guarantee, what it has already, and its part of the rest, up to what it
has and waits for. Tenants are divided first, then each tenant's models: a tenant gains nothing by more models. What is
lent and cannot be recalled is never part of somebody else's share, so all that a model has above its own share can be
recalled. While sessions answer recalls, guarantees that are not used are divided too. Shares are whole granules, and
what rounding leaves goes to those that lost the most by it: a model that wants more never has a smaller share.

This is why a request within its share never starves. All shares fit in the capacity, and firm bytes are a lower bound
of a share. So what such requests lack is at most what others have beyond their shares, and all of that can be recalled.
While one of them waits, nothing beyond a share is lent. A recall ends by bytes, by an answer or at its deadline, and
what did not come is firm from then on. After one round in which nobody was late, the free bytes cover all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from . import policy
from .admission import Admission
from .ledger import Ledger
from .names import Location, ModelName
from .recallable import Recallable

_FRACTION = 16
"""Fraction bits of the level at which items are filled."""


class Item(NamedTuple):
    """A tenant or a model in a division: it gets at least `low` bytes, at most `high`, and between these by `weight`.

    It gets `base` bytes before the rest is divided. `used` bytes of a model are firm, or within its guarantee.
    """

    weight: int
    low: int
    high: int
    base: int = 0
    used: int = 0


def fill(room: int, items: Sequence[Item], granule: int) -> list[int]:
    """Return how many bytes each item gets of `room`.

    Each gets its `low`, even if that is more than there is. Items of weight 0 get what the others leave, in equal
    parts. An item never gets less when its `high` grows by whole granules.
    """
    found = [item.low for item in items]
    left = room - sum(found)
    for group in (
        {i: item for i, item in enumerate(items) if item.weight},
        {i: item._replace(weight=1) for i, item in enumerate(items) if not item.weight},
    ):
        if left > 0 and group:
            least = sum([item.low for item in group.values()])
            for i, size in zip(group, _fill_group(left + least, list(group.values()), granule), strict=True):
                left -= size - found[i]
                found[i] = size
    return found


def _fill_group(room: int, items: Sequence[Item], granule: int) -> list[int]:
    level = _level(room, items)
    sizes = []
    rounded = []
    for i, (weight, low, high, *_) in enumerate(items):
        part = weight * level >> _FRACTION
        sizes.append(max(low, _lowered(high, part, granule)))
        if part < high:
            rounded.append((sizes[i] - part, i))
    left = room - sum(sizes)
    # The bytes that rounding left over go to the items that lost the most by it. The level is rounded as well: so an
    # item that should get all that it wants may be a byte short of that, and must not lose a whole granule for it to
    # an item that is at its `low`.
    for _, i in sorted(rounded):
        more = min(left, granule, items[i].high - sizes[i])
        sizes[i] += more
        left -= more
    return sizes


def _lowered(size: int, bound: int, granule: int) -> int:
    """Return `size`, lowered by the fewest whole granules that bring it down to `bound`.

    `bound` itself is not rounded: limits, guarantees and declarations may be odd sizes, so a rounded `bound` could be
    less than a `size` that is within it.
    """
    return size if size <= bound else size + (bound - size) // granule * granule


def _level(room: int, items: Iterable[Item]) -> int:
    """Return the highest level at which all items fit in `room`, if each takes its weight times the level."""
    bends = []
    total = 0
    for weight, low, high, *_ in items:
        total += low << _FRACTION
        bends += [(-(-(low << _FRACTION) // weight), weight), ((high << _FRACTION) // weight, -weight)]
    bends.sort()
    level = slope = 0
    room <<= _FRACTION
    for bend, change in bends:
        if total + slope * (bend - level) > room:
            return level + (room - total) // slope
        total += slope * (bend - level)
        level, slope = bend, slope + change
    return level


class Shares:
    """The division over one ledger."""

    def __init__(self, ledger: Ledger, rules: policy.Rules, admission: Admission, recallable: Recallable) -> None:
        self._ledger = ledger
        self._rules = rules
        self._admission = admission
        self._recallable = recallable

    def divide(
        self, location: Location, wanted: Mapping[ModelName, int], less: int = 0, keepers: Collection[ModelName] = ()
    ) -> dict[ModelName, int]:
        """Return the share of each model that has a charge or a guarantee, or wants more: `wanted` bytes.

        All that `keepers` have is taken to be firm.

        All but `less` bytes of the location are divided.
        """
        total = self._ledger.totals[location]
        guarantees = self._admission.guarantees_of_models(location)
        models: dict[str, dict[ModelName, Item]] = {tenant: {} for tenant in self._admission.tenants(location)}
        charged = [name for name, row in self._ledger.models.items() if row.charges[location].bytes]
        for name in sorted({*charged, *guarantees, *wanted}):
            item = self._model(name, location, wanted.get(name, 0), guarantees.get(name, 0), keeps=name in keepers)
            if item.base or item.high:
                models.setdefault(name.tenant, {})[name] = item
        tenants = [self._tenant(tenant, location, items.values()) for tenant, items in models.items()]
        granule = self._rules.granularity
        room = total.capacity - total.releasing - less - sum([tenant.base for tenant in tenants])
        found: dict[ModelName, int] = {}
        for tenant, items, extra in zip(tenants, models.values(), fill(room, tenants, granule), strict=True):
            own, room = list(items.values()), tenant.base + extra
            if room < sum([item.base + item.low for item in own]):  # the limit is too low for all that is guaranteed
                own = [Item(item.weight, item.used, item.base + item.low) for item in own]
            room -= sum([item.base for item in own])
            for name, item, size in zip(items, own, fill(room, own, granule), strict=True):
                found[name] = item.base + size
        return found

    def _model(self, name: ModelName, location: Location, wanted: int, guarantee: int, *, keeps: bool) -> Item:
        """Return a model's item: its guarantee, and from what is firm beyond that up to what it has and wants."""
        ledger, rules = self._ledger, self._rules
        row = ledger.models.get(name)
        charge = row.charges[location] if row else None
        releasing = charge.releasing if charge else 0
        lent = charge.bytes - releasing if charge else 0
        firm = lent if keeps else lent - self._recallable.of_model(name, location)
        limit = policy.model_limit(ledger, rules, name, location)
        most = lent + wanted
        if limit is not None:
            most = _lowered(most, limit - releasing, rules.granularity)
        base = min(guarantee, max(firm, most)) if self._recallable.is_possible else guarantee
        low = max(0, firm - base)
        weight = policy.weight_of(ledger.quotas, rules, (*name, location))
        return Item(weight, low, max(low, most - base), base, max(firm, min(base, lent)))

    def _tenant(self, tenant: str, location: Location, models: Collection[Item]) -> Item:
        """Return a tenant's item: its usable guarantee, or what its models want of that, and what they want besides."""
        least = sum([model.base + model.low for model in models])
        most = sum([model.base + model.high for model in models])
        limit = policy.limit_of(self._ledger.quotas, self._rules, (tenant, None, location))
        if limit is not None:
            charge = self._ledger.tenants.get((tenant, location))
            bound = limit - (charge.releasing if charge else 0)
            least = max(sum([model.used for model in models]), _lowered(least, bound, self._rules.granularity))
            most = _lowered(most, bound, self._rules.granularity)
        most = max(least, most)
        base = self._admission.usable_guarantee(tenant, location)
        if self._recallable.is_possible and tenant not in self._rules.unlent:
            base = min(base, most)
        low = max(0, least - base)
        weight = policy.weight_of(self._ledger.quotas, self._rules, (tenant, None, location))
        return Item(weight, low, max(low, most - base), base)
