"""What changed in the books: one frozen value per change, in the order of the changes.

The ledger changes through facts alone, so replaying them gives the same ledger. Sizes in bytes, times in
nanoseconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections.abc import Mapping

from .events import Location, ModelName
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
    """The session's row is gone; it was charged nothing any more."""

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
    """A session asked for numbers that nobody had asked for before: they are the model's from now on."""

    name: ModelName
    virtual_capacity: int | None
    limits: Mapping[Location, int]


@value
class ModelJoined:
    """A session registered a model that is there."""

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
    """A model that nobody uses and that is charged nothing is gone."""

    name: ModelName


@value
class ModelCarried:
    """A model's past, which a story of the books as they stand can't tell otherwise; it stands behind all charges."""

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
    """These extents of the session are charged no more."""

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
    """A session holds the segment `times` less. With "holder died" its memory may be kept by nobody knows whom."""

    segment: int
    session: int
    times: int
    cause: str


@value
class SegmentHeldAgain:
    """A session held a segment so many times more before this story begins."""

    segment: int
    session: int
    times: int


@value
class SegmentDoubted:
    """A holder of the segment died before this story begins. Its memory may be kept by nobody knows whom."""

    segment: int


@value
class SegmentCredited:
    """These extents of a segment were never made, and are charged no more."""

    segment: int
    ids: range


@value
class SegmentEnded:
    """The segment's row is gone, its charge credited. `proven`: the device showed it free (None: nobody had to ask)."""

    segment: int
    proven: bool | None


@value
class StockChanged:
    """So many more, or fewer, extents of this size are kept that were never lent: made, used or dropped."""

    location: Location
    extent_bytes: int
    change: int
    cause: str


@value
class UnaccountedSeen:
    """What the device had used beyond the books, signed: a later daemon's dead have this to fall from."""

    location: Location
    unaccounted: int


@value
class QuotaSet:
    """A limit was commanded for a model, or for a tenant (`model` is None); None ends the command."""

    tenant: str
    model: str | None
    location: Location
    limit: int | None


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
    | LocationSettled
    | SegmentBegan
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
