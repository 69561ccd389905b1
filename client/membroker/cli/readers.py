"""What `membroker top` shows: the books of all brokers of this machine, read again and again.

Owns a thread for each device, so that a broker that stops, dies or comes back holds up neither the keys nor the other
devices.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from .. import Client
from ..admin import Admin, TenantStatus
from ..errors import MembrokerError
from ..ext import arguments, names, start_thread
from ..ext import endpoint as endpoints
from ..types import DeviceStatus, ModelStatus
from .books import open_books, read_on
from .tables import is_asleep, pods_of

REFUSED_SECONDS = 60
"""For so long after a refusal a model is one that is refused."""
LATE_SECONDS = 2
"""A broker that has not answered for so long since it was asked again is silent. A shorter delay is not shown."""


class Row(NamedTuple):
    """A model or a tenant at one location of one device; sizes in bytes."""

    device: str
    name: str
    location: str
    used: int
    guarantee: int
    limit: int | None
    share: int | None
    waiting: int
    recalled: int
    late: int
    rate: float
    refused: int
    is_asleep: bool = False
    is_refused: bool = False
    pods: Sequence[str] = ()


@dataclass(slots=True)
class Snapshot:
    """What one device's broker said last, at `read_at` of `time.time`. `trouble`: why it says nothing now.

    It is asked again when `time.monotonic` is `due`. `silent_seconds` have passed since, or 0 if those are few.
    """

    name: str
    read_at: float = 0.0
    due: float = 0.0
    silent_seconds: int = 0
    device: DeviceStatus | None = None
    tenants: Mapping[str, TenantStatus] = field(default_factory=dict)
    models: Sequence[ModelStatus] = ()
    pods: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Those of the tenants and models that have any, by their resource names."""
    rates: Mapping[str, float] = field(default_factory=dict)
    refused: Set[str] = frozenset()
    """The models that were refused in the last minute, as far as that was seen."""
    trouble: str = ""

    def at(self, now: float) -> Snapshot:
        """Return the snapshot as it is at `now`, of `time.monotonic`: the same in each second of a silence."""
        silent = int(now - self.due)
        return self if self.device is None or silent < LATE_SECONDS else replace(self, silent_seconds=silent)


class Readers:
    """A thread for each device, which keeps the device's last snapshot. Devices that appear later get one, too."""

    def __init__(self, endpoint: str | None, interval: float, *, admin: bool) -> None:
        self._endpoint = endpoint or os.environ.get(names.ENDPOINT_VARIABLE) or None
        self._interval = interval
        self._admin = admin
        self._known: dict[str, Snapshot] = {}
        self._read_once = threading.Semaphore(0)

    def first(self) -> None:
        """Start to read, and wait a moment for the first answers. Raises what is wrong where there is no broker."""
        if self._endpoint or not endpoints.living_devices():
            with open_books(self._endpoint, self._admin):  # raises, with what to do
                pass
        self._look()
        for _ in list(self._known):
            self._read_once.acquire(timeout=2.0)

    def snapshots(self) -> list[Snapshot]:
        """Return the last snapshot of each device, by name."""
        self._look()
        now = time.monotonic()
        return [self._known[name].at(now) for name in sorted(self._known)]

    def _look(self) -> None:
        places = [self._endpoint] if self._endpoint else []
        with suppress(MembrokerError, OSError):
            places = places or list(map(str, endpoints.living_devices()))
        for place in places:
            if place not in self._known:
                self._known[place] = Snapshot(_device_name(place))
                start_thread(self._read, "membroker-reader", place)

    def _read(self, place: str) -> None:
        before: dict[str, int] = {}
        refusals: dict[str, tuple[int, float]] = {}
        """Of each model: how many there were, and when there was a new one."""
        at = 0.0

        def take(books: Client | Admin) -> Snapshot:
            nonlocal before, refusals, at
            device, models, now = books.device(), books.models(), time.monotonic()
            moved = {model.name: model.allocations_total + model.releases_total for model in models}
            rates = {name: max(0, count - before.get(name, count)) / (now - at) for name, count in moved.items()}
            for model in models:
                count = sum(model.denials_total.values())
                known, since = refusals.get(model.name, (count, now - REFUSED_SECONDS))
                refusals[model.name] = (count, now if count > known else since)
            refusals = {model.name: refusals[model.name] for model in models}
            pods = pods_of(books.sessions())
            tenants = books.tenants() if isinstance(books, Admin) else []
            by_name = {arguments.parts_of(tenant.name)[0]: tenant for tenant in tenants}
            before, at = moved, now
            return Snapshot(
                _device_name(place),
                read_at=time.time(),
                due=time.monotonic() + self._interval,
                device=device,
                tenants=by_name,
                models=models,
                pods=pods,
                rates=rates,
                refused={name for name, (_, since) in refusals.items() if now - since < REFUSED_SECONDS},
            )

        for found in read_on(lambda: open_books(place, self._admin or _is_operator(place)), take, self._interval):
            if not isinstance(found, Snapshot):
                before, refusals = {}, {}  # the next daemon counts from 0
                found = Snapshot(self._known[place].name, trouble=str(found))
            self._known[place] = found
            self._read_once.release()


def _is_operator(place: str) -> bool:
    """Say whether a device was named, not a tenant's endpoint, and this user can enter its admin endpoint."""
    return endpoints.is_device(Path(place)) and os.access(Path(place, "admin", "grpc.sock"), os.W_OK)


def _device_name(place: str) -> str:
    """Return the name of a device's directory, also for an endpoint in it."""
    path = Path(place)
    for part in (path, *path.parents):
        if (part / "tenants").is_dir():
            return part.name
    return path.name


def rows_of(snapshots: Sequence[Snapshot], *, by_tenant: bool) -> Iterator[Row]:
    """Yield the rows of all devices: of each model, or of each tenant."""
    for snapshot in snapshots:
        rows = list(_models_of(snapshot))
        yield from _tenants_of(snapshot, rows) if by_tenant else rows


def _tenants_of(snapshot: Snapshot, models: Sequence[Row]) -> Iterator[Row]:
    """Yield a row for each tenant and location: the sums of its models, and the tenant's own quota if it is known."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in models:
        found.setdefault((row.name.partition("/")[0], row.location), []).append(row)
    for name, tenant in snapshot.tenants.items():
        for location, quota in tenant.books.items():
            if quota.guarantee_bytes or quota.limit_bytes is not None:
                found.setdefault((name, location), [])
    for (name, location), rows in found.items():
        books = snapshot.tenants[name].books.get(location) if name in snapshot.tenants else None
        shares = [row.share for row in rows if row.share is not None]
        yield Row(
            device=snapshot.name,
            name=name,
            location=location,
            used=sum(row.used for row in rows),
            guarantee=books.guarantee_bytes if books else sum(row.guarantee for row in rows),
            limit=books.limit_bytes if books else None,
            share=sum(shares) if shares else None,
            waiting=sum(row.waiting for row in rows),
            recalled=sum(row.recalled for row in rows),
            late=sum(row.late for row in rows),
            rate=sum(row.rate for row in rows),
            refused=sum(row.refused for row in rows),
            is_refused=any(row.is_refused for row in rows),
            pods=snapshot.pods.get(f"tenants/{name}", ()),
        )


def _models_of(snapshot: Snapshot) -> Iterator[Row]:
    for model in snapshot.models:
        tenant, name = arguments.parts_of(model.name)[:2]
        for books in model.books.values():
            if books.location != "device" and not (books.peak_bytes or books.guarantee_bytes):
                continue
            yield Row(
                device=snapshot.name,
                name=f"{tenant}/{name}",
                location=books.location,
                used=books.used_bytes,
                guarantee=books.guarantee_bytes,
                limit=books.limit_bytes,
                share=books.share_bytes,
                waiting=books.waiting_bytes,
                recalled=books.recalled_bytes,
                late=books.late_bytes,
                rate=snapshot.rates.get(model.name, 0.0) if books.location == "device" else 0.0,
                refused=sum(model.denials_total.values()) if books.location == "device" else 0,
                is_asleep=books.location == "device" and is_asleep(model),
                is_refused=books.location == "device" and model.name in snapshot.refused,
                pods=snapshot.pods.get(model.name, ()),
            )
