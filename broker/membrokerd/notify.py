"""The socket on which systemd listens to the daemon that it started (sd_notify(3))."""

from __future__ import annotations

import asyncio
import os
import socket

from . import logs


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


def keep_watchdog_quiet(io: asyncio.AbstractEventLoop) -> None:
    """Tell systemd twice in each of its watchdog's periods that this event loop turns, where it wants to know."""
    period = os.environ.get("WATCHDOG_USEC", "")
    if not period.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    seconds = int(period) / 2e6

    def tell() -> None:
        notify("WATCHDOG=1")
        io.call_later(seconds, tell)

    tell()
