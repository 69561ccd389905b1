"""What the core asks of the world: answers to callers, and extents to make. Outcomes come back as events."""

from __future__ import annotations

from .denied import Denied
from .events import Location, ModelName, SegmentName
from .values import value


@value
class SessionOpened:
    """Answer to OpenSession."""

    session: int


@value
class SessionResumed:
    """Answer to ResumeSession: its Holds may come."""

    session: int
    tenant: str
    observer: bool


@value
class Reconciled:
    """Answer to StateHolds: the books agree, but for what they do not know; and the models of the session."""

    unknown_extents: tuple[int, ...]
    unknown_segments: tuple[int, ...]
    models: tuple[ModelName, ...]


@value
class Registered:
    """Answer to RegisterModel."""

    name: ModelName


@value
class Allocated:
    """Answer to Allocate: every packet is queued on the session's connection."""

    count: int
    extent_bytes: int


@value
class Released:
    """Answer to Release."""

    released_bytes: int


@value
class Declared:
    """Answer to Declare."""

    declared_bytes: int


@value
class Detached:
    """Answer to DetachSegment."""


@value
class Done:
    """Answer to whatever has nothing more to say."""


@value
class SegmentView:
    """A segment as it stands: the answer to a create, a seal, an attach and a delete."""

    segment: int
    name: SegmentName
    state: str
    location: Location
    size: int
    extents: int
    sessions: int
    writer: int
    began_at: int


Result = (
    SessionOpened
    | SessionResumed
    | Reconciled
    | Registered
    | Allocated
    | Released
    | Declared
    | SegmentView
    | Detached
    | Done
)


@value
class Answer:
    """Answer `call`: with a result, or with a refusal."""

    call: int
    result: Result | Denied


@value
class HearOthers:
    """Read what has come in from everybody before `call` is refused for want of room. Outcome: OthersHeard."""

    call: int


@value
class Make:
    """Create, export and send one packet of extents, if the device gate allows. Outcome: Made or NotMade.

    Those of a `segment` (not 0) are kept by the descriptor store first; those that are `stocked` exist already.
    `answer` is what its call will be answered with if all of this is made: it can go with the packet, and be on its way
    before the books hear of it.
    """

    session: int
    request_id: int
    part: int
    parts: int
    ids: range
    extent_bytes: int
    location: Location
    segment: int = 0
    stocked: bool = False
    answer: Allocated | None = None


@value
class Stock:
    """Make one extent ahead, when nothing else is to be done. Outcome: Stocked."""

    location: Location
    extent_bytes: int


@value
class DropStock:
    """Let go of so many extents of the stock."""

    location: Location
    extent_bytes: int
    count: int


@value
class Send:
    """Send one packet of a segment's descriptors. Outcome: Made or NotMade."""

    session: int
    request_id: int
    part: int
    parts: int
    ids: range
    extent_bytes: int
    segment: int


@value
class Seal:
    """Make later mappings of a segment read-only, where the driver can. Outcome: Sealed or NotSealed."""

    segment: int


@value
class Drop:
    """Close the broker's own descriptors of a segment. Outcome: Dropped."""

    segment: int


@value
class NameSuspects:
    """Say who may have what the device has used beyond the books: `unaccounted` bytes, `risen` of them new."""

    unaccounted: int
    risen: int


@value
class Disconnect:
    """The session broke the protocol: close its connection. What it holds stays charged."""

    session: int
    why: str


@value
class Forget:
    """The session ended: drop its token, its connection and the watch on its process."""

    session: int


Effect = Answer | HearOthers | Make | Send | Stock | DropStock | Seal | Drop | NameSuspects | Disconnect | Forget
