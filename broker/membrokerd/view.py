"""The view of one scrape: all that the metrics show of the daemon, taken in portions between the event loop's turns.

It reads the books and every counter of the daemon, and keeps and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping

from . import __version__
from .config.config import TenantConfig
from .core import snapshot
from .device import Plan
from .edge.handoff.outbox import Traffic
from .loop import Loop
from .observe import logs
from .observe.history import History
from .observe.metrics import MetricsView
from .restart.descriptor_store import Store
from .turns import gather


def take_view(
    loop: Loop,
    plan: Plan,
    tenants: Mapping[str, TenantConfig],
    traffic: Traffic,
    store: Store,
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
        observers=len(broker.ledger.sessions) - sessions.total(),
        max_sessions=broker.books.rules.max_sessions,
        memory={where: loop.figures.get(where) for where in broker.books.rules.capacities},
        memory_descriptors_open=traffic.descriptors + len(store) + loop.packets.stocked + 1,
        device=plan.driver.device,
        version=__version__,
        taken_at=time.time(),
        unproven_releases=dict(broker.settling.unproven),
        refused=dict(traffic.refused),
        notices_dropped=traffic.notices_dropped,
        evictions=evictions,
        log_lines_dropped=logs.dropped(),
        stock_changes=dict(broker.stock.changes),
        headroom={"device": plan.headroom},
        gate_reserve={"device": plan.gate_reserve},
        draining=broker.books.draining,
        journal_full=bool(broker.books.cannot_write),
        driver_fallback=plan.fell_back,
        longest_turn_seconds=loop.turns.longest,
        longest_turn_cpu_seconds=loop.turns.longest_cpu,
        slow_turns=loop.turns.slow,
        history=history.samples,
    )
