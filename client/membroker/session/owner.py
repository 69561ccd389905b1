"""`SessionOwner`: what mapped memory needs of a session, whatever it borrows.

It must never know what is borrowed, nor how it is released: its subclasses do.
"""

from __future__ import annotations

from ..vmm.driver import Driver
from .session import Session


class SessionOwner:
    """Most of an `Owner`: the session's part, without `give_back`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.track, self.untrack = session.track, session.untrack
        self.interrupted, self.later = session.interrupted, session.later

    @property
    def driver(self) -> Driver:
        """The driver of the broker's device, in this process."""
        return self._session.driver
