"""Signs of life: notifications to systemd's socket (sd_notify(3)), the state that /healthz shows, and a file."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from . import logs

BEAT_SECONDS = 1.0
STALE_SECONDS = 5.0
"""An event loop without a beat for this long hangs: no turn should take a tenth of a second."""


def started_by_systemd() -> bool:
    """Return whether this is the main process of a systemd service. systemd says so from version 248 on."""
    return os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())


def connect() -> socket.socket | None:
    """Return a socket that is connected to systemd's, or None if it gave none. Raises `OSError`."""
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
    """Notify systemd, or the parent of all GPUs' daemons, if it started this process.

    Only READY=1 waits for a peer that does not read, since without it the start fails. The rest is dropped: the event
    loop must not stop with a peer that is stopped.
    """
    try:
        connection = connect()
        if connection is not None:
            with connection, suppress(BlockingIOError):
                connection.send(state.encode(), 0 if "READY=1" in state else socket.MSG_DONTWAIT)
    except OSError as error:  # even without a descriptor left, the daemon must go on
        logs.warn("cannot notify systemd", socket=os.environ["NOTIFY_SOCKET"], error=error.strerror)


class Heartbeat:
    """Shows that the event loop turns, to any thread that asks, to systemd's watchdog if it is on, and by a file.

    The beats come from the loop itself, so they end when it hangs. Each sets the time of `state/alive`. A probe that
    looks at that needs no connection, so nobody can keep it out by a flood of them.
    """

    def __init__(self, io: asyncio.AbstractEventLoop, state: Path) -> None:
        self._io = io
        self._file = state / "alive"
        self._is_touched = True
        self._seconds = BEAT_SECONDS
        watchdog = os.environ.get("WATCHDOG_USEC", "")
        self._watched = watchdog.isdecimal() and int(watchdog) > 0
        self._watched &= os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if self._watched:
            self._seconds = min(BEAT_SECONDS, int(watchdog) / 2e6)
        self._beat()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._watched:
            notify("WATCHDOG=1")
        self._touch()
        self._io.call_later(self._seconds, self._beat)

    def _touch(self) -> None:
        was_touched, self._is_touched = self._is_touched, False
        try:
            self._file.touch(mode=0o600)
            self._is_touched = True
        except OSError as error:
            if was_touched:
                logs.warn("a probe cannot see that the event loop turns", file=self._file, error=error.strerror)

    def health(self) -> tuple[bool, str]:
        """Return whether the loop has turned lately, and a sentence; may be called on any thread."""
        silent = time.monotonic() - self._beat_at
        if silent < STALE_SECONDS:
            return True, "ok"
        return False, f"the event loop has not turned for {silent:.0f} seconds"
