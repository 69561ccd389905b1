"""Deferred refusals: a request is refused for lack of room only after every connection has been read.

A release has no answer, so a worker can tell another that memory is free before the daemon has read the release.
A request that would be refused for lack of room is deferred instead: the daemon reads everything that had been sent
until then, and the request is decided once more, for good.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import effects as fx
from . import events as ev
from . import policy
from .books import Books
from .denied import Denied, Reason, deny

Debit = ev.Allocate | ev.Declare | ev.CreateSegment


class Hearing:
    """The deferred requests."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.deferred: dict[int, dict[int, Debit]] = {}
        """By session, then by call. Sessions without deferred requests have no entry."""
        self._whose: dict[int, int] = {}
        """By call: the session."""
        self._decided: int | None = None
        """The call that is decided for good, and not deferred again."""

    def has(self, session: int, request_id: int) -> bool:
        """Say whether a request with this id is deferred."""
        return any(one.request_id == request_id for one in self.deferred.get(session, {}).values())

    def refuse(self, event: Debit, denied: Denied, name: ev.ModelName) -> None:
        """Refuse a request; for lack of room, only if it was deferred before.

        A session can have as many deferred requests as it can have calls; one more is refused at once.
        """
        books, asked = self._books, self.deferred.get(event.session, {})
        waits = denied.reason in policy.WANTS_OF_ROOM and event.call != self._decided
        if waits and len(asked) < books.rules.max_calls_per_session:
            asked[event.call] = event
            self.deferred[event.session], self._whose[event.call] = asked, event.session
            books.emit(fx.DrainInputs(event.call))
        else:
            books.refuse(event.call, denied, event.session, name)

    def inputs_drained(self, event: ev.InputsDrained) -> Debit | None:
        """Return the deferred request, to be decided for good; None if it was decided in the meantime."""
        return self._take_decided(event.call) if event.call in self._whose else None

    def take_older(self, event: ev.Declare) -> Iterator[ev.Declare]:
        """Yield the deferred declarations that `event` replaces: each must be decided before the newer one."""
        asked, what = self.deferred.get(event.session, {}).values(), (event.name, event.location)
        for one in [one for one in asked if isinstance(one, ev.Declare) and (one.name, one.location) == what]:
            self._take_decided(one.call)
            yield one

    def give_up(self, session: int) -> None:
        """Answer all deferred requests of a session: its connection is lost, or it has ended."""
        for call in list(self.deferred.get(session, ())):
            self._take(call)
            self._books.answer(call, deny(Reason.DELIVERY_FAILED))

    def _take_decided(self, call: int) -> Debit:
        self._decided = call  # no later call has this number
        return self._take(call)

    def _take(self, call: int) -> Debit:
        session = self._whose.pop(call)
        asked = self.deferred[session]
        if len(asked) == 1:
            del self.deferred[session]
        return asked.pop(call)
