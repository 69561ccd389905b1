"""Judges guarantees: what is kept for a tenant or a model is lent to nobody else, and never refused to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from membrokerd.core import events as ev
from membrokerd.core.denied import Denied

if TYPE_CHECKING:
    from tests.simulation.referee import Referee


class GuaranteesReferee:
    """Works out from the definition, in one sum over everything, what the core keeps as running rules."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self.debits = self.refusals = 0
        """Debits beside a guarantee that was not used, and refusals that name one."""

    @property
    def _broker(self) -> Any:
        return self._referee.world.broker

    def debited(self, name: ev.ModelName, where: ev.Location, size: int) -> None:
        """The debit of `size` bytes, which is in the books, took nothing that is kept for others."""
        total = self._broker.ledger.totals[where]
        after, before = self._needed(where, {}), self._needed(where, {name: -size})
        self.debits += after > total.lent
        assert after <= max(before, total.capacity - total.releasing), f"{name} was lent what is guaranteed to others"

    def may_borrow(
        self, name: ev.ModelName, where: ev.Location, size: int, undone: tuple[ev.ModelName, int] | None = None
    ) -> bool:
        """Say whether limits, guarantees and the capacity leave room for `size` more bytes.

        `undone` is a debit of another tenant's model that is in the books, and is thought away.
        """
        total = self._broker.ledger.totals[where]
        if size > total.free + (undone[1] if undone else 0) or self.is_limited(name, where, size):
            return False
        without = {undone[0]: -undone[1]} if undone else {}
        after, before = self._needed(where, {**without, name: size}), self._needed(where, without)
        return after <= max(before, total.capacity - total.releasing)

    def is_limited(self, name: ev.ModelName, where: ev.Location, size: int) -> bool:
        """Say whether a limit of the model or its tenant leaves no room for `size` more bytes."""
        return not self._within_limits(name, where, size)

    def _within_limits(self, name: ev.ModelName, where: ev.Location, size: int) -> bool:
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

    def is_guaranteed(self, name: ev.ModelName, where: ev.Location, size: int, less: int = 0) -> bool:
        """Say whether `size` more bytes, and `less` fewer before, are within the model's guarantee or its tenant's."""
        if self.lent(name, where) - less + size <= self.guarantee(name, where):
            return True
        models = {one for one in self._broker.ledger.models if one.tenant == name.tenant}
        models |= self._guaranteed(name.tenant, where)
        lent = {one: self.lent(one, where) + (size - less if one == name else 0) for one in models}
        whole = sum(max(self.guarantee(one, where), lent[one]) for one in models)
        return whole <= (self._referee.set_for((name.tenant, None, where)).guarantee or 0)

    def guaranteed_anywhere(self, where: ev.Location) -> set[ev.ModelName]:
        """Return the models that have a guarantee."""
        return {ev.ModelName(tenant, model) for tenant, model, at in self._keys() if model and at == where}

    def tenants_with_guarantees(self, where: ev.Location) -> set[str]:
        """Return the tenants that have a quota."""
        return {tenant for tenant, _, at in self._keys() if at == where}

    def _needed(self, where: ev.Location, changes: Mapping[ev.ModelName, int]) -> int:
        """Return what guarantees and loans need together, if these models had so many more bytes."""
        ledger, needed = self._broker.ledger, 0
        tenants = {one.tenant for one in ledger.models}
        tenants |= {tenant for tenant, _, at in self._keys() if at == where}
        for tenant in tenants:
            models = {one for one in ledger.models if one.tenant == tenant} | self._guaranteed(tenant, where)
            lent = {one: self.lent(one, where) + changes.get(one, 0) for one in models}
            of_models = sum(max(self.guarantee(one, where), lent[one]) for one in models)
            limit, guarantee, _ = self._referee.set_for((tenant, None, where))
            term = max(of_models, guarantee or 0)
            if limit is not None:  # what a tenant may not borrow is not kept for it
                mine = sum(more for name, more in changes.items() if name.tenant == tenant)
                left = max(0, limit - ledger.tenant_charged(tenant, where) - mine)
                term = min(term, sum(lent.values()) + left)
            needed += term
        return needed

    def _guaranteed(self, tenant: str, where: ev.Location) -> set[ev.ModelName]:
        return {
            ev.ModelName(tenant, model)
            for other, model, at in self._keys()
            if other == tenant and model and at == where
        }

    def guarantee(self, name: ev.ModelName, where: ev.Location) -> int:
        """Return what a model is guaranteed: at most its limits."""
        asked = self._referee.asked.get(name, {}).get(where) if name in self._broker.ledger.models else None
        limit, guarantee, _ = self._referee.set_for((*name, where))
        sizes = (guarantee, asked, limit)
        return min(size for size in sizes if size is not None)

    def lent(self, name: ev.ModelName, where: ev.Location) -> int:
        row = self._broker.ledger.models.get(name)
        return row.charges[where].bytes - row.charges[where].releasing if row else 0

    def refused(self, denied: Denied) -> None:
        """What was refused for want of room had none; a guarantee that can be kept is never refused."""
        tenant, model = str(denied.numbers["model"]).removeprefix("tenants/").split("/models/")
        where: Any = denied.numbers["location"]
        asked, name = int(denied.numbers["requested_bytes"]), ev.ModelName(tenant, model)
        assert not self.may_borrow(name, where, asked), f"{name} was refused what it may borrow: {denied}"
        self.refusals += "reserved_bytes" in denied.numbers

    def _keys(self) -> set[Any]:
        return {*self._referee.quotas, *self._broker.rules.guarantees}

    def report(self) -> str:
        """Return what happened, in a line."""
        return f"{self.debits:,} debits beside an unused guarantee, {self.refusals:,} refusals because of one"
