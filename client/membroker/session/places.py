"""Places: which calls of a session may be at the broker, and which wait in front of it until one of those has ended.

The broker lets a session have 16 calls that bring descriptors, and refuses the next one. So when many threads call,
the others wait here, in the order in which they came.

A call belongs to the line of what it may wait for: the memory of a model at a location, or the seal of a segment. One
that does not wait belongs to no line. Some places are kept for these, and for lines that have no call at the broker:
otherwise calls that wait for minutes would hold up one that could be answered at once.

Owns the places and the order. It is pure: it never sends, never sleeps, and takes no lock. Every method may run twice,
because an interrupt can end the first run.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..wire.names import MAX_CALLS_PER_SESSION

MOST_PATIENT = MAX_CALLS_PER_SESSION - 4
"""The places that calls of lines share. Of the others one is kept for calls of no line, and a new line gets one."""


class Places:
    """The calls of one connection, by their request ids."""

    def __init__(self) -> None:
        self._taken: dict[int, Hashable] = {}
        """The line of each call at the broker; None for a call of no line."""
        self._front: dict[int, Hashable] = {}
        """The same of the calls in front, in the order in which they came."""

    def enter(self, call: int, line: Hashable) -> bool:
        """Give a new call a place, or put it behind those that came before it; say whether it has a place."""
        is_crowded = self._front or len(self._taken) >= MOST_PATIENT
        if is_crowded and (line in self._front.values() or not self._has_room(line)):
            self._front[call] = line
            return False
        self._taken[call] = line
        return True

    def has(self, call: int) -> bool:
        """Say whether a call has a place."""
        return call in self._taken

    def hurry(self, call: int) -> list[int]:
        """Let a call in front not wait at the broker, because its time is over; return the calls that get a place."""
        if call in self._front:
            self._front[call] = None
        return self._fill()

    def leave(self, call: int) -> list[int]:
        """Remove a call that has ended, or was given up in front; return the calls that get a place."""
        self._taken.pop(call, None)
        if not self._front:
            return []
        self._front.pop(call, None)
        return self._fill()

    def _has_room(self, line: Hashable) -> bool:
        if len(self._taken) < MOST_PATIENT:
            return True
        if line is None:
            return len(self._taken) < MAX_CALLS_PER_SESSION
        return len(self._taken) < MAX_CALLS_PER_SESSION - 1 and line not in self._taken.values()

    def _fill(self) -> list[int]:
        """Give free places to the calls that came first, of those that may have one."""
        admitted, full = [], set[Hashable]()
        for call, line in self._front.items():
            if len(self._taken) >= MAX_CALLS_PER_SESSION:
                break
            if line in full:
                continue
            if self._has_room(line):
                self._taken[call] = line
                admitted.append(call)
            else:
                full.add(line)
        for call in admitted:
            self._front.pop(call, None)
        return admitted
