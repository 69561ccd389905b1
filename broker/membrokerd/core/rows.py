"""The rows of the ledger: sessions, segments, models, and what each of them is charged.

Plain records. Only the ledger changes them, by facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .names import Location, ModelName, SegmentName


class Loan(NamedTuple):
    """What all extents of one debit have in common."""

    name: ModelName
    location: Location
    extent_bytes: int


class Quota(NamedTuple):
    """What an operator has set for a model or a tenant at one location: bytes, and a weight of 0 to `MAX_WEIGHT`.

    None leaves the configuration.
    """

    limit: int | None = None
    guarantee: int | None = None
    weight: int | None = None


@dataclass(slots=True)
class Charge:
    """Charged bytes and extents; `declared` is part of `bytes`."""

    bytes: int = 0
    extents: int = 0
    declared: int = 0


class GuestTimes(NamedTuple):
    """When a guest declared something last, and until when it has its slice."""

    used_at: int
    slice_until: int


@dataclass(slots=True)
class SessionRow:
    """One session. `extents` are lent to it one by one.

    `charges` are their sums, declarations included, without entries of zero bytes.
    """

    session: int
    tenant: str
    pid: int
    uid: int
    process: str
    observer: bool
    client: str
    began_at: int
    endpoint: str = ""
    token_hash: str = ""
    state: str = "open"
    models: set[ModelName] = field(default_factory=set)
    extents: dict[int, Loan] = field(default_factory=dict)
    charges: dict[tuple[ModelName, Location], Charge] = field(default_factory=dict)
    guests: dict[tuple[ModelName, Location], GuestTimes] = field(default_factory=dict)
    """Those of its charges that can be recalled as a whole only."""
    sums: dict[Location, tuple[int, int]] = field(default_factory=dict)
    """Charged bytes and extents at each location, over all models, without entries of zero bytes."""
    segments: dict[int, int] = field(default_factory=dict)
    """How many times it holds each segment. It is not charged for them: their models are."""

    def charged(self, location: Location) -> int:
        """Return the bytes charged at a location. Called for every dead session at every audit."""
        return self.sums.get(location, (0, 0))[0]


@dataclass(slots=True)
class SegmentRow:
    """One segment. `ids` are the extents that it began with; `bytes` and `extents` are what is still charged of them.

    `holders` are the sessions that have it mapped, and how many times. `uncertain`: one of them died, so only the
    device can say when its memory is gone. `delete_when_left`: it is deleted when it is sealed and has no holders.
    """

    segment: int
    name: ModelName
    label: str
    location: Location
    extent_bytes: int
    last_bytes: int
    ids: range
    writer: int
    began_at: int
    bytes: int
    extents: int
    state: str = "writing"
    holders: dict[int, int] = field(default_factory=dict)
    uncertain: bool = False
    delete_when_left: bool = False

    def full_name(self) -> SegmentName:
        """Return its resource name."""
        return SegmentName(self.name.tenant, self.name.model, self.label)

    def size_of(self, ids: range) -> int:
        """Return the bytes of some of its extents, which follow each other."""
        last = self.ids[-1] in ids
        return self.extent_bytes * (len(ids) - last) + self.last_bytes * last

    def charged(self, location: Location) -> int:
        """Return the bytes charged at a location."""
        return self.bytes if location == self.location else 0


@dataclass(slots=True)
class ModelCharge(Charge):
    """A model's charge at one location, with its history. `segments` is the part of `bytes` in segments."""

    peak: int = 0
    releasing: int = 0
    segments: int = 0


class TenantCharge(NamedTuple):
    """What all models of a tenant are charged at one location; `releasing` is part of `bytes`."""

    bytes: int
    releasing: int


@dataclass(slots=True)
class ModelRow:
    """One model: the numbers its workers asked for (the first request counts), its sessions and its charges.

    `segments` is how many segments it has, in whatever state.
    """

    name: ModelName
    virtual_capacity: int | None
    limits: Mapping[Location, int]
    sessions: set[int] = field(default_factory=set)
    charges: dict[Location, ModelCharge] = field(default_factory=dict)
    segments: int = 0
    allocations: int = 0
    releases: int = 0
    idle_since: int = 0

    def used(self) -> int:
        """Bytes that the model is charged at all locations together."""
        return sum(charge.bytes for charge in self.charges.values())


@dataclass(slots=True)
class Total:
    """A location: capacity = lent + releasing + free. `unaccounted` is the figure last recorded for a later daemon."""

    capacity: int
    lent: int = 0
    releasing: int = 0
    stock: int = 0
    unaccounted: int | None = None

    @property
    def charged(self) -> int:
        """The bytes that limits apply to."""
        return self.lent + self.releasing

    @property
    def free(self) -> int:
        """Capacity that is neither lent nor releasing."""
        return self.capacity - self.lent - self.releasing
