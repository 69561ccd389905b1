"""Deferrals: when a refusal for lack of room that the core has deferred is decided.

That is after every connection has been read, because a release that was sent before the request may still be unread.
Owns how long a call waits for that, and decides nothing about it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from .turns import SHARE_SECONDS

HEARING_SECONDS = 0.02
"""How long a call waits at most while other connections keep sending."""


class Deferrals:
    """The calls that wait. `decide` is told of each, once."""

    def __init__(self, decide: Callable[[int], None]) -> None:
        self.cut_short = 0
        """How many times a connection had more to say than it may in one turn."""
        self._decide = decide
        self._io = asyncio.get_running_loop()
        self._cut_short_before = 0
        self._turn = 0
        self._waiting: deque[tuple[int, int, float]] = deque()
        """Each call, the turn in which it was deferred, and when."""

    def add(self, call: int) -> None:
        """Defer a call."""
        self._waiting.append((call, self._turn, self._io.time()))
        if len(self._waiting) == 1:
            self._io.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Decide the calls that have waited for a whole turn, in which all that there was to read was read.

        Runs before the reading of its turn, because the event loop keeps the order of its calls.
        """
        self._turn += 1
        silent, self._cut_short_before = self.cut_short == self._cut_short_before, self.cut_short
        late = self._io.time() - HEARING_SECONDS
        end = time.perf_counter() + SHARE_SECONDS
        try:
            while self._waiting and time.perf_counter() < end:
                call, turn, deferred_at = self._waiting[0]
                if turn + 2 > self._turn or not (silent or deferred_at <= late):
                    break
                self._waiting.popleft()
                self._decide(call)
        finally:
            if self._waiting:
                self._io.call_soon(self._begin_turn)
