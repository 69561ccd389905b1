"""The invariants of the ledger: its running sums agree with each other, and with what each row holds.

For the tests and the simulator, and for the books that a daemon takes over. Must never change a ledger.
"""

from __future__ import annotations

from collections import Counter

from .ledger import Ledger
from .names import Location
from .rows import Charge, SegmentRow, SessionRow


def check(ledger: Ledger) -> None:
    """Assert that the running sums agree with each other. Cost grows with models and tenants, not extents."""
    assert ledger.model_names == sorted(ledger.models), "the models by name"
    for location, total in ledger.totals.items():
        models = [model.charges[location] for model in ledger.models.values()]
        tenants = Counter([name.tenant for name in ledger.models])
        assert tenants == ledger.models_of, "the models of each tenant"
        _same("lent + releasing, by model", total.charged, sum(charge.bytes for charge in models))
        _same("releasing, by model", total.releasing, sum(charge.releasing for charge in models))
        _same(
            "lent + releasing, by tenant",
            total.charged,
            sum(ledger.tenant_charged(tenant, location) for tenant in tenants),
        )
        _same("lent, by tenant", total.lent, sum(ledger.tenant_lent(tenant, location) for tenant in tenants))
        assert Counter([row.name.tenant for row in ledger.segments.values()]) == ledger.segments_of, "of each tenant"
        of_models = Counter([row.name for row in ledger.segments.values()])
        assert {name: row.segments for name, row in ledger.models.items() if row.segments} == of_models, "of each model"
        _same("extents of segments", ledger.segment_extents, sum(len(row.ids) for row in ledger.segments.values()))
        segments = sum(row.charged(location) for row in ledger.segments.values())
        _same("segments, by model", sum(charge.segments for charge in models), segments)
        assert total.lent >= 0, total
        assert total.releasing >= 0, total
        assert total.stock >= 0, total
        assert total.charged + total.stock <= total.capacity, total


def recount(ledger: Ledger) -> None:
    """Assert that every running sum is what its single extents and declarations add up to."""
    check(ledger)
    seen: set[int] = set()
    for row in ledger.sessions.values():
        assert seen.isdisjoint(row.extents), "an extent has two owners"
        seen.update(row.extents)
        _recount_session(row)
        for (name, _), charge in row.charges.items():
            assert name in ledger.models, f"{name} ended and is charged"
            assert charge.bytes, f"session {row.session} has a charge of nothing"
        assert row.guests.keys() <= row.charges.keys(), f"session {row.session} is a guest without a charge"
    for segment in ledger.segments.values():
        assert seen.isdisjoint(segment.ids), "an extent has two owners"
        seen.update(segment.ids)
        _recount_holders(ledger, segment)
    owners: list[SessionRow | SegmentRow] = [*ledger.sessions.values(), *ledger.segments.values()]
    for location, total in ledger.totals.items():
        charged = sum(row.charged(location) for row in owners)
        dead = sum(row.charged(location) for row in owners if row.state == "releasing")
        _same("lent + releasing, by owner", total.charged, charged)
        _same("releasing, by owner", total.releasing, dead)
        extents = sum(row.sums.get(location, (0, 0))[1] for row in ledger.sessions.values())
        extents += sum(row.extents for row in ledger.segments.values() if row.location == location)
        _same("extents, by model", sum(row.charges[location].extents for row in ledger.models.values()), extents)


def _recount_holders(ledger: Ledger, segment: SegmentRow) -> None:
    assert ledger.labels[segment.full_name()] == segment.segment, "a segment's name is another's"
    of_all = {session: row.segments.get(segment.segment) for session, row in ledger.sessions.items()}
    held = {session: times for session, times in of_all.items() if times is not None}
    _same(f"segment {segment.segment}, by session", held, segment.holders)


def _recount_session(row: SessionRow) -> None:
    charges = {key: Charge(charge.declared, 0, charge.declared) for key, charge in row.charges.items()}
    for name, location, size in row.extents.values():
        charge = charges.setdefault((name, location), Charge())
        charge.bytes += size
        charge.extents += 1
    for key in row.charges.keys() | charges.keys():
        _same(f"session {row.session}, {key}", row.charges.get(key), charges.get(key))
    sums: dict[Location, tuple[int, int]] = {}
    for (_, where), charge in charges.items():
        size, extents = sums.get(where, (0, 0))
        sums[where] = size + charge.bytes, extents + charge.extents
    _same(f"session {row.session}, by location", row.sums, sums)


def _same(what: str, left: object, right: object) -> None:
    assert left == right, f"{what}: {left} != {right}"
