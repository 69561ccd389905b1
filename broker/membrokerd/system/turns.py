"""The turns of the event loop: how long each one takes, and which peers are served in it.

A turn is what the loop does between two polls of its descriptors. All peers share it, and what there is no time for
waits for the next turn. `Turns` measures turns, and serves the tenants in the order of `TenantQueues`; `TurnSelector`
tells it when a turn begins and ends. docs/bounds.md has the table of what bounds a turn, and what single steps cost.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from .tenant_queues import TenantQueues

_T = TypeVar("_T")

SLOW_SECONDS = 0.05
"""Longer turns are counted as slow. Nothing that a peer sends may cause one."""
PORTION_SECONDS = 0.004
"""How long one turn serves peers, of all tenants together; and how long it does any other work that has no bound."""

MOST_COLLECTED = 25_000
"""How many objects the next full garbage collection may look at again."""
COLLECTIONS_BEFORE_FULL = 3
"""How many collections of the second generation, at most 8,400 objects each, one of the third can come after."""

Work = Callable[[], bool]
"""Does one step of work for a peer, and returns whether there is more. Equal ones wait only once."""


def spare_collections() -> None:
    """Exclude the objects that live long from garbage collection: those of the start, and others when they are many.

    A full collection looks at all objects that it could free, and no turn can interrupt it: 25 ms for those of the
    start, 230 ms for those of 16,384 waits. What is excluded is freed with the last reference to it. So an object that
    lives long must be in no cycle of references when it ends.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], COLLECTIONS_BEFORE_FULL)
    gc.callbacks.append(_exclude_old)


def _exclude_old(phase: str, info: dict[str, int]) -> None:
    """Exclude what a full collection has left, if it is much."""
    if phase == "stop" and info["generation"] == 2 and len(gc.get_objects(generation=2)) > MOST_COLLECTED:
        gc.freeze()


def in_portions(work: Generator[None, None, _T], done: Callable[[_T], None]) -> None:
    """Run `work` for PORTION_SECONDS of each turn, and pass its result to `done`.

    For work that grows with the books, such as a view of all models. Each `yield` in `work` lets the loop do other
    things, so the books can change between two steps.
    """
    end = time.perf_counter() + PORTION_SECONDS
    try:
        while time.perf_counter() < end:
            next(work)
    except StopIteration as finished:
        done(finished.value)
    else:
        asyncio.get_running_loop().call_soon(in_portions, work, done)


def gather(rows: Iterable[_T]) -> Generator[None, None, list[_T]]:
    """Return the rows in a list, as work for `in_portions`: one row per step."""
    gathered = []
    for row in rows:
        gathered.append(row)
        yield
    return gathered


class Turns:
    """The cost of one event loop's turns, and the work for peers that waits for this turn or a later one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.longest = 0.0
        """The longest turn since the start, in seconds."""
        self.longest_cpu = 0.0
        """The most CPU time of this thread in a turn, in seconds. Other processes do not raise it; a hypervisor can."""
        self.slow = 0
        """How many turns took longer than `SLOW_SECONDS`."""
        self._clock = clock
        self._began: tuple[float, float] | None = None
        self._queues: TenantQueues[Work] = TenantQueues()
        self.put: Callable[[str, Work], None] = self._queues.put
        """Do a step of work for a peer of a tenant when it is the tenant's turn. What waits already waits on."""

    def start_over(self) -> None:
        """Forget what was measured, and start a turn: nobody has waited for what the daemon's start has taken."""
        self.longest = self.longest_cpu = 0.0
        self.slow = 0
        self.begin()

    def begin(self) -> None:
        """Start a turn."""
        self._began = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """End the turn and record how long it took."""
        if self._began is None:
            return
        began, began_cpu = self._began
        self._began = None
        seconds = time.perf_counter() - began
        if seconds > self.longest_cpu:  # the CPU time, which is never more, may be the most so far
            self.longest_cpu = max(self.longest_cpu, time.thread_time() - began_cpu)
            self.longest = max(self.longest, seconds)
        self.slow += seconds > SLOW_SECONDS

    @property
    def is_waiting(self) -> bool:
        """Whether any work waits."""
        return bool(self._queues)

    def serve(self) -> None:
        """Do the work that waits, step by step, for PORTION_SECONDS. The rest waits for the next turn."""
        queues, clock = self._queues, self._clock
        now = clock()
        end = now + PORTION_SECONDS
        while queues and now < end:
            tenant, work = queues.take()
            while True:
                goes_on = work()
                began, now = now, clock()
                queues.charge(tenant, now - began)
                if not goes_on or now >= end or not queues.go_on(tenant):
                    break
            if goes_on:
                queues.put(tenant, work)


class TurnSelector(selectors.EpollSelector):
    """An event loop's selector. It tells when a turn ends and the next begins, and has the turn's work done last.

    What is ready is passed on to callbacks that put work into the queues. When all have run, `Turns.serve` runs, as if
    it were the callback of one more descriptor: in this turn, and not one poll later.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._serving: selectors.SelectorKey | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready descriptors. A turn ends when this is called, and the next one begins when it returns."""
        turns = self._turns
        turns.end()
        ready = super().select(0 if turns.is_waiting else timeout)
        turns.begin()
        if self._serving is None:
            handle = asyncio.Handle(turns.serve, (), asyncio.get_running_loop())
            self._serving = selectors.SelectorKey(-1, -1, selectors.EVENT_READ, (handle, None))
        ready.append((self._serving, selectors.EVENT_READ))
        return ready
