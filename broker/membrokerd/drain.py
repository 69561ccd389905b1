"""The wait for a drained device: once nothing is charged, or the operator's time is over, the daemon exits.

Owns that one timer. It decides nothing about lending: that nothing more is lent is the core's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from .observe import logs

LOOK_SECONDS = 0.05


class Drain:
    """Calls `stop` once, if it was asked to, when `is_empty` says so or the deadline has come."""

    def __init__(self, is_empty: Callable[[], bool], stop: Callable[[], None]) -> None:
        self._is_empty = is_empty
        self._stop = stop
        self._deadline: datetime | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, deadline: datetime | None, *, exits: bool) -> None:
        """Begin to wait, or wait by these terms from now on."""
        self.end()
        self._deadline = deadline
        by = "none" if deadline is None else deadline.isoformat(timespec="seconds")
        logs.log("draining", deadline=by, exits=exits)
        if exits:
            self._look()

    def end(self) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        is_late = self._deadline is not None and datetime.now(UTC) >= self._deadline
        if is_late or self._is_empty():
            logs.log(
                "drained" if self._is_empty() else "the drain's deadline has come: what is lent stays with its workers"
            )
            self._stop()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
