"""Events: what the core is told. Requests of sessions, outcomes of effects, and figures of the device.

Frozen values; sizes in bytes, no times (time is an argument of `step`). `call` is the daemon's own number for a
request that is to be answered, opaque to the core; `request_id` is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping

from .names import Location, ModelName, SegmentName
from .values import value

Seen = Mapping[Location, int | None]
"""Bytes in use on the device at each location, by any process; None where the device cannot say.

Read between packets, never while one is made, and reported after the outcome of every packet made before. So the core
knows which of its debits the figure includes.
"""


class Event:
    """Something that the core is told."""

    __slots__ = ()


@value
class Request(Event):
    """What a session asks for, by a request id of its own."""

    call: int
    session: int
    request_id: int


@value
class OpenSession(Event):
    """A process said Hello at a tenant's endpoint. `process` is equal for all sessions of one process.

    `token_hash` is the hash of the session's token, which is valid at this endpoint only.
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
class ResumeSession(Event):
    """A process that knows a session's token said Hello again.

    The new connection is the session's from the answer on. No ConnectionLost is reported for an old one.
    """

    call: int
    session: int
    process: str


@value
class StateHolds(Event):
    """Everything a resuming process holds of its session: extents, holds of each segment, declared bytes.

    `answering` are the models of which it answers recalls; the declarations of `guests` can be recalled.

    Reported after every NotDelivered of the old connection; nothing is delivered on the new one before the answer.
    """

    call: int
    session: int
    extents: frozenset[int]
    segments: Mapping[int, int]
    declarations: Mapping[tuple[ModelName, Location], int]
    answering: frozenset[ModelName] = frozenset()
    guests: frozenset[tuple[ModelName, Location]] = frozenset()


@value
class ForgetSession(Event):
    """An operator ends a detached session."""

    call: int
    session: int


@value
class Restarted(Event):
    """A daemon started with the books of an earlier one. The first event, if there are such books.

    `lost` are the segments for which the descriptor store misses descriptors.
    """

    lost: frozenset[int]
    seen: Seen


@value
class ConnectionLost(Event):
    """A session's handoff connection is lost. Its process may be alive."""

    session: int


@value
class ProcessDied(Event):
    """A session's process is dead. `seen` was read after that became known."""

    session: int
    seen: Seen


@value
class Goodbye(Request):
    """A process ends its session; what the session still holds counts as released."""


@value
class RegisterModel(Request):
    """Register or join a model. Numbers that are None, or not in `limits`, are not changed.

    `answers`: whether the session answers recalls of the model from now on. None changes nothing; a new session does
    not answer. `replaces`: the limits take the place of those that were registered.
    """

    name: ModelName
    virtual_capacity: int | None
    limits: Mapping[Location, int]
    exclusive: bool
    answers: bool | None = None
    replaces: bool = False


@value
class UnregisterModel(Request):
    """Leave a model."""

    name: ModelName


@value
class Allocate(Request):
    """Borrow `count` extents of `extent_bytes`; wait at most `wait_ns` for room (None: as the rules say).

    `ahead`: they are not needed yet, so the request is granted only if there is room and nobody waits. `wanted_bytes`
    is a guess of what the session will want soon, these extents included; 0: unknown.
    """

    name: ModelName
    location: Location
    extent_bytes: int
    count: int
    wait_ns: int | None = None
    ahead: bool = False
    wanted_bytes: int = 0


@value
class Release(Request):
    """Release extents: the session says that it has unmapped them."""

    ids: tuple[int, ...]


@value
class Declare(Request):
    """The whole declaration of a session for a model and a location; more waits at most `wait_ns` for room.

    `recallable`: the session is a guest there: a recall asks for all that it has, and it declares 0 then.
    """

    name: ModelName
    location: Location
    declared_bytes: int
    recallable: bool = False
    wait_ns: int | None = None


@value
class CreateSegment(Request):
    """Create a segment of `size` bytes under a model, to be written by this session; wait as `Allocate` does.

    With `delete_when_left` it is deleted when it is sealed and no session holds it any more.
    """

    name: SegmentName
    location: Location
    size: int
    wait_ns: int | None = None
    delete_when_left: bool = False


@value
class SealSegment(Request):
    """The writer has written all of its segment, and waited for its own work."""

    segment: int


@value
class AttachSegment(Request):
    """Attach a segment; wait at most `wait_ns` for its seal."""

    name: SegmentName
    wait_ns: int


@value
class DetachSegment(Request):
    """Detach from a segment: the session says that it has unmapped it."""

    segment: int


@value
class DeleteSegment(Event):
    """End a segment; `session` is None for an operator, `generation` 0 for any segment of that name.

    With `only_if_left` one that is sealed and that no session holds, and whose writer has ended or asks for it.
    Not a `Request`, because an operator may ask for it, too.
    """

    call: int
    session: int | None
    request_id: int
    name: SegmentName
    generation: int
    only_if_left: bool = False


@value
class Sealed(Event):
    """Later mappings of the segment are read-only, as far as the driver can enforce that."""

    segment: int


@value
class NotSealed(Event):
    """The driver could not seal the segment, which is unchanged."""

    segment: int
    reason: str
    numbers: Mapping[str, int | str]


@value
class Stocked(Event):
    """An extent was made ahead, and is kept; `made` is False when it could not be."""

    location: Location
    extent_bytes: int
    made: bool


@value
class Dropped(Event):
    """The broker's own descriptors of a segment are closed."""

    segment: int


@value
class Elapsed(Event):
    """`Broker.deadline` has come, or is close."""


@value
class Acknowledge(Event):
    """The session has imported a packet's descriptors, or closed them unused."""

    session: int
    request_id: int
    part: int


@value
class AcknowledgeUpTo(Event):
    """A session has taken the first `count` packets that were sent to it since its connection began."""

    session: int
    count: int


@value
class Made(Event):
    """Outcome of Make or Send: the packet's extents exist, and its descriptors are queued on the connection."""

    session: int
    request_id: int
    part: int


@value
class NotMade(Event):
    """Outcome of Make: no extent of the packet exists any more. Outcome of Send: the packet is not sent."""

    session: int
    request_id: int
    part: int
    reason: str
    numbers: Mapping[str, int | str]


@value
class NotDelivered(Event):
    """A packet was queued but never sent, because its connection broke. Its descriptors are closed."""

    session: int
    request_id: int
    part: int


@value
class Audit(Event):
    """The device's current figures. Ten times a second, and every 10 ms while bytes are releasing."""

    seen: Seen


@value
class InputsDrained(Event):
    """Outcome of DrainInputs: all input that was pending then has been reported."""

    call: int


@value
class SetQuota(Event):
    """An operator sets the quota of a model, or of a tenant (`model` is None). None leaves the configured number.

    `undo`: a replay restores numbers that were in force before. It is never refused.
    """

    call: int
    tenant: str
    model: str | None
    location: Location
    limit: int | None
    guarantee: int | None = None
    weight: int | None = None
    undo: bool = False


@value
class CancelWait(Event):
    """The caller of `call` no longer wants an answer: if the call waits, for room or for a seal, its wait ends.

    A call that does not wait, or is not known, is left alone.
    """

    call: int


@value
class AnswerRecall(Event):
    """A session has released what it can of a recall, and keeps the rest. If no such recall is open, it is ignored.

    `size` is the largest size that the session had heard of. If it is less than the size of the first notice, the
    session has heard of no raise.
    """

    session: int
    recall: int
    size: int = 0


@value
class SetDraining(Event):
    """An operator stops lending, or allows it again."""

    call: int
    draining: bool
