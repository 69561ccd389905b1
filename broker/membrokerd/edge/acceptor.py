"""The listening socket of one endpoint: accepts when it is the endpoint's turn, and counts what it refuses.

Decides nothing about a connection: it passes each one on, with a socket that does not block.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from membroker.wire.system_calls import describe

from ..core.denied import Reason
from ..system import logs
from ..system.process import call_failed
from ..system.turns import Turns
from .closing import SocketCloser

PAUSE_SECONDS = 0.1
"""How long to wait before accepting again when the process has no descriptor left, or too many connections close."""
REFUSED_LINE_SECONDS = 1.0


@dataclass(slots=True)
class Refusals:
    """The connections that an endpoint has refused: `counter` counts those of all endpoints, by reason."""

    endpoint: str
    counter: Counter[str]
    _unsaid: Counter[Reason] = field(default_factory=Counter)
    _silent_until: dict[Reason, float] = field(default_factory=dict)

    def note(self, reason: Reason, **fields: object) -> None:
        """Count a refused connection. A reason is logged at most once a second, so that no peer can fill the log."""
        self.counter[reason.value] += 1
        self._unsaid[reason] += 1
        if time.monotonic() < self._silent_until.get(reason, 0.0):
            return
        count = self._unsaid.pop(reason)
        logs.log("connection refused", endpoint=self.endpoint, reason=reason.value, count=count, **fields)
        self._silent_until[reason] = time.monotonic() + REFUSED_LINE_SECONDS


class Acceptor:
    """Accepts at a listening socket, and owns it. `accepted` gets each connection, and owns that.

    Its owner ends it with `hang_up`.
    """

    def __init__(
        self, sock: socket.socket, turns: Turns, refusals: Refusals, accepted: Callable[[socket.socket], None]
    ) -> None:
        self._sock = sock
        self._turns = turns
        self._refusals = refusals
        self._accepted = accepted
        self._closing = SocketCloser()
        self.hang_up = self._closing.hang_up
        self._io = asyncio.get_running_loop()
        self._io.add_reader(sock, self._acceptable)

    def _acceptable(self) -> None:
        """Accept when it is the endpoint's turn."""
        self._turns.put(self._refusals.endpoint, self._accept_one)

    def _accept_one(self) -> bool:
        """Accept a connection. Return False when none is waiting, or no more can be accepted for now."""
        if self._sock.fileno() < 0:
            return False
        if self._closing.is_crowded:
            self._pause()
            return False
        try:
            connection = self._take()
        except BlockingIOError:
            return False
        except OSError as error:
            self._refusals.note(call_failed("accept4", error).reason, error=describe("accept4", error))
            self._pause()
            return False
        self._accepted(connection)
        return True

    def _take(self) -> socket.socket:
        """Return the next connection. A byte that is out of band stays in its place there.

        Elsewhere a peek skips such a byte, and the next read drops it with the descriptors that it carries: the thread
        that reads waits for those.
        """
        connection, _ = self._sock.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        connection.setblocking(False)
        return connection

    def _pause(self) -> None:
        self._io.remove_reader(self._sock)
        self._io.call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._io.add_reader(self._sock, self._acceptable)

    def close(self) -> None:
        """Accept no more, and close what was not accepted yet: its peers may have sent something already."""
        self._io.remove_reader(self._sock)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
            while True:
                self.hang_up(self._take())
        self._sock.close()
