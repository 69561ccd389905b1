"""Deferrals: before the core refuses a call for lack of room, everything that connections have queued is read.

A release that was sent before the request may be among it. So the core defers such a call, and decides it when all is
read that was queued then. Owns how long a call waits for that, and decides nothing about it. Tenants take turns, as a
decision may divide all memory, and a tenant may have thousands of calls here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..system.tenant_queues import TenantQueues
from ..system.turns import PORTION_SECONDS
from .connections import SessionConnection

HEARING_SECONDS = 0.02
"""How long a call waits at most for connections that had more queued than they may send in a turn or two.

It is CPU time of the event loop. On the clock, 20 ms may pass before anything is read where other processes have the
cores, and then the call would be refused for memory that was released before.
"""
HEARING_TURNS = 5
"""How many turns it waits at least. When a virtual machine stands still, its CPU time goes on, but no turn begins."""


@dataclass(slots=True)
class _Batch:
    """Calls that were deferred in one turn. They wait until each connection in `unread` is read up to its byte.

    They wait no longer once `time.thread_time` has reached `until` and turn number `last` has begun.
    """

    calls: list[tuple[str, int]]
    until: float
    last: int
    unread: list[tuple[SessionConnection, int]]

    def is_heard(self) -> bool:
        """Return whether all is read."""
        self.unread = [
            (connection, end) for connection, end in self.unread if connection.heard < end and connection.queued()
        ]
        return not self.unread


class Deferrals:
    """The calls that wait. `decide` is told of each, once; `connections` returns all that there are.

    Calls of `first` are decided before those of all tenants.
    """

    def __init__(
        self, decide: Callable[[int], None], connections: Callable[[], Iterable[SessionConnection]], first: str
    ) -> None:
        self._decide = decide
        self._connections = connections
        self._io = asyncio.get_running_loop()
        self._new: list[tuple[str, int]] = []
        """The calls that were deferred in this turn, each with its tenant."""
        self._turn = 0
        """How many turns have begun in which calls waited."""
        self._batches: deque[_Batch] = deque()
        self._heard: TenantQueues[int] = TenantQueues(first)
        """The calls that have waited long enough."""
        self._scheduled = False

    def add(self, tenant: str, call: int) -> None:
        """Defer a call of a tenant."""
        self._new.append((tenant, call))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._io.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Note what is queued, once for all calls of the last turn, and decide the calls that have waited long enough.

        This comes first in the turn, because the event loop keeps the order of its calls.
        """
        self._scheduled = False
        self._turn += 1
        now, end = time.thread_time(), time.perf_counter() + PORTION_SECONDS
        if self._new:
            unread = [
                (connection, connection.heard + queued)
                for connection in self._connections()
                if (queued := connection.queued())
            ]
            self._batches.append(_Batch(self._new, now + HEARING_SECONDS, self._turn + HEARING_TURNS, unread))
            self._new = []
        while self._batches:
            first = self._batches[0]
            if (now < first.until or self._turn < first.last) and not first.is_heard():
                break
            for tenant, call in self._batches.popleft().calls:
                self._heard.put(tenant, call)
        try:
            while self._heard:
                tenant, call = self._heard.take()
                began = time.perf_counter()
                self._decide(call)
                decided = time.perf_counter()
                self._heard.charge(tenant, decided - began)
                if decided >= end:
                    break
        finally:
            if self._batches or self._heard:
                self._schedule()
