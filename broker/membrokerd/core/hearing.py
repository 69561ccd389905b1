"""Hearing: for want of room nobody is refused before the others were heard.

A release wants no answer, so a worker may tell another of memory that the broker has not heard of yet. What would be
refused for want of room is put aside, the daemon reads what everybody has sent until then, and decides it for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import effects as fx
from . import events as ev
from . import policy
from .denied import Denied, Reason, deny

if TYPE_CHECKING:
    from .broker import Broker

Debit = ev.Allocate | ev.Declare | ev.CreateSegment


class Hearing:
    """The requests that are refused once the others were heard, if there is no room then either."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._asked: dict[int, dict[int, Debit]] = {}
        """By session, then by call. Only sessions that have any are in it."""
        self._whose: dict[int, int] = {}
        """By call: the session."""
        self._decided: int | None = None

    def has(self, session: int, request_id: int) -> bool:
        """Say whether a request of this id is put aside."""
        asked = self._asked.get(session)
        return asked is not None and any(one.request_id == request_id for one in asked.values())

    def refuse(self, event: Debit, denied: Denied, name: ev.ModelName) -> None:
        """Refuse a request; but for want of room only when what others have given back before has been heard.

        A session has as many put aside as it may have calls: whoever asks for more at a time is refused at once.
        """
        broker, asked = self._broker, self._asked.get(event.session, {})
        waits = denied.reason in policy.WANTS_OF_ROOM and event.call != self._decided
        if waits and len(asked) < broker.books.rules.max_calls_per_session:
            asked[event.call] = event
            self._asked[event.session], self._whose[event.call] = asked, event.session
            broker.books.emit(fx.HearOthers(event.call))
        else:
            broker.books.refuse(event.call, denied, event.session, name)

    def others_heard(self, event: ev.OthersHeard, now: int) -> None:
        """Decide a request for good, unless it was meanwhile."""
        if event.call in self._whose:
            self._decided = event.call
            self._broker.handle(self._take(event.call), now)
            self._decided = None

    def decide_older(self, event: ev.Declare, now: int) -> bool:
        """Each declaration replaces the one before: none may be decided behind a newer one. Say whether one was."""
        asked, what = self._asked.get(event.session, {}).values(), (event.name, event.location)
        older = [one for one in asked if isinstance(one, ev.Declare) and (one.name, one.location) == what]
        for one in older:
            self.others_heard(ev.OthersHeard(one.call), now)
        return bool(older)

    def give_up(self, session: int) -> None:
        """What a session has asked for is of another connection, or another life."""
        for call in list(self._asked.get(session, ())):
            self._take(call)
            self._broker.books.answer(call, deny(Reason.DELIVERY_FAILED))

    def _take(self, call: int) -> Debit:
        session = self._whose.pop(call)
        asked = self._asked[session]
        if len(asked) == 1:
            del self._asked[session]
        return asked.pop(call)
