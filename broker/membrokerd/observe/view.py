"""The view of one scrape: all that the metrics show of the daemon, taken in portions between the event loop's turns.

It reads the books and every counter of the daemon, and keeps and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping

from .. import __version__
from ..config.config import TenantConfig
from ..core import snapshot
from ..device.plan import Plan
from ..edge.handoff.outbox import OutboxCounters
from ..runtime.loop import Loop
from ..system import logs
from ..system.turns import gather
from . import catalog
from .history import History
from .metrics import MetricsView


def take_view(
    loop: Loop,
    plan: Plan,
    tenants: Mapping[str, TenantConfig],
    traffic: OutboxCounters,
    evictions: int,
    history: History,
) -> Generator[None, None, MetricsView]:
    """Return the view, as work for `in_portions`. The sums are as of its last step."""
    broker = loop.broker
    models = yield from gather(snapshot.each_model(broker))
    segments = yield from gather(snapshot.each_segment(broker))
    sessions = snapshot.count_sessions(broker)
    return MetricsView(
        locations=snapshot.take_locations(broker),
        tenants=snapshot.take_tenants(broker, tenants),
        models=tuple(models),
        segments=tuple(segments),
        sessions=sessions,
        memory={where: loop.figures.get(where) for where in broker.books.rules.capacities},
        device=plan.driver.device,
        version=__version__,
        figures={
            catalog.DEVICE_GRANULARITY: plan.driver.device.granularity,
            catalog.DRAINING: broker.books.draining,
            catalog.JOURNAL_FULL: bool(broker.books.cannot_write),
            catalog.DRIVER_FALLBACK: plan.fell_back,
            catalog.DESCRIPTORS: traffic.descriptors + len(loop.store) + loop.packets.stocked + 1,
            catalog.NOTICES_DROPPED: traffic.notices_dropped,
            catalog.EVICTIONS: evictions,
            catalog.LOG_DROPPED: logs.dropped(),
            catalog.OBSERVERS: len(broker.ledger.sessions) - sessions.total(),
            catalog.SESSIONS_LIMIT: broker.books.rules.max_sessions,
            catalog.SCRAPE_TIME: time.time(),
            catalog.LONGEST_TURN: loop.turns.longest,
            catalog.LONGEST_TURN_CPU: loop.turns.longest_cpu,
            catalog.SLOW_TURNS: loop.turns.slow,
        },
        unproven_releases=dict(broker.releasing.unproven),
        refused=dict(traffic.refused),
        stock_changes=dict(broker.stock.changes),
        headroom=plan.headroom,
        gate_reserve=plan.gate_reserve,
        history=history.samples,
    )
