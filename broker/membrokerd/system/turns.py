"""The turns of the event loop: how long each one takes, and how much of one turn each tenant may use.

A turn is what the loop does between two polls of its descriptors. All peers share it, so a peer that sends more than
its share of work waits for the next turn. `Turns` measures turns and enforces the shares; `TurnSelector` tells it when
a turn begins and ends. docs/bounds.md has the table of what bounds a turn, and what single steps cost.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_T = TypeVar("_T")

SLOW_SECONDS = 0.05
"""Longer turns are counted as slow. Nothing that a peer sends may cause one."""
READING_SECONDS = 0.016
"""How long one turn may spend on messages from peers."""
SHARE_SECONDS = 0.004
"""How much of READING_SECONDS one tenant may use, however many connections it has."""


def spare_collections() -> None:
    """Exclude the objects that live as long as the daemon from garbage collection: a full one took 25 ms of a turn."""
    gc.collect()
    gc.freeze()


def in_portions(work: Generator[None, None, _T], done: Callable[[_T], None]) -> None:
    """Run `work` for SHARE_SECONDS of each turn, and pass its result to `done`.

    For work that grows with the books, such as a view of all models. Each `yield` in `work` lets the loop do other
    things, so the books can change between two steps.
    """
    end = time.perf_counter() + SHARE_SECONDS
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
    """The cost of one event loop's turns, and the shares that are left of the current turn."""

    def __init__(self) -> None:
        self.number = 0
        self.longest = 0.0
        """The longest turn since the start, in seconds."""
        self.longest_cpu = 0.0
        """The most CPU time of this thread in one turn, in seconds. Load from other processes does not raise it."""
        self.slow = 0
        """How many turns took longer than `SLOW_SECONDS`."""
        self._began: tuple[float, float] | None = None
        self._used = 0.0
        self._shares: dict[str, float] = {}
        self._late: dict[int, int] = {}
        """The number of the turn in which each waiting descriptor was first passed over."""

    def begin(self) -> None:
        """Start a turn."""
        self.number += 1
        self._used = 0.0
        self._shares.clear()
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

    def left(self, tenant: str, descriptor: int) -> float:
        """Return how many seconds of this turn a tenant may still use. If none, its descriptor goes first later."""
        left = min(READING_SECONDS - self._used, SHARE_SECONDS - self._shares.get(tenant, 0.0))
        if left <= 0:
            self.pass_over(descriptor)
        elif self._late:
            self._late.pop(descriptor, None)
        return left

    def may(self, tenant: str, descriptor: int) -> bool:
        """Return whether this tenant may use more of this turn. If not, its descriptor goes first in a later turn."""
        return self.left(tenant, descriptor) > 0

    def pass_over(self, descriptor: int) -> None:
        """Let a descriptor wait, although it may have more to read. It goes first in a later turn."""
        self._late.setdefault(descriptor, self.number)

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant's share of this turn."""
        self._used += seconds
        self._shares[tenant] = self._shares.get(tenant, 0.0) + seconds

    def passed_over(self, descriptor: int) -> int:
        """Return the number of the turn since which a descriptor has waited; this turn's if it has not."""
        return self._late.get(descriptor, self.number)

    @property
    def anybody_late(self) -> bool:
        """Whether any descriptor was passed over and still waits."""
        return bool(self._late)

    def forget(self, descriptor: int) -> None:
        """Forget a descriptor that is not polled any more."""
        self._late.pop(descriptor, None)


class TurnSelector(selectors.EpollSelector):
    """An event loop's selector that returns the descriptor that has waited longest first.

    The kernel's order never changes, so without this the same descriptors would be passed over in every turn.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready descriptors. A turn ends when this is called, and the next one begins when it returns."""
        turns = self._turns
        turns.end()
        ready = super().select(timeout)
        turns.begin()
        if turns.anybody_late:
            ready.sort(key=lambda key: turns.passed_over(key[0].fd))
        return ready

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """Stop polling a descriptor."""
        key = super().unregister(fileobj)
        self._turns.forget(key.fd)
        return key
