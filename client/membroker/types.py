"""Status values and notices, as plain data: no message of the wire shows through.

Owns frozen dataclasses. Names that end in `_bytes` are in bytes and are the wire's own; `size` and `offset` are in
bytes too. It must never import protobuf, nor hold anything alive: each value was true when it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A pool at one moment, counted in this process.

    `virtual_capacity_bytes` are addresses. `physical_usage_bytes` is the memory behind them, in whole pages;
    `spare_pages` of these pages are mapped and not in use. `offloaded_bytes` are allocated, and their contents are in
    host memory. `largest_free_run_bytes` is the longest run of addresses that one more allocation can have.

    `fragmentation_ratio` is the external fragmentation of the addresses: 1 - largest free run / free addresses. It is
    0.0 if all free addresses are in one run, or if none is free. It does not tell what is unused inside of pages, nor
    whether there is memory to borrow. The device's memory cannot fragment, because a page can lie anywhere.
    """

    virtual_capacity_bytes: int
    physical_usage_bytes: int
    mapped_pages: int
    largest_free_run_bytes: int
    fragmentation_ratio: float
    spare_pages: int = 0
    offloaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PoolMapping:
    """A run of pages of a pool with the same state. `offset` and `size` are in bytes.

    `state` is `used`, `pinned` (used, and a view, span or pin of it is alive), `spare` (mapped and charged, but not
    allocated), `offloaded` (allocated, with its bytes on the host) or `changing` (another call is working on it).
    `access` is `none`, `read` or `read_write`. `extents` are the source's ids of the extents behind the pages, one for
    each page; offloaded pages have none.
    """

    offset: int
    size: int
    state: str
    access: str
    extents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """What a compaction moved: the bytes at `old_offset + n` are now at `new_offset + n`, for every n < `size`."""

    old_offset: int
    new_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GlobalMemoryStats:
    """All models of a `SharedMemoryPool` at one moment, counted in this process.

    `physical_usage_bytes` is the memory behind the pages of all models. `physical_limit_bytes` is its limit, or None if
    only the lender's limits apply. Neither includes other users of the device.
    """

    physical_limit_bytes: int | None
    physical_usage_bytes: int
    num_models: int


@dataclass(frozen=True, slots=True)
class LocationBooks:
    """The broker's books of one location, and the device's own figures.

    `capacity_bytes` = `lent_bytes` + `releasing_bytes` + `free_bytes`. Releasing bytes are those of dead workers,
    charged until the device shows them free. `stock_bytes` are extents made ahead, part of the free ones.
    `headroom_bytes` is what the broker never lends. `device_total_bytes` and `device_used_bytes` are the driver's
    (NVML on a GPU). `unaccounted_bytes` are in use on the device and not in the books. The last three are None if the
    device cannot tell. `reserved_bytes` are guaranteed to tenants and models that have not borrowed them, and lent only
    to sessions that answer recalls; `guarantee_shortfall_bytes` of them are neither free nor can be recalled.
    `waiting_requests` requests of all tenants wait for `waiting_bytes`. `gate_reserve_bytes` of the headroom must stay
    free on the device after each loan; the rest is there for what is unaccounted.
    """

    location: str
    capacity_bytes: int
    lent_bytes: int
    releasing_bytes: int
    stock_bytes: int
    free_bytes: int
    headroom_bytes: int
    unaccounted_bytes: int | None
    device_total_bytes: int | None
    device_used_bytes: int | None
    reserved_bytes: int = 0
    guarantee_shortfall_bytes: int = 0
    waiting_bytes: int = 0
    waiting_requests: int = 0
    gate_reserve_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The device of a broker, and its books by location (`"device"`, `"host"`).

    `granularity_bytes` is the unit of every extent. `revision` is a counter that each change of the books raises. `pid`
    and `start_time` are the daemon's. `metrics_url` is empty if metrics are off. While an operator drains the device
    (`draining`), the daemon's journal has no room on its disk (`journal_full`), or the device does not answer
    (`device_lost`, as a GPU that fell off the bus), it lends nothing more. `driver_fallback` says that no GPU was
    usable, and the broker lends host memory instead. `asleep_sessions` counts the engines that sleep, of those models
    whose engines sleep by themselves; `asleep_guests` of all `guests` are not awake. Only an operator sees
    `reload_problems`, why the last reload of the configuration was refused, and `pending_keys`, which keys of the file
    are not in force as of the last reload.
    """

    uuid: str
    product: str
    driver: str
    granularity_bytes: int
    locations: Mapping[str, LocationBooks]
    revision: int
    version: str
    pid: int
    start_time: datetime
    sessions: int
    detached_sessions: int
    metrics_url: str
    draining: bool
    journal_full: bool = False
    driver_fallback: bool = False
    device_lost: bool = False
    asleep_sessions: int = 0
    reload_problems: tuple[str, ...] = ()
    pending_keys: tuple[str, ...] = ()
    guests: int = 0
    asleep_guests: int = 0


@dataclass(frozen=True, slots=True)
class ModelBooks:
    """What a model is charged at one location.

    `used_bytes` includes `declared_bytes`, `releasing_bytes` and `segment_bytes`; a segment is charged once, however
    many processes map it. `peak_bytes` is the largest `used_bytes` so far. `limit_bytes` is None if only the limits of
    the tenant and the device apply. `guarantee_bytes` can be borrowed at any time. `extents` is a count. `weight` is
    the model's present weight among the tenant's models. `waiting_requests` requests of the model wait for
    `waiting_bytes`. `recallable_bytes` of `used_bytes` can be recalled. `recalled_bytes` were recalled and are not
    released yet, and `late_bytes` were neither released nor answered for by the deadline. `share_bytes` is what the
    division by weight gives the model; None while nobody waits. `asked_limit_bytes` is the limit that programs asked
    for, which can only lower the operator's.
    """

    location: str
    used_bytes: int
    peak_bytes: int
    releasing_bytes: int
    declared_bytes: int
    limit_bytes: int | None
    extents: int
    segment_bytes: int
    guarantee_bytes: int = 0
    weight: int = 1
    waiting_bytes: int = 0
    waiting_requests: int = 0
    recallable_bytes: int = 0
    recalled_bytes: int = 0
    late_bytes: int = 0
    share_bytes: int | None = None
    asked_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model of this tenant, its books by location, and its counters since it began.

    `denials_total` counts refusals by the broker's reason, such as `MODEL_LIMIT`. Its engines sleep by themselves when
    they had no request for `idle_sleep_ms`; None: they do not. Of these, `asleep_sessions` sleep, the first of them
    since `asleep_since`; `asleep_by_itself` says that no operator asked that one to. `guests` is what its guests have
    said last, at most 16.
    """

    name: str
    virtual_capacity_bytes: int
    books: Mapping[str, ModelBooks]
    sessions: int
    allocations_total: int
    releases_total: int
    denials_total: Mapping[str, int]
    idle_sleep_ms: int | None = None
    asleep_sessions: int = 0
    asleep_since: datetime | None = None
    asleep_by_itself: bool = False
    guests: tuple[SleepStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a request was refused or had to wait, or why memory was recalled.

    `kind` is `refused`, `waited`, `waiting` (now) or `recalled`. `why` is a sentence of the broker; it is empty for a
    request that had room and only waited for its turn. `result` is the reason for a refusal; `granted` or `cancelled`
    for a request that waited; and `returned`, `kept` or `late` for a recall. `request` is the name of the request, as
    in `MembrokerError.request`, and is empty for a recall. `wanted_by` is the model that needed recalled memory, or
    empty if a limit was lowered.
    """

    kind: str
    time: datetime
    model: str
    location: str
    session: str
    request_id: int
    size_bytes: int
    returned_bytes: int
    after_ms: int
    result: str
    why: str
    guaranteed: bool
    wanted_by: str

    @property
    def request(self) -> str:
        """The name of the request."""
        return f"{self.session}/requests/{self.request_id}" if self.request_id else ""


@dataclass(frozen=True, slots=True)
class Available:
    """What a model could borrow at one moment. It reserves nothing, so the next request of any process can change it.

    `now_bytes` is the most that one request could have got: the smallest of what the model's limit, the tenant's limit,
    the capacity and the device left. Memory that is kept for the guarantees of others is not included. `limit_bytes` is
    the model's limit, and `tenant_limit_bytes` is the limit for all models of its tenant together. Each is None if
    there is no such limit. `guarantee_bytes` is what the model can be charged at any time.

    `share_bytes` is what the model could have in all if it wanted all there is. The capacity is divided by weight among
    the models that hold or wait for memory, and only sessions that answer recalls are asked for what they have beyond
    their share. `obtainable_bytes` is how much more than now the model could have: the most that a request that waits
    could get.
    """

    now_bytes: int
    limit_bytes: int | None
    guarantee_bytes: int = 0
    obtainable_bytes: int = 0
    share_bytes: int = 0
    tenant_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SessionBooks:
    """What a session is charged at one location. `extents` is a count."""

    location: str
    used_bytes: int
    extents: int


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One `connect()` of one process. `state` is `open`, `detached` or `releasing`.

    `pid` is the process as the broker sees it, or 0 if the broker cannot see it. `client` is the name that the process
    gave itself; the broker does not trust it. `models` and `segments` are resource names, of each at most 128;
    `more_models` and `more_segments` count the others. `pod_uid` is that of the Kubernetes pod that the process runs
    in, by its cgroup, and `pod_name` its NAMESPACE/NAME; "" if it is in none, or if the broker cannot see it.
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
    more_models: int = 0
    more_segments: int = 0
    pod_uid: str = ""
    pod_name: str = ""


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """A segment: memory under a name, written by one session and attached by many.

    `name` is `tenants/{tenant}/models/{model}/segments/{segment}`. `state` is `writing`, `sealed`, `ending` (deleted,
    or its writer is gone; charged until the last session has left) or `releasing`. `sessions` counts the sessions that
    hold it, and `writer` is `sessions/{session}`. A `generation` is never used twice.
    """

    name: str
    generation: int
    state: str
    location: str
    size_bytes: int
    extents: int
    sessions: int
    writer: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class SleepRequest:
    """An operator asks an engine to sleep, or to wake if `wake` is true. `keep_weights` releases only its cache.

    `deadline` is how long the operator waits, on the clock of `time.monotonic`. An engine that has requests for all of
    that time does not begin to sleep. With `idle_seconds` the broker asks by itself: the engine sleeps only if it has
    had no request for so long, and 0 asks how far it is.
    """

    wake: bool
    keep_weights: bool
    deadline: float
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SleepStatus:
    """The progress of an engine that falls asleep or wakes.

    `state` is `awake`, `busy` (it sleeps when its requests have ended), `falling_asleep`, `asleep`, `waking` or
    `unsupported`. `cache_bytes` of its KV cache are released for this sleep, and `weight_bytes` of its weights are on
    the host. `detail` is a sentence for the operator, or empty. `idle_ms` is how long an engine has had no request;
    None if it has one, or if sleep would not pay now. `asleep_ms` is how long it has slept, and `by_itself` that no
    operator asked it to.

    The rest is of a guest, a program that is suspended as a whole (`weight_bytes` are then all of its memory). `cause`
    is why it sleeps or slept last: `recall`, `idle`, `operator` or `excess` (it used more than the broker lent).
    `needed_bytes` of the device must be lent before it wakes. `sleep_took_ms` and `wake_took_ms` are how long it took
    the last time; None: it never has.
    """

    state: str
    cache_bytes: int = 0
    weight_bytes: int = 0
    detail: str = ""
    idle_ms: int | None = None
    asleep_ms: int | None = None
    by_itself: bool = False
    cause: str = ""
    needed_bytes: int = 0
    sleep_took_ms: int | None = None
    wake_took_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Draining:
    """An operator drains the device, or deletes the tenant: the broker lends nothing more.

    `deadline` is in UTC, or None.
    What is lent stays. Finish the work, close what can be closed, and go elsewhere.
    """

    deadline: datetime | None


@dataclass(frozen=True, slots=True)
class Undrained:
    """The drain has ended, and the broker lends again."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The broker stops and will close the connection. Mapped memory stays valid."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost. Mapped memory stays valid; calls wait while the session reconnects."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session goes on. `outage_seconds` is the time since the connection was lost."""

    outage_seconds: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The broker does not know the session any more. Every call raises `SessionLost`: call `connect()` again."""


Notice = Draining | Undrained | Stopping | Disconnected | Resumed | Forgotten
