"""Facts: what changed in the books, one frozen value per change, in the order of the changes.

The ledger changes through facts alone, so replaying them gives the same ledger. Sizes in bytes, times in
nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Mapping

from .names import Location, ModelName
from .values import value


@value
class SessionBegan:
    """A process opened a session."""

    session: int
    tenant: str
    pid: int
    uid: int
    process: str
    observer: bool
    client: str
    at: int
    endpoint: str = ""
    token_hash: str = ""


@value
class SessionMoved:
    """The session's lifecycle took a step. With "process died" all it is charged turns to releasing."""

    session: int
    cause: str
    at: int


@value
class SessionEnded:
    """The session's row is removed; its charges were credited before."""

    session: int
    at: int


@value
class ModelBegan:
    """A model was registered, with what its first worker asked for."""

    name: ModelName
    virtual_capacity: int | None
    limits: Mapping[Location, int]


@value
class ModelAsked:
    """A session set numbers of the model: those that no session had set before, or in the place of them."""

    name: ModelName
    virtual_capacity: int | None
    limits: Mapping[Location, int]


@value
class ModelJoined:
    """A session registered an existing model."""

    name: ModelName
    session: int


@value
class ModelLeft:
    """A session unregistered a model."""

    name: ModelName
    session: int
    at: int


@value
class ModelEnded:
    """A model without sessions and charges is removed."""

    name: ModelName


@value
class ModelCarried:
    """A model's history, which a snapshot of the books has no other facts for; it follows all charges."""

    name: ModelName
    peaks: Mapping[Location, int]
    allocations: int
    releases: int
    idle_since: int


@value
class Debited:
    """The extents `first` to `first + count - 1` are charged to the session and its model."""

    session: int
    name: ModelName
    location: Location
    extent_bytes: int
    first: int
    count: int


@value
class Credited:
    """These extents of the session are no longer charged."""

    session: int
    ids: tuple[int, ...] | range
    cause: str


@value
class DeclarationSet:
    """The session's declaration for a model and a location is now this."""

    session: int
    name: ModelName
    location: Location
    declared_bytes: int


@value
class GuestSet:
    """The session is a guest there, which declared something last at `used_at`. None: it is a guest no more."""

    session: int
    name: ModelName
    location: Location
    used_at: int | None
    slice_until: int


@value
class TurnBegan:
    """The tenant's turn to have guests began."""

    tenant: str
    location: Location
    at: int


@value
class LocationSettled:
    """All that a dead session was charged at a location is credited. `proven`: the device showed it free."""

    session: int
    location: Location
    proven: bool


@value
class SegmentBegan:
    """A segment is charged to its model: `count` extents from `first` on, the last one of `last_bytes`."""

    segment: int
    name: ModelName
    label: str
    location: Location
    extent_bytes: int
    last_bytes: int
    first: int
    count: int
    writer: int
    at: int


@value
class SegmentBound:
    """The segment is deleted when it is sealed and no session holds it any more."""

    segment: int


@value
class SegmentMoved:
    """The segment's lifecycle took a step. With "dropped after a death" its charge turns to releasing."""

    segment: int
    cause: str


@value
class SegmentHeld:
    """A session holds the segment, or holds it once more."""

    segment: int
    session: int


@value
class SegmentLeft:
    """A session dropped `times` of its holds. With "holder died" an unknown process may keep the memory."""

    segment: int
    session: int
    times: int
    cause: str


@value
class SegmentHeldAgain:
    """In a snapshot: the session holds the segment `times` more."""

    segment: int
    session: int
    times: int


@value
class SegmentDoubted:
    """In a snapshot: a holder of the segment died, so an unknown process may keep its memory."""

    segment: int


@value
class SegmentCredited:
    """These extents of a segment were never made, and are no longer charged."""

    segment: int
    ids: range


@value
class SegmentEnded:
    """The segment's row is removed, its charge credited. `proven`: the device showed it free (None: no holder died)."""

    segment: int
    proven: bool | None


@value
class StockChanged:
    """The stock of this size changed by `change` extents: they were made, used or dropped."""

    location: Location
    extent_bytes: int
    change: int
    cause: str


@value
class UnaccountedSeen:
    """What the device had in use beyond the books, signed: a later daemon measures releases from it."""

    location: Location
    unaccounted: int


@value
class QuotaSet:
    """An operator set the quota of a model, or of a tenant (`model` is None). None leaves the configured number."""

    tenant: str
    model: str | None
    location: Location
    limit: int | None
    guarantee: int | None = None
    weight: int | None = None


Fact = (
    SessionBegan
    | SessionMoved
    | SessionEnded
    | ModelBegan
    | ModelAsked
    | ModelJoined
    | ModelLeft
    | ModelEnded
    | ModelCarried
    | Debited
    | Credited
    | DeclarationSet
    | GuestSet
    | TurnBegan
    | LocationSettled
    | SegmentBegan
    | SegmentBound
    | SegmentMoved
    | SegmentHeld
    | SegmentLeft
    | SegmentHeldAgain
    | SegmentDoubted
    | SegmentCredited
    | SegmentEnded
    | StockChanged
    | UnaccountedSeen
    | QuotaSet
)
