"""Views of books, made by hand: what `/metrics` and the status page render."""

from __future__ import annotations

from collections.abc import Callable

from membroker.v1.resources_pb2 import SleepStatus
from membroker.vmm.driver import DeviceInfo, MemoryInfo
from membrokerd.core.effects import SegmentView
from membrokerd.core.names import ModelName, SegmentName
from membrokerd.core.snapshot import LocationView, ModelLocationView, ModelView, TenantLocationView, TenantView
from membrokerd.observe import catalog
from membrokerd.observe.metrics import MetricsView, PodView

from .sizes import MIB

FIGURES = {
    spec: 0 for spec in catalog.ALL.values() if not (spec.labels or spec.kind == "histogram" or spec in catalog.PARENT)
}
UUID = "GPU-12345678-0000-0000-0000-000000000000"


def model(tenant: str, name: str, used: int, limit: int | None = None, segments: int = 0, **denials: int) -> ModelView:
    lent = (used, used + MIB, 0, 5, segments, used // (2 * MIB))
    at_device = ModelLocationView("device", *lent, limit, None, MIB, 1, 6 * MIB, 2, 3 * MIB, 2 * MIB, MIB)
    at_host = ModelLocationView("host", 0, 0, 0, 0, 0, 0, None, None, 0, 1, 0, 0, 0, 0, 0)
    return ModelView(ModelName(tenant, name), 64 << 30, (at_device, at_host), 1, 7, 3, denials)


def segment(number: int, tenant: str, model: str, state: str) -> SegmentView:
    return SegmentView(number, SegmentName(tenant, model, f"s{number}"), state, "device", 2 * MIB, 1, 1, 1, 0)


def books(
    *models: ModelView,
    releasing: int = 0,
    unaccounted: int | None = 0,
    segments: tuple[SegmentView, ...] = (),
    tenants: tuple[TenantView, ...] = (),
    pods: tuple[PodView, ...] = (),
) -> MetricsView:
    charged = sum(each.locations[0].used for each in models)
    capacity = 256 * MIB
    device = LocationView(
        "device", capacity, charged - releasing, releasing, 0, capacity - charged, unaccounted, 8 * MIB, MIB, 6 * MIB, 2
    )
    return MetricsView(
        locations=(device, LocationView("host", 0, 0, 0, 0, 0, None, 0, 0, 0, 0)),
        tenants=tenants,
        models=models,
        segments=segments,
        sessions={"open": 1, "detached": 1},
        memory={"device": MemoryInfo(1 << 30, 1 << 29), "host": None},
        device=DeviceInfo(UUID, "a GPU", "cuda", 2 * MIB),
        version="0.1.0",
        figures=FIGURES
        | {catalog.RELOADED: 1, catalog.OBSERVERS: 1, catalog.SESSIONS_LIMIT: 16, catalog.SCRAPE_TIME: 1.7e9},
        asleep={each.name: 1 for each in models},
        guests={each.name: [SleepStatus(state=SleepStatus.ASLEEP, sleep_took_ms=9, wake_took_ms=3)] for each in models},
        pods=pods,
        headroom=2 << 30,
        gate_reserve=256 * MIB,
    )


FULL = books(
    model("acme", "a", 4 * MIB, limit=8 * MIB, segments=2 * MIB, CAPACITY=1),
    segments=(segment(1, "acme", "a", "sealed"),),
    tenants=(TenantView("acme", (TenantLocationView("device", 4 * MIB, 16 * MIB, 2 * MIB, 1, 6 * MIB),), 1, 1, {}),),
    pods=(PodView("0b9c8f7e", "web/a-0", "acme", 2, {"device": 4 * MIB}),),
)
"""Books in which every metric of the books has a series."""


class Source:
    """A daemon whose view a test can change."""

    def __init__(self, view: MetricsView) -> None:
        self.now = view
        self.views = 0
        self.before: Callable[[], None] = lambda: None
        """Called before each view."""

    def view(self) -> MetricsView:
        self.views += 1
        self.before()
        return self.now
