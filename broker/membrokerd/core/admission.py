"""Which debits are admitted: limits, guarantees and the capacity decide.

The reserve rule: the unused guarantee of a tenant or a model is lent to nobody else, unless it can be recalled. All
guarantees, and the firm bytes beyond them, fit in the capacity. Owns the table of guarantees in force. Must never
change the ledger.

The quantities, in bytes, of a model (M), a tenant (T), a session's part of a model (S) or a location (L). The code and
its tests use these names and no others.

    charged      MTL  lent and releasing bytes: what limits count
    lent         MTL  charged, without what is releasing
    releasing    MTL  of dead processes, until the device shows it free
    free           L  capacity without what is charged
    limit        MT   the most that may be charged
    guarantee    MT   what is kept for it: set by operators, at most its limit
    usable guarantee
                  T   the guarantee, lowered by what is releasing under the limit
    unused       MT   guarantee without what is lent
    unlent        T   unused, of a tenant whose guarantee is never lent to others
    recallable  SMTL  in extents of sessions that answer recalls; without what is kept, and what late sessions have
    kept        SM    what was not released when a recall was answered: not asked for until its time is over
    firm         MT   lent and not recallable: declarations and segments, too, but those of guests
    unfirm       MT   guarantee without what is firm
    not firm       L  free and recallable together
    reserved       L  the unfirm guarantees of all: lent only so that it can be recalled
    shortfall      L  reserved beyond what is not firm: so much of the guarantees cannot be kept now
    asked       SM    recalled and neither released nor kept: `coming` until the deadline, `late` after it
    bound        S    what it could be lent if all others were recalled
    room         S    what it can be lent now, as far as the capacity is concerned: at most `bound`
    available    S    what it can be lent now: the least of the rooms of all levels
    share        M    its part of the location while requests wait: see `shares`
    excess       M    lent and not asked for, above its share: what others may have recalled from it
    wanted       M    of its requests that wait, and its hold
    short          L  wanted by the requests whose turn it is, and neither free nor coming
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from . import policy
from .denied import Denied, Reason, deny
from .ledger import Ledger
from .names import Location, ModelName, QuotaKey
from .recallable import Recallable
from .rows import Quota, TenantCharge


class _Guarantees(NamedTuple):
    """A tenant's guarantees at one location: its own (0: none), and those of its models; and its limit."""

    own: int
    models: dict[ModelName, int]
    limit: int | None


Level = tuple[Reason, str, int, int, int]
"""One bound of a debit: the reason for a refusal, the level's name, bytes used, the limit, and what still fits."""


class Admission:
    """Decides about the debits of one ledger, by `rules` and by the quotas that were in force when it was made."""

    def __init__(self, ledger: Ledger, rules: policy.Rules, recallable: Recallable) -> None:
        self._ledger = ledger
        self._rules = rules
        self._recallable = recallable
        self._sums: dict[tuple[str, Location], tuple[TenantCharge | None, int, int, int]] = {}
        """What `_by_models` returns, and the charge and the revision that it holds for."""
        self._reserved: dict[Location, tuple[tuple[int, int], int]] = {}
        """What `reserved` returns, and the revisions that it holds for."""
        self._unlent: dict[Location, tuple[int, int]] = {}
        """The unused guarantees that are never lent, and the revision that they hold for."""
        self._limits: dict[tuple[ModelName, Location], tuple[int | None, int | None]] = {}
        """The limits in force of a model and of its tenant: a cache, filled when they are asked for."""
        self._guarantees = {where: _guarantees_of_tenants(ledger.quotas, rules, where) for where in ledger.totals}
        for rows in self._guarantees.values():
            for row in rows.values():
                for name in row.models:
                    self.refresh_model(name)

    def refresh_model(self, name: ModelName) -> None:
        """Work out a model's limit and guarantee again: it began or ended, or its workers asked for another limit."""
        for location, rows in self._guarantees.items():
            self._limits.pop((name, location), None)
            self._ledger.touched.add((name, location))
            row = rows.get(name.tenant)
            if row is not None and name in row.models:
                size = policy.guarantee_of(self._ledger.quotas, self._rules, (*name, location))
                limit = policy.model_limit(self._ledger, self._rules, name, location)
                row.models[name] = size if limit is None else min(size, limit)
                self._sums.pop((name.tenant, location), None)
                self._reserved.pop(location, None)
                self._unlent.pop(location, None)

    # --- guarantees ---

    def model_guarantee(self, name: ModelName, location: Location) -> int:
        """Return the bytes that a model is guaranteed: at most its limit in force."""
        row = self._guarantees[location].get(name.tenant)
        return row.models.get(name, 0) if row else 0

    def tenant_guarantee(self, tenant: str, location: Location) -> int:
        """Return the bytes that a tenant is guaranteed: its own guarantee, or its models' if these are more."""
        row = self._guarantees[location].get(tenant)
        size = max(row.own, sum(row.models.values())) if row else 0
        return min(size, policy.MAX_BYTES if row is None or row.limit is None else row.limit)

    def usable_guarantee(self, tenant: str, location: Location) -> int:
        """Return what a tenant can use of its guarantee now: its limit counts bytes that are releasing, too."""
        size = self.tenant_guarantee(tenant, location)
        row = self._guarantees[location].get(tenant)
        if row is None or row.limit is None:
            return size
        releasing = self._ledger.tenant_charged(tenant, location) - self._ledger.tenant_lent(tenant, location)
        return max(0, min(size, row.limit - releasing))

    def has_own_guarantee(self, name: ModelName, location: Location) -> bool:
        """Say whether operators have guaranteed something to the model itself."""
        row = self._guarantees[location].get(name.tenant)
        return row is not None and name in row.models

    def guarantees_of_models(self, location: Location) -> dict[ModelName, int]:
        """Return the guarantee of each model that has one."""
        return {name: size for row in self._guarantees[location].values() for name, size in row.models.items()}

    def tenants(self, location: Location) -> Collection[str]:
        """Return the tenants to which something is guaranteed."""
        return self._guarantees[location].keys()

    def is_guaranteed(self, name: ModelName, location: Location, size: int) -> bool:
        """Say whether the model would stay within its own guarantee, or that of its tenant, with `size` more bytes."""
        return size <= self.guaranteed_room(name, location)

    def guaranteed_room(self, name: ModelName, location: Location) -> int:
        """Return how many more bytes the model could have within its own guarantee, or that of its tenant."""
        if not self._guarantees[location]:
            return 0
        own, _, slack = self._unused(name, location)
        return own + slack

    def reserved(self, location: Location) -> int:
        """Return the bytes that are kept for unused guarantees: they are lent only so that they can be recalled.

        They are kept until something changes: a look at many tenants asks for each of them.
        """
        revisions = self._ledger.revision, self._recallable.revision
        known = self._reserved.get(location)
        if known is None or known[0] != revisions:
            size = sum([self._reserved_for(tenant, location) for tenant in self._guarantees[location]])
            known = self._reserved[location] = revisions, min(policy.MAX_BYTES, size)
        return known[1]

    def shortfall(self, location: Location) -> int:
        """Return how many bytes of the unused guarantees are neither free nor can be recalled."""
        return max(0, self.reserved(location) - self.not_firm(location))

    def not_firm(self, location: Location) -> int:
        """Return the bytes that are free or can be recalled."""
        return self._ledger.totals[location].free + self._recallable.total(location)

    def _reserved_for(self, tenant: str, location: Location) -> int:
        """Return what is kept for a tenant: no more than its limit lets it borrow."""
        own, _, limit = self._guarantees[location][tenant]
        recallable = self._recallable.of_tenant(tenant, location)
        firm = self._ledger.tenant_lent(tenant, location) - recallable
        _, unfirm = self._by_models(tenant, location)
        unused = max(unfirm, own - firm)
        if limit is None:
            return unused
        return min(unused, max(0, limit - self._ledger.tenant_charged(tenant, location) + recallable))

    def hold_without(self, name: ModelName, location: Location, of_model: int, of_tenant: int) -> bool:
        """Say whether the guarantees of a model and of its tenant hold if these lose so many bytes.

        What is not lost counts: a guarantee that is larger than what is lent does not hold.
        """
        row = self._guarantees[location].get(name.tenant)
        if row is None:
            return True
        left = self._ledger.tenant_lent(name.tenant, location) - of_tenant
        of_own = not of_tenant or left >= row.own
        return of_own and self.lent(name, location) - of_model >= row.models.get(name, 0)

    def unlent_beside(self, tenant: str | None, location: Location) -> int:
        """Return the unused guarantees that are never lent, except those of one tenant."""
        if not self._rules.unlent:
            return 0
        known = self._unlent.get(location)
        if known is None or known[0] != self._ledger.revision:
            size = sum([self.unlent(owner, location) for owner in self._rules.unlent])
            known = self._unlent[location] = self._ledger.revision, size
        return known[1] - (self.unlent(tenant, location) if tenant is not None else 0)

    def unlent(self, tenant: str, location: Location) -> int:
        """Return a tenant's unused guarantee, if it is never lent: no more than its limit lets it borrow."""
        if tenant not in self._rules.unlent:
            return 0
        return max(0, self.usable_guarantee(tenant, location) - self._ledger.tenant_lent(tenant, location))

    def _by_models(self, tenant: str, location: Location) -> tuple[int, int]:
        """Return which part of its models' guarantees a tenant has not borrowed, and which part is not firm.

        Both are kept until a charge of the tenant changes (the ledger then has a new record of it), or what is
        recallable.
        """
        key, revision = (tenant, location), self._recallable.revision
        charge = self._ledger.tenants.get(key)
        known = self._sums.get(key)
        if known is None or known[0] is not charge or known[1] != revision:
            unused = unfirm = 0
            for name, size in self._guarantees[location][tenant].models.items():
                lent = self.lent(name, location)
                unused += max(0, size - lent)
                unfirm += max(0, size - lent + self._recallable.of_model(name, location))
            known = self._sums[key] = charge, revision, unused, unfirm
        return known[2:]

    def lent(self, name: ModelName, location: Location) -> int:
        """Return what a model is charged, without what is releasing."""
        row = self._ledger.models.get(name)
        return row.charges[location].bytes - row.charges[location].releasing if row else 0

    def firm(self, name: ModelName, location: Location) -> int:
        """Return what a model is charged and cannot be recalled."""
        return self.lent(name, location) - self._recallable.of_model(name, location)

    def _unused(self, name: ModelName, location: Location) -> tuple[int, int, int]:
        """Return what is unused of three guarantees: a model's, its tenant's other models', and the tenant's beyond."""
        row = self._guarantees[location].get(name.tenant)
        if row is None:
            return 0, 0, 0
        own = max(0, row.models.get(name, 0) - self.lent(name, location))
        unused, _ = self._by_models(name.tenant, location)
        return own, unused - own, max(0, row.own - self._ledger.tenant_lent(name.tenant, location) - unused)

    def _unfirm(self, name: ModelName, location: Location) -> int:
        """Return the room that the guarantees of a model and its tenant have for bytes that cannot be recalled."""
        row = self._guarantees[location].get(name.tenant)
        if row is None:
            return 0
        own = max(0, row.models.get(name, 0) - self.firm(name, location))
        firm = self._ledger.tenant_lent(name.tenant, location) - self._recallable.of_tenant(name.tenant, location)
        _, unfirm = self._by_models(name.tenant, location)
        return own + max(0, row.own - firm - unfirm)

    # --- debits ---

    def admit(self, name: ModelName, location: Location, size: int, session: int | None = None) -> Denied | None:
        """Return why a debit of `size` bytes is refused, or None: the model's limit, the tenant's, the capacity.

        `session` is the one that borrows extents; None: the bytes cannot be recalled, whichever session has them.
        """
        is_trusted = self._recallable.is_possible and self._recallable.is_trusted(session, name, location)
        for level in self.levels(name, location, is_trusted):
            if size > level[-1]:
                return over(level, name, location, size)
        return None

    def available(
        self, name: ModelName, location: Location, device_room: int | None, session: int | None = None
    ) -> int:
        """Return the most bytes that could be lent to a model now: the tightest level's room, in whole granules.

        `device_room` is what the device itself could hold besides; None: it cannot say.
        """
        is_trusted = self._recallable.is_trusted(session, name, location)
        rooms = [room for *_, room in self.levels(name, location, is_trusted)]
        if device_room is not None:
            rooms.append(device_room)
        return max(0, min(rooms)) // self._rules.granularity * self._rules.granularity

    def levels(self, name: ModelName, location: Location, is_trusted: bool, bound: int | None = None) -> list[Level]:
        """Return each level that has a limit, the lowest first. `is_trusted`: what is lent can be recalled.

        `bound` is what `bound` returns, if it is known.
        """
        ledger, guarantees = self._ledger, self._guarantees[location]
        levels: list[Level] = []
        model_limit, tenant_limit = self._limits.get((name, location)) or self._limits_of(name, location)
        if model_limit is not None:
            used = ledger.models[name].charges[location].bytes
            levels.append((Reason.MODEL_LIMIT, "model", used, model_limit, model_limit - used))
        own, others, _ = self._unused(name, location) if guarantees else (0, 0, 0)
        if tenant_limit is not None:
            used = ledger.tenant_charged(name.tenant, location)
            room = max(tenant_limit - used - others, min(tenant_limit - used, own))
            levels.append((Reason.TENANT_LIMIT, "tenant", used, tenant_limit, room))
        total = ledger.totals[location]
        charged = total.lent + total.releasing
        room = total.capacity - charged
        if guarantees or self._recallable.recalls or self._recallable.marks:
            room = self.room(name, location, self.bound(name, location, is_trusted) if bound is None else bound)
        levels.append((Reason.CAPACITY, "capacity", charged, total.capacity, room))
        return levels

    def limit_room(self, name: ModelName, location: Location) -> int:
        """Return how many more bytes the model's own limit allows."""
        limit, _ = self._limits.get((name, location)) or self._limits_of(name, location)
        if limit is None:
            return policy.MAX_BYTES
        row = self._ledger.models.get(name)
        return limit - row.charges[location].bytes if row else limit

    def _limits_of(self, name: ModelName, location: Location) -> tuple[int | None, int | None]:
        """Work out the limits in force of a model and of its tenant."""
        ledger, rules = self._ledger, self._rules
        of_tenant = policy.limit_of(ledger.quotas, rules, (name.tenant, None, location))
        limits = policy.model_limit(ledger, rules, name, location), of_tenant
        if name in ledger.models:  # else nothing would forget them
            self._limits[name, location] = limits
        return limits

    def room(self, name: ModelName, location: Location, bound: int) -> int:
        """Return how many bytes the capacity and the reserve rule allow a session of a model with this bound."""
        free = self._ledger.totals[location].free
        return min(bound, free - self.unlent_beside(name.tenant, location) if self._rules.unlent else free)

    def bound(self, name: ModelName, location: Location, is_trusted: bool) -> int:
        """Return how many bytes a session could be lent for a model if all others were recalled.

        `is_trusted`: what it is lent can be recalled.
        """
        if self._recallable.is_marked(name, location):
            return self.guaranteed_room(name, location)
        if is_trusted:
            return policy.MAX_BYTES
        return self._unfirm(name, location) + max(0, self.not_firm(location) - self.reserved(location))


def over(level: Level, name: ModelName, location: Location, size: int) -> Denied:
    """Return the refusal of a debit that is more than a level has room for."""
    reason, word, used, limit, room = level
    reserved = limit - used - max(0, room)
    numbers = {"reserved_bytes": reserved} if reserved > 0 else {}
    return deny(
        reason,
        level=word,
        model=str(name),
        location=location,
        requested_bytes=size,
        used_bytes=used,
        available_bytes=max(0, room),
        limit_bytes=limit,
        **numbers,
    )


# --- numbers that must fit each other ---


class Misfit(NamedTuple):
    """Guarantees that cannot be kept: `size` bytes are more than `most`, which is what `bound` allows.

    They are a model's, a tenant's (`model` is None), or those of all tenants (`tenant` is None, too). `what` says so.
    """

    tenant: str | None
    model: str | None
    bound: str
    size: int
    most: int
    what: str


def misfits(quotas: Mapping[QuotaKey, Quota], rules: policy.Rules, location: Location) -> Iterator[Misfit]:
    """Yield the guarantees at a location that cannot be kept.

    A model's is at most its limit, those of a tenant's models at most the tenant's guarantee and limit, and those of
    all tenants at most the capacity.
    """
    total = 0
    for tenant, row in _guarantees_of_tenants(quotas, rules, location).items():
        for name, size in row.models.items():
            limit = policy.limit_of(quotas, rules, (*name, location))
            if limit is not None and size > limit:
                yield Misfit(tenant, name.model, "its limit", size, limit, f"the guarantee of {name}")
        of_models = sum(row.models.values())
        together = f"the guarantees of the models of tenants/{tenant} together"
        if 0 < row.own < of_models:
            yield Misfit(tenant, None, "the guarantee of the tenant", of_models, row.own, together)
        needed = max(row.own, of_models)
        if row.limit is not None and needed > row.limit:
            what = f"the guarantee of tenants/{tenant}" if row.own >= of_models else together
            yield Misfit(tenant, None, "the limit of the tenant", needed, row.limit, what)
        total += needed
    capacity = rules.capacities[location]
    if total > capacity:
        yield Misfit(None, None, "the capacity", total, capacity, "the guarantees of all tenants together")


def _guarantees_of_tenants(
    quotas: Mapping[QuotaKey, Quota], rules: policy.Rules, location: Location
) -> dict[str, _Guarantees]:
    """Return what operators have guaranteed to each tenant and its models, by tenant."""
    found: dict[str, _Guarantees] = {}
    keys = [key for key, quota in quotas.items() if quota.guarantee is not None]
    for key in sorted({*keys, *rules.guarantees}, key=lambda key: (key[0], key[1] or "")):
        tenant, model, where = key
        size = policy.guarantee_of(quotas, rules, key)
        if where != location or not size:
            continue
        if tenant not in found:
            found[tenant] = _Guarantees(0, {}, policy.limit_of(quotas, rules, (tenant, None, location)))
        if model is None:
            found[tenant] = found[tenant]._replace(own=size)
        else:
            found[tenant].models[ModelName(tenant, model)] = size
    return found
