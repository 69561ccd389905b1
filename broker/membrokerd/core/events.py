"""What the core is told: requests of sessions, outcomes of effects, and what the device shows.

Frozen values; sizes in bytes, times nowhere (time is `step`'s argument). `call` is the edge's own number for a
question that wants an answer and is never looked into; `request_id` is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from .values import value

Location = Literal["device", "host"]
LOCATIONS: tuple[Location, ...] = ("device", "host")

Seen = Mapping[Location, int | None]
"""Bytes of each location that the device shows in use, by anybody; None where it cannot say.

Read between packets, never while one is made, and told after the outcome of every packet that was made before: so the
core knows which of its debits the figure can show.
"""


class ModelName(NamedTuple):
    """A model: its tenant and its own name."""

    tenant: str
    model: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/models/{self.model}"


ANY_MODEL = "-"
"""In a segment's name, where a model stands: whichever has the segment."""


class SegmentName(NamedTuple):
    """A segment: its model, or `ANY_MODEL`, and its own name (`label`)."""

    tenant: str
    model: str
    label: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/models/{self.model}/segments/{self.label}"


@value
class OpenSession:
    """A process said Hello at a tenant's endpoint. `process` is equal for all sessions of one process.

    `token_hash` is of the token that will speak for the session, at this endpoint only.
    """

    call: int
    tenant: str
    pid: int
    uid: int
    process: str
    observer: bool
    client: str
    endpoint: str = ""
    token_hash: str = ""


@value
class ResumeSession:
    """A process that knows a session's token said Hello again.

    The new connection is the session's from the answer on: of the old one, if it seems to live, no end is told.
    """

    call: int
    session: int
    process: str


@value
class StateHolds:
    """All that a resuming process has of its session: extents, how many times which segment, declared bytes.

    Told behind every NotDelivered of the old connection; nothing is delivered on the new one before the answer.
    """

    call: int
    session: int
    extents: frozenset[int]
    segments: Mapping[int, int]
    declarations: Mapping[tuple[ModelName, Location], int]


@value
class ForgetSession:
    """An operator gives up on a detached session."""

    call: int
    session: int


@value
class Restarted:
    """A daemon began with the books of another. Told before anything else.

    `lost` are the segments of which the descriptor store has not every descriptor; `seen` is what the device shows.
    """

    lost: frozenset[int]
    seen: Seen


@value
class ConnectionLost:
    """A session's handoff connection is gone. Its process may live."""

    session: int


@value
class ProcessDied:
    """A session's process is dead. `seen` was read after that became known."""

    session: int
    seen: Seen


@value
class Goodbye:
    """A session ends by its own word; what it still holds is taken as given back."""

    call: int
    session: int
    request_id: int


@value
class RegisterModel:
    """Register or join a model. What is None, or not in `limits`, is left to what is there."""

    call: int
    session: int
    request_id: int
    name: ModelName
    virtual_capacity: int | None
    limits: Mapping[Location, int]
    exclusive: bool


@value
class UnregisterModel:
    """Leave a model."""

    call: int
    session: int
    request_id: int
    name: ModelName


@value
class Allocate:
    """Borrow `count` extents of `extent_bytes`."""

    call: int
    session: int
    request_id: int
    name: ModelName
    location: Location
    extent_bytes: int
    count: int


@value
class Release:
    """Give extents back, by the session's word."""

    call: int
    session: int
    request_id: int
    ids: tuple[int, ...]


@value
class Declare:
    """The whole declaration of a session for a model and a location."""

    call: int
    session: int
    request_id: int
    name: ModelName
    location: Location
    declared_bytes: int


@value
class CreateSegment:
    """Make a segment of `size` bytes under a model, to be written by this session."""

    call: int
    session: int
    request_id: int
    name: SegmentName
    location: Location
    size: int


@value
class SealSegment:
    """The writer has written all of its segment, and waited for its own work."""

    call: int
    session: int
    request_id: int
    segment: int


@value
class AttachSegment:
    """Take hold of a segment; wait at most `wait_ns` for its seal."""

    call: int
    session: int
    request_id: int
    name: SegmentName
    wait_ns: int


@value
class DetachSegment:
    """Let go of a segment, by the session's word."""

    call: int
    session: int
    request_id: int
    segment: int


@value
class DeleteSegment:
    """End a segment; `session` is None for an operator, `generation` 0 for whichever has the name."""

    call: int
    session: int | None
    request_id: int
    name: SegmentName
    generation: int


@value
class Sealed:
    """Nobody who maps the segment from now on can write to it, as far as the driver can hold that."""

    segment: int


@value
class NotSealed:
    """The driver could not seal the segment: it is as before."""

    segment: int
    reason: str
    numbers: Mapping[str, int | str]


@value
class Stocked:
    """An extent was made ahead, and is kept; `made` is False when it could not be."""

    location: Location
    extent_bytes: int
    made: bool


@value
class Dropped:
    """The broker's own descriptors of a segment are closed."""

    segment: int


@value
class Elapsed:
    """The time that the core waits for (`Broker.deadline`) has come, or is close."""


@value
class Acknowledge:
    """A packet's descriptors are imported and closed, or closed unused."""

    session: int
    request_id: int
    part: int


@value
class AcknowledgeUpTo:
    """A session has taken the first `count` packets that were sent to it since its connection began."""

    session: int
    count: int


@value
class Made:
    """A packet's extents exist, and its descriptors are queued on the session's connection: of a Make, or a Send."""

    session: int
    request_id: int
    part: int


@value
class NotMade:
    """Of a Make: none of the packet's extents exists any more. Of a Send: it is not sent."""

    session: int
    request_id: int
    part: int
    reason: str
    numbers: Mapping[str, int | str]


@value
class NotDelivered:
    """A packet was queued and never sent: its connection broke first. Its descriptors are closed."""

    session: int
    request_id: int
    part: int


@value
class Audit:
    """What the device shows now. Comes ten times a second, and every 10 ms while bytes are releasing."""

    seen: Seen


@value
class OthersHeard:
    """Of a HearOthers: what had come in from anybody before it has been told."""

    call: int


@value
class SetQuota:
    """Command a limit for a model, or for a tenant (`model` is None); None ends the command."""

    call: int
    tenant: str
    model: str | None
    location: Location
    limit: int | None


@value
class SetDraining:
    """Lend nothing more, or lend again."""

    call: int
    draining: bool


Event = (
    OpenSession
    | ResumeSession
    | StateHolds
    | ForgetSession
    | Restarted
    | SetDraining
    | ConnectionLost
    | ProcessDied
    | Goodbye
    | RegisterModel
    | UnregisterModel
    | Allocate
    | Release
    | Declare
    | CreateSegment
    | SealSegment
    | AttachSegment
    | DetachSegment
    | DeleteSegment
    | Sealed
    | NotSealed
    | Stocked
    | Dropped
    | Elapsed
    | Acknowledge
    | AcknowledgeUpTo
    | Made
    | NotMade
    | NotDelivered
    | Audit
    | OthersHeard
    | SetQuota
)
