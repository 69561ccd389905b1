"""Judges guarantees: what is kept for a tenant or a model is lent to nobody else, and never refused to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tests.simulation.parts import Counting, once_a_step

from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.referee import Referee

NOTHING: Mapping[Any, int] = MappingProxyType({})


class GuaranteesReferee(Counting):
    """Works out from the definition, in one sum over everything, what the core keeps as running rules."""

    COUNTED = ("beside_unlent",)

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self.beside_unlent = 0
        """Debits beside a guarantee that is not used, and never lent."""
        self.later: Counter[tuple[ModelName, Location]] = Counter()
        """What the debits of the step come to that are not judged yet: all of them are in the books."""

    @property
    def _broker(self) -> Any:
        return self._referee.world.broker

    def follow(self, step: Step) -> None:
        """Take down what a step lent: it can grant several requests, each by the books of its moment."""
        self.later = Counter()
        for fact in step.facts:
            match fact:
                case ft.Debited():
                    self.later[fact.name, fact.location] += fact.extent_bytes * fact.count
                case ft.SegmentBegan():
                    self.later[fact.name, fact.location] += fact.extent_bytes * (fact.count - 1) + fact.last_bytes

    def debited(self, name: ModelName, where: Location, size: int, session: int | None) -> None:
        """The debit of `size` bytes, which is in the books, took nothing that is kept for others.

        `session` is the one that borrows extents; None: the bytes cannot be recalled.
        """
        recalls, total = self._referee.recalls, self._broker.ledger.totals[where]
        if recalls.is_marked(name, where):
            within = self.is_guaranteed(name, where, size, undone=self.later)
            assert within, f"{name} was lent more, and owes or keeps what it was asked for"
        self.later[name, where] -= size
        firm = 0 if recalls.is_trusted(session, name, where) else size
        after, before = self.needed(where, {}), self.needed(where, {name: -firm})
        assert after <= max(before, total.capacity - total.releasing), f"{name} was lent what is guaranteed to others"
        unlent = self.unlent_beside(name.tenant, where)
        self.beside_unlent += unlent > 0
        assert total.free >= unlent, f"{name} was lent what is never lent to others"

    def may_borrow(
        self, name: ModelName, where: Location, size: int, session: int | None = None, undone: Any = None
    ) -> bool:
        """Say whether limits, guarantees and the capacity leave room for `size` more bytes.

        `undone` is the request of another tenant that was granted: its debit is in the books, and is thought away.
        """
        free = self._broker.ledger.totals[where].free + (undone.size if undone else 0)
        if undone and undone.name.tenant in self._broker.books.rules.unlent:
            free -= undone.size  # at most so much was its own
        if size > free - self.unlent_beside(name.tenant, where) or self.is_limited(name, where, size):
            return False
        return self.is_allowed(name, where, size, session, undone)

    def is_allowed(
        self, name: ModelName, where: Location, size: int, session: int | None = None, undone: Any = None
    ) -> bool:
        """Say whether all guarantees, and what is firm beyond them, still fit with `size` more bytes."""
        recalls, total = self._referee.recalls, self._broker.ledger.totals[where]
        if recalls.is_marked(name, where):
            return self.is_guaranteed(name, where, size)
        if recalls.is_trusted(session, name, where):
            return True
        firm = undone and not recalls.is_trusted(borrower(undone), undone.name, where)
        without = {undone.name: -undone.size} if firm else {}
        after, before = self.needed(where, {**without, name: size}), self.needed(where, without)
        return after <= max(before, total.capacity - total.releasing)

    @once_a_step
    def unlent(self, tenant: str, where: Location) -> int:
        """Return a tenant's unused guarantee, if it is never lent."""
        if tenant not in self._broker.books.rules.unlent:
            return 0
        models = [one for one in self._broker.ledger.models if one.tenant == tenant]
        lent = sum(self.lent(name, where) for name in models)
        return max(0, self.usable_guarantee(tenant, where) - lent)

    def unlent_beside(self, tenant: str | None, where: Location) -> int:
        """Return the unused guarantees of all other tenants that are never lent."""
        return sum(self.unlent(one, where) for one in self._broker.books.rules.unlent if one != tenant)

    @once_a_step
    def tenant_guarantee(self, tenant: str, where: Location) -> int:
        """Return what a tenant is guaranteed: at least what its models are, and at most its limit."""
        limit, guarantee, _ = self._referee.set_for((tenant, None, where))
        whole = max(guarantee or 0, sum(self.guarantee(name, where) for name in self._guaranteed(tenant, where)))
        return whole if limit is None else min(whole, limit)

    def usable_guarantee(self, tenant: str, where: Location) -> int:
        """Return what a tenant can have lent of its guarantee: its limit counts what is releasing, too."""
        limit, size = self._referee.set_for((tenant, None, where)).limit, self.tenant_guarantee(tenant, where)
        charge = self._broker.ledger.tenants.get((tenant, where))
        return size if limit is None or charge is None else max(0, min(size, limit - charge.releasing))

    def fit_limits(self, where: Location) -> bool:
        """Say whether each tenant's limit has room for what is guaranteed to its models, and is firm beyond that.

        If not, what models use of their guarantees takes part in the division nevertheless.
        """
        models = {*self._broker.ledger.models, *self.guaranteed_anywhere(where)}
        for tenant in {name.tenant for name in models}:
            limit = self._referee.set_for((tenant, None, where)).limit
            charge = self._broker.ledger.tenants.get((tenant, where))
            sizes = [max(self.guarantee(one, where), self.firm(one, where)) for one in models if one.tenant == tenant]
            if limit is not None and sum(sizes) > limit - (charge.releasing if charge else 0):
                return False
        return True

    def used(self, name: ModelName, where: Location) -> int:
        """Return what a model uses of its guarantee: its limit counts what is releasing, too."""
        limit, lent = self.limit(name, where), self.lent(name, where)
        if limit is not None and lent:
            lent = min(lent, limit - self._broker.ledger.models[name].charges[where].releasing)
        return min(self.guarantee(name, where), lent)

    def above_limits(self, where: Location) -> dict[ModelName, int]:
        """Return how many bytes models, or their tenants, have above their limits."""
        found: dict[ModelName, int] = {}
        models = self._broker.ledger.models
        for name in models:
            limit = self.limit(name, where)
            more = 0 if limit is None else self.lent(name, where) - limit
            limit = self._referee.set_for((name.tenant, None, where)).limit
            if limit is not None:
                more = max(more, sum(self.lent(one, where) for one in models if one.tenant == name.tenant) - limit)
            if more > 0:
                found[name] = more
        return found

    def is_limited(self, name: ModelName, where: Location, size: int) -> bool:
        """Say whether a limit of the model or its tenant leaves no room for `size` more bytes."""
        return not self._within_limits(name, where, size)

    def _within_limits(self, name: ModelName, where: Location, size: int) -> bool:
        ledger = self._broker.ledger
        row = ledger.models[name].charges[where]
        limits = [self._referee.set_for((*name, where)).limit, self._referee.asked[name].get(where)]
        if any(limit is not None and row.bytes + size > limit for limit in limits):
            return False
        limit = self._referee.set_for((name.tenant, None, where)).limit
        if limit is None:
            return True
        models = {one for one in ledger.models if one.tenant == name.tenant} | self._guaranteed(name.tenant, where)
        whole = sum(ledger.models[one].charges[where].bytes for one in models if one in ledger.models)
        others = sum(max(0, self.guarantee(one, where) - self.lent(one, where)) for one in models - {name})
        if self.lent(name, where) + size <= self.guarantee(name, where):
            others = 0
        return whole + size + others <= limit

    def is_guaranteed(
        self,
        name: ModelName,
        where: Location,
        size: int,
        undone: Mapping[tuple[ModelName, Location], int] = NOTHING,
    ) -> bool:
        """Say whether `size` more bytes are within the model's guarantee or its tenant's.

        `undone` are debits that are in the books, and are thought away.
        """
        models = {one for one in self._broker.ledger.models if one.tenant == name.tenant}
        models |= self._guaranteed(name.tenant, where)
        lent = {one: self.lent(one, where) - undone.get((one, where), 0) for one in models}
        lent[name] = lent.get(name, 0) + size
        if lent[name] <= self.guarantee(name, where):
            return True
        whole = sum(max(self.guarantee(one, where), lent[one]) for one in models)
        return whole <= (self._referee.set_for((name.tenant, None, where)).guarantee or 0)

    def guaranteed_anywhere(self, where: Location) -> set[ModelName]:
        """Return the models that have a guarantee."""
        return {ModelName(tenant, model) for tenant, model, at in self._keys() if model and at == where}

    def tenants_with_guarantees(self, where: Location) -> set[str]:
        """Return the tenants that have a quota."""
        return {tenant for tenant, _, at in self._keys() if at == where}

    def needed(self, where: Location, changes: Mapping[ModelName, int]) -> int:
        """Return what guarantees and firm bytes need together, if these models had so many more firm bytes."""
        needed: int = self._needed(where)
        for tenant in {name.tenant for name in changes}:
            mine = tuple((name, more) for name, more in changes.items() if name.tenant == tenant)
            needed += self._needed_by(tenant, where, mine) - self._needed_by(tenant, where, ())
        return needed

    @once_a_step
    def _needed(self, where: Location) -> int:
        tenants = {one.tenant for one in self._broker.ledger.models}
        tenants |= {tenant for tenant, _, at in self._keys() if at == where}
        return sum(self._needed_by(tenant, where, ()) for tenant in tenants)

    @once_a_step
    def _needed_by(self, tenant: str, where: Location, changes: tuple[tuple[ModelName, int], ...]) -> int:
        ledger, more = self._broker.ledger, dict(changes)
        models = {one for one in ledger.models if one.tenant == tenant} | self._guaranteed(tenant, where)
        firm = {one: self.firm(one, where) + more.get(one, 0) for one in models}
        of_models = sum(max(self.guarantee(one, where), firm[one]) for one in models)
        limit, guarantee, _ = self._referee.set_for((tenant, None, where))
        term: int = max(of_models, guarantee or 0)
        if limit is not None:  # what a tenant may not borrow is not kept for it
            charged = ledger.tenant_charged(tenant, where) - self._referee.recalls.of_tenant(tenant, where)
            term = min(term, sum(firm.values()) + max(0, limit - charged - sum(more.values())))
        return term

    @once_a_step
    def firm(self, name: ModelName, where: Location) -> int:
        """Return what a model is charged and cannot be recalled."""
        return self.lent(name, where) - self._referee.recalls.of_model(name, where)

    @once_a_step
    def _guaranteed(self, tenant: str, where: Location) -> set[ModelName]:
        return {
            ModelName(tenant, model) for other, model, at in self._keys() if other == tenant and model and at == where
        }

    @once_a_step
    def guarantee(self, name: ModelName, where: Location) -> int:
        """Return what a model is guaranteed: at most its limits."""
        asked = self._referee.asked.get(name, {}).get(where) if name in self._broker.ledger.models else None
        limit, guarantee, _ = self._referee.set_for((*name, where))
        sizes = (guarantee, asked, limit)
        return min(size for size in sizes if size is not None)

    def limit(self, name: ModelName, where: Location) -> int | None:
        """Return a model's limit: the smaller of what operators have set, and what its workers asked for."""
        limits = [self._referee.set_for((*name, where)).limit, self._referee.asked.get(name, {}).get(where)]
        return min((limit for limit in limits if limit is not None), default=None)

    @once_a_step
    def lent(self, name: ModelName, where: Location) -> int:
        row = self._broker.ledger.models.get(name)
        return row.charges[where].bytes - row.charges[where].releasing if row else 0

    @once_a_step
    def _keys(self) -> set[Any]:
        return {*self._referee.quotas, *self._broker.books.rules.guarantees}


def borrower(request: Any) -> int | None:
    """Return the session of a request for extents; None for other requests, whose bytes cannot be recalled."""
    return request.event.session if isinstance(request.event, ev.Allocate) else None
