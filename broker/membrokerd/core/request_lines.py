"""Lines: the requests that wait, by model and by what is known of their sessions, so that a look is at lines alone.

All requests of a line have the same bounds and differ in size and age only. So a line answers for all of them which is
the oldest that fits in so many bytes, and what those that fit want together: a look at thousands of requests costs as
much as one at their models. Owns what waits. Must never decide: `schedule` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from .books import Books
from .names import Location, ModelName
from .requests import DebitRequest


class LineKey(NamedTuple):
    """What the requests of one line have in common.

    `is_timed`: they have a deadline. `is_trusted`: what they get can be recalled. `is_asked`: their sessions are asked
    for memory of the model. `is_guest`: they are declarations that can be recalled.
    """

    name: ModelName
    location: Location
    is_timed: bool
    is_trusted: bool
    is_asked: bool
    is_guest: bool


class Fitting(NamedTuple):
    """The requests of a line up to some size: the oldest, their bytes, and what their sessions will want together."""

    oldest: DebitRequest | None
    size: int
    wanted: int


_NONE = Fitting(None, 0, 0)


class RequestLine:
    """The requests of one key: of a model at a location, and of sessions that are alike."""

    def __init__(self, key: LineKey) -> None:
        self.key = key
        self._by_size: list[tuple[int, int]] = []
        """Sizes and calls, the smallest first."""
        self._requests: dict[int, DebitRequest] = {}
        """By call."""
        self._known: dict[int, Fitting] = {}
        """By the number of requests that fit, until one comes or goes."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: DebitRequest) -> None:
        """Let a request wait here."""
        insort(self._by_size, (request.size, request.event.call))
        self._requests[request.event.call] = request
        self._known.clear()

    def remove(self, request: DebitRequest) -> None:
        """Take a request out."""
        entry = request.size, request.event.call
        del self._by_size[bisect_left(self._by_size, entry)]
        del self._requests[request.event.call]
        self._known.clear()

    @property
    def largest(self) -> DebitRequest:
        """The largest request."""
        return self._requests[self._by_size[-1][1]]

    def fitting(self, most: int) -> Fitting:
        """Return what is known of the requests of at most so many bytes."""
        if most < self._by_size[0][0]:
            return _NONE
        count = len(self._by_size)
        if most < self._by_size[-1][0]:
            count = bisect_left(self._by_size, (most + 1, 0))
        found = self._known.get(count)
        if found is None:
            found = self._known[count] = self._look(count)
        return found

    def _look(self, count: int) -> Fitting:
        requests = [self._requests[call] for _, call in self._by_size[:count]]
        oldest = self._requests[min(call for _, call in self._by_size[:count])]
        return Fitting(oldest, *wanted_by(requests))


def wanted_by(requests: Collection[DebitRequest]) -> tuple[int, int]:
    """Return the size of requests together, and what they want. Each says what its whole session will want."""
    sessions: dict[int, tuple[int, int]] = {}
    for request in requests:
        size, most = sessions.get(request.event.session, (0, 0))
        sessions[request.event.session] = size + request.size, max(most, request.wanted)
    return sum([size for size, _ in sessions.values()]), sum([max(both) for both in sessions.values()])


class RequestLines:
    """All requests that wait."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._lines: defaultdict[Location, dict[LineKey, RequestLine]] = defaultdict(dict)
        """No line is empty."""
        self._places: dict[int, RequestLine | None] = {}
        """By call: the line of a request; None: it has met a full device, and is tried again after an audit."""
        self._of_session: defaultdict[int, dict[int, DebitRequest]] = defaultdict(dict)
        """By session and call, in the order of their coming. No entry is empty."""
        self.wanted: defaultdict[Location, Counter[ModelName]] = defaultdict(Counter)
        """The bytes that all requests of a model want. No entry is zero."""
        self.to_end: dict[int, DebitRequest] = {}
        """By call: requests that cannot wait any longer, because their session has left the model."""

    @property
    def count(self) -> int:
        """How many lines there are."""
        return sum([len(lines) for lines in self._lines.values()])

    def at(self, location: Location) -> Collection[RequestLine]:
        """Return the lines at a location."""
        return self._lines[location].values()

    def of_session(self, session: int) -> list[DebitRequest]:
        """Return the requests of a session, the oldest first."""
        return sorted(self._of_session[session].values(), key=call_of) if session in self._of_session else []

    def add(self, request: DebitRequest) -> None:
        """Let a request wait."""
        self._of_session[request.event.session][request.event.call] = request
        self.wanted[request.location][request.name] += request.size
        self._place(request)

    def remove(self, request: DebitRequest) -> None:
        """Take a request out."""
        call, own, wanted = request.event.call, self._of_session[request.event.session], self.wanted[request.location]
        self._take(request)
        del own[call]
        if not own:
            del self._of_session[request.event.session]
        wanted[request.name] -= request.size
        if not wanted[request.name]:
            del wanted[request.name]

    def place_again(self, request: DebitRequest) -> None:
        """Place a request again: it is tried again after it met a full device."""
        self._take(request)
        self._place(request)

    def follow(self) -> None:
        """Place requests again whose sessions were asked for memory, answer from now on, or left a model."""
        moved = self._books.recallable.moved
        while moved:
            borrower = moved.pop()
            for request in self.of_session(borrower.session) if self._places else ():
                if (request.name, request.location) == borrower[1:]:
                    self.place_again(request)

    def _place(self, request: DebitRequest) -> None:
        event, name, location = request.event, request.name, request.location
        recallable = self._books.recallable
        is_asked = recallable.asked_of(event.session, name, location) > 0
        if name not in self._books.ledger.sessions[event.session].models:
            self.to_end[event.call] = request
        if request.met_full_device:
            if is_asked and not self._books.admission.is_guaranteed(name, location, request.size):
                self.to_end[event.call] = request
            self._places[event.call] = None
            return
        is_trusted = recallable.is_trusted(request.borrower, name, location)
        key = LineKey(name, location, request.deadline is not None, is_trusted, is_asked, request.is_guest)
        lines = self._lines[location]
        if key not in lines:
            lines[key] = RequestLine(key)
        self._places[event.call] = line = lines[key]
        line.add(request)

    def _take(self, request: DebitRequest) -> None:
        self.to_end.pop(request.event.call, None)
        line = self._places.pop(request.event.call)
        if line is not None:
            line.remove(request)
            if not len(line):
                del self._lines[request.location][line.key]


def call_of(request: DebitRequest) -> int:
    """Return the call of a request: calls are numbered in the order of their coming."""
    return request.event.call
