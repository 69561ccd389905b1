"""What a tenant's engine wants at each moment of a run: a list of phases, each with a target, from a seed."""

from __future__ import annotations

import random
from typing import NamedTuple

TENANTS = 3
PHASE_SECONDS = (1.5, 4.0)
LEVELS = (0.04, 0.2, 0.35, 0.5, 0.65)
"""Targets of a phase, as parts of the capacity. Three tenants want 1.04 of it on average, and up to 1.95."""
LENGTHS = (4, 64)
"""Pages that a sequence has at its end."""


class Numbers(NamedTuple):
    """The sizes of a run, in bytes and seconds."""

    driver: str
    capacity: int
    page: int
    seconds: float
    seed: int

    @property
    def guarantee(self) -> int:
        """What each tenant is guaranteed."""
        return self.capacity // 4 // self.page * self.page

    @property
    def share(self) -> int:
        """The static share of each tenant: its guarantee, and its part of what is guaranteed to nobody."""
        return self.guarantee + (self.capacity - TENANTS * self.guarantee) // TENANTS


class Phase(NamedTuple):
    """From `start` seconds on, the engine keeps sequences of `pages` pages in all."""

    start: float
    pages: int


class PhaseTrace:
    """The phases of one tenant, and the lengths of its sequences. Equal seeds give equal traces."""

    def __init__(self, seed: int, tenant: int, seconds: float, capacity_pages: int) -> None:
        self._random = random.Random(f"{seed} {tenant}")
        self._phases: list[Phase] = []
        start = 0.0
        while start < seconds:
            self._phases.append(Phase(start, int(self._random.choice(LEVELS) * capacity_pages)))
            start += self._random.uniform(*PHASE_SECONDS)
        self._next = 0

    def wanted(self, elapsed: float) -> int:
        """Return how many pages the engine wants to use now."""
        while self._next + 1 < len(self._phases) and self._phases[self._next + 1].start <= elapsed:
            self._next += 1
        return self._phases[self._next].pages

    def length(self) -> int:
        """Return how many pages the next sequence will have."""
        return self._random.randint(*LENGTHS)
