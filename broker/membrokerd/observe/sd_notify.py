"""Signs of life: what systemd is told on its socket (sd_notify(3)), and what the probes of /healthz ask."""

from __future__ import annotations

import asyncio
import os
import socket
import time

from . import logs

BEAT_SECONDS = 1.0
STALE_SECONDS = 5.0
"""A loop that has not beaten for so long hangs: no turn of it should take a tenth of a second."""


def connect() -> socket.socket | None:
    """Return a socket connected to systemd's, or None where it has given none; raises OSError."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        connection.connect("\0" + address[1:] if address.startswith("@") else address)
    except OSError:
        connection.close()
        raise
    return connection


def notify(state: str) -> None:
    """Tell systemd, if it started us."""
    try:
        connection = connect()
        if connection is not None:
            with connection:
                connection.send(state.encode())
    except OSError as error:  # with no descriptor left too: what it tells of must happen all the same
        logs.warn("cannot notify systemd", error=error.strerror)


class Heartbeat:
    """Shows that the event loop turns: by a stamp that any thread may ask for, and to systemd's watchdog if it is on.

    Both beat from the loop itself, so that neither outlives it.
    """

    def __init__(self, io: asyncio.AbstractEventLoop) -> None:
        self._io = io
        self._seconds = BEAT_SECONDS
        watchdog = os.environ.get("WATCHDOG_USEC", "")
        self._watched = watchdog.isdecimal() and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if self._watched:
            self._seconds = min(BEAT_SECONDS, int(watchdog) / 2e6)
        self._beat()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._watched:
            notify("WATCHDOG=1")
        self._io.call_later(self._seconds, self._beat)

    def health(self) -> tuple[bool, str]:
        """Return whether the loop has turned lately, and a sentence; called on any thread."""
        silent = time.monotonic() - self._beat_at
        if silent < STALE_SECONDS:
            return True, "ok"
        return False, f"the event loop has not turned for {silent:.0f} seconds"
