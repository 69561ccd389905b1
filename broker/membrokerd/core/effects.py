"""Effects: what the core asks the daemon to do. Outcomes come back as events."""

from __future__ import annotations

from typing import Literal

from .denied import Denied
from .names import Location, ModelName, SegmentName
from .values import value


class Result:
    """The answer to a call that is not refused."""

    __slots__ = ()


@value
class SessionOpened(Result):
    """Answer to OpenSession."""

    session: int


@value
class SessionResumed(Result):
    """Answer to ResumeSession: the process may now state its Holds."""

    session: int
    tenant: str
    observer: bool


@value
class Reconciled(Result):
    """Answer to StateHolds: what the process stated that is not in the books, and the models of the session."""

    unknown_extents: tuple[int, ...]
    unknown_segments: tuple[int, ...]
    models: tuple[ModelName, ...]


@value
class Registered(Result):
    """Answer to RegisterModel."""

    name: ModelName


@value
class Allocated(Result):
    """Answer to Allocate: every packet is queued on the session's connection."""

    count: int
    extent_bytes: int


@value
class Released(Result):
    """Answer to Release."""

    released_bytes: int


@value
class Declared(Result):
    """Answer to Declare."""

    declared_bytes: int


@value
class Detached(Result):
    """Answer to DetachSegment."""


@value
class Done(Result):
    """Answer to a request that succeeded, and that has nothing else to tell."""


@value
class SegmentView(Result):
    """The current state of a segment: the answer to a create, a seal, an attach and a delete."""

    segment: int
    name: SegmentName
    state: str
    location: Location
    size: int
    extents: int
    sessions: int
    writer: int
    began_at: int


class Effect:
    """Something that the daemon must do."""

    __slots__ = ()


@value
class Answer(Effect):
    """Answer `call`: with a result, or with a refusal."""

    call: int
    result: Result | Denied


@value
class DrainInputs(Effect):
    """Read every connection's pending input before `call` is refused for lack of room. Outcome: InputsDrained."""

    call: int


WaitResult = Literal["granted", "refused", "cancelled"]


@value
class Waited(Effect):
    """A request of `size` bytes has waited for room for `waited_ns`, and its wait is over.

    `guaranteed`: it was within its model's or tenant's guarantee when it came. `why` is the refusal that it would have
    got then if it had not waited; None if there was room, and others came first.
    """

    call: int
    session: int
    request_id: int
    name: ModelName
    location: Location
    size: int
    waited_ns: int
    result: WaitResult
    guaranteed: bool
    why: Denied | None


@value
class SendRecall(Effect):
    """Ask a session for `size` bytes of a model at a location, to be answered within `within_ns` from now.

    `is_guaranteed`: some of them were lacking for a request within a guarantee.
    Emitted again with the same `recall` when the recall is raised: `size` is then the sum of all that was asked for.
    Emitted again, too, while a late session has not answered: `size` is then what it has not released.
    """

    session: int
    recall: int
    name: ModelName
    location: Location
    size: int
    within_ns: int
    is_guaranteed: bool = False


RecallResult = Literal["returned", "kept", "late"]


@value
class Recalled(Effect):
    """A recall of `size` bytes has ended after `after_ns`, or is late; `returned` bytes were released.

    `wanted_by` is the model whose request lacked the bytes; None: a limit was lowered.
    """

    session: int
    name: ModelName
    location: Location
    size: int
    returned: int
    after_ns: int
    result: RecallResult
    wanted_by: ModelName | None = None


@value
class Make(Effect):
    """Create, export and send one packet of extents, if the device gate allows. Outcome: Made or NotMade.

    Extents of a `segment` (not 0) go to the descriptor store first; `stocked` ones exist already. `answer` is the
    answer to the call if the whole packet is made: it can be sent with the packet, before the books learn of it.
    """

    tenant: str
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
class Stock(Effect):
    """Make one extent ahead, when the executor is idle. Outcome: Stocked."""

    location: Location
    extent_bytes: int


@value
class DropStock(Effect):
    """Release `count` extents of the stock."""

    location: Location
    extent_bytes: int
    count: int


@value
class Send(Effect):
    """Send one packet of a segment's descriptors. Outcome: Made or NotMade."""

    session: int
    request_id: int
    part: int
    parts: int
    ids: range
    extent_bytes: int
    segment: int


@value
class Seal(Effect):
    """Make later mappings of a segment read-only, where the driver can. Outcome: Sealed or NotSealed."""

    segment: int


@value
class Drop(Effect):
    """Close the broker's own descriptors of a segment. Outcome: Dropped."""

    segment: int


@value
class NameSuspects(Effect):
    """Name processes that may use the `unaccounted` bytes beyond the books; `risen` of them are new."""

    unaccounted: int
    risen: int


@value
class Disconnect(Effect):
    """The session broke the protocol: close its connection. What it holds stays charged."""

    session: int
    why: str


@value
class Forget(Effect):
    """The session ended: drop its token, its connection and the watch on its process."""

    session: int
