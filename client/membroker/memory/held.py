"""`Held`: what a pool, a buffer, an array and a segment have in common: each has a `Holding`, and ends.

Owns the end that a user asks for, by `close` or by leaving a `with` block. When memory really goes back is the
holding's to say; this must never unmap or give back anything itself.
"""

from __future__ import annotations

from ..closing import Closing
from .holding import Holding
from .region import device_failures


class Held(Closing):
    """Something mapped in this process, until it is closed. A context manager."""

    _holding: Holding

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._holding.closed

    def close(self) -> None:
        """Unmap all of it in this process and give it back, addresses too. Idempotent.

        With living views, spans and tensors, or calls in other threads, it happens when the last of them has ended;
        else it waits for the work that this process has given to the device. When the broker is away it unmaps all the
        same, and raises nothing. Raises `DeviceFailure`; what could not be given back then is held until it is closed
        again, or its client is.
        """
        with device_failures():
            self._holding.end()
