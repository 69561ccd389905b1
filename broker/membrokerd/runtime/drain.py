"""The wait of a drain: the daemon exits once nothing is charged, or at the operator's deadline.

Owns that one timer. It must never decide about lending: the core refuses new loans during a drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from ..system import logs

LOOK_SECONDS = 0.05


class Drain:
    """Calls `stop` once, when `is_empty` returns True or the deadline has passed, if the drain is to exit."""

    def __init__(self, is_empty: Callable[[], bool], stop: Callable[[], None]) -> None:
        self._is_empty = is_empty
        self._stop = stop
        self._deadline: datetime | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, deadline: datetime | None, *, exits: bool) -> None:
        """Start waiting, or replace the deadline and `exits` of the current wait."""
        self.end()
        self._deadline = deadline
        by = "none" if deadline is None else deadline.isoformat(timespec="seconds")
        logs.log("draining", deadline=by, exits=exits)
        if exits:
            self._look()

    def end(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        is_late = self._deadline is not None and datetime.now(UTC) >= self._deadline
        if is_late or self._is_empty():
            logs.log(
                "drained" if self._is_empty() else "the drain's deadline has passed: workers keep the memory they have"
            )
            self._stop()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
