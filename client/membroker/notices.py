"""What happens to a session from outside, as its user is told: the broker drains or stops, goes away, or is back.

Owns one frozen dataclass for each. It must never import protobuf, as the module of the other values.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Draining:
    """The broker lends nothing more: an operator wants the device free of it, by `deadline` (UTC) where there is one.

    What is lent stays. Finish, close what can be closed, and go elsewhere.
    """

    deadline: datetime | None


@dataclass(frozen=True, slots=True)
class Undrained:
    """The broker lends again."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The broker stops, and will close the connection. What is mapped stays valid."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The broker is gone. What is mapped stays valid; calls wait, and the session tries to reconnect."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session goes on, `outage_seconds` after its broker was missed."""

    outage_seconds: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The broker that is there now does not know the session: every call raises `SessionLost`, so connect() anew."""


Notice = Draining | Undrained | Stopping | Disconnected | Resumed | Forgotten
