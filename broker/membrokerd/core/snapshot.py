"""The books as values, for listings, metrics and logs. Sizes in bytes, times in nanoseconds.

A view of one thing is consistent. A generator yields views of many things while the books may change between two of
them: it looks at each thing when it comes to it, and leaves out what has ended since it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from . import policy
from .effects import SegmentView
from .machine import Broker
from .names import Location, ModelName, SegmentName
from .rows import SessionRow
from .values import value

MOST_MODELS = 64
"""How many models of a process are named: its 16 sessions may have 256 each."""


@value
class LocationView:
    """One location. `unaccounted` is signed here; None where the device cannot say.

    `reserved` is guaranteed and not borrowed; `shortfall` is the part of it that is neither free nor recallable.
    """

    location: Location
    capacity: int
    lent: int
    releasing: int
    stock: int
    free: int
    unaccounted: int | None
    reserved: int
    shortfall: int
    waiting: int
    waiting_requests: int


@value
class ModelLocationView:
    """A model's charge at one location, and what its requests wait for; the quota is the one in force.

    `recallable` is the part of the charge that the broker can ask for. It has asked for `recalled`, which is not
    released yet, and for `late`, which is not released in time, or of which its sessions keep every byte.
    """

    location: Location
    used: int
    peak: int
    releasing: int
    declared: int
    segments: int
    extents: int
    limit: int | None
    asked_limit: int | None
    guarantee: int
    weight: int
    waiting: int
    waiting_requests: int
    recallable: int
    recalled: int
    late: int


@value
class ModelView:
    """One model. A pool of it reserves `virtual_capacity` addresses by default: as registered, else the capacity."""

    name: ModelName
    virtual_capacity: int
    locations: tuple[ModelLocationView, ...]
    sessions: int
    allocations: int
    releases: int
    denials: Mapping[str, int]


@value
class TenantLocationView:
    """A tenant's charge at one location, and what its requests wait for; the quota is the one in force."""

    location: Location
    used: int
    limit: int | None
    guarantee: int
    weight: int
    waiting: int


@value
class TenantView:
    """One tenant; `sessions` are without observers, `denials` its refusals by reason since the daemon's start."""

    tenant: str
    locations: tuple[TenantLocationView, ...]
    models: int
    sessions: int
    denials: Mapping[str, int]


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
class HolderView:
    """What one process holds of the device: bytes charged, and bytes of the segments that it has attached.

    `models` are the first MOST_MODELS of its models, by name.
    """

    charged: int
    segments: int
    sessions: tuple[int, ...]
    models: tuple[ModelName, ...]


def take_device(broker: Broker) -> DeviceView:
    """Return the device's sums: every tenant may ask for them, so no model or segment is looked at."""
    states = count_sessions(broker)
    detached = states["detached"]
    return DeviceView(broker.ledger.revision, take_locations(broker), states["open"] + detached, detached)


def take_locations(broker: Broker) -> tuple[LocationView, ...]:
    """Return the sums of each location."""
    return tuple(
        LocationView(
            location=where,
            capacity=t.capacity,
            lent=t.lent,
            releasing=t.releasing,
            stock=t.stock,
            free=t.free,
            unaccounted=broker.releasing.shown(where),
            reserved=broker.books.admission.reserved(where),
            shortfall=broker.books.admission.shortfall(where),
            waiting=waiting,
            waiting_requests=waiting_requests,
        )
        for where, t in broker.ledger.totals.items()
        for waiting, waiting_requests in [broker.waiting.of_location(where)]
    )


def count_sessions(broker: Broker) -> Counter[str]:
    """Return how many sessions are in each state, without observers."""
    return Counter(row.state for row in broker.ledger.sessions.values() if not row.observer)


def take_model(broker: Broker, name: ModelName) -> ModelView:
    """Return one model, which must exist."""
    row = broker.ledger.models[name]
    return ModelView(
        name=row.name,
        virtual_capacity=row.virtual_capacity or broker.ledger.totals["device"].capacity,
        locations=tuple(
            ModelLocationView(
                location=where,
                used=charge.bytes,
                peak=charge.peak,
                releasing=charge.releasing,
                declared=charge.declared,
                segments=charge.segments,
                extents=charge.extents,
                limit=policy.model_limit(broker.ledger, broker.books.rules, row.name, where),
                asked_limit=policy.asked_limit(row, where),
                guarantee=broker.books.admission.model_guarantee(row.name, where),
                weight=policy.weight_of(broker.ledger.quotas, broker.books.rules, (*row.name, where)),
                waiting=waiting,
                waiting_requests=waiting_requests,
                recallable=broker.books.recallable.of_model(row.name, where),
                recalled=broker.books.recallable.asked_of_model(row.name, where),
                late=broker.books.recallable.owed(row.name, where),
            )
            for where, charge in row.charges.items()
            for waiting, waiting_requests in [broker.waiting.of_model(row.name, where)]
        ),
        sessions=len(row.sessions),
        allocations=row.allocations,
        releases=row.releases,
        denials=dict(broker.denials.get(name, {})),
    )


def each_model(broker: Broker) -> Iterator[ModelView]:
    """Yield all models, by name. A model takes 16 us."""
    for name in tuple(broker.ledger.model_names):
        if name in broker.ledger.models:
            yield take_model(broker, name)


def each_segment(broker: Broker) -> Iterator[SegmentView]:
    """Yield all segments, in the order they began."""
    for segment in tuple(broker.ledger.segments):
        if row := broker.ledger.segments.get(segment):
            yield broker.segments.view(row)


def each_holder(broker: Broker) -> Iterator[tuple[int, HolderView]]:
    """Yield what each process with a session holds of the device, by pid."""
    ledger = broker.ledger
    by_pid: dict[int, list[int]] = {}
    for row in ledger.sessions.values():
        by_pid.setdefault(row.pid, []).append(row.session)
    for pid, sessions in by_pid.items():
        rows = [ledger.sessions[session] for session in sessions if session in ledger.sessions]
        segments = {segment for row in rows for segment in row.segments}
        yield (
            pid,
            HolderView(
                sum(row.charged("device") for row in rows),
                sum(ledger.segments[segment].charged("device") for segment in segments),
                tuple(row.session for row in rows),
                tuple(sorted({name for row in rows for name in row.models})[:MOST_MODELS]),
            ),
        )


def take_tenants(broker: Broker, configured: Iterable[str]) -> tuple[TenantView, ...]:
    """Return the configured tenants, and every other that has a session, a model or a commanded limit, by name."""
    ledger = broker.ledger
    sessions = Counter(row.tenant for row in ledger.sessions.values() if not row.observer)
    others = {row.tenant for row in ledger.sessions.values()} | {tenant for tenant, _, _ in ledger.quotas}
    return tuple(
        TenantView(
            tenant,
            tuple(
                TenantLocationView(
                    where,
                    ledger.tenant_charged(tenant, where),
                    policy.limit_of(ledger.quotas, broker.books.rules, (tenant, None, where)),
                    broker.books.admission.tenant_guarantee(tenant, where),
                    policy.weight_of(ledger.quotas, broker.books.rules, (tenant, None, where)),
                    broker.waiting.of_location(where, tenant)[0],
                )
                for where in ledger.totals
            ),
            ledger.models_of[tenant],
            sessions[tenant],
            dict(broker.books.tenant_denials.get(tenant, {})),
        )
        for tenant in sorted({*configured, *ledger.models_of, *others})
    )


def take_session(broker: Broker, row: SessionRow) -> SessionView:
    """Return one session; with 256 models it takes 0.1 ms."""
    return SessionView(
        session=row.session,
        tenant=row.tenant,
        state=row.state,
        pid=row.pid,
        uid=row.uid,
        observer=row.observer,
        client=row.client,
        models=tuple(row.models),
        locations=tuple((where, size, extents) for where, (size, extents) in row.sums.items()),
        segments=tuple(broker.ledger.segments[segment].full_name() for segment in row.segments),
        began_at=row.began_at,
    )
