"""What Prometheus sees: every figure of one scrape comes from one look at the books, so that none can drift.

Owns the names, helps and labels, and the two histograms. It must never keep a figure of its own that the books
have, and never change anything. The HTTP side is `metrics_server`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from membroker.vmm.driver import DeviceInfo, MemoryInfo

from .core.events import Location
from .core.lifecycles import SEGMENT, SESSION
from .core.snapshot import LocationView, ModelView, Snapshot


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. `labels` come after `gpu_uuid`, which all have."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_MODEL = ("tenant", "model")
_MODEL_AT = ("tenant", "model", "location")
_AT = ("location",)

MODEL_VIRTUAL = Spec("membroker_model_virtual_bytes", "gauge", "Addresses that a pool of the model reserves.", _MODEL)
MODEL_USED = Spec(
    "membroker_model_used_bytes", "gauge", "Bytes the model is charged: lent, and not yet shown free.", _MODEL_AT
)
MODEL_PEAK = Spec("membroker_model_peak_bytes", "gauge", "Highest charge since the model began.", _MODEL_AT)
MODEL_LIMIT = Spec("membroker_model_limit_bytes", "gauge", "Limit in force; absent where there is none.", _MODEL_AT)
MODEL_EXTENTS = Spec("membroker_model_extents", "gauge", "Extents the model is charged for.", _MODEL_AT)
MODEL_SEGMENTS = Spec(
    "membroker_model_segment_bytes",
    "gauge",
    "Bytes the model is charged for its segments, once each; part of the bytes used.",
    _MODEL_AT,
)
MODEL_SESSIONS = Spec("membroker_model_sessions", "gauge", "Live sessions that registered the model.", _MODEL)
MODEL_ALLOCATIONS = Spec(
    "membroker_model_allocations_total", "counter", "Extents granted since the model began.", _MODEL
)
MODEL_RELEASES = Spec(
    "membroker_model_releases_total", "counter", "Extents given back since the model began, by word or death.", _MODEL
)
MODEL_DENIALS = Spec(
    "membroker_model_denials_total",
    "counter",
    "Requests refused since the model or this daemon began.",
    (*_MODEL, "reason"),
)
DEVICE_CAPACITY = Spec("membroker_device_capacity_bytes", "gauge", "Bytes the broker may lend.", _AT)
DEVICE_LENT = Spec("membroker_device_lent_bytes", "gauge", "Bytes lent to processes that live.", _AT)
DEVICE_RELEASING = Spec(
    "membroker_device_releasing_bytes", "gauge", "Bytes of dead processes that the device does not show free.", _AT
)
DEVICE_STOCK = Spec("membroker_device_stock_bytes", "gauge", "Fresh bytes made ahead, free in the books.", _AT)
DEVICE_FREE = Spec("membroker_device_free_bytes", "gauge", "Capacity neither lent nor releasing.", _AT)
DEVICE_UNACCOUNTED = Spec(
    "membroker_device_unaccounted_bytes",
    "gauge",
    "Bytes the device has used beyond the books; at least 0, absent where it cannot say.",
    _AT,
)
DEVICE_HEADROOM = Spec("membroker_device_headroom_bytes", "gauge", "Bytes the broker never lends.", _AT)
DEVICE_GATE_RESERVE = Spec(
    "membroker_device_gate_reserve_bytes", "gauge", "Bytes that must stay free on the device when it lends.", _AT
)
DEVICE_GRANULARITY = Spec("membroker_device_granularity_bytes", "gauge", "Every extent is a multiple of it.")
MEMORY_TOTAL = Spec("membroker_device_memory_total_bytes", "gauge", "Bytes the location has.", _AT)
MEMORY_USED = Spec(
    "membroker_device_memory_used_bytes", "gauge", "Bytes of the location in use by anybody, as it shows itself.", _AT
)
DESCRIPTORS = Spec(
    "membroker_memory_descriptors_open",
    "gauge",
    "Descriptors of memory that the broker holds open: segments', those on their way, and the anchor.",
)
SEGMENTS = Spec(
    "membroker_segments", "gauge", "Segments of a model, by state; absent where it has none.", (*_MODEL, "state")
)
SESSIONS = Spec("membroker_sessions", "gauge", "Sessions of workers, observers left out.", ("state",))
DRAINING = Spec("membroker_device_draining", "gauge", "1 while an operator drains the device: nothing more is lent.")
REFUSED = Spec("membroker_connections_refused_total", "counter", "Handoff connections turned away.", ("reason",))
NOTICES_DROPPED = Spec("membroker_notices_dropped_total", "counter", "Notices that a session was too slow to take.")
DRIVER_CALLS = Spec("membroker_driver_call_seconds", "histogram", "Time of one driver call.", ("call",))
REQUESTS = Spec(
    "membroker_request_seconds",
    "histogram",
    "Time from a request's arrival to its answer.",
    ("method", "transport"),
)
STEPS = Spec("membroker_core_step_seconds", "histogram", "Time of one step of the core: the books and the rules.")
LONGEST_TURN = Spec("membroker_loop_longest_turn_seconds", "gauge", "Longest turn of the event loop since the start.")
LONGEST_TURN_CPU = Spec(
    "membroker_loop_longest_turn_cpu_seconds", "gauge", "Most CPU time that one turn of the event loop has used."
)
SLOW_TURNS = Spec("membroker_loop_slow_turns_total", "counter", "Turns of the event loop that took more than 50 ms.")
JOURNAL = Spec("membroker_journal_append_seconds", "histogram", "Time of writing one step's facts down.")
STOCK_EXTENTS = Spec(
    "membroker_stock_extents_total",
    "counter",
    "Extents of the stock: made ahead, used for a request, dropped.",
    ("change",),
)
BUILD_INFO = Spec("membroker_build_info", "gauge", "1, with what this daemon is.", ("version", "driver", "product"))

BUCKETS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Seconds: a handoff takes 11 µs, gRPC 500, a create of 1 GiB some ms; what takes a second is a fault."""

ALL: Mapping[str, Spec] = {spec.name: spec for spec in globals().values() if isinstance(spec, Spec)}


@dataclass(frozen=True, slots=True)
class MetricsView:
    """All that a scrape needs, of one moment.

    `memory` is what each location shows, None where it cannot say; `refused` counts by reason, connections and
    calls alike; `headroom` and `gate_reserve` are bytes.
    """

    snapshot: Snapshot
    memory: Mapping[Location, MemoryInfo | None]
    memory_descriptors_open: int
    device: DeviceInfo
    version: str
    refused: Mapping[str, int] = field(default_factory=Counter)
    notices_dropped: int = 0
    stock_changes: Mapping[str, int] = field(default_factory=Counter)
    headroom: Mapping[Location, int] = field(default_factory=dict)
    gate_reserve: Mapping[Location, int] = field(default_factory=dict)
    draining: bool = False
    longest_turn_seconds: float = 0.0
    longest_turn_cpu_seconds: float = 0.0
    slow_turns: int = 0


class MetricsSource(Protocol):
    """Where a scrape gets its view."""

    def view(self) -> MetricsView:
        """Return a consistent view; called on a thread of the HTTP server. Raises `TimeoutError` when it can't."""
        ...


class Histogram:
    """Times of one kind of work by its labels. Any thread may observe; a scrape sees whole observations only."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Count one piece of work that took `seconds`. The labels must be of a bounded set: no pids, no names."""
        with self._lock:
            row = self._rows.get(labels)
            if row is None:
                assert len(labels) == len(self._spec.labels)
                row = self._rows[labels] = ([0] * (len(BUCKETS) + 1), [0.0])
            row[0][bisect_left(BUCKETS, seconds)] += 1
            row[1][0] += seconds

    def collect(self, gpu_uuid: str) -> Metric:
        """Return the family as it stands."""
        family = HistogramMetricFamily(self._spec.name, self._spec.help, labels=("gpu_uuid", *self._spec.labels))
        with self._lock:
            rows = [(labels, list(counts), total[0]) for labels, (counts, total) in sorted(self._rows.items())]
        for labels, counts, total in rows:
            family.add_metric((gpu_uuid, *labels), list(_cumulative(counts)), total)
        return family


def _cumulative(counts: Iterable[int]) -> Iterator[tuple[str, float]]:
    below = 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
        below += count
        yield bound, float(below)


class Metrics:
    """The registry of one daemon: one collector over one view, and the histograms that the edges feed."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self.driver_calls = Histogram(DRIVER_CALLS)
        self.requests = Histogram(REQUESTS)
        self.steps = Histogram(STEPS)
        self.journal = Histogram(JOURNAL)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are unique by the table, and a view may not be there yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family, from one view."""
        view = self._source.view()
        families = _Families(view.device.uuid)
        _add_device(families, view)
        for model in view.snapshot.models:
            _add_model(families, model)
        _add_segments(families, view.snapshot)
        yield from families.all()
        yield self.driver_calls.collect(view.device.uuid)
        yield self.requests.collect(view.device.uuid)
        yield self.steps.collect(view.device.uuid)
        yield self.journal.collect(view.device.uuid)


class _Families:
    """The families of one scrape, each made at its first use or empty at the end."""

    def __init__(self, gpu_uuid: str) -> None:
        self._gpu_uuid = gpu_uuid
        self._families = {spec.name: _family(spec) for spec in ALL.values() if spec.kind != "histogram"}

    def add(self, spec: Spec, value: float | None, *labels: str) -> None:
        """Add a series; None is a figure that does not exist, and so no series."""
        assert len(labels) == len(spec.labels)
        if value is not None:
            self._families[spec.name].add_metric((self._gpu_uuid, *labels), value)

    def all(self) -> Iterable[Metric]:
        return self._families.values()


def _family(spec: Spec) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=("gpu_uuid", *spec.labels))


def _add_device(families: _Families, view: MetricsView) -> None:
    for change, extents in sorted(view.stock_changes.items()):
        families.add(STOCK_EXTENTS, extents, change)
    families.add(BUILD_INFO, 1, view.version, view.device.driver, view.device.name)
    families.add(DEVICE_GRANULARITY, view.device.granularity)
    families.add(DRAINING, int(view.draining))
    families.add(DESCRIPTORS, view.memory_descriptors_open)
    families.add(NOTICES_DROPPED, view.notices_dropped)
    families.add(LONGEST_TURN, view.longest_turn_seconds)
    families.add(LONGEST_TURN_CPU, view.longest_turn_cpu_seconds)
    families.add(SLOW_TURNS, view.slow_turns)
    for reason, count in sorted(view.refused.items()):
        families.add(REFUSED, count, reason)
    states = Counter(session.state for session in view.snapshot.sessions if not session.observer)
    for state in SESSION:
        if SESSION[state]:
            families.add(SESSIONS, states[state], state)
    for location in view.snapshot.locations:
        _add_location(families, view, location)


def _add_location(families: _Families, view: MetricsView, books: LocationView) -> None:
    where = books.location
    for spec, value in (
        (DEVICE_CAPACITY, books.capacity),
        (DEVICE_LENT, books.lent),
        (DEVICE_RELEASING, books.releasing),
        (DEVICE_STOCK, books.stock),
        (DEVICE_FREE, books.free),
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
    for reason, count in sorted(model.denials.items()):
        families.add(MODEL_DENIALS, count, *name, reason)
    for books in model.locations:
        families.add(MODEL_USED, books.used, *name, books.location)
        families.add(MODEL_PEAK, books.peak, *name, books.location)
        families.add(MODEL_LIMIT, books.limit, *name, books.location)
        families.add(MODEL_EXTENTS, books.extents, *name, books.location)
        families.add(MODEL_SEGMENTS, books.segments, *name, books.location)


def _add_segments(families: _Families, snapshot: Snapshot) -> None:
    """Add every state's count for the models that have segments: they come and go, their models' bytes stay."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for segment in snapshot.segments:
        counts.setdefault((segment.name.tenant, segment.name.model), Counter())[segment.state] += 1
    for name, states in sorted(counts.items()):
        for state in SEGMENT:
            if SEGMENT[state]:
                families.add(SEGMENTS, states[state], *name, state)
