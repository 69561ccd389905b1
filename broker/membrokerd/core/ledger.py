"""The ledger: which session and model is charged for what, at which location. Changed by facts alone.

A row for each session, segment and model, and totals for each tenant and location, all running sums; `recount` checks
them. Holds no rule: whether a debit is allowed is `policy`'s business.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import facts, lifecycles
from .names import Location, ModelName, QuotaKey, SegmentName
from .rows import Charge, GuestTimes, Loan, ModelCharge, ModelRow, Quota, SegmentRow, SessionRow, TenantCharge, Total
from .sums import add

_NOTHING = TenantCharge(0, 0)


class Ledger:
    """The ledger of one device. Read the rows freely; change them through `apply` alone."""

    def __init__(self, capacities: Mapping[Location, int]) -> None:
        self.totals = {location: Total(capacity) for location, capacity in capacities.items()}
        self.sessions: dict[int, SessionRow] = {}
        self.models: dict[ModelName, ModelRow] = {}
        self.model_names: list[ModelName] = []
        """The models, by tenant and name: a page of them costs as much as its rows."""
        self.models_of: Counter[str] = Counter()
        """How many models each tenant has. No entry is zero."""
        self.segments: dict[int, SegmentRow] = {}
        self.segments_of: Counter[str] = Counter()
        """How many segments each tenant has. No entry is zero."""
        self.segment_extents = 0
        """How many extents all segments began with."""
        self.labels: dict[SegmentName, int] = {}
        self.tenants: dict[tuple[str, Location], TenantCharge] = {}
        """What each tenant is charged, without entries of zero bytes."""
        self.turns: dict[tuple[str, Location], int] = {}
        """When each tenant's last turn began: its guests were lent memory. No entry is of a tenant without a model."""
        self.quotas: dict[QuotaKey, Quota] = {}
        self.revision = 0
        self.touched: set[tuple[ModelName, Location]] = set()
        """The models of which a charge has changed since somebody emptied this. What is known of them beside the ledger
        is noted here, too."""

    def apply(self, fact: facts.Fact) -> None:
        """Apply one fact, and raise the revision when it changes the books."""
        _APPLY[type(fact)](self, fact)
        if not isinstance(fact, facts.UnaccountedSeen):  # a figure of the device, not a change of the books
            self.revision += 1

    def tenant_charged(self, tenant: str, location: Location) -> int:
        """Bytes that a tenant is charged at a location."""
        return self.tenants.get((tenant, location), _NOTHING).bytes

    def tenant_lent(self, tenant: str, location: Location) -> int:
        """Bytes that a tenant is charged at a location and that are not releasing."""
        charged, releasing = self.tenants.get((tenant, location), _NOTHING)
        return charged - releasing

    # --- one method for each fact ---

    def _session_began(self, fact: facts.SessionBegan) -> None:
        assert fact.session not in self.sessions
        self.sessions[fact.session] = SessionRow(
            session=fact.session,
            tenant=fact.tenant,
            pid=fact.pid,
            uid=fact.uid,
            process=fact.process,
            observer=fact.observer,
            client=fact.client,
            began_at=fact.at,
            endpoint=fact.endpoint,
            token_hash=fact.token_hash,
        )

    def _session_moved(self, fact: facts.SessionMoved) -> None:
        row = self.sessions[fact.session]
        row.state = lifecycles.SESSION[row.state][fact.cause]
        if row.state != "releasing":
            return
        for (name, location), charge in row.charges.items():
            self._turn_to_releasing(name, location, charge.bytes)
        self._leave_all(row, fact.at)

    def _session_ended(self, fact: facts.SessionEnded) -> None:
        row = self.sessions.pop(fact.session)
        assert not row.extents, "a session ended that is still charged"
        assert not row.segments, "a session ended that still holds a segment"
        assert not row.charges, "a session ended that is still charged"
        self._leave_all(row, fact.at)

    def _model_began(self, fact: facts.ModelBegan) -> None:
        assert fact.name not in self.models
        charges = {location: ModelCharge() for location in self.totals}
        self.models[fact.name] = ModelRow(fact.name, fact.virtual_capacity, dict(fact.limits), charges=charges)
        insort(self.model_names, fact.name)
        self.models_of[fact.name.tenant] += 1

    def _model_asked(self, fact: facts.ModelAsked) -> None:
        row = self.models[fact.name]
        if fact.virtual_capacity is not None:
            row.virtual_capacity = fact.virtual_capacity
        row.limits = {**row.limits, **fact.limits}

    def _model_joined(self, fact: facts.ModelJoined) -> None:
        self.models[fact.name].sessions.add(fact.session)
        self.sessions[fact.session].models.add(fact.name)

    def _model_left(self, fact: facts.ModelLeft) -> None:
        row = self.sessions[fact.session]
        row.models.discard(fact.name)
        assert not any(name == fact.name for name, _ in row.charges), "a session left a model that it is charged for"
        self._leave(fact.name, fact.session, fact.at)

    def _model_ended(self, fact: facts.ModelEnded) -> None:
        row = self.models.pop(fact.name)
        del self.model_names[bisect_left(self.model_names, fact.name)]
        add(self.models_of, -1, fact.name.tenant)
        assert not row.used(), "a model ended that is still charged"
        assert not row.sessions, "a model ended that is still used"
        assert not row.segments, "a model ended with a segment"
        if not self.models_of[fact.name.tenant]:
            for location in row.charges:
                self.turns.pop((fact.name.tenant, location), None)

    def _model_carried(self, fact: facts.ModelCarried) -> None:
        row = self.models[fact.name]
        for location, charge in row.charges.items():  # a later daemon may lend at fewer
            charge.peak = fact.peaks.get(location, 0)
        row.allocations, row.releases, row.idle_since = fact.allocations, fact.releases, fact.idle_since

    def _debited(self, fact: facts.Debited) -> None:
        row = self.sessions[fact.session]
        loan = Loan(fact.name, fact.location, fact.extent_bytes)
        row.extents.update(dict.fromkeys(range(fact.first, fact.first + fact.count), loan))
        self._charge(row, fact.name, fact.location, fact.extent_bytes * fact.count, fact.count)
        self.models[fact.name].allocations += fact.count

    def _credited(self, fact: facts.Credited) -> None:
        row = self.sessions[fact.session]
        assert lifecycles.EXTENT["releasing" if row.state == "releasing" else "lent"][fact.cause] == "credited"
        for (name, location, size), alike in itertools.groupby(map(row.extents.pop, fact.ids)):
            count = len(list(alike))
            self._credit_extents(row, name, location, size * count, count)

    def _declaration_set(self, fact: facts.DeclarationSet) -> None:
        row = self.sessions[fact.session]
        charge = row.charges.setdefault((fact.name, fact.location), Charge())
        change = fact.declared_bytes - charge.declared
        charge.declared += change
        self.models[fact.name].charges[fact.location].declared += change
        self._charge(row, fact.name, fact.location, change, 0)

    def _guest_set(self, fact: facts.GuestSet) -> None:
        row, key = self.sessions[fact.session], (fact.name, fact.location)
        assert key in row.charges, "a guest has nothing"
        if fact.used_at is None:
            del row.guests[key]
        else:
            row.guests[key] = GuestTimes(fact.used_at, fact.slice_until)

    def _turn_began(self, fact: facts.TurnBegan) -> None:
        self.turns[fact.tenant, fact.location] = fact.at

    def _location_settled(self, fact: facts.LocationSettled) -> None:
        row = self.sessions[fact.session]
        assert lifecycles.EXTENT["releasing" if row.state == "releasing" else "lent"]["settled"] == "credited"
        row.extents = {key: loan for key, loan in row.extents.items() if loan.location != fact.location}
        for (name, location), charge in list(row.charges.items()):
            if location == fact.location:
                self.models[name].charges[location].declared -= charge.declared
                charge.declared = 0
                self._credit_extents(row, name, location, charge.bytes, charge.extents)

    def _segment_began(self, fact: facts.SegmentBegan) -> None:
        size = fact.extent_bytes * (fact.count - 1) + fact.last_bytes
        ids = range(fact.first, fact.first + fact.count)
        row = SegmentRow(
            segment=fact.segment,
            name=fact.name,
            label=fact.label,
            location=fact.location,
            extent_bytes=fact.extent_bytes,
            last_bytes=fact.last_bytes,
            ids=ids,
            writer=fact.writer,
            began_at=fact.at,
            bytes=size,
            extents=fact.count,
        )
        assert row.full_name() not in self.labels
        self.segments[fact.segment] = row
        self.labels[row.full_name()] = fact.segment
        self._sum_segment(row, size, fact.count)
        self.segments_of[fact.name.tenant] += 1
        self.segment_extents += fact.count
        model = self.models[fact.name]
        model.segments += 1
        model.allocations += fact.count

    def _segment_bound(self, fact: facts.SegmentBound) -> None:
        self.segments[fact.segment].delete_when_left = True

    def _segment_moved(self, fact: facts.SegmentMoved) -> None:
        row = self.segments[fact.segment]
        row.state = lifecycles.SEGMENT[row.state][fact.cause]
        if row.state == "releasing":
            self._turn_to_releasing(row.name, row.location, row.bytes)

    def _segment_held(self, fact: facts.SegmentHeld) -> None:
        holders, held = self.segments[fact.segment].holders, self.sessions[fact.session].segments
        holders[fact.session] = held[fact.segment] = held.get(fact.segment, 0) + 1

    def _segment_held_again(self, fact: facts.SegmentHeldAgain) -> None:
        holders, held = self.segments[fact.segment].holders, self.sessions[fact.session].segments
        holders[fact.session] = held[fact.segment] = held[fact.segment] + fact.times

    def _segment_left(self, fact: facts.SegmentLeft) -> None:
        row, held = self.segments[fact.segment], self.sessions[fact.session].segments
        left = held[fact.segment] - fact.times
        assert left >= 0, "a session left a segment more often than it held it"
        row.holders[fact.session] = held[fact.segment] = left
        if not left:
            del row.holders[fact.session], held[fact.segment]
        row.uncertain |= fact.cause == "holder died"

    def _segment_doubted(self, fact: facts.SegmentDoubted) -> None:
        self.segments[fact.segment].uncertain = True

    def _segment_credited(self, fact: facts.SegmentCredited) -> None:
        row = self.segments[fact.segment]
        self._credit_segment(row, row.size_of(fact.ids), len(fact.ids))

    def _segment_ended(self, fact: facts.SegmentEnded) -> None:
        row = self.segments[fact.segment]
        assert not row.holders, "a segment ended that sessions hold"
        ended = lifecycles.SEGMENT[row.state]["dropped" if fact.proven is None else "settled"]
        self._credit_segment(row, row.bytes, row.extents)
        row.state = ended
        self.models[row.name].segments -= 1
        add(self.segments_of, -1, row.name.tenant)
        self.segment_extents -= len(row.ids)
        del self.segments[fact.segment], self.labels[row.full_name()]

    def _stock_changed(self, fact: facts.StockChanged) -> None:
        self.totals[fact.location].stock += fact.extent_bytes * fact.change

    def _unaccounted_seen(self, fact: facts.UnaccountedSeen) -> None:
        if fact.location in self.totals:  # a later daemon may lend at fewer
            self.totals[fact.location].unaccounted = fact.unaccounted

    def _quota_set(self, fact: facts.QuotaSet) -> None:
        key, quota = (fact.tenant, fact.model, fact.location), Quota(fact.limit, fact.guarantee, fact.weight)
        if quota == Quota():
            self.quotas.pop(key, None)
        else:
            self.quotas[key] = quota

    # --- the sums ---

    def _credit_extents(self, row: SessionRow, name: ModelName, location: Location, size: int, extents: int) -> None:
        self._charge(row, name, location, -size, -extents)
        self.models[name].releases += extents

    def _charge(self, row: SessionRow, name: ModelName, location: Location, change: int, extents: int) -> None:
        """Move a session's sums by `change` bytes, and those above it."""
        key = (name, location)
        charge = row.charges.get(key)
        if charge is None:
            charge = row.charges[key] = Charge()
        charge.bytes += change
        charge.extents += extents
        if not charge.bytes:
            del row.charges[key]
            row.guests.pop(key, None)
        size, count = row.sums.get(location, (0, 0))
        if size + change:
            row.sums[location] = size + change, count + extents
        else:
            row.sums.pop(location, None)
        self._sum(name, location, change, extents, releasing=row.state == "releasing")

    def _credit_segment(self, row: SegmentRow, size: int, extents: int) -> None:
        row.bytes -= size
        row.extents -= extents
        self._sum_segment(row, -size, -extents)
        self.models[row.name].releases += extents

    def _sum_segment(self, row: SegmentRow, change: int, extents: int) -> None:
        self.models[row.name].charges[row.location].segments += change
        self._sum(row.name, row.location, change, extents, releasing=row.state == "releasing")

    def _sum(self, name: ModelName, location: Location, change: int, extents: int, *, releasing: bool) -> None:
        """Move the sums of a model, its tenant and the location: the one place where they change."""
        model, total = self.models[name].charges[location], self.totals[location]
        self.touched.add((name, location))
        model.bytes += change
        model.extents += extents
        if releasing:
            total.releasing += change
            model.releasing += change
        else:
            total.lent += change
        if model.bytes > model.peak:
            model.peak = model.bytes
        key = (name.tenant, location)
        charged, dead = self.tenants.get(key, _NOTHING)
        if charged + change:
            self.tenants[key] = TenantCharge(charged + change, dead + change if releasing else dead)
        else:
            self.tenants.pop(key, None)

    def _turn_to_releasing(self, name: ModelName, location: Location, size: int) -> None:
        """Move `size` lent bytes of a model to its releasing ones."""
        total, key = self.totals[location], (name.tenant, location)
        self.touched.add((name, location))
        total.lent -= size
        total.releasing += size
        self.models[name].charges[location].releasing += size
        if size:
            charged, releasing = self.tenants[key]
            self.tenants[key] = TenantCharge(charged, releasing + size)

    def _leave_all(self, row: SessionRow, at: int) -> None:
        for name in row.models:
            self._leave(name, row.session, at)
        row.models.clear()

    def _leave(self, name: ModelName, session: int, at: int) -> None:
        model = self.models[name]
        model.sessions.discard(session)
        if not model.sessions:
            model.idle_since = at


_APPLY: dict[type, Callable[[Ledger, Any], None]] = {
    facts.SessionBegan: Ledger._session_began,
    facts.SessionMoved: Ledger._session_moved,
    facts.SessionEnded: Ledger._session_ended,
    facts.ModelBegan: Ledger._model_began,
    facts.ModelAsked: Ledger._model_asked,
    facts.ModelJoined: Ledger._model_joined,
    facts.ModelLeft: Ledger._model_left,
    facts.ModelEnded: Ledger._model_ended,
    facts.ModelCarried: Ledger._model_carried,
    facts.Debited: Ledger._debited,
    facts.Credited: Ledger._credited,
    facts.DeclarationSet: Ledger._declaration_set,
    facts.GuestSet: Ledger._guest_set,
    facts.TurnBegan: Ledger._turn_began,
    facts.LocationSettled: Ledger._location_settled,
    facts.SegmentBegan: Ledger._segment_began,
    facts.SegmentBound: Ledger._segment_bound,
    facts.SegmentMoved: Ledger._segment_moved,
    facts.SegmentHeld: Ledger._segment_held,
    facts.SegmentLeft: Ledger._segment_left,
    facts.SegmentHeldAgain: Ledger._segment_held_again,
    facts.SegmentDoubted: Ledger._segment_doubted,
    facts.SegmentCredited: Ledger._segment_credited,
    facts.SegmentEnded: Ledger._segment_ended,
    facts.StockChanged: Ledger._stock_changed,
    facts.UnaccountedSeen: Ledger._unaccounted_seen,
    facts.QuotaSet: Ledger._quota_set,
}


def replay(capacities: Mapping[Location, int], history: Iterable[facts.Fact]) -> Ledger:
    """Return the ledger that these facts make, from nothing."""
    ledger = Ledger(capacities)
    for fact in history:
        ledger.apply(fact)
    return ledger
