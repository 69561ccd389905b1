"""Attaches that wait for the seal of a segment, and when each of them is refused.

Owns these requests, and nothing of a segment: `segments` says when one is sealed or has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from . import events as ev
from .books import Books
from .deadlines import Deadlines
from .denied import Denied, Reason, deny
from .lending import Lending
from .sums import add

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
        self._of_session: dict[int, dict[int, None]] = {}
        """The same by session."""
        self._of_tenant: Counter[str] = Counter()
        """How many wait, by tenant. No entry is zero."""
        self.ends: Deadlines[int] = Deadlines(self._is_end)
        """When each of them times out, by call."""
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
        self._calls.setdefault(segment, {})[event.call] = None
        self._of_session.setdefault(event.session, {})[event.call] = None
        self._of_tenant[event.name.tenant] += 1
        self._set(WaitingAttach(event, segment, now + event.wait_ns))
        self._set_deadline()

    def _set(self, attach: WaitingAttach) -> None:
        self._waiting[attach.event.call] = attach
        self.ends.add(attach.deadline, attach.event.call)

    def _set_deadline(self) -> None:
        first = self.ends.first()
        self.deadline = first[0] if first is not None else None

    def _is_end(self, at: int, call: int) -> bool:
        """Say whether the attach of a call waits until then."""
        return call in self._waiting and self._waiting[call].deadline == at

    def refuse_one_more(self, tenant: str) -> Denied | None:
        """Return why no more attaches of a tenant may wait, or None. One seal begins all of them in one step."""
        limit = self._books.rules.max_waiting_per_tenant
        if self._of_tenant[tenant] < limit:
            return None
        return deny(Reason.TOO_MANY_REQUESTS, limit=limit, whose="tenant", calls="attaches that wait for a seal")

    def take_for(self, segment: int) -> list[ev.AttachSegment]:
        """Remove the attaches that wait for the seal of a segment, and return them."""
        return [attach.event for attach in self._take(self._waiting_for(segment))]

    def segment_ended(self, segment: int, denied: Denied) -> None:
        """Refuse those that wait for the seal of a segment, which will never come: as many as one step may.

        The others are refused when `Elapsed` comes, at once.
        """
        waiting, most = self._waiting_for(segment), self._most()
        self._refuse([attach._replace(denied=denied) for attach in waiting[:most]])
        for attach in waiting[most:]:
            self._set(attach._replace(deadline=0, denied=denied))
        self._set_deadline()

    def elapsed(self, now: int) -> None:
        """Refuse those whose wait has timed out, and those that were left over as their segment ended."""
        due: list[WaitingAttach] = []
        while (self.ends.first() or (now + 1, 0))[0] <= now and len(due) < self._most():
            due.append(self._waiting[self.ends.take(now) or 0])
        self._refuse(due)

    def _most(self) -> int:
        """Return how many may still be refused in this step."""
        return len(self._waiting) if self._books.stopping else MOST_AT_ONCE - self._refused

    def cancel(self, call: int) -> None:
        """End the wait of an attach that its caller no longer wants; any other call is left alone."""
        if call in self._waiting:
            self._take([self._waiting[call]])
            self._books.answer(call, deny(Reason.DELIVERY_FAILED))

    def give_up(self, session: int) -> None:
        """Fail those of a session that is disconnected, leaving or dead."""
        for attach in self._take([self._waiting[call] for call in self._of_session.get(session, ())]):
            self._books.answer(attach.event.call, deny(Reason.DELIVERY_FAILED))

    def _waiting_for(self, segment: int) -> list[WaitingAttach]:
        return [self._waiting[call] for call in self._calls.get(segment, ())]

    def _refuse(self, waiting: list[WaitingAttach]) -> None:
        for attach in self._take(waiting):
            self._refused += 1
            self._books.answer(attach.event.call, attach.denied or self._not_sealed(attach.segment))

    def _not_sealed(self, segment: int) -> Denied:
        return deny(Reason.SEGMENT_NOT_SEALED, segment=str(self._books.ledger.segments[segment].full_name()))

    def _take(self, waiting: list[WaitingAttach]) -> list[WaitingAttach]:
        """Remove these of the attaches that wait, and return them."""
        for event, segment, *_ in waiting:
            del self._waiting[event.call]
            for calls, key in ((self._calls, segment), (self._of_session, event.session)):
                del calls[key][event.call]
                if not calls[key]:
                    del calls[key]
            add(self._of_tenant, -1, event.name.tenant)
            self._lending.wait_no_more(event.session, event.request_id)
        self._set_deadline()
        return waiting
