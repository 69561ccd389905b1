"""The connections of one session, pure: what becomes of them goes in, and what the session does about it comes out.

Owns the state of the session, when the next attempt to resume is made, which calls wait for that, how long, and what
they raise. An event is a method. It never opens a socket, reads a clock, takes a lock or starts a thread: that is for
its shell, which holds a lock around each event (`reconnecting`). A connection is known here by its calls (`machine`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Final

from ..errors import BrokerUnavailable, ClosedError, MembrokerError, SessionLost
from .machine import Calls

LIFECYCLE: Final[Mapping[str, Mapping[str, str]]] = {
    # From a goodbye on, the end of the connection is expected.
    "connected": {"connection lost": "lost", "goodbye": "leaving", "closed": "closed"},
    # Calls wait. Until a thread has begun to reconnect, they try to start one.
    "lost": {"thread started": "reconnecting", "goodbye": "leaving", "closed": "closed"},
    # A thread tries to resume the session. Calls wait.
    "reconnecting": {"resumed": "connected", "token rejected": "unknown", "goodbye": "leaving", "closed": "closed"},
    # The broker does not know the session. Calls raise `SessionLost`.
    "unknown": {"closed": "closed"},
    "leaving": {"closed": "closed"},
    "closed": {},
}
"""`LIFECYCLE[state][cause]` is the next state. A cause that has no entry comes too late, and changes nothing."""

REJECTED = "TOKEN_REJECTED"
"""The reason of an error when the broker does not know the session."""
NOTICING_SECONDS = 1.0
"""When a call by gRPC has failed: how much later the handoff connection may end for the same cause."""
REMINDER_SECONDS = 60.0
AGAIN_SECONDS = 0.1
"""How often a call tries to start the thread that reconnects, where none could start."""
_UNANSWERED = ("", "STOPPING", "DELIVERY_FAILED", REJECTED)
"""Reasons of errors after which a call is repeated on the next connection, if there is one."""


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each attempt: 50 ms, doubled each time up to 1 s, less a random half at most.

    Random, because all workers of a machine lose their broker in the same moment.
    """
    seconds = 0.05
    while True:
        yield seconds * random.uniform(0.5, 1.0)
        seconds = min(2 * seconds, 1.0)


class Outages:
    """The state of a session at the broker `name`; `calls` are those of its last connection.

    A call waits `outage` seconds for the next one; after an interrupt, when the broker is still there, at least
    `timeout`. `trouble` is what the last attempt to resume met.
    """

    def __init__(self, name: str, calls: Calls, *, outage: float, timeout: float) -> None:
        self.state: str = "connected"
        self.calls = calls
        self.outage = outage
        self.is_closing: bool = False
        self.trouble: str = ""
        self.begun: float = 0.0
        """When the thread began that reconnects."""
        self._reminded = 0.0
        self._pauses: Iterator[float] = iter(())
        self._name, self._timeout = name, timeout

    def move(self, cause: str) -> bool:
        """Go to the next state, if there is one for this cause; say whether there is."""
        following = LIFECYCLE[self.state].get(cause)
        self.state = following or self.state
        return following is not None

    @property
    def is_away(self) -> bool:
        """Whether there is no connection, and there may be another one."""
        return self.state in ("lost", "reconnecting")

    @property
    def patience(self) -> float:
        """How many seconds a call waits for the next connection."""
        return max(self.outage, self._timeout) if self.calls.is_interrupted else self.outage

    def wait(self, failed: Calls, error: MembrokerError, since: float, now: float) -> float:
        """Return how many seconds a call waits that failed with `error`; 0 if it is repeated on another connection now.

        Raises when it waits no more, or does not wait at all.
        """
        if error.reason not in _UNANSWERED:
            raise error
        if failed is not self.calls:
            return 0.0
        if self.is_closing or self.state in ("leaving", "closed"):
            raise ClosedError("this client is closed")
        if self.state == "unknown":
            raise SessionLost(self.trouble)
        is_lost = failed.is_lost or error.reason == "STOPPING"
        left = since + (self.patience if is_lost else min(NOTICING_SECONDS, self.outage)) - now
        if left > 0:
            return min(left, AGAIN_SECONDS) if self.state == "lost" else left
        if not failed.is_lost or not self.outage:
            raise error
        tried = f", the last attempt to reconnect said: {self.trouble}" if self.trouble else ""
        raise BrokerUnavailable(f"{error}; this call waited {self.outage:g} s for it{tried}")

    # The thread that reconnects

    def begin(self, lost: Calls, now: float) -> bool:
        """A thread has started; say whether it reconnects. After an interrupt a second one may have been started."""
        if lost is not self.calls or not self.move("thread started"):
            return False
        self.begun = self._reminded = now
        self._pauses = itertools.chain([0.0] if lost.is_interrupted else [], pauses())
        return True

    def next_try(self, now: float) -> float:
        """Return when the next attempt to resume is made."""
        return now + next(self._pauses)

    def failed(self, error: Exception, now: float) -> str:
        """An attempt to resume has failed; return what to warn of, if that is due."""
        self.trouble = str(error)
        if getattr(error, "reason", "") == REJECTED:
            self.trouble = (
                f"the broker at {self._name} does not know this session: {error}; mapped memory stays valid until it "
                "is closed, and counts as unaccounted at the broker; call connect() again"
            )
            return self.trouble if self.move("token rejected") else ""
        if now - self._reminded < REMINDER_SECONDS:
            return ""
        self._reminded = now
        return f"no broker for {now - self.begun:.0f} s, still reconnecting: {self.trouble}"

    def resumed(self, calls: Calls) -> None:
        """The broker and the session agree on a new connection: all calls use it. Raises if that is too late."""
        if calls.is_lost or not self.move("resumed"):
            raise BrokerUnavailable(f"the connection to the broker at {self._name} ended again")
        calls.is_closing = self.is_closing
        self.calls, self.trouble = calls, ""

    # The end

    def close_soon(self) -> None:
        """The client closes: no call waits any more, for another connection or for memory."""
        self.is_closing = self.calls.is_closing = True
