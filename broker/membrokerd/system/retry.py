"""When a packet that a socket did not take may be sent again. It runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

IN_FLIGHT_SECONDS = 0.05
"""How long a packet waits when this user has as many descriptors in flight as the kernel allows. The kernel counts
those of all processes of the user, so the peer may not be the cause, and its socket does not tell when it is over."""


class Retry:
    """Says when a packet may be sent that `sock` did not take. The socket does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self.is_pending = False
        """Whether a packet waits. It does until `stop`, also while `again` runs."""
        self._sock = sock
        self._io = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def after(self, error: OSError, again: Callable[[], None]) -> bool:
        """Call `again` when it may be sent, if this error of a send is a matter of time. Return whether it is."""
        self.stop()
        if isinstance(error, BlockingIOError):
            self._io.add_writer(self._sock, again)
        elif error.errno == errno.ETOOMANYREFS:
            self._timer = self._io.call_later(IN_FLIGHT_SECONDS, again)
        else:
            return False
        self.is_pending = True
        return True

    def stop(self) -> None:
        """Call nothing any more. The owner of the socket does this before it closes it."""
        if self.is_pending:
            self.is_pending = False
            self._io.remove_writer(self._sock)
            if self._timer is not None:
                self._timer.cancel()
