"""`SessionOwner`: what mapped memory needs of a session, whatever it borrows.

It must never know what is borrowed, nor how it is released: its subclasses do.
"""

from __future__ import annotations

from collections.abc import Callable

from ..memory.lender import Tracked
from ..vmm.driver import Driver
from .session import Session


class SessionOwner:
    """Most of an `Owner`: the session's part, without `give_back`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def driver(self) -> Driver:
        """The driver of the broker's device, in this process."""
        return self._session.driver

    def track(self, memory: Tracked) -> None:
        """Let the client end this memory when it closes."""
        self._session.track(memory)

    def untrack(self, memory: Tracked) -> None:
        """Forget memory that was released."""
        self._session.untrack(memory)

    def interrupted(self) -> None:
        """Drop the connection: an interrupt may have left a call half done, and a resume settles what is held."""
        self._session.interrupted()

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` in the background thread; for finalizers."""
        self._session.later(work)
