"""What is timed: calls that are made one after the other, again and again, with or without a broker."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

from .samples import Samples


class Job:
    """Calls by their names. It is made in the process that makes them, after `warm_up` rounds that nobody measures."""

    warm_up = 0

    def __init__(self, **calls: Callable[[], object]) -> None:
        self.calls = calls

    def prepare(self) -> None:
        """Do what comes before the calls each time, and is not timed."""

    def close(self) -> None:
        """Let go of everything."""

    def named(self, name: str) -> Job:
        """Return the job of this name, of a process that has several."""
        assert not name
        return self

    def warm(self) -> None:
        """Do it until the first times are over."""
        if self.warm_up:
            timed(self, at_least=self.warm_up)


class Held(Job):
    """A call that takes something, and its close. `calls` are what the two are called."""

    def __init__(self, take: Callable[[], Any], calls: tuple[str, str] = ("take", "give")) -> None:
        self._take, self._held = take, None
        super().__init__(**dict(zip(calls, (self._hold, self._let_go), strict=True)))

    def _hold(self) -> None:
        self._held = self._take()

    def _let_go(self) -> None:
        self._held.close()


def timed(
    job: Job,
    seconds: float = 0.0,
    *,
    gap_seconds: float = 0.0,
    at_least: int = 1,
    until: Callable[[], bool] | None = None,
) -> Samples:
    """Do a job for some seconds and at least so often, or `until` it says so, with a gap before each call."""
    times = {name: array("Q") for name in job.calls}
    steps = [(call, times[name].append) for name, call in job.calls.items()]
    clock, sleep, count = time.monotonic_ns, time.sleep, 0
    begun = clock()
    end = begun + int(seconds * 1e9)
    while True:
        job.prepare()
        for call, note in steps:
            if gap_seconds:
                sleep(gap_seconds)
            start = clock()
            call()
            note(clock() - start)
        count += 1
        if until() if until is not None else count >= at_least and clock() >= end:
            return Samples(times, clock() - begun)


def repeated(call: Callable[[], object], count: int) -> Samples:
    """Measure a call of this process; the first time is the warm-up."""
    call()
    return timed(Job(call=call), at_least=count)
