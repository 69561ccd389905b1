"""The metrics: all figures of one scrape come from one view of the books, so they always agree.

Owns the names, helps and labels, and the text of the last scrape. It must never keep a copy of a figure
that the books have, and never change anything. `durations` has the histograms, `metrics_server` the HTTP side.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from membroker.vmm.driver import DeviceInfo, MemoryInfo

from ..core.denied import Reason
from ..core.effects import RecallResult, SegmentView, WaitResult
from ..core.events import Location
from ..core.lifecycles import SEGMENT, SESSION
from ..core.snapshot import LocationView, ModelView, TenantView
from .durations import WAIT_BUCKETS, Durations

KEPT_SECONDS = 1.0
"""How long the text of a scrape is kept and shared by all scrapers."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. `labels` come after `gpu_uuid`, which all have."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_MODEL = ("tenant", "model")
_MODEL_AT = ("tenant", "model", "location")
_TENANT_AT = ("tenant", "location")
_AT = ("location",)

TENANT_USED = Spec("membroker_tenant_used_bytes", "gauge", "Bytes that the tenant's models are charged.", _TENANT_AT)
TENANT_LIMIT = Spec(
    "membroker_tenant_limit_bytes", "gauge", "Limit of the tenant in force; absent if it has no limit.", _TENANT_AT
)
TENANT_GUARANTEE = Spec(
    "membroker_tenant_guarantee_bytes", "gauge", "Bytes that the tenant is guaranteed, or its models are.", _TENANT_AT
)
MODEL_VIRTUAL = Spec(
    "membroker_model_virtual_bytes", "gauge", "Bytes of addresses that a pool of the model reserves.", _MODEL
)
MODEL_USED = Spec(
    "membroker_model_used_bytes",
    "gauge",
    "Bytes that the model is charged: lent, or not yet shown free by the device.",
    _MODEL_AT,
)
MODEL_PEAK = Spec("membroker_model_peak_bytes", "gauge", "Highest charge since the model began.", _MODEL_AT)
MODEL_LIMIT = Spec(
    "membroker_model_limit_bytes", "gauge", "Limit of the model in force; absent if it has no limit.", _MODEL_AT
)
MODEL_GUARANTEE = Spec(
    "membroker_model_guarantee_bytes",
    "gauge",
    "Bytes that the model is guaranteed; 0 if it has no guarantee.",
    _MODEL_AT,
)
MODEL_WAITING = Spec("membroker_model_waiting_bytes", "gauge", "Bytes that requests of the model wait for.", _MODEL_AT)
MODEL_WAITING_REQUESTS = Spec(
    "membroker_model_waiting_requests", "gauge", "Requests of the model that wait for memory.", _MODEL_AT
)
MODEL_RECALLABLE = Spec(
    "membroker_model_recallable_bytes",
    "gauge",
    "Bytes of the model that the broker can ask for: extents of sessions that answer recalls.",
    _MODEL_AT,
)
MODEL_LATE = Spec(
    "membroker_model_late_bytes",
    "gauge",
    "Bytes that the model's workers were asked for, and neither released nor answered for in time.",
    _MODEL_AT,
)
MODEL_EXTENTS = Spec("membroker_model_extents", "gauge", "Extents that the model is charged for.", _MODEL_AT)
MODEL_SEGMENTS = Spec(
    "membroker_model_segment_bytes",
    "gauge",
    "Bytes that the model is charged for its segments, once each; part of membroker_model_used_bytes.",
    _MODEL_AT,
)
MODEL_SESSIONS = Spec("membroker_model_sessions", "gauge", "Live sessions that registered the model.", _MODEL)
MODEL_ALLOCATIONS = Spec(
    "membroker_model_allocations_total", "counter", "Extents granted since the model began.", _MODEL
)
MODEL_RELEASES = Spec(
    "membroker_model_releases_total",
    "counter",
    "Extents credited since the model began: released by a worker, or held by one that died.",
    _MODEL,
)
MODEL_DENIALS = Spec(
    "membroker_model_denials_total",
    "counter",
    "Requests refused since the model began or this daemon started, whichever was later.",
    (*_MODEL, "reason"),
)
DEVICE_CAPACITY = Spec("membroker_device_capacity_bytes", "gauge", "Bytes that the broker may lend.", _AT)
DEVICE_LENT = Spec("membroker_device_lent_bytes", "gauge", "Bytes lent to live processes.", _AT)
DEVICE_RELEASING = Spec(
    "membroker_device_releasing_bytes",
    "gauge",
    "Bytes of dead processes that the device does not yet show free.",
    _AT,
)
DEVICE_UNPROVEN = Spec(
    "membroker_device_unproven_releases_total",
    "counter",
    "Dead processes and segments that were credited after settle_seconds although the device did not show their "
    "bytes free.",
    _AT,
)
DEVICE_STOCK = Spec(
    "membroker_device_stock_bytes", "gauge", "Bytes created ahead of requests; the books count them as free.", _AT
)
DEVICE_FREE = Spec("membroker_device_free_bytes", "gauge", "Capacity that is neither lent nor releasing.", _AT)
DEVICE_RESERVED = Spec(
    "membroker_device_reserved_bytes",
    "gauge",
    "Bytes that are guaranteed to tenants and models and not borrowed by them. They are lent only to be recalled.",
    _AT,
)
DEVICE_SHORTFALL = Spec(
    "membroker_device_guarantee_shortfall_bytes",
    "gauge",
    "Reserved bytes that are neither free nor can be recalled: so much of the guarantees cannot be kept now.",
    _AT,
)
DEVICE_UNACCOUNTED = Spec(
    "membroker_device_unaccounted_bytes",
    "gauge",
    "Bytes in use on the device that the books do not explain; at least 0, absent if the device cannot tell.",
    _AT,
)
DEVICE_HEADROOM = Spec("membroker_device_headroom_bytes", "gauge", "Bytes that the broker never lends.", _AT)
DEVICE_GATE_RESERVE = Spec(
    "membroker_device_gate_reserve_bytes", "gauge", "Bytes that must stay free on the device after each loan.", _AT
)
DEVICE_GRANULARITY = Spec("membroker_device_granularity_bytes", "gauge", "Size that every extent is a multiple of.")
MEMORY_TOTAL = Spec("membroker_device_memory_total_bytes", "gauge", "Bytes of memory that the location has.", _AT)
MEMORY_USED = Spec("membroker_device_memory_used_bytes", "gauge", "Bytes in use at the location, by any process.", _AT)
DESCRIPTORS = Spec(
    "membroker_memory_descriptors_open",
    "gauge",
    "Memory descriptors that the broker holds open: of segments, of the stock, in delivery, and the anchor.",
)
SEGMENTS = Spec(
    "membroker_segments",
    "gauge",
    "Segments of a model by state; absent if the model has no segments.",
    (*_MODEL, "state"),
)
SEGMENT_ATTACHMENTS = Spec(
    "membroker_segment_attachments", "gauge", "Sessions that have the segment attached.", (*_MODEL, "segment")
)
SESSIONS = Spec("membroker_sessions", "gauge", "Sessions of workers by state, without observers.", ("state",))
OBSERVERS = Spec("membroker_observers", "gauge", "Sessions that only observe and cannot borrow.")
SESSIONS_LIMIT = Spec("membroker_sessions_limit", "gauge", "Most sessions at a time, observers included.")
DRAINING = Spec("membroker_device_draining", "gauge", "1 while an operator drains the device: it lends nothing more.")
JOURNAL_FULL = Spec(
    "membroker_journal_full", "gauge", "1 while the journal cannot be written: the broker lends nothing more."
)
REFUSED = Spec("membroker_connections_refused_total", "counter", "Handoff connections refused.", ("reason",))
NOTICES_DROPPED = Spec(
    "membroker_notices_dropped_total", "counter", "Notices dropped because a session did not read them."
)
EVICTIONS = Spec(
    "membroker_evictions_total", "counter", "Processes that were sent SIGTERM because an operator evicts them."
)
LOG_DROPPED = Spec(
    "membroker_log_lines_dropped_total", "counter", "Log lines dropped because stderr was not read fast enough."
)
DRIVER_CALLS = Spec("membroker_driver_call_seconds", "histogram", "Time of one driver call.", ("call",))
REQUESTS = Spec(
    "membroker_request_seconds",
    "histogram",
    "Time from a request's arrival to its answer, waits included.",
    ("method", "transport"),
)
WAITS = Spec(
    "membroker_wait_seconds",
    "histogram",
    "Time that a request waited for memory, by how its wait ended, and whether it was within a guarantee.",
    ("result", "guaranteed"),
)
RECALLS = Spec(
    "membroker_recall_seconds",
    "histogram",
    "Time from a recall of memory to its end: returned, kept in part, or late. Late ones count when they become late.",
    ("result",),
)
STEPS = Spec("membroker_core_step_seconds", "histogram", "Time of one step of the core: books and rules.")
LONGEST_TURN = Spec("membroker_loop_longest_turn_seconds", "gauge", "Longest turn of the event loop since the start.")
LONGEST_TURN_CPU = Spec(
    "membroker_loop_longest_turn_cpu_seconds", "gauge", "Most CPU time that one turn of the event loop has used."
)
SLOW_TURNS = Spec("membroker_loop_slow_turns_total", "counter", "Turns of the event loop that took more than 50 ms.")
JOURNAL = Spec("membroker_journal_append_seconds", "histogram", "Time to append the facts of one step to the journal.")
STOCK_EXTENTS = Spec(
    "membroker_stock_extents_total",
    "counter",
    "Extents of the stock: made ahead, used for a request, or dropped.",
    ("change",),
)
DRIVER_FALLBACK = Spec(
    "membroker_driver_fallback",
    "gauge",
    '1 if driver = "auto" found no usable GPU and the broker lends host memory instead.',
)
BUILD_INFO = Spec(
    "membroker_build_info",
    "gauge",
    "1, with the daemon's version, driver and product as labels.",
    ("version", "driver", "product"),
)
SCRAPE_TIME = Spec(
    "membroker_scrape_time_seconds",
    "gauge",
    "Unix time of these figures; scrapes within a second share them.",
)

ALL: Mapping[str, Spec] = {spec.name: spec for spec in globals().values() if isinstance(spec, Spec)}


MODEL_DENIAL_REASONS = (
    Reason.MODEL_LIMIT,
    Reason.TENANT_LIMIT,
    Reason.CAPACITY,
    Reason.DEVICE_FULL,
    Reason.DRIVER_FAILED,
    Reason.DESCRIPTORS_EXHAUSTED,
    Reason.JOURNAL_FULL,
)
"""Refusals that an operator watches: each model has a series of each from its start, because `increase()` does not
see a counter's step from absent to 1. A worker's own mistakes appear with the first one."""
STOCK_CHANGES = ("made", "used", "dropped")


@dataclass(frozen=True, slots=True)
class MetricsView:
    """All figures of a scrape, of one moment.

    `sessions` counts workers' sessions by state. `memory` is the device's figure by location, None if it cannot tell.
    `refused` counts connections and calls by reason. `headroom` and `gate_reserve` are bytes.
    """

    locations: tuple[LocationView, ...]
    tenants: tuple[TenantView, ...]
    models: tuple[ModelView, ...]
    segments: tuple[SegmentView, ...]
    sessions: Mapping[str, int]
    observers: int
    max_sessions: int
    memory: Mapping[Location, MemoryInfo | None]
    memory_descriptors_open: int
    device: DeviceInfo
    version: str
    taken_at: float
    unproven_releases: Mapping[Location, int] = field(default_factory=Counter)
    refused: Mapping[str, int] = field(default_factory=Counter)
    notices_dropped: int = 0
    evictions: int = 0
    log_lines_dropped: int = 0
    stock_changes: Mapping[str, int] = field(default_factory=Counter)
    headroom: Mapping[Location, int] = field(default_factory=dict)
    gate_reserve: Mapping[Location, int] = field(default_factory=dict)
    draining: bool = False
    journal_full: bool = False
    driver_fallback: bool = False
    longest_turn_seconds: float = 0.0
    longest_turn_cpu_seconds: float = 0.0
    slow_turns: int = 0


class MetricsSource(Protocol):
    """The daemon, as a scrape sees it."""

    def view(self) -> MetricsView:
        """Return a consistent view; called on a thread of the HTTP server. Raises `TimeoutError`."""
        ...


class Metrics:
    """The registry of one daemon: one collector over one view, the process's own figures, and the histograms."""

    def __init__(self, source: MetricsSource, gpu_uuid: str) -> None:
        disable_created_metrics()
        self._source = source
        self._gpu_uuid = gpu_uuid
        self._rendering = threading.Lock()
        self._rendered: bytes | None = None
        self._render_again_at = 0.0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        durations = Durations(self.registry, gpu_uuid)
        self.count = durations.count
        self.steps, self.journal = durations.add(STEPS.name, STEPS.help)(), durations.add(JOURNAL.name, JOURNAL.help)()
        self.driver_call = durations.add(DRIVER_CALLS.name, DRIVER_CALLS.help, *DRIVER_CALLS.labels)
        self.request = durations.add(REQUESTS.name, REQUESTS.help, *REQUESTS.labels)
        waits = durations.add(WAITS.name, WAITS.help, *WAITS.labels, buckets=WAIT_BUCKETS)
        self.waits = {  # each has a series from the start
            (result, guaranteed): waits(result, str(guaranteed).lower())
            for result in get_args(WaitResult)
            for guaranteed in (False, True)
        }

        recalls = durations.add(RECALLS.name, RECALLS.help, *RECALLS.labels, buckets=WAIT_BUCKETS)
        self.recalls = {result: recalls(result) for result in get_args(RecallResult)}

    def render(self) -> bytes:
        """Return the text of a scrape, at most KEPT_SECONDS old. Raises `TimeoutError` if there is no view.

        One thread renders, and the others wait for its text. Rendering keeps the interpreter from the event loop's
        thread, so the time it takes must not depend on the number of scrapers.
        """
        with self._rendering:
            if time.monotonic() >= self._render_again_at:
                try:
                    self._rendered = generate_latest(self.registry)
                except TimeoutError:
                    self._rendered = None
                self._render_again_at = time.monotonic() + KEPT_SECONDS
            if self._rendered is None:
                raise TimeoutError
            return self._rendered

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the table keeps names unique, and there may be no view yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the books, from one view."""
        self.count()  # the registry asks the histograms after this collector
        view = self._source.view()
        families = _Families(self._gpu_uuid)
        _add_daemon(families, view)
        for books in view.locations:
            _add_location(families, view, books)
        for tenant in view.tenants:
            for one in tenant.locations:
                families.add(TENANT_USED, one.used, tenant.tenant, one.location)
                families.add(TENANT_LIMIT, one.limit, tenant.tenant, one.location)
                families.add(TENANT_GUARANTEE, one.guarantee, tenant.tenant, one.location)
        for model in view.models:
            _add_model(families, model)
        _add_segments(families, view.segments)
        yield from families.all()


class _Families:
    """The families of one scrape; one without a series is empty."""

    def __init__(self, gpu_uuid: str) -> None:
        self._gpu_uuid = gpu_uuid
        self._families = {spec.name: _family(spec) for spec in ALL.values() if spec.kind != "histogram"}

    def add(self, spec: Spec, value: float | None, *labels: str) -> None:
        """Add a series, unless the value is None: then the figure does not exist."""
        assert len(labels) == len(spec.labels)
        if value is not None:
            self._families[spec.name].add_metric((self._gpu_uuid, *labels), value)

    def all(self) -> Iterable[Metric]:
        return self._families.values()


def _family(spec: Spec) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=("gpu_uuid", *spec.labels))


def _add_daemon(families: _Families, view: MetricsView) -> None:
    for spec, value in (
        (DEVICE_GRANULARITY, view.device.granularity),
        (DRAINING, view.draining),
        (JOURNAL_FULL, view.journal_full),
        (DRIVER_FALLBACK, view.driver_fallback),
        (DESCRIPTORS, view.memory_descriptors_open),
        (NOTICES_DROPPED, view.notices_dropped),
        (EVICTIONS, view.evictions),
        (LOG_DROPPED, view.log_lines_dropped),
        (OBSERVERS, view.observers),
        (SESSIONS_LIMIT, view.max_sessions),
        (SCRAPE_TIME, view.taken_at),
        (LONGEST_TURN, view.longest_turn_seconds),
        (LONGEST_TURN_CPU, view.longest_turn_cpu_seconds),
        (SLOW_TURNS, view.slow_turns),
    ):
        families.add(spec, value)
    families.add(BUILD_INFO, 1, view.version, view.device.driver, view.device.name)
    for state in SESSION:
        if SESSION[state]:
            families.add(SESSIONS, view.sessions.get(state, 0), state)
    for spec, known, counts in (
        (STOCK_EXTENTS, STOCK_CHANGES, view.stock_changes),
        (REFUSED, Reason, view.refused),
    ):
        for label, count in _from_the_start(known, counts):
            families.add(spec, count, label)


def _from_the_start(known: Iterable[str], counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the counts by label, with a zero for each known label that has counted nothing yet."""
    return sorted((dict.fromkeys(known, 0) | dict(counts)).items())


def _add_location(families: _Families, view: MetricsView, books: LocationView) -> None:
    where = books.location
    for spec, value in (
        (DEVICE_CAPACITY, books.capacity),
        (DEVICE_LENT, books.lent),
        (DEVICE_RELEASING, books.releasing),
        (DEVICE_UNPROVEN, view.unproven_releases.get(where, 0)),
        (DEVICE_STOCK, books.stock),
        (DEVICE_FREE, books.free),
        (DEVICE_RESERVED, books.reserved),
        (DEVICE_SHORTFALL, books.shortfall),
        (DEVICE_UNACCOUNTED, None if books.unaccounted is None else max(0, books.unaccounted)),
        (DEVICE_HEADROOM, view.headroom.get(where)),
        (DEVICE_GATE_RESERVE, view.gate_reserve.get(where)),
    ):
        families.add(spec, value, where)
    if (memory := view.memory.get(where)) is not None:
        families.add(MEMORY_TOTAL, memory.total, where)
        families.add(MEMORY_USED, memory.used, where)


def _add_model(families: _Families, model: ModelView) -> None:
    name = (model.name.tenant, model.name.model)
    families.add(MODEL_VIRTUAL, model.virtual_capacity, *name)
    families.add(MODEL_SESSIONS, model.sessions, *name)
    families.add(MODEL_ALLOCATIONS, model.allocations, *name)
    families.add(MODEL_RELEASES, model.releases, *name)
    for reason, count in _from_the_start(MODEL_DENIAL_REASONS, model.denials):
        families.add(MODEL_DENIALS, count, *name, reason)
    for books in model.locations:
        families.add(MODEL_USED, books.used, *name, books.location)
        families.add(MODEL_PEAK, books.peak, *name, books.location)
        families.add(MODEL_LIMIT, books.limit, *name, books.location)
        families.add(MODEL_GUARANTEE, books.guarantee, *name, books.location)
        families.add(MODEL_WAITING, books.waiting, *name, books.location)
        families.add(MODEL_WAITING_REQUESTS, books.waiting_requests, *name, books.location)
        families.add(MODEL_RECALLABLE, books.recallable, *name, books.location)
        families.add(MODEL_LATE, books.late, *name, books.location)
        families.add(MODEL_EXTENTS, books.extents, *name, books.location)
        families.add(MODEL_SEGMENTS, books.segments, *name, books.location)


def _add_segments(families: _Families, segments: Iterable[SegmentView]) -> None:
    """Add every state's count for the models that have segments, and each segment's attachments.

    A deleted segment can still exist beside its successor of the same name: a name is one series, their sum.
    """
    states: dict[tuple[str, str], Counter[str]] = {}
    attachments: Counter[tuple[str, str, str]] = Counter()
    for segment in segments:
        name = segment.name
        states.setdefault((name.tenant, name.model), Counter())[segment.state] += 1
        attachments[name.tenant, name.model, name.label] += segment.sessions
    for model, counts in sorted(states.items()):
        for state in SEGMENT:
            if SEGMENT[state]:
                families.add(SEGMENTS, counts[state], *model, state)
    for full_name, sessions in sorted(attachments.items()):
        families.add(SEGMENT_ATTACHMENTS, sessions, *full_name)
