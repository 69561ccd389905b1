"""One consistent look at the books, as values: for listings, metrics and logs. Sizes in bytes, times in nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from . import policy
from .effects import SegmentView
from .events import Location, ModelName, SegmentName
from .machine import Broker
from .rows import ModelRow, SessionRow
from .values import value


@value
class LocationView:
    """One location. `unaccounted` is signed here; None where the device cannot say."""

    location: Location
    capacity: int
    lent: int
    releasing: int
    stock: int
    free: int
    unaccounted: int | None


@value
class ModelLocationView:
    """A model's charge at one location; `limit` is the one in force."""

    location: Location
    used: int
    peak: int
    releasing: int
    declared: int
    segments: int
    extents: int
    limit: int | None


@value
class ModelView:
    """One model."""

    name: ModelName
    virtual_capacity: int
    locations: tuple[ModelLocationView, ...]
    sessions: int
    allocations: int
    releases: int
    denials: Mapping[str, int]


@value
class TenantView:
    """One tenant; `locations` are (location, bytes charged, the limit in force), `sessions` without observers."""

    tenant: str
    locations: tuple[tuple[Location, int, int | None], ...]
    models: int
    sessions: int


@value
class SessionView:
    """One session; `locations` are (location, bytes, extents), `segments` those that it holds."""

    session: int
    tenant: str
    state: str
    pid: int
    uid: int
    observer: bool
    client: str
    models: tuple[ModelName, ...]
    locations: tuple[tuple[Location, int, int], ...]
    segments: tuple[SegmentName, ...]
    began_at: int


@value
class DeviceView:
    """The sums of the device at one revision. `sessions` are workers' that live, `detached` those of them that are."""

    revision: int
    locations: tuple[LocationView, ...]
    sessions: int
    detached: int


@value
class Snapshot:
    """The books at one revision."""

    revision: int
    locations: tuple[LocationView, ...]
    models: tuple[ModelView, ...]
    sessions: tuple[SessionView, ...]
    segments: tuple[SegmentView, ...]


def take(broker: Broker) -> Snapshot:
    """Return the books as they stand, models by name, sessions and segments in the order they began."""
    revision, locations = broker.ledger.revision, take_locations(broker)
    return Snapshot(revision, locations, take_models(broker), take_sessions(broker), take_segments(broker))


def take_device(broker: Broker) -> DeviceView:
    """Return the device's sums: every tenant may ask for them, so no model or segment is looked at."""
    states = count_sessions(broker)
    detached = states["detached"]
    return DeviceView(broker.ledger.revision, take_locations(broker), states["open"] + detached, detached)


def take_locations(broker: Broker) -> tuple[LocationView, ...]:
    """Return the sums of each location."""
    return tuple(
        LocationView(where, t.capacity, t.lent, t.releasing, t.stock, t.free, broker.settling.shown(where))
        for where, t in broker.ledger.totals.items()
    )


def count_sessions(broker: Broker) -> Counter[str]:
    """Return how many sessions are in each state, without observers."""
    return Counter(row.state for row in broker.ledger.sessions.values() if not row.observer)


def take_model(broker: Broker, name: ModelName) -> ModelView:
    """Return one model that there is."""
    denials: dict[str, int] = {reason: count for (model, reason), count in broker.denials.items() if model == name}
    return _model(broker, broker.ledger.models[name], denials)


def take_models(broker: Broker, tenant: str | None = None) -> tuple[ModelView, ...]:
    """Return the models of a tenant, or all, by name."""
    denials: dict[ModelName, dict[str, int]] = {}
    for (name, reason), count in broker.denials.items():
        denials.setdefault(name, {})[reason] = count
    rows = sorted((name, row) for name, row in broker.ledger.models.items() if tenant in (None, name.tenant))
    return tuple(_model(broker, row, denials.get(name, {})) for name, row in rows)


def take_sessions(broker: Broker, tenant: str | None = None) -> tuple[SessionView, ...]:
    """Return the sessions of a tenant, or all, in the order they began."""
    return tuple(take_session(broker, row) for row in broker.ledger.sessions.values() if tenant in (None, row.tenant))


def take_segments(broker: Broker, tenant: str | None = None) -> tuple[SegmentView, ...]:
    """Return the segments of a tenant, or all, in the order they began."""
    rows = broker.ledger.segments.values()
    return tuple(broker.segments.view(row) for row in rows if tenant in (None, row.name.tenant))


def take_tenants(broker: Broker, configured: Iterable[str]) -> tuple[TenantView, ...]:
    """Return the configured tenants, and every other that has a session, a model or a commanded limit, by name."""
    ledger = broker.ledger
    models = Counter(name.tenant for name in ledger.models)
    sessions = Counter(row.tenant for row in ledger.sessions.values() if not row.observer)
    others = {row.tenant for row in ledger.sessions.values()} | {tenant for tenant, _, _ in ledger.quotas}
    return tuple(
        TenantView(
            tenant,
            tuple(
                (
                    where,
                    ledger.tenant_charged(tenant, where),
                    policy.tenant_limit(ledger, broker.rules, tenant, where),
                )
                for where in ledger.totals
            ),
            models[tenant],
            sessions[tenant],
        )
        for tenant in sorted({*configured, *models, *others})
    )


def _model(broker: Broker, row: ModelRow, denials: Mapping[str, int]) -> ModelView:
    return ModelView(
        row.name,
        virtual_capacity(broker, row),
        tuple(
            ModelLocationView(
                where,
                charge.bytes,
                charge.peak,
                charge.releasing,
                charge.declared,
                charge.segments,
                charge.extents,
                policy.model_limit(broker.ledger, broker.rules, row.name, where),
            )
            for where, charge in row.charges.items()
        ),
        len(row.sessions),
        row.allocations,
        row.releases,
        denials,
    )


def virtual_capacity(broker: Broker, row: ModelRow) -> int:
    """Return the addresses that a pool of this model reserves by default: as registered, else the capacity."""
    return row.virtual_capacity or broker.ledger.totals["device"].capacity


def take_session(broker: Broker, row: SessionRow) -> SessionView:
    """Return one session. All of a thousand sessions, with 256 models each, take 0.1 s."""
    return SessionView(
        row.session,
        row.tenant,
        row.state,
        row.pid,
        row.uid,
        row.observer,
        row.client,
        tuple(row.models),
        tuple((where, size, extents) for where, (size, extents) in row.sums.items()),
        tuple(broker.ledger.segments[segment].full_name() for segment in row.segments),
        row.began_at,
    )
