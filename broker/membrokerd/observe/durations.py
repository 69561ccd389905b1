"""The histograms: how long requests, waits, steps, driver calls and writes take. Noted at once, counted later.

Owns every histogram of the registry and the seconds that they have not counted yet. Noting is one call of the
interpreter, so that no request waits for a histogram.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Histogram

from .catalog import Spec

BUCKETS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Seconds: a handoff takes 11 µs, a gRPC call 500, a create of 1 GiB some ms; a call of a second is a fault."""
WAIT_BUCKETS = (1e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: a request waits for other workers, so for as long as these compute."""


class _Histogram(Histogram):  # type: ignore[misc]
    """A histogram that counts many observations at once, in a thirtieth of the time that it takes one by one."""

    def observe_all(self, amounts: list[float]) -> None:
        amounts.sort()
        counted = 0
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            if counted == len(amounts):
                break
            until = bisect_right(amounts, bound, counted)
            bucket.inc(until - counted)
            counted = until
        self._sum.inc(sum(amounts))


class Times:
    """The durations of one kind of work, in seconds. `observe` notes one more, on any thread."""

    def __init__(self, histogram: _Histogram) -> None:
        self._histogram = histogram
        self.counted = 0
        self._seconds: list[float] = []
        self.observe = self._seconds.append

    def count(self) -> None:
        """Count what was noted so far. Only one thread at a time may call this."""
        noted = self._seconds[:]
        if noted:
            del self._seconds[: len(noted)]
            self._histogram.observe_all(noted)
            self.counted += len(noted)


class Durations:
    """The histograms of one registry. Their first label is the GPU's."""

    def __init__(self, registry: CollectorRegistry, gpu_uuid: str) -> None:
        self._registry = registry
        self._gpu_uuid = gpu_uuid
        self._counting = threading.Lock()
        self._times: list[Times] = []

    def add(self, spec: Spec, buckets: Sequence[float] = BUCKETS) -> Callable[..., Times]:
        """Add a histogram, and return a function from the values of its labels to their `Times`."""
        labels = ("gpu_uuid", *spec.labels)
        histogram = _Histogram(spec.name, spec.help, labels, buckets=buckets, registry=self._registry)

        @functools.cache
        def times_of(*values: str) -> Times:
            times = Times(histogram.labels(self._gpu_uuid, *values))
            self._times.append(times)
            return times

        return times_of

    def count(self) -> None:
        """Count what was noted. Any thread may call this; it is called often enough to bound the memory."""
        with self._counting:
            for times in list(self._times):
                times.count()
