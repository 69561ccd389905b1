"""The catalog of metrics: the name, kind, help and labels of each, and the label values that always have a series.

It must know no figure: `metrics` fills the gauges and counters, `durations` the histograms, and `merged` those of the
parent of several daemons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..ext import Reason


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
    "membroker_tenant_guarantee_bytes",
    "gauge",
    "Guarantee of the tenant; by default the sum of its models'.",
    _TENANT_AT,
)
TENANT_DENIALS = Spec(
    "membroker_tenant_denials_total",
    "counter",
    "Requests of the tenant's models refused since this daemon started.",
    ("tenant", "reason"),
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
    "Bytes of the model that the broker can recall: extents of sessions that answer recalls.",
    _MODEL_AT,
)
MODEL_LATE = Spec(
    "membroker_model_late_bytes",
    "gauge",
    "Bytes recalled from the model's workers, for which they did not answer in time, or of which they keep every byte.",
    _MODEL_AT,
)
MODEL_EXTENTS = Spec("membroker_model_extents", "gauge", "Extents that the model is charged for.", _MODEL_AT)
MODEL_DECLARED = Spec(
    "membroker_model_declared_bytes",
    "gauge",
    "Bytes of the charge that the model's workers have declared: memory that they allocate without the broker.",
    _MODEL_AT,
)
MODEL_SEGMENTS = Spec(
    "membroker_model_segment_bytes",
    "gauge",
    "Bytes that the model is charged for its segments, once each; part of membroker_model_used_bytes.",
    _MODEL_AT,
)
MODEL_SESSIONS = Spec("membroker_model_sessions", "gauge", "Live sessions that registered the model.", _MODEL)
MODEL_ASLEEP = Spec(
    "membroker_model_asleep_sessions",
    "gauge",
    "Sessions of the model with an engine that sleeps; absent unless idle_sleep_seconds is set for it.",
    _MODEL,
)
MODEL_GUESTS = Spec(
    "membroker_model_guest_sessions",
    "gauge",
    "Guests of the model, programs that are suspended as a whole, by state, and why they sleep: recall, idle, operator "
    "or excess.",
    (*_MODEL, "state", "cause"),
)
MODEL_GUEST_IMAGE = Spec(
    "membroker_model_guest_image_bytes",
    "gauge",
    "Host memory that the images of the model's suspended guests take.",
    _MODEL,
)
MODEL_GUEST_NEEDED = Spec(
    "membroker_model_guest_needed_bytes",
    "gauge",
    "Device memory that the model's guests must be lent before they wake.",
    _MODEL,
)
MODEL_GUEST_STEP = Spec(
    "membroker_model_guest_step_seconds",
    "gauge",
    "How long a guest of the model took the last time to fall asleep, or to be put back: the slowest one.",
    (*_MODEL, "step"),
)
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
    "Requests refused since the model or this daemon began; without reasons if metrics.model_reasons is false.",
    (*_MODEL, "reason"),
)
DEVICE_CAPACITY = Spec("membroker_device_capacity_bytes", "gauge", "Bytes that the broker may lend.", _AT)
DEVICE_LENT = Spec("membroker_device_lent_bytes", "gauge", "Bytes lent to live processes.", _AT)
DEVICE_RELEASING = Spec(
    "membroker_device_releasing_bytes", "gauge", "Bytes of dead processes that the device does not yet show free.", _AT
)
DEVICE_UNPROVEN = Spec(
    "membroker_device_unproven_releases_total",
    "counter",
    "Dead processes and segments that were credited after settle_seconds although the device did not show their "
    "bytes free.",
    _AT,
)
DEVICE_DENIALS = Spec(
    "membroker_device_denials_total", "counter", "Requests refused since this daemon started.", ("reason",)
)
DEVICE_STOCK = Spec(
    "membroker_device_stock_bytes",
    "gauge",
    "Bytes of the warm pool, created ahead of requests; the books count them as free.",
    _AT,
)
DEVICE_FREE = Spec("membroker_device_free_bytes", "gauge", "Capacity that is neither lent nor releasing.", _AT)
DEVICE_RESERVED = Spec(
    "membroker_device_reserved_bytes",
    "gauge",
    "Guaranteed bytes that their owners have not borrowed. Only sessions that answer recalls can borrow them.",
    _AT,
)
DEVICE_SHORTFALL = Spec(
    "membroker_device_guarantee_shortfall_bytes",
    "gauge",
    "Reserved bytes that are neither free nor recallable: this much of the guarantees cannot be kept now.",
    _AT,
)
DEVICE_UNACCOUNTED = Spec(
    "membroker_device_unaccounted_bytes",
    "gauge",
    "Bytes in use on the device that are not in the books; at least 0, absent if the device cannot tell.",
    _AT,
)
DEVICE_HEADROOM = Spec("membroker_device_headroom_bytes", "gauge", "Bytes that the broker never lends.", _AT)
DEVICE_GATE_RESERVE = Spec(
    "membroker_device_gate_reserve_bytes", "gauge", "Bytes that must stay free on the device after each loan.", _AT
)
DEVICE_GRANULARITY = Spec(
    "membroker_device_granularity_bytes", "gauge", "The size of every extent is a multiple of this."
)
MEMORY_TOTAL = Spec("membroker_device_memory_total_bytes", "gauge", "Bytes of memory at the location.", _AT)
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
SEGMENT_SAVED = Spec(
    "membroker_segment_saved_bytes",
    "gauge",
    "Bytes that sharing saves: each segment's size, once for each session that maps it except the first.",
    _MODEL_AT,
)
SESSIONS = Spec("membroker_sessions", "gauge", "Sessions of workers by state, without observers.", ("state",))
OBSERVERS = Spec("membroker_observers", "gauge", "Sessions that only observe and cannot borrow.")
SESSIONS_LIMIT = Spec("membroker_sessions_limit", "gauge", "Maximum number of sessions, observers included.")
DRAINING = Spec("membroker_device_draining", "gauge", "1 while the device is drained: the broker lends nothing more.")
JOURNAL_FULL = Spec(
    "membroker_journal_full", "gauge", "1 while the journal cannot be written: the broker lends nothing more."
)
DEVICE_LOST = Spec(
    "membroker_device_lost", "gauge", "1 while the device does not answer: the broker lends nothing more."
)
POD_USED = Spec(
    "membroker_pod_used_bytes",
    "gauge",
    "Bytes that a Kubernetes pod's sessions are charged, without segments. The name is empty without /var/log/pods.",
    ("tenant", "pod_namespace", "pod_name", "pod_uid", "location"),
)
REFUSED = Spec("membroker_connections_refused_total", "counter", "Handoff connections refused.", ("reason",))
NOTICES_DROPPED = Spec(
    "membroker_notices_dropped_total", "counter", "Notices dropped because a session did not read them."
)
EVICTIONS = Spec(
    "membroker_evictions_total", "counter", "Processes that were sent SIGTERM because an operator evicted them."
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
    "Time that a request waited for memory, by its result and by whether it was within a guarantee.",
    ("result", "guaranteed"),
)
RECALLS = Spec(
    "membroker_recall_seconds",
    "histogram",
    "Time from a recall to its end: returned, kept in part, or late. A late recall counts when it becomes late.",
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
    "Extents of the warm pool: made ahead, used for a request, or dropped.",
    ("change",),
)
DRIVER_FALLBACK = Spec(
    "membroker_driver_fallback",
    "gauge",
    '1 if driver = "auto" found no usable GPU and the broker lends host memory instead.',
)
RELOADED = Spec(
    "membroker_config_last_reload_successful",
    "gauge",
    "0 if the last reload of the configuration was refused; the next start would fail with that file.",
)
RELOADED_AT = Spec(
    "membroker_config_last_reload_success_timestamp_seconds",
    "gauge",
    "Unix time of the last reload that was put in force, or of the start.",
)
BUILD_INFO = Spec(
    "membroker_build_info",
    "gauge",
    "1, with the daemon's version, commit (empty if the installation does not have it), driver and product as labels.",
    ("version", "commit", "driver", "product"),
)
SCRAPE_TIME = Spec(
    "membroker_scrape_time_seconds",
    "gauge",
    "Unix time at which these figures were taken; scrapes within a second share them.",
)
DAEMON_UP = Spec("membroker_daemon_up", "gauge", "1 while the GPU's daemon answers, else 0.")
DAEMON_RESTARTS = Spec(
    "membroker_daemon_restarts_total",
    "counter",
    "How often the parent has restarted the GPU's daemon.",
)

ALL: Mapping[str, Spec] = {spec.name: spec for spec in globals().values() if isinstance(spec, Spec)}
PARENT = (DAEMON_UP, DAEMON_RESTARTS)
"""Served by `membrokerd --all` itself; a daemon serves all others."""

DENIAL_REASONS = (
    Reason.MODEL_LIMIT,
    Reason.TENANT_LIMIT,
    Reason.CAPACITY,
    Reason.DEVICE_FULL,
    Reason.DRIVER_FAILED,
    Reason.DESCRIPTORS_EXHAUSTED,
    Reason.JOURNAL_FULL,
)
"""Refusals that an operator watches: the device, each tenant and each model have a series of each from their start,
because `increase()` does not see a counter's step from absent to 1. A worker's own mistakes appear with the first one.
Alerts are about the device's and the tenants': a model can be refused before its first scrape."""
STOCK_CHANGES = ("made", "used", "dropped")
