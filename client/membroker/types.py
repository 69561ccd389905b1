"""What the library tells about memory, as plain values: nothing of the wire shows through.

Owns frozen dataclasses with sizes in bytes. It must never import protobuf, nor hold anything that is alive:
each value is what was true when it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A pool at one moment.

    `virtual_capacity` and `physical_usage` are bytes: addresses reserved, and memory behind them (whole pages), of
    which `spare_pages` are mapped and not in use. `largest_free_run` is how many bytes one more allocation can have
    at most, as far as addresses go: those without memory, and those of spare pages. `offloaded_bytes` are allocated,
    have no memory behind them, and lie on the host.

    `fragmentation_ratio` is external fragmentation of the addresses, 1 - largest free run / free addresses: 0.0
    when what is free lies in one piece, or nothing is free. It does not tell what is unused inside of pages, nor
    whether there is memory to borrow, and it says nothing about the device's memory, which cannot fragment: pages
    lie anywhere.
    """

    virtual_capacity: int
    physical_usage: int
    mapped_pages: int
    largest_free_run: int
    fragmentation_ratio: float
    spare_pages: int = 0
    offloaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PoolMapping:
    """Pages of a pool, side by side, of which the same holds. `offset` and `size` are in bytes.

    `state` is `used`, `pinned` (used, and a view, a span or a pin of it lives), `spare` (mapped and charged, and
    allocated by nobody), `offloaded` (allocated, and its bytes on the host) or `changing` (another call is at it).
    `access` is `none`, `read` or `read_write`. `extents` are the source's ids of the extents behind the pages, one for
    each; offloaded pages have none.
    """

    offset: int
    size: int
    state: str
    access: str
    extents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """What a compaction moved, in bytes: whatever was at `old_offset + n` is at `new_offset + n`, for n < `size`."""

    old_offset: int
    new_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GlobalMemoryStats:
    """All models of a `SharedMemoryPool` at one moment.

    `physical_usage` is bytes of memory behind all of their pages; `physical_limit` what it may come to, in bytes, or
    None where only those limits hold that the lender has itself. Neither tells what others use of the device.
    """

    physical_limit: int | None
    physical_usage: int
    num_models: int


@dataclass(frozen=True, slots=True)
class LocationBooks:
    """The broker's books of one location, and what the device itself shows; all in bytes.

    `capacity` = `lent` + `releasing` + `free`. What the device cannot say is None.
    """

    location: str
    capacity: int
    lent: int
    releasing: int
    stock: int
    free: int
    headroom: int
    unaccounted: int | None
    device_total: int | None
    device_used: int | None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The device of a broker, and its books by location (`"device"`, `"host"`)."""

    uuid: str
    product: str
    driver: str
    granularity: int
    locations: Mapping[str, LocationBooks]
    revision: int
    version: str
    pid: int
    start_time: datetime
    sessions: int
    detached_sessions: int
    metrics_url: str
    draining: bool


@dataclass(frozen=True, slots=True)
class ModelBooks:
    """What a model is charged at one location, in bytes.

    `limit` is None where only the levels above it hold. `segments` is the part of `used` that the model's segments
    are charged, once each.
    """

    location: str
    used: int
    peak: int
    releasing: int
    declared: int
    limit: int | None
    extents: int
    segments: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model of this tenant, its books by location, and its counters since it began.

    `denials_total` counts refusals by the broker's reason, such as `MODEL_LIMIT`.
    """

    name: str
    virtual_capacity: int
    books: Mapping[str, ModelBooks]
    sessions: int
    allocations_total: int
    releases_total: int
    denials_total: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Available:
    """What a model could borrow at one moment, in bytes. It reserves nothing: the next request of anybody changes it.

    `now` is the most that one request could have got: the least that the model's limit, its tenant's, the capacity and
    the device itself left. `limit` is the model's, None where only the levels above it hold.
    """

    now: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class SessionBooks:
    """What a session is charged at one location, in bytes and extents."""

    location: str
    used: int
    extents: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One connect() of one process. `state` is `open`, `detached` or `releasing`.

    `pid` is as the broker sees it, 0 where it cannot; `client` is what the process calls itself, never trusted.
    """

    name: str
    tenant: str
    state: str
    pid: int
    uid: int
    observer: bool
    client: str
    models: tuple[str, ...]
    books: Mapping[str, SessionBooks]
    create_time: datetime
    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """A segment: memory under a name, written by one session and attached by many.

    `name` is `tenants/{tenant}/models/{model}/segments/{segment}`, `size` in bytes, `state` one of `writing`,
    `sealed`, `ending` (deleted, or without a writer; charged until its last session has left) and `releasing`.
    `sessions` counts who holds it, `writer` is `sessions/{session}`. A `generation` is never used twice.
    """

    name: str
    generation: int
    state: str
    location: str
    size: int
    extents: int
    sessions: int
    writer: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Draining:
    """The broker lends nothing more: an operator wants the device free of it, by `deadline` (UTC) where there is one.

    What is lent stays. Finish, close what can be closed, and go elsewhere.
    """

    deadline: datetime | None


@dataclass(frozen=True, slots=True)
class Undrained:
    """The broker lends again."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The broker stops, and will close the connection. What is mapped stays valid."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The broker is gone. What is mapped stays valid; calls wait, and the session tries to reconnect."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session goes on, `outage_seconds` after its broker was missed."""

    outage_seconds: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The broker that is there now does not know the session: every call raises `SessionLost`, so connect() anew."""


Notice = Draining | Undrained | Stopping | Disconnected | Resumed | Forgotten
