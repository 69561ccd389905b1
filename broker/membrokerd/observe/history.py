"""The last minutes of the device's memory, for the status page: a bounded ring of samples.

Owns when a sample is taken and what is in it. A sample has nothing that /metrics did not show at that time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..ext import Broker

SAMPLE_SECONDS = 2.0
SAMPLES = 151
"""Five minutes. A sample with every tenant that it names is about 2 KiB."""
MOST_TENANTS = 12
"""How many tenants a sample names: those that use the most. The others are one sum."""


class Sample(NamedTuple):
    """The device's own memory at one moment (seconds of CLOCK_MONOTONIC), in bytes, and all refusals so far.

    `tenants` are the largest by their use, `others` is the sum of the rest.
    """

    at: float
    tenants: Mapping[str, int]
    others: int
    capacity: int
    free: int
    unaccounted: int
    waiting: int
    refusals: int


class History:
    """The samples of one daemon, the oldest first."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = now()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The samples, the oldest first."""
        return tuple(self._samples)

    def look(self, broker: Broker) -> None:
        """Take a sample if it is time for one. It is called after each audit."""
        now = self._now()
        if now >= self._next:
            self._next = now + SAMPLE_SECONDS
            self._samples.append(_take(broker, now))


def _take(broker: Broker, now: float) -> Sample:
    ledger = broker.ledger
    total = ledger.totals["device"]
    charged = [
        (ledger.tenant_charged(tenant, "device"), tenant) for tenant, where in ledger.tenants if where == "device"
    ]
    charged.sort(reverse=True)
    return Sample(
        at=now,
        tenants={tenant: size for size, tenant in charged[:MOST_TENANTS] if size},
        others=sum(size for size, _ in charged[MOST_TENANTS:]),
        capacity=total.capacity,
        free=total.free,
        unaccounted=max(0, broker.releasing.shown("device") or 0),
        waiting=broker.waiting.of_location("device")[0],
        refusals=broker.books.device_denials.total(),
    )
