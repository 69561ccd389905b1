"""The metrics: all figures of one scrape come from one view of the books, so they always agree.

Owns the text of the last scrape. It must never keep a copy of a figure that the books have, and never change
anything. `catalog` has the names, `durations` the histograms, `metrics_server` the HTTP side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from membroker.v1.resources_pb2 import SleepStatus
from membroker.vmm.driver import DeviceInfo, MemoryInfo
from membroker.wire.build import commit

from ..ext import Location, ModelName, Reason, lifecycles, snapshot
from ..ext import effects as fx
from . import catalog
from .cached_text import CachedText
from .durations import WAIT_BUCKETS, Durations
from .history import Sample

MOST_NAMES = 1_024
"""Names of a tenant, of models and of segments together, that have series of their own within NAME_SECONDS."""
NAME_SECONDS = 3600.0
_CAUSES = (SleepStatus.RECALL, SleepStatus.IDLE, SleepStatus.OPERATOR, SleepStatus.EXCESS)


@dataclass(frozen=True, slots=True)
class PodView:
    """The sessions of a tenant in one pod, and what they are charged. `name` is NAMESPACE/NAME, or "" if unknown."""

    uid: str
    name: str
    tenant: str
    sessions: int
    used: Mapping[Location, int]


@dataclass(frozen=True, slots=True)
class MetricsView:
    """All figures of a scrape, of one moment.

    `sessions` counts workers' sessions by state. `memory` is the device's figure by location, None if it cannot tell.
    `figures` are those of the daemon as a whole. `refused` counts connections and calls by reason, `denials` requests
    about models. `asleep` is how many engines sleep, of each model whose engines sleep by themselves. `guests` is what
    the guests of a model have said. `headroom` and `gate_reserve` are bytes of the device. `host` is the name of the
    machine, or of the node.
    """

    locations: tuple[snapshot.LocationView, ...]
    tenants: tuple[snapshot.TenantView, ...]
    models: tuple[snapshot.ModelView, ...]
    segments: tuple[fx.SegmentView, ...]
    sessions: Mapping[str, int]
    memory: Mapping[Location, MemoryInfo | None]
    device: DeviceInfo
    version: str
    figures: Mapping[catalog.Spec, float]
    unproven_releases: Mapping[Location, int] = field(default_factory=Counter)
    refused: Mapping[str, int] = field(default_factory=Counter)
    denials: Mapping[str, int] = field(default_factory=Counter)
    stock_changes: Mapping[str, int] = field(default_factory=Counter)
    asleep: Mapping[ModelName, int] = field(default_factory=dict)
    guests: Mapping[ModelName, Sequence[SleepStatus]] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    headroom: int = 0
    gate_reserve: int = 0
    history: tuple[Sample, ...] = ()
    host: str = ""


class Metrics:
    """The registry of one daemon: one collector over one view, the process's own figures, and the histograms.

    `take_view` is called on a thread of the HTTP server, and may raise `TimeoutError`. Without `model_reasons` the
    refusals of a model are one series, with an empty reason.
    """

    def __init__(self, take_view: Callable[[], MetricsView], gpu_uuid: str, *, model_reasons: bool = True) -> None:
        disable_created_metrics()
        self._model_reasons = model_reasons
        self._names = _Names()
        self._take_view = take_view
        self._gpu_uuid = gpu_uuid
        self.registry = CollectorRegistry()
        self._kept = CachedText(lambda: generate_latest(self.registry))
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        durations = Durations(self.registry, gpu_uuid)
        self.count = durations.count
        self.steps, self.journal = durations.add(catalog.STEPS)(), durations.add(catalog.JOURNAL)()
        self.driver_call = durations.add(catalog.DRIVER_CALLS)
        self.request = durations.add(catalog.REQUESTS)
        waits = durations.add(catalog.WAITS, WAIT_BUCKETS)
        self.waits = {  # each has a series from the start
            (result, guaranteed): waits(result, str(guaranteed).lower())
            for result in get_args(fx.WaitResult)
            for guaranteed in (False, True)
        }
        recalls = durations.add(catalog.RECALLS, WAIT_BUCKETS)
        self.recalls = {result: recalls(result) for result in get_args(fx.RecallResult)}

    def render(self) -> bytes:
        """Return the text of a scrape, at most a second old. Raises `TimeoutError` if there is no view."""
        return self._kept.get()

    def waits_ended(self) -> Mapping[str, int]:
        """Return how many waits ended so far, by their result."""
        self.count()
        found: Counter[str] = Counter()
        for (result, _), times in self.waits.items():
            found[result] += times.counted
        return found

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the catalog keeps names unique, and there may be no view yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the books, from one view."""
        self.count()  # the registry asks the histograms after this collector
        view = self._take_view()
        families = _Families(self._gpu_uuid)
        _add_daemon(families, view)
        for books in view.locations:
            _add_location(families, view, books)
        for tenant in view.tenants:
            for reason, count in _from_the_start(catalog.DENIAL_REASONS, tenant.denials):
                families.add(catalog.TENANT_DENIALS, count, tenant.tenant, reason)
            for row in tenant.locations:
                families.add(catalog.TENANT_USED, row.used, tenant.tenant, row.location)
                families.add(catalog.TENANT_LIMIT, row.limit, tenant.tenant, row.location)
                families.add(catalog.TENANT_GUARANTEE, row.guarantee, tenant.tenant, row.location)
        for model in view.models:
            if not self._names.admit(model.name.tenant, model.name.model):
                _add_model(families, model, (model.name.tenant, ""))
                continue
            _add_model(families, model, model.name)
            families.add(catalog.MODEL_ALLOCATIONS, model.allocations, *model.name)
            families.add(catalog.MODEL_RELEASES, model.releases, *model.name)
            refused = (
                _from_the_start(catalog.DENIAL_REASONS, model.denials)
                if self._model_reasons
                else [("", sum(model.denials.values()))]
            )
            for reason, count in refused:
                families.add(catalog.MODEL_DENIALS, count, *model.name, reason)
            families.add(catalog.MODEL_ASLEEP, view.asleep.get(model.name), *model.name)
            _add_guests(families, model.name, view.guests.get(model.name, ()))
        _add_segments(families, view.segments, self._names)
        for pod in view.pods:
            namespace, _, name = pod.name.partition("/")
            for location, used in pod.used.items():
                families.add(catalog.POD_USED, used, pod.tenant, namespace, name, pod.uid, location)
        yield from families.all()


class _Names:
    """Which names have series of their own.

    Prometheus keeps a series for hours after its last scrape, and a tenant can give its models and segments 2,000 new
    names a second.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[tuple[str, ...], float]] = {}
        """By tenant: when each name was shown last, the oldest first."""

    def admit(self, tenant: str, *name: str) -> bool:
        """Return whether a name has series of its own in this scrape."""
        now = time.monotonic()
        seen = self._seen.setdefault(tenant, {})
        if seen.pop(name, None) is None and len(seen) >= MOST_NAMES:
            oldest = next(iter(seen))
            if now - seen[oldest] < NAME_SECONDS:
                return False
            del seen[oldest]
        seen[name] = now
        return True


class _Families:
    """The families of one scrape; one without a series is empty. What is added to the same labels is summed."""

    def __init__(self, gpu_uuid: str) -> None:
        self._gpu_uuid = gpu_uuid
        mine = (spec for spec in catalog.ALL.values() if spec.kind != "histogram" and spec not in catalog.PARENT)
        self._families = {spec.name: _family(spec) for spec in mine}
        self._values: dict[tuple[str, ...], float] = {}
        """By name and labels."""

    def add(self, spec: catalog.Spec, value: float | None, *labels: str) -> None:
        """Add a series, unless the value is None: then the figure does not exist."""
        assert len(labels) == len(spec.labels)
        if value is not None:
            series = spec.name, *labels
            self._values[series] = self._values.get(series, 0) + value

    def all(self) -> Iterable[Metric]:
        for (name, *labels), value in self._values.items():
            self._families[name].add_metric((self._gpu_uuid, *labels), value)
        return self._families.values()


def _family(spec: catalog.Spec) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return kind(spec.name, spec.help, labels=("gpu_uuid", *spec.labels))


def _add_daemon(families: _Families, view: MetricsView) -> None:
    for spec, value in view.figures.items():
        families.add(spec, value)
    families.add(catalog.BUILD_INFO, 1, view.version, commit(), view.device.driver, view.device.name)
    for state in lifecycles.SESSION:
        if lifecycles.SESSION[state]:
            families.add(catalog.SESSIONS, view.sessions.get(state, 0), state)
    for spec, known, counts in (
        (catalog.STOCK_EXTENTS, catalog.STOCK_CHANGES, view.stock_changes),
        (catalog.REFUSED, Reason, view.refused),
        (catalog.DEVICE_DENIALS, catalog.DENIAL_REASONS, view.denials),
    ):
        for label, count in _from_the_start(known, counts):
            families.add(spec, count, label)


def _from_the_start(known: Iterable[str], counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the counts by label, with a zero for each known label that has counted nothing yet."""
    return sorted((dict.fromkeys(known, 0) | dict(counts)).items())


def _add_guests(families: _Families, name: ModelName, guests: Sequence[SleepStatus]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for guest in guests:
        asleep = guest.state not in (SleepStatus.AWAKE, SleepStatus.BUSY)
        state = SleepStatus.State.Name(guest.state).lower() if asleep else "awake"
        counts[state, SleepStatus.Cause.Name(guest.cause).lower() if asleep and guest.cause in _CAUSES else ""] += 1
    for (state, cause), count in sorted(counts.items()):
        families.add(catalog.MODEL_GUESTS, count, *name, state, cause)
    if guests:
        families.add(catalog.MODEL_GUEST_IMAGE, sum(guest.weight_bytes for guest in guests), *name)
        families.add(catalog.MODEL_GUEST_NEEDED, sum(guest.needed_bytes for guest in guests), *name)
    slept = [guest.sleep_took_ms / 1000 for guest in guests if guest.HasField("sleep_took_ms")]
    woke = [guest.wake_took_ms / 1000 for guest in guests if guest.HasField("wake_took_ms")]
    families.add(catalog.MODEL_GUEST_STEP, max(slept, default=None), *name, "sleep")
    families.add(catalog.MODEL_GUEST_STEP, max(woke, default=None), *name, "wake")


def _add_location(families: _Families, view: MetricsView, books: snapshot.LocationView) -> None:
    where = books.location
    for spec, value in (
        (catalog.DEVICE_CAPACITY, books.capacity),
        (catalog.DEVICE_LENT, books.lent),
        (catalog.DEVICE_RELEASING, books.releasing),
        (catalog.DEVICE_UNPROVEN, view.unproven_releases.get(where, 0)),
        (catalog.DEVICE_STOCK, books.stock),
        (catalog.DEVICE_FREE, books.free),
        (catalog.DEVICE_RESERVED, books.reserved),
        (catalog.DEVICE_SHORTFALL, books.shortfall),
        (catalog.DEVICE_UNACCOUNTED, None if books.unaccounted is None else max(0, books.unaccounted)),
        (catalog.DEVICE_HEADROOM, view.headroom if where == "device" else None),
        (catalog.DEVICE_GATE_RESERVE, view.gate_reserve if where == "device" else None),
    ):
        families.add(spec, value, where)
    if (memory := view.memory.get(where)) is not None:
        families.add(catalog.MEMORY_TOTAL, memory.total, where)
        families.add(catalog.MEMORY_USED, memory.used, where)


def _add_model(families: _Families, model: snapshot.ModelView, name: tuple[str, str]) -> None:
    """Add the gauges of a model, under this tenant and model."""
    families.add(catalog.MODEL_VIRTUAL, model.virtual_capacity, *name)
    families.add(catalog.MODEL_SESSIONS, model.sessions, *name)
    for books in model.locations:
        families.add(catalog.MODEL_USED, books.used, *name, books.location)
        families.add(catalog.MODEL_PEAK, books.peak, *name, books.location)
        families.add(catalog.MODEL_LIMIT, books.limit, *name, books.location)
        families.add(catalog.MODEL_GUARANTEE, books.guarantee, *name, books.location)
        families.add(catalog.MODEL_WAITING, books.waiting, *name, books.location)
        families.add(catalog.MODEL_WAITING_REQUESTS, books.waiting_requests, *name, books.location)
        families.add(catalog.MODEL_RECALLABLE, books.recallable, *name, books.location)
        families.add(catalog.MODEL_LATE, books.late, *name, books.location)
        families.add(catalog.MODEL_EXTENTS, books.extents, *name, books.location)
        families.add(catalog.MODEL_DECLARED, books.declared, *name, books.location)
        families.add(catalog.MODEL_SEGMENTS, books.segments, *name, books.location)


def _add_segments(families: _Families, segments: Iterable[fx.SegmentView], names: _Names) -> None:
    """Add every state's count for the models that have segments, what sharing saves, and each segment's attachments.

    A deleted segment can still exist beside its successor of the same name: a name is one series, their sum.
    """
    states: dict[tuple[str, str], Counter[str]] = {}
    attachments: Counter[tuple[str, str, str]] = Counter()
    saved: Counter[tuple[str, str, str]] = Counter()
    for segment in segments:
        tenant, of_model, label = segment.name
        if not names.admit(tenant, of_model):
            of_model = label = ""
        elif not names.admit(tenant, of_model, label):
            label = ""
        states.setdefault((tenant, of_model), Counter())[segment.state] += 1
        attachments[tenant, of_model, label] += segment.sessions
        saved[tenant, of_model, segment.location] += segment.size * max(0, segment.sessions - 1)
    for model, counts in sorted(states.items()):
        for state in lifecycles.SEGMENT:
            if lifecycles.SEGMENT[state]:
                families.add(catalog.SEGMENTS, counts[state], *model, state)
    for model_at, size in sorted(saved.items()):
        families.add(catalog.SEGMENT_SAVED, size, *model_at)
    for full_name, sessions in sorted(attachments.items()):
        families.add(catalog.SEGMENT_ATTACHMENTS, sessions, *full_name)
