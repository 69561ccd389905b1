"""The rules: what is configured, the limits in force, and what is a legal request. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from membroker.wire import names

from .denied import Denied, Reason, deny
from .ledger import Ledger
from .names import Location, ModelName, QuotaKey
from .rows import ModelRow, Quota

ATTACHABLE = ("writing", "sealing", "sealed")
"""The states of a segment that is not ending."""
PACKET_EXTENTS = names.MAX_DESCRIPTORS
"""Extents in one packet: the unit of creating, delivering and taking turns."""
WINDOW = names.DESCRIPTORS_IN_FLIGHT
MAX_COUNT = names.MAX_EXTENTS_PER_CALL
MAX_RELEASE = names.MAX_IDS_PER_FRAME
MAX_BYTES = names.MAX_BYTES
MAX_WEIGHT = 1_000
MAX_WAIT_NS = names.MAX_WAIT_SECONDS * 10**9


@dataclass(frozen=True, slots=True)
class Rules:
    """The configuration, in bytes, nanoseconds and counts.

    In the keys of `limits`, `guarantees` and `weights`, the model is None for the number of a tenant.
    `default_limits` apply to each tenant that has no limit at that location.

    A request within its model's guarantee waits `guarantee_wait_ns` for room, unless it says how long. A session has
    `recall_ns` to answer a recall. A guest is not recalled for `slice_ns` after it began. The unused guarantees of the
    tenants in `unlent` are lent to no other tenant, not even to sessions that answer recalls.

    A segment consists of extents of `segment_extent_bytes`, and one for the rest. `stock_extents` and `stock_bytes`
    bound the stock, all sizes together; 0 turns it off.
    """

    granularity: int
    capacities: Mapping[Location, int]
    limits: Mapping[QuotaKey, int] = field(default_factory=dict)
    default_limits: Mapping[Location, int] = field(default_factory=dict)
    guarantees: Mapping[QuotaKey, int] = field(default_factory=dict)
    weights: Mapping[QuotaKey, int] = field(default_factory=dict)
    unlent: frozenset[str] = frozenset()
    anchor_bytes: int = 0
    settle_ns: int = 10_000_000_000
    model_grace_ns: int = 60_000_000_000
    guarantee_wait_ns: int = 10_000_000_000
    recall_ns: int = 1_000_000_000
    slice_ns: int = 60_000_000_000
    max_sessions: int = 128
    max_sessions_per_process: int = 16
    max_sessions_per_tenant: int | None = None
    max_models_per_tenant: int = 256
    max_models: int | None = None
    max_calls_per_session: int = names.MAX_CALLS_PER_SESSION
    segment_extent_bytes: int = 1 << 30
    max_segments_per_tenant: int = 256
    max_segment_extents: int = 4_096
    max_waiting_per_tenant: int = 1_024
    stock_extents: int = 0
    stock_bytes: int = 0


WANTS_OF_ROOM = frozenset((Reason.MODEL_LIMIT, Reason.TENANT_LIMIT, Reason.CAPACITY))
"""The reasons for which `admit` refuses: after a release, the same request may be admitted."""


def shape_of_segment(rules: Rules, size: int) -> tuple[int, int, int]:
    """Return (size of an extent, size of the last one, how many) of a segment of `size` bytes."""
    whole, rest = divmod(size, rules.segment_extent_bytes)
    if not whole:
        return size, size, 1
    return rules.segment_extent_bytes, rest or rules.segment_extent_bytes, whole + bool(rest)


def limit_of(quotas: Mapping[QuotaKey, Quota], rules: Rules, key: QuotaKey) -> int | None:
    """Return the limit that operators have set, as commanded or else configured. A tenant's is the one in force."""
    quota = quotas.get(key)
    if quota is not None and quota.limit is not None:
        return quota.limit
    limit = rules.limits.get(key)
    return rules.default_limits.get(key[2]) if limit is None and key[1] is None else limit


def guarantee_of(quotas: Mapping[QuotaKey, Quota], rules: Rules, key: QuotaKey) -> int:
    """Return the guarantee that operators have set: what is commanded, or else configured, or else 0."""
    quota = quotas.get(key)
    return rules.guarantees.get(key, 0) if quota is None or quota.guarantee is None else quota.guarantee


def quota_of(quotas: Mapping[QuotaKey, Quota], rules: Rules, key: QuotaKey) -> Quota:
    """Return what operators have set: each number as commanded, or else configured."""
    quota = quotas.get(key, Quota())
    weight = rules.weights.get(key) if quota.weight is None else quota.weight
    return Quota(limit_of(quotas, rules, key), guarantee_of(quotas, rules, key) or None, weight)


def weight_of(quotas: Mapping[QuotaKey, Quota], rules: Rules, key: QuotaKey) -> int:
    """Return the weight in force: what is commanded, or else configured, or else 1."""
    quota = quotas.get(key)
    return rules.weights.get(key, 1) if quota is None or quota.weight is None else quota.weight


def model_limit(ledger: Ledger, rules: Rules, name: ModelName, location: Location) -> int | None:
    """Return the model's limit in force: the smaller of what was asked and what is commanded, or else configured."""
    row = ledger.models.get(name)
    asked = asked_limit(row, location) if row else None
    ruled = limit_of(ledger.quotas, rules, (*name, location))
    if asked is None or ruled is None:
        return ruled if asked is None else asked
    return min(asked, ruled)


def asked_limit(row: ModelRow, location: Location) -> int | None:
    """Return the limit that a model's workers ask for. The largest number stands for no limit."""
    asked = row.limits.get(location)
    return None if asked == MAX_BYTES else asked


def check_extents(
    rules: Rules, location: Location, extent_bytes: int, count: int, wait_ns: int | None = None
) -> Denied | None:
    """Return why the numbers of an Allocate are invalid, or None. Called before any arithmetic is done with them."""
    capacity = rules.capacities.get(location)
    if not capacity:
        return deny(Reason.LOCATION_UNAVAILABLE, location=location)
    if not 0 < extent_bytes <= MAX_BYTES or extent_bytes % rules.granularity:
        granule = rules.granularity
        return deny(Reason.INVALID_SIZE, size_bytes=extent_bytes, least_bytes=granule, granularity_bytes=granule)
    if not 0 < count <= MAX_COUNT:
        return deny(Reason.INVALID_COUNT, count=count, max_count=MAX_COUNT)
    return check_wait(wait_ns) if wait_ns is not None else None


def check_wait(wait_ns: int) -> Denied | None:
    """Return why a call cannot wait that long, or None."""
    if 0 <= wait_ns <= MAX_WAIT_NS:
        return None
    return deny(Reason.INVALID_ARGUMENT, what="a wait is between 0 and 24 hours")


def gate(free: int | None, size: int, reserve: int) -> bool:
    """Say whether the device itself can hold `size` more bytes and keep `reserve` free (None: it cannot say)."""
    return free is None or free - size >= reserve
