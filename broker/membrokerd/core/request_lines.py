"""Lines: the requests that wait, by model and by what is known of their sessions. Groups: lines with the same room.

All requests of a line have the same bounds and differ in size and age only. What there is room for is the same for most
models of a tenant, so their lines are one group. A group answers for all of them which is the oldest request that fits
in so many bytes, and what those that fit want together, also of those alone that stay within the shares of their
models: a look at thousands of requests, of as many models, costs as much as one at their tenants. Owns what waits, and
which models have a share for it. Must never decide: `schedule` does.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from . import policy
from .books import Books
from .names import Location, ModelName
from .requests import DebitRequest

MOST_SHARERS = 1_024
"""How many models have a share for what they wait for, so that a division costs no more however many wait."""


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


class GroupKey(NamedTuple):
    """What the lines of one group have in common: as in `LineKey`, and the tenant.

    `is_marked`: their models keep what they are asked for. `alone` is the model of a line that is a group of its own,
    because its requests can have more or less than those of others: they do not wait, or are of a guest, or their model
    has a guarantee of its own.
    """

    tenant: str
    location: Location
    is_timed: bool
    is_trusted: bool
    is_asked: bool
    is_guest: bool
    is_marked: bool
    alone: ModelName | None


class BySize:
    """Requests by size: which is the oldest of those up to a size, and how many bytes they want together."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int]] = []
        """Sizes and calls, the smallest first."""
        self._requests: dict[int, DebitRequest] = {}
        """By call."""
        self._oldest: list[int] = []
        """The first call of so many entries, once it was asked for."""
        self._sums: list[int] = []
        """The sizes of so many entries together, once that was asked for."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: DebitRequest) -> None:
        """Take a request in."""
        insort(self._entries, (request.size, request.event.call))
        self._requests[request.event.call] = request
        self._oldest, self._sums = [], []

    def remove(self, request: DebitRequest) -> None:
        """Take a request out."""
        call = request.event.call
        del self._entries[bisect_left(self._entries, (request.size, call))]
        del self._requests[call]
        self._oldest, self._sums = [], []

    def replace(self, gone: Collection[int], new: Collection[DebitRequest]) -> None:
        """Take out the requests of these calls, and others in: at once, since they may be many."""
        if not gone and not new:
            return
        left = [entry for entry in self._entries if entry[1] not in gone] if gone else self._entries
        self._entries = sorted(left + [(request.size, request.event.call) for request in new])
        for call in gone:
            del self._requests[call]
        self._requests.update({request.event.call: request for request in new})
        self._oldest, self._sums = [], []

    @property
    def largest(self) -> DebitRequest:
        """The largest request."""
        return self._requests[self._entries[-1][1]]

    @property
    def least(self) -> int:
        """The bytes of the smallest request."""
        return self._entries[0][0]

    def oldest(self, most: int) -> DebitRequest | None:
        """Return the oldest request of at most so many bytes."""
        count = self._count(most)
        if not count:
            return None
        if not self._oldest:
            self._oldest = list(itertools.accumulate([call for _, call in self._entries], min))
        return self._requests[self._oldest[count - 1]]

    def size(self, most: int) -> int:
        """Return the bytes of all requests of at most so many bytes."""
        count = self._count(most)
        if not count:
            return 0
        if not self._sums:
            self._sums = list(itertools.accumulate([size for size, _ in self._entries]))
        return self._sums[count - 1]

    def up_to(self, most: int) -> list[DebitRequest]:
        """Return all requests of at most so many bytes."""
        return [self._requests[call] for _, call in self._entries[: self._count(most)]]

    def of(self, line: RequestLine, most: int) -> list[DebitRequest]:
        """Return those requests of a line that are among these and have at most so many bytes."""
        return [request for request in line.up_to(most) if request.event.call in self._requests]

    def _count(self, most: int) -> int:
        if not self._entries or most < self._entries[0][0]:
            return 0
        if most >= self._entries[-1][0]:
            return len(self._entries)
        return bisect_left(self._entries, (most + 1, 0))


class RequestLine(BySize):
    """The requests of one key: of a model at a location, and of sessions that are alike."""

    def __init__(self, key: LineKey, number: int, group: LineGroup) -> None:
        super().__init__()
        self.key = key
        self.number = number
        """Lines are numbered in the order of their coming."""
        self.group = group


class LineGroup(BySize):
    """All requests of some lines of a tenant: as far as room goes, they differ in size and age only."""

    def __init__(self, key: GroupKey) -> None:
        super().__init__()
        self.key = key
        self.lines: dict[ModelName, RequestLine] = {}
        self._in_order: list[RequestLine] = []
        """The lines by their numbers."""
        self._entitled = Entitled(self.lines)

    @property
    def name(self) -> ModelName:
        """One of the models. What is asked about room has the same answer for all."""
        return next(iter(self.lines))

    def entitled(self, shares: Mapping[ModelName, int], lent: Callable[..., int]) -> Entitled:
        """Return the requests that stay within the shares of their models, to which so much is lent.

        What was found for a line is kept until its share changes, or `changed` is told.
        """
        self._entitled.follow(shares, lent)
        return self._entitled

    def lines_up_to(self, most: int) -> Iterator[RequestLine]:
        """Yield the lines with a request of at most so many bytes, in the order of their coming."""
        return (line for line in self._in_order if line.least <= most)

    def changed(self, line: RequestLine) -> None:
        """Note that a line has other requests, or its model another charge."""
        self._entitled.stale[line.key.name] = None

    def join(self, line: RequestLine) -> None:
        """Take in a line, with its requests."""
        line.group = self
        self.lines[line.key.name] = line
        insort(self._in_order, line, key=number_of)
        for request in line.up_to(policy.MAX_BYTES):
            self.add(request)
        self.changed(line)

    def leave(self, line: RequestLine) -> None:
        """Take out a line, with its requests."""
        del self.lines[line.key.name]
        del self._in_order[bisect_left(self._in_order, line.number, key=number_of)]
        for request in line.up_to(policy.MAX_BYTES):
            self.remove(request)
        self.changed(line)


class Entitled(BySize):
    """The requests of a group that stay within the shares of their models."""

    def __init__(self, lines: Mapping[ModelName, RequestLine]) -> None:
        super().__init__()
        self._lines = lines
        """All lines of the group, by model."""
        self.stale: dict[ModelName, None] = {}
        """The models whose lines must be looked at again."""
        self._shares: Mapping[ModelName, int] = {}
        self._found: dict[ModelName, list[DebitRequest]] = {}
        """By model: its requests that are among these. No entry is empty."""
        self._rooms: dict[ModelName, int] = {}
        """By model of `_found`: how much less than its share it has."""
        self.room = 0
        """The same of all these models together. Their requests may want more than that together."""

    def follow(self, shares: Mapping[ModelName, int], lent: Callable[..., int]) -> None:
        """Look again at the lines that are stale, or whose models have another share."""
        before, self._shares = self._shares, shares
        if shares is not before:
            self.stale.update(dict.fromkeys(_changes(before, shares)))
        gone, new = set[int](), list[DebitRequest]()
        for name in self.stale:
            line, share = self._lines.get(name), shares.get(name)
            found, room = list[DebitRequest](), 0
            if line is not None and share is not None:
                room = share - lent(name, line.key.location)
                found = line.up_to(room)
            known = self._found.pop(name, [])
            self.room -= self._rooms.pop(name, 0)
            if found:
                self._found[name], self._rooms[name] = found, room
                self.room += room
            if found != known:
                gone.update([request.event.call for request in known])
                new += found
        self.stale.clear()
        self.replace(gone, new)

    def lines_up_to(self, most: int) -> Iterator[RequestLine]:
        """Yield the lines with one of these of at most so many bytes, in the order of their coming."""
        lines = map(self._lines.get, self._found)
        found = [line for line in lines if line is not None and line.least <= most]
        return iter(sorted(found, key=number_of))


class Look(NamedTuple):
    """A group, and how many bytes one of its requests can have: now, in the end, and within a guarantee.

    Those of at most `most` bytes want something: the others have no room, and do not wait or cannot be helped.
    """

    group: LineGroup
    room: int
    bound: int
    guaranteed: int
    most: int


def _changes(before: Mapping[ModelName, int], after: Mapping[ModelName, int]) -> Collection[ModelName]:
    """Return the models whose shares are not the same."""
    if len(before) == len(after) and all(map(operator.is_, before, after)):  # no name is hashed
        return [name for name, old, new in zip(after, before.values(), after.values(), strict=True) if old != new]
    return [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]


def wanted_by(requests: Collection[DebitRequest]) -> tuple[int, int]:
    """Return the size of requests together, and what they want. Each says what its whole session will want."""
    sessions: dict[int, tuple[int, int]] = {}
    for request in requests:
        size, most = sessions.get(request.event.session, (0, 0))
        sessions[request.event.session] = size + request.size, max(most, request.wanted)
    return sum([size for size, _ in sessions.values()]), sum([max(both) for both in sessions.values()])


class Sharers:
    """The models that have a share for what they wait for: of each tenant those that have waited longest.

    All tenants have equally many, as far as so many wait, at least one each, and together at most MOST_SHARERS.
    """

    def __init__(self, changed: Callable[[ModelName], None]) -> None:
        self._changed = changed
        """Told of each model that has one from now on, or has none any more, because of others."""
        self._each = MOST_SHARERS
        """How many models of a tenant may have one."""
        self._count = 0
        self._first: defaultdict[str, OrderedDict[ModelName, None]] = defaultdict(OrderedDict)
        """By tenant: those that have one, in the order of their coming. No entry is empty."""
        self._behind: defaultdict[str, OrderedDict[ModelName, None]] = defaultdict(OrderedDict)
        """By tenant: the others, in the order of their coming. No entry is empty."""

    def __contains__(self, name: ModelName) -> bool:
        return name.tenant in self._first and name in self._first[name.tenant]

    def add(self, name: ModelName) -> None:
        """Take in a model that begins to wait."""
        if name.tenant in self._behind or len(self._first[name.tenant]) >= self._each:
            self._behind[name.tenant][name] = None
            self._let_in()
            return
        self._first[name.tenant][name] = None
        self._count += 1
        if self._count > MOST_SHARERS:
            self._each = max(1, max(map(len, self._first.values())) - 1)
            for tenant, own in self._first.items():
                if len(own) > self._each:
                    last, _ = own.popitem()
                    self._behind[tenant][last] = None
                    self._behind[tenant].move_to_end(last, last=False)
                    self._count -= 1
                    self._changed(last)

    def remove(self, name: ModelName) -> None:
        """Take out a model that waits no more, if it did."""
        tenant = name.tenant
        if name in self:
            del self._first[tenant][name]
            self._count -= 1
            if tenant in self._behind:
                self._promote(tenant)
            elif not self._first[tenant]:
                del self._first[tenant]
        elif tenant in self._behind:
            self._behind[tenant].pop(name, None)
            if not self._behind[tenant]:
                del self._behind[tenant]
        self._let_in()

    def _let_in(self) -> None:
        """Let one more model of each tenant have a share, as long as there is room for all of them."""
        while self._behind and self._count + len(self._behind) <= MOST_SHARERS:
            self._each += 1
            for tenant in list(self._behind):
                self._promote(tenant)

    def _promote(self, tenant: str) -> None:
        """Let the model have a share that has waited longest of those of a tenant that have none."""
        name, _ = self._behind[tenant].popitem(last=False)
        if not self._behind[tenant]:
            del self._behind[tenant]
        self._first[tenant][name] = None
        self._count += 1
        self._changed(name)


class RequestLines:
    """All requests that wait."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._groups: defaultdict[Location, dict[GroupKey, LineGroup]] = defaultdict(dict)
        """No group is empty."""
        self._lines: defaultdict[tuple[ModelName, Location], dict[LineKey, RequestLine]] = defaultdict(dict)
        """By model and location. No line is empty."""
        self._numbers = itertools.count()
        self._places: dict[int, RequestLine | None] = {}
        """By call: the line of a request; None: it has met a full device, and is tried again after an audit."""
        self._full: defaultdict[tuple[ModelName, Location], dict[int, DebitRequest]] = defaultdict(dict)
        """By model and location, then by call: the requests without a line. No entry is empty."""
        self._of_session: defaultdict[int, dict[int, DebitRequest]] = defaultdict(dict)
        """By session and call, in the order of their coming. No entry is empty."""
        self.wanted: defaultdict[Location, Counter[ModelName]] = defaultdict(Counter)
        """The bytes that all requests of a model want. No entry is zero."""
        self._sharers = {where: Sharers(partial(self._touch, where)) for where in books.ledger.totals}
        self.above_limit: defaultdict[Location, dict[LineKey, RequestLine]] = defaultdict(dict)
        """The lines with a request that the limit of its model does not allow. It may not wait."""
        self.to_end: dict[int, DebitRequest] = {}
        """By call: requests that cannot wait any longer. Their session has left the model, or is asked for memory."""

    def at(self, location: Location) -> Collection[LineGroup]:
        """Return the groups of lines at a location."""
        return self._groups[location].values()

    def of_model(self, name: ModelName, location: Location) -> Collection[RequestLine]:
        """Return the lines of a model."""
        return self._lines[name, location].values() if (name, location) in self._lines else ()

    def of_session(self, session: int) -> list[DebitRequest]:
        """Return the requests of a session, the oldest first."""
        return sorted(self._of_session[session].values(), key=call_of) if session in self._of_session else []

    def shared(self, name: ModelName, location: Location) -> int:
        """Return the bytes that a model wants, if it has a share for them."""
        return self.wanted[location][name] if name in self._sharers[location] else 0

    def _touch(self, location: Location, name: ModelName) -> None:
        self._books.ledger.touched.add((name, location))

    def add(self, request: DebitRequest) -> None:
        """Let a request wait."""
        self._of_session[request.event.session][request.event.call] = request
        if request.name not in self.wanted[request.location]:
            self._sharers[request.location].add(request.name)
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
            self._sharers[request.location].remove(request.name)

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

    def changed(self, name: ModelName, location: Location) -> None:
        """Follow a change of what is charged to a model, of its limit, its guarantee or its mark, or of its lines."""
        for line in self.of_model(name, location):
            group = self._group_of(line.key)
            if group is not line.group:
                self._leave(line)
                group.join(line)
            group.changed(line)
            if line.key.is_timed and line.largest.size > self._books.admission.limit_room(name, location):
                self.above_limit[location][line.key] = line
            else:
                self.above_limit[location].pop(line.key, None)
        if (name, location) in self._full:
            for request in self._full[name, location].values():
                self._end_if_asked(request)

    def _place(self, request: DebitRequest) -> None:
        event, name, location = request.event, request.name, request.location
        self._books.ledger.touched.add((name, location))
        recallable = self._books.recallable
        is_asked = recallable.asked_of(event.session, name, location) > 0
        if name not in self._books.ledger.sessions[event.session].models:
            self.to_end[event.call] = request
        if request.met_full_device:
            self._full[name, location][event.call] = request
            self._places[event.call] = None
            self._end_if_asked(request)
            return
        is_trusted = recallable.is_trusted(request.borrower, name, location)
        key = LineKey(name, location, request.deadline is not None, is_trusted, is_asked, request.is_guest)
        lines = self._lines[name, location]
        line = lines.get(key)
        if line is None:
            line = lines[key] = RequestLine(key, next(self._numbers), self._group_of(key))
            line.group.join(line)
        self._places[event.call] = line
        line.add(request)
        line.group.add(request)
        line.group.changed(line)

    def _end_if_asked(self, request: DebitRequest) -> None:
        """Let a request that has met a full device wait no longer if its session is asked for what it would exceed."""
        name, location = request.name, request.location
        asked = self._books.recallable.asked_of(request.event.session, name, location)
        if asked and not self._books.admission.is_guaranteed(name, location, request.size):
            self.to_end[request.event.call] = request

    def _take(self, request: DebitRequest) -> None:
        self._books.ledger.touched.add((request.name, request.location))
        self.to_end.pop(request.event.call, None)
        line = self._places.pop(request.event.call)
        if line is None:
            full = self._full[request.name, request.location]
            del full[request.event.call]
            if not full:
                del self._full[request.name, request.location]
            return
        line.remove(request)
        line.group.remove(request)
        line.group.changed(line)
        if not len(line):
            self._leave(line)
            self.above_limit[request.location].pop(line.key, None)
            lines = self._lines[request.name, request.location]
            del lines[line.key]
            if not lines:
                del self._lines[request.name, request.location]

    def _leave(self, line: RequestLine) -> None:
        """Take a line out of its group."""
        line.group.leave(line)
        if not line.group.lines:
            del self._groups[line.key.location][line.group.key]

    def _group_of(self, line: LineKey) -> LineGroup:
        """Return the group of a line, which may be a new one."""
        name, location, is_timed, is_trusted, is_asked, is_guest = line
        admission, is_marked = self._books.admission, self._books.recallable.is_marked(name, location)
        is_alone = not is_timed or is_guest or admission.has_own_guarantee(name, location)
        alone = name if is_alone else None
        key = GroupKey(name.tenant, location, is_timed, is_trusted, is_asked, is_guest, is_marked, alone)
        groups = self._groups[location]
        if key not in groups:
            groups[key] = LineGroup(key)
        return groups[key]


number_of = operator.attrgetter("number")
"""Returns the number of a line."""


def call_of(request: DebitRequest) -> int:
    """Return the call of a request: calls are numbered in the order of their coming."""
    return request.event.call
