"""Attaches that wait for the seal of a segment, and when each of them is refused.

Owns these requests, and nothing of a segment: `segments` says when one is sealed or has ended.
"""

from __future__ import annotations

from typing import NamedTuple

from . import events as ev
from .books import Books
from .denied import Denied, Reason, deny
from .lending import Lending

MOST_AT_ONCE = 64
"""How many attaches that wait are refused in one step. The others follow in the next: see `deadline`."""


class WaitingAttach(NamedTuple):
    """An attach that waits for the seal of a segment."""

    event: ev.AttachSegment
    segment: int
    deadline: int
    denied: Denied | None = None
    """Why it is refused, if its segment has ended: its deadline is 0 then."""


class Attaches:
    """The attaches that wait, in the order of their requests."""

    def __init__(self, books: Books, lending: Lending) -> None:
        self._books = books
        self._lending = lending
        self._waiting: dict[int, WaitingAttach] = {}
        """By call, in the order of their requests."""
        self._calls: dict[int, dict[int, None]] = {}
        """By segment: the calls that wait for its seal, in the same order. A segment without any has no entry."""
        self._refused = 0
        """How many of them were refused in this step."""
        self.deadline: int | None = None
        """When the first of them times out, in nanoseconds; 0 if some are to be refused at once."""

    def begin_step(self) -> None:
        """Let attaches be refused again."""
        self._refused = 0

    def wait(self, event: ev.AttachSegment, segment: int, now: int) -> None:
        """Let an attach wait for the seal of a segment, as long as it says."""
        self._lending.wait(event.session, event.request_id)
        deadline = now + event.wait_ns
        self._waiting[event.call] = WaitingAttach(event, segment, deadline)
        self._calls.setdefault(segment, {})[event.call] = None
        self.deadline = deadline if self.deadline is None else min(deadline, self.deadline)

    def refuse_one_more(self, tenant: str) -> Denied | None:
        """Return why no more attaches of a tenant may wait, or None. One seal begins all of them in one step."""
        limit = self._books.rules.max_waiting_per_tenant
        if sum(1 for attach in self._waiting.values() if attach.event.name.tenant == tenant) < limit:
            return None
        return deny(Reason.TOO_MANY_REQUESTS, limit=limit, whose="tenant", calls="attaches that wait for a seal")

    def take_for(self, segment: int) -> list[ev.AttachSegment]:
        """Remove the attaches that wait for the seal of a segment, and return them."""
        return [attach.event for attach in self._take(self._waiting_for(segment))]

    def segment_ended(self, segment: int, denied: Denied) -> None:
        """Refuse those that wait for the seal of a segment: it will never come."""
        self._refuse([attach._replace(deadline=0, denied=denied) for attach in self._waiting_for(segment)])

    def elapsed(self, now: int) -> None:
        """Refuse those whose wait has timed out, and those that were left over as their segment ended."""
        self._refuse([attach for attach in self._waiting.values() if attach.deadline <= now])

    def cancel(self, call: int) -> None:
        """End the wait of an attach that its caller no longer wants; any other call is left alone."""
        if call in self._waiting:
            self._take([self._waiting[call]])
            self._books.answer(call, deny(Reason.DELIVERY_FAILED))

    def give_up(self, session: int) -> None:
        """Fail those of a session that is disconnected, leaving or dead."""
        for attach in self._take([attach for attach in self._waiting.values() if attach.event.session == session]):
            self._books.answer(attach.event.call, deny(Reason.DELIVERY_FAILED))

    def _waiting_for(self, segment: int) -> list[WaitingAttach]:
        return [self._waiting[call] for call in self._calls.get(segment, ())]

    def _refuse(self, waiting: list[WaitingAttach]) -> None:
        """Refuse as many as one step may, and the others when `Elapsed` comes, at once."""
        most = len(waiting) if self._books.stopping else MOST_AT_ONCE - self._refused
        for attach in self._take(waiting[:most]):
            self._refused += 1
            self._books.answer(attach.event.call, attach.denied or self._not_sealed(attach.segment))
        for attach in waiting[most:]:
            self._waiting[attach.event.call] = attach
            self.deadline = attach.deadline if self.deadline is None else min(attach.deadline, self.deadline)

    def _not_sealed(self, segment: int) -> Denied:
        return deny(Reason.SEGMENT_NOT_SEALED, segment=str(self._books.ledger.segments[segment].full_name()))

    def _take(self, waiting: list[WaitingAttach]) -> list[WaitingAttach]:
        """Remove these of the attaches that wait, and return them."""
        first = False
        for event, segment, *_ in waiting:
            first |= self._waiting.pop(event.call).deadline == self.deadline
            calls = self._calls[segment]
            del calls[event.call]
            if not calls:
                del self._calls[segment]
            self._lending.wait_no_more(event.session, event.request_id)
        if first:
            self.deadline = min((attach.deadline for attach in self._waiting.values()), default=None)
        return waiting
