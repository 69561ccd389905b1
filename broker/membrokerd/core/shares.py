"""Shares: how a location's memory is divided among the models that borrow there, by weighted max-min fairness.

A model's share is what it could have now: its guarantee, what it has already, and its part of the rest, up to what it
has and waits for. Tenants are divided first, then each tenant's models: a tenant gains nothing by more models. What is
lent and cannot be recalled is never part of somebody else's share, so all that a model has above its own share can be
recalled. While sessions answer recalls, guarantees that are not used are divided too. What too many models wait for
counts only for those of each tenant that have waited longest: `request_lines.Sharers`. Shares are whole granules, and
what rounding leaves goes to those that lost the most by it: a model that wants more never has a smaller share.

This is why a request within its share never starves. All shares fit in the capacity, and firm bytes are a lower bound
of a share. So what such requests lack is at most what others have beyond their shares, and all of that can be recalled.
There is one exception: while a session does not return what is guaranteed to others, the shares do not all fit. Then
`Schedule` grants nothing to tenants that keep recalled memory, as long as others wait for what they may have.
While a request within its share waits, nothing beyond a share is lent. A recall ends by bytes, by an answer or at its
deadline, and what did not come is firm from then on. After one round in which nobody was late, the free bytes cover all
of these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import policy
from .admission import Admission
from .ledger import Ledger
from .names import Location, ModelName
from .recallable import Recallable

_FRACTION = 16
"""Fraction bits of the level at which items are filled."""
_KNOWN = 4
"""How many divisions of a tenant's share among its models are kept."""


class Item(NamedTuple):
    """A tenant or a model in a division: it gets at least `low` bytes, at most `high`, and between these by `weight`.

    It gets `base` bytes before the rest is divided. `used` bytes of a model are firm, or within its guarantee.
    """

    weight: int
    low: int
    high: int
    base: int = 0
    used: int = 0


PORTION = 256
"""How many models are left to the next division, so that it need not work out all at once."""
_EMPTY = Item(0, 0, 0)
_NOTHING: Mapping[ModelName, int] = {}


def fill(room: int, items: Sequence[Item], granule: int) -> list[int]:
    """Return how many bytes each item gets of `room`.

    Each gets its `low`, even if that is more than there is. Items of weight 0 get what the others leave, in equal
    parts. An item never gets less when its `high` grows by whole granules.
    """
    if len(items) == 1:
        _, low, high, *_ = items[0]
        return [max(low, min(room, high))]
    found = [item[1] for item in items]
    left = room - sum(found)
    if left <= 0:
        return found
    if all(item[0] for item in items):
        return _fill_group(room, items, granule)
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
    for weight, low, high, _, _ in items:
        part = weight * level >> _FRACTION
        if part >= high:
            sizes.append(high)
            continue
        size = max(low, high + (part - high) // granule * granule)  # `_lowered`
        rounded.append((size - part, len(sizes)))
        sizes.append(size)
    left = room - sum(sizes)
    # The bytes that rounding left over go to the items that lost the most by it. The level is rounded as well: so an
    # item that should get all that it wants may be a byte short of that, and must not lose a whole granule for it to
    # an item that is at its `low`.
    rounded.sort()
    for _, i in rounded:
        if not left:
            break
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
    for weight, low, high, _, _ in items:
        total += low
        bends.append((-(-(low << _FRACTION) // weight), weight))
        bends.append(((high << _FRACTION) // weight, -weight))
    bends.sort()
    level = slope = 0
    room, total = room << _FRACTION, total << _FRACTION
    for bend, change in bends:
        if total + slope * (bend - level) > room:
            return level + (room - total) // slope
        total += slope * (bend - level)
        level, slope = bend, slope + change
    return level


class Part:
    """A tenant's part in a division: its item, and those of its models in the order of their names. Never changed."""

    def __init__(self, item: Item, models: dict[ModelName, Item], sums: Item, granule: int) -> None:
        self.item = item
        self.models = models
        self.sums = sums
        """The numbers of all models together."""
        self._granule = granule
        self._known: dict[int, dict[ModelName, int]] = {}
        """The shares of the models, by the tenant's share: the last ones that were asked for."""

    def divide(self, room: int) -> dict[ModelName, int]:
        """Return the share of each model, if the tenant's is `room`."""
        found = self._known.get(room)
        if found is None:
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            found = self._known[room] = self._divide(room)
        return found

    def _divide(self, room: int) -> dict[ModelName, int]:
        items, sums = list(self.models.values()), self.sums
        own = items
        if room < sums.base + sums.low:  # the limit is too low for all that is guaranteed
            own = [Item(item.weight, item.used, item.base + item.low) for item in items]
            sums = _EMPTY
        sizes = fill(room - sums.base, own, self._granule)
        if sums.base:
            sizes = [size + item.base for size, item in zip(sizes, own, strict=True)]
        return dict(zip(self.models, sizes, strict=True))


class Division(Mapping[ModelName, int]):
    """The share of each model that has a charge or a guarantee, or wants more. A tenant's are computed when needed."""

    def __init__(self, parts: Mapping[str, Part], rooms: Mapping[str, int]) -> None:
        self._parts = parts
        self._rooms = rooms

    def of_tenant(self, tenant: str) -> Mapping[ModelName, int]:
        """Return the shares of a tenant's models: the same object as in another division, if nothing has changed."""
        part = self._parts.get(tenant)
        return _NOTHING if part is None else part.divide(self._rooms[tenant])

    def get(self, name: ModelName, default: Any = None) -> Any:
        """Return the share of a model, as any mapping does: the inherited function is slower."""
        return self.of_tenant(name.tenant).get(name, default)

    def __getitem__(self, name: ModelName) -> int:
        return self.of_tenant(name.tenant)[name]

    def __iter__(self) -> Iterator[ModelName]:
        for part in self._parts.values():
            yield from part.models

    def __len__(self) -> int:
        return sum(len(part.models) for part in self._parts.values())


class Shares:
    """The division over one ledger, by rules and guarantees that do not change, if recalls are possible or if not.

    Each model's item is kept until `changed` says that something about the model has changed.
    """

    def __init__(
        self,
        ledger: Ledger,
        rules: policy.Rules,
        admission: Admission,
        recallable: Recallable,
        wanted: Callable[[ModelName, Location], int] = lambda *_: 0,
        *,
        is_possible: bool,
    ) -> None:
        self._ledger = ledger
        self._rules = rules
        self._admission = admission
        self._recallable = recallable
        self._wanted = wanted
        """How many bytes a model wants beyond those that it has."""
        self._parts: dict[Location, dict[str, Part]] = {location: {} for location in ledger.totals}
        self._changed: dict[Location, set[ModelName]] = {location: set() for location in ledger.totals}
        self._unknown = set(ledger.totals)
        """Where all models that are charged, or guaranteed something, must be worked out."""
        self._is_possible = is_possible
        self._rooms: dict[Location, tuple[int, list[Item], dict[str, int]]] = {}
        """What was divided last among the tenants, with their items, and the shares of the tenants."""

    def changed(self, name: ModelName, location: Location) -> None:
        """Note that something about a model has changed. A portion of changes is worked out at once."""
        if location in self._changed:
            self._changed[location].add(name)
            if len(self._changed[location]) > PORTION:
                self.follow(location)

    def divide(
        self,
        location: Location,
        wanted: Mapping[ModelName, int] = _NOTHING,
        less: int = 0,
        keepers: Collection[ModelName] = (),
    ) -> Division:
        """Return the shares. The models in `wanted` are taken to want so many bytes instead.

        All that `keepers` have is taken to be firm. All but `less` bytes of the location are divided.
        """
        parts = self.follow(location)
        if wanted or keepers:
            parts = self._follow(location, parts, {*wanted, *keepers}, wanted, keepers)
        total, items = self._ledger.totals[location], [part.item for part in parts.values()]
        room = total.capacity - total.releasing - less - sum([item.base for item in items])
        known = self._rooms.get(location)
        if known is None or known[0] != room or known[1] != items or list(known[2]) != list(parts):
            extra = fill(room, items, self._rules.granularity)
            rooms = {tenant: item.base + size for tenant, item, size in zip(parts, items, extra, strict=True)}
            known = room, items, rooms
            if not (wanted or keepers or less):
                self._rooms[location] = known
        return Division(parts, known[2])

    def follow(self, location: Location) -> dict[str, Part]:
        """Work out the parts of all tenants again of which a model has changed, and return those of all."""
        changed = self._changed[location]
        if location in self._unknown:
            self._unknown.remove(location)
            changed.update([name for name, row in self._ledger.models.items() if row.charges[location].bytes])
            changed.update(self._admission.guarantees_of_models(location))
        if changed or not self._parts[location]:
            self._parts[location] = self._follow(location, self._parts[location], changed)
            self._changed[location] = set()
        return self._parts[location]

    def _follow(
        self,
        location: Location,
        before: Mapping[str, Part],
        names: Collection[ModelName],
        wanted: Mapping[ModelName, int] = _NOTHING,
        keepers: Collection[ModelName] = (),
    ) -> dict[str, Part]:
        """Return the parts of all tenants after these models have changed."""
        by_tenant: dict[str, list[ModelName]] = {tenant: [] for tenant in self._admission.tenants(location)}
        for name in names:
            by_tenant.setdefault(name.tenant, []).append(name)
        parts = dict(before)
        for tenant, own in by_tenant.items():
            known = before.get(tenant)
            if known is not None and not own:
                continue
            models, sums = dict(known.models) if known else {}, known.sums if known else _EMPTY
            for name in own:
                want = wanted[name] if name in wanted else self._wanted(name, location)
                guarantee = self._admission.model_guarantee(name, location)
                item = self._model(name, location, want, guarantee, keeps=name in keepers)
                old = models.get(name, _EMPTY)
                if item.base or item.high:
                    models[name] = item
                else:
                    models.pop(name, None)
                    item = _EMPTY
                sums = Item(
                    weight=sums.weight + item.weight - old.weight,
                    low=sums.low + item.low - old.low,
                    high=sums.high + item.high - old.high,
                    base=sums.base + item.base - old.base,
                    used=sums.used + item.used - old.used,
                )
            if known is None or models.keys() - known.models.keys():
                models = dict(sorted(models.items()))
            if models or tenant in self._admission.tenants(location):
                parts[tenant] = Part(self._tenant(tenant, location, sums), models, sums, self._rules.granularity)
            else:
                parts.pop(tenant, None)
        if len(parts) != len(before) or parts.keys() != before.keys():
            first = self._admission.tenants(location)
            parts = {tenant: parts[tenant] for tenant in (*first, *sorted(parts.keys() - first))}
        return parts

    def _model(self, name: ModelName, location: Location, wanted: int, guarantee: int, *, keeps: bool) -> Item:
        """Return a model's item: its guarantee, and from what is firm beyond that up to what it has and wants."""
        lent, granule = self._admission.lent(name, location), self._rules.granularity
        firm = lent if keeps else lent - self._recallable.of_model(name, location)
        most = _lowered(lent + wanted, lent + self._admission.limit_room(name, location), granule)
        base = min(guarantee, max(firm, most)) if self._is_possible else guarantee
        low = max(0, firm - base)
        weight = policy.weight_of(self._ledger.quotas, self._rules, (*name, location))
        return Item(weight, low, max(low, most - base), base, max(firm, min(base, lent)))

    def _tenant(self, tenant: str, location: Location, models: Item) -> Item:
        """Return a tenant's item: its usable guarantee, or what its models want of that, and what they want besides.

        `models` are the numbers of its models together.
        """
        least, most = models.base + models.low, models.base + models.high
        limit = policy.limit_of(self._ledger.quotas, self._rules, (tenant, None, location))
        if limit is not None:
            charge = self._ledger.tenants.get((tenant, location))
            bound = limit - (charge.releasing if charge else 0)
            least = max(models.used, _lowered(least, bound, self._rules.granularity))
            most = _lowered(most, bound, self._rules.granularity)
        most = max(least, most)
        base = self._admission.usable_guarantee(tenant, location)
        if self._is_possible and tenant not in self._rules.unlent:
            base = min(base, most)
        low = max(0, least - base)
        weight = policy.weight_of(self._ledger.quotas, self._rules, (tenant, None, location))
        return Item(weight, low, max(low, most - base), base)
