"""The steps of one vLLM engine: numbered where they are scheduled, and followed where they are launched.

Owns the fences. The two sides may be in two processes: what goes from the scheduler to each rank is two numbers in the
connector's metadata of a step.

A fence is at the beginning of the step that was being scheduled when it was asked for. That step uses none of the
blocks that are to go, and what it saves is queued in front of the fence. At the step's end, a recall would wait for one
step more, which is up to half a second with long prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ..engine import Over


class Scheduled:
    """The scheduler's side. `passed` is that of `Launched`, or the least of all ranks."""

    def __init__(self, passed: Callable[[], int]) -> None:
        self.number: int = 0
        """The step that is scheduled now, or next."""
        self.fenced: int = 0
        """The last step with a fence at its beginning."""
        self._passed = passed

    def fence(self) -> StepFence:
        """Return a fence at the beginning of this step."""
        self.fenced = self.number
        return StepFence(self.number, self._passed)


class StepFence(NamedTuple):
    """The beginning of a step on every device. The step may not have been launched yet."""

    number: int
    passed: Callable[[], int]

    def query(self) -> bool:
        """Return whether it has passed."""
        return self.number <= self.passed()


class Launched:
    """A worker's side. `record` returns an event behind all work that was launched."""

    def __init__(self) -> None:
        self.record: Callable[[], Any] = Over
        self._events: deque[tuple[int, Any]] = deque()
        self._recorded = self._passed = -1

    def begin(self, number: int, fenced: int) -> None:
        """Note that all work before a step was launched. `fenced` is the last step with a fence when it was scheduled.

        An event is recorded only if there is a fence since the last one.
        """
        if fenced > self._recorded:
            self._events.append((number, self.record()))
            self._recorded = number

    def passed(self) -> int:
        """Return the last step with a fence before which all work is over. One thread may call it."""
        while self._events and self._events[0][1].query():
            self._passed = self._events.popleft()[0]
        return self._passed
