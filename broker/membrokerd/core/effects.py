"""What the core asks of the world: answers to callers, and extents to make. Outcomes come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from .denied import Denied
from .events import Location, ModelName


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Answer to OpenSession."""

    session: int


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to RegisterModel."""

    name: ModelName


@dataclass(frozen=True, slots=True)
class Allocated:
    """Answer to Allocate: every packet is queued on the session's connection."""

    count: int
    extent_bytes: int


@dataclass(frozen=True, slots=True)
class Released:
    """Answer to Release."""

    released_bytes: int


@dataclass(frozen=True, slots=True)
class Declared:
    """Answer to Declare."""

    declared_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to whatever has nothing more to say."""


Result = SessionOpened | Registered | Allocated | Released | Declared | Done


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer `call`: with a result, or with a refusal."""

    call: int
    result: Result | Denied


@dataclass(frozen=True, slots=True)
class Make:
    """Create, export and send one packet of extents, if the device gate allows. Outcome: Made or NotMade."""

    session: int
    request_id: int
    part: int
    parts: int
    ids: range
    extent_bytes: int
    location: Location


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The session broke the protocol: close its connection. What it holds stays charged."""

    session: int
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The session ended: drop its token, its connection and the watch on its process."""

    session: int


Effect = Answer | Make | Disconnect | Forget
