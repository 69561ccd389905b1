"""Places: which calls of a session may be at the broker, and which wait in front of it until one of those has ended.

The broker lets a session have 16 calls that bring descriptors, and refuses the next one. So when many threads call,
the others wait here, in the order in which they came. Some places are kept for calls that do not wait for memory:
those that do would otherwise hold up a call that could be answered at once.

Owns the places and the order. It is pure: it never sends, never sleeps, and takes no lock. Every method may run twice,
because an interrupt can end the first run.
"""

from __future__ import annotations

from ..wire.names import MAX_CALLS_PER_SESSION

MOST_PATIENT = MAX_CALLS_PER_SESSION - 4
"""A call that may wait for memory, or for a seal, gets a place only while fewer than so many are taken."""


class Places:
    """The calls of one connection, by their request ids, which rise in the order in which calls begin."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._patient: dict[int, None] = {}
        """The calls in front that may wait at the broker, in their order."""
        self._prompt: dict[int, None] = {}
        """The others in front, in their order."""

    def enter(self, call: int, *, may_wait: bool) -> bool:
        """Give a new call a place, or put it behind those that came before it; say whether it has a place."""
        line, most = (self._patient, MOST_PATIENT) if may_wait else (self._prompt, MAX_CALLS_PER_SESSION)
        if line or len(self._taken) >= most:
            line[call] = None
            return False
        self._taken.add(call)
        return True

    def has(self, call: int) -> bool:
        """Say whether a call has a place."""
        return call in self._taken

    def hurry(self, call: int) -> list[int]:
        """Let a call in front not wait at the broker, because its time is over; return the calls that get a place."""
        if call in self._patient:
            self._prompt[call] = None
            del self._patient[call]
        return self._fill()

    def leave(self, call: int) -> list[int]:
        """Remove a call that has ended, or was given up in front; return the calls that get a place."""
        self._taken.discard(call)
        if not (self._patient or self._prompt):
            return []
        self._patient.pop(call, None)
        self._prompt.pop(call, None)
        return self._fill()

    def _fill(self) -> list[int]:
        """Give free places to the calls that came first, of those that may have one."""
        admitted = []
        while len(self._taken) < MAX_CALLS_PER_SESSION:
            lines = [self._patient, self._prompt] if len(self._taken) < MOST_PATIENT else [self._prompt]
            first = min((next(iter(line)) for line in lines if line), default=None)
            if first is None:
                break
            self._taken.add(first)
            self._patient.pop(first, None)
            self._prompt.pop(first, None)
            admitted.append(first)
        return admitted
