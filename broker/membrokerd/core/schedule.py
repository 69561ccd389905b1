"""Whose turn it is among the requests that wait, and which models are asked for memory on their behalf.

A request within its model's guarantee goes first, then one within its model's share, then the others; among equals the
oldest. While sessions answer recalls, what is missing for a higher class is recalled from the models that have more
than their share, after free bytes and what open recalls will bring are counted. Until it comes, a request of a lower
class is not granted; if nothing is on its way, because all that could be asked keep what they have, those within their
shares are. At its deadline a request gets what the higher classes leave. Once the oldest request within its share has
waited longer than two rounds of recalls, only guaranteed ones overtake it, as long as something is on its way. A
request that does not wait has memory recalled too, at most once in `recall_seconds` for each model, so that its next
try finds it.

Guests are recalled as a whole, and only when all pieces that models have beyond their shares do not suffice: those that
have declared nothing for the longest time, as many as suffice. Of these, a guest is left alone if the later ones
suffice without it. Then only those pieces are recalled that are lacking besides. A guest that waits beyond its share
has its turn after all requests within theirs: other guests whose slices are over are recalled for it, if it can run
then. Once it has waited longer than two slices, guests whose turn is later wait until it has had its turn, also those
within their shares, if it can run when all slices are over. The turn is first that of the tenant whose guests had none
for the longest time, then that of its oldest request. So tenants whose guests do not fit together divide the time,
however many guests each has. A guest is lent nothing that is guaranteed to others: while its slice lasts, it is firm.

A model that grows page by page would recall page by page. So others are asked for more than it wants now: for 1/64 of
the capacity, doubled with each further recall, up to 1/8; or for what the session says that it will want, within the
model's share. A hold keeps what came beyond the request from requests beyond their share. If the model has borrowed
less than half of what its sessions said when the hold ends, others gave it back for nothing. Then what the tenant's
sessions say counts for nothing, for two seconds, and twice as long each time.

Owns the holds. Must never keep a request: `waiting` owns them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from . import policy
from .books import Books
from .denied import Reason
from .names import Location, ModelName
from .recallable import Borrower
from .recalls import Recalls, doubled
from .request_lines import Entitled, LineGroup, RequestLines, call_of, number_of, wanted_by
from .requests import DebitRequest
from .shares import Division, Shares

HOLD_NS = 500_000_000
"""How long a model's hold lasts, and how much longer each time while a recall for the model is open. Longer holds cost
use of the GPU; without them a growing model recalls page by page, and a simulation showed eight times the waits."""
MOST_HELD = 256
"""Of how many lines of requests the models begin or renew holds in one step: those that have waited longest."""
_LEAST_STEP, _MOST_STEP = 64, 8
"""A hold grows in steps of 1/64 of the capacity, doubled with each recall, to at most 1/8."""


class Hold(NamedTuple):
    """Up to `size` bytes a model will probably want, because it grows and others were asked for memory for it.

    Recalls ask for as much at once, and requests beyond their share get none of it. A hold is not a debit. `hoped` of
    the bytes are there only because the model's sessions say that they will want them. `lent` is what the model had
    when it was last looked at: `size` falls by what it releases, which is not kept for it.
    """

    size: int
    lent: int
    step: int
    until: int
    hoped: int


class Wasted(NamedTuple):
    """How often in a row a tenant did not borrow what it said that it will want, and until when it is not believed.

    The last time it was `hoped` bytes.
    """

    times: int
    until: int
    hoped: int


class Look(NamedTuple):
    """A group, and how many bytes one of its requests can have: now, in the end, and within a guarantee.

    Those of at most `most` bytes want something: the others have no room, and do not wait or cannot be helped.
    """

    group: LineGroup
    room: int
    bound: int
    guaranteed: int
    most: int


class Reach(NamedTuple):
    """Requests of a group, and of how many bytes they are at most: all, or those within the shares of their models."""

    group: LineGroup
    requests: LineGroup | Entitled
    most: int


class Demand(NamedTuple):
    """What requests want that come first: the model of the oldest, and which they are; or one that does not wait.

    `is_guaranteed`: all of it is within guarantees.
    """

    first: ModelName
    reaches: Sequence[Reach] = ()
    beside: DebitRequest | None = None
    is_guaranteed: bool = False


class GuestToAsk(NamedTuple):
    """A guest that could be asked for all that it has. `firm` of that cannot be recalled for other tenants."""

    borrower: Borrower
    size: int
    firm: int = 0


class GuestsThatCanGo(dict[tuple[str, bool], list[GuestToAsk]]):
    """Which guests could be asked for a guest of a tenant; True: or will be when their slices are over."""


class Schedule:
    """The order of the requests that wait at each location."""

    def __init__(self, books: Books, recalls: Recalls, lines: RequestLines) -> None:
        self._books = books
        self._recalls = recalls
        self._lines = lines
        self._divided: dict[Location, Division] = {}
        """The shares at each location. A grant within a share does not change them, since the model then has what it
        waited for, and a share is of both together. So they are computed once for all such grants of a step."""
        self._holds: dict[tuple[ModelName, Location], Hold] = {}
        self._wasted: dict[str, Wasted] = {}
        """By tenant."""
        self._asked_for: dict[tuple[ModelName, Location], int] = {}
        """Until when no more is recalled for the refused requests of a model that does not wait."""
        self._admission = books.admission
        """The guarantees by which the lines are grouped, and `_shares` divides."""
        self._shares = self._new_shares()
        self.deadline: int | None = None
        """When the first hold ends, in nanoseconds; None without holds."""

    def divide_again(self) -> None:
        """Forget the shares: something has changed that they depend on."""
        self._divided.clear()

    def elapsed(self, now: int) -> None:
        """End the holds whose time is over. One goes on while a recall for its model is open: it is for those bytes."""
        if self.deadline is None or self.deadline > now:
            return
        for key, hold in list(self._holds.items()):
            if hold.until <= now:
                self._books.ledger.touched.add(key)
                if self._books.recallable.is_coming_for(key[0]):
                    self._holds[key] = hold._replace(until=now + HOLD_NS)
                else:
                    del self._holds[key]
                    self._judge_use(key, hold, now)
                    self.divide_again()
        self.deadline = min([hold.until for hold in self._holds.values()], default=None)

    def _judge_use(self, key: tuple[ModelName, Location], hold: Hold, now: int) -> None:
        """Note whether a model has borrowed at least half of what its sessions said that they will want."""
        tenant = key[0].tenant
        if not hold.hoped:
            return
        unused, free = hold.size - self._books.admission.lent(*key), self._books.ledger.totals[key[1]].free
        if 2 * unused <= hold.hoped:
            if tenant in self._wasted and hold.hoped >= self._wasted[tenant].hoped:
                del self._wasted[tenant]
        elif 2 * free > hold.hoped:  # else nobody has given it back
            times = self._wasted[tenant].times + 1 if tenant in self._wasted else 1
            # Tenants come and go: what is long over is forgotten.
            self._wasted = {
                name: wasted for name, wasted in self._wasted.items() if now < wasted.until + doubled(wasted.times)
            }
            self._wasted[tenant] = Wasted(times, now + doubled(times), hold.hoped)

    @property
    def is_left_over(self) -> bool:
        """Whether this step has asked as many sessions as one step may. The next step asks the others, if needed."""
        return not self._recalls.room

    @property
    def has_holds(self) -> bool:
        """Whether a hold is in force."""
        return bool(self._holds)

    # --- whose turn it is ---

    def follow(self) -> None:
        """Follow all that has changed about models."""
        books, touched = self._books, self._books.ledger.touched
        if books.admission is not self._admission:
            self._admission, self._shares = books.admission, self._new_shares()
            touched.clear()  # all models that are charged are worked out again
            touched.update(self._holds)
            touched.update((name, location) for location, names in self._lines.wanted.items() for name in names)
        for name, location in touched:
            self._shrink_hold(name, location)
            for shares in self._shares.values():
                shares.changed(name, location)
            self._lines.changed(name, location)
        touched.clear()

    def _shrink_hold(self, name: ModelName, location: Location) -> None:
        """Take what a model has released from its hold: it does not grow by that, so nothing is kept for it."""
        if (hold := self._holds.get((name, location))) is not None:
            lent = self._admission.lent(name, location)
            if lent != hold.lent:
                self._holds[name, location] = hold._replace(size=hold.size - max(0, hold.lent - lent), lent=lent)

    def _new_shares(self) -> dict[bool, Shares]:
        """Return the divisions, by whether recalls are possible: a session can change that, over and over."""
        books = self._books
        parts = books.ledger, books.rules, books.admission, books.recallable, self._wanted
        return {is_possible: Shares(*parts, is_possible=is_possible) for is_possible in (False, True)}

    def next(self, location: Location, now: int) -> tuple[DebitRequest, bool] | None:
        """Return the request to decide next, and whether its turn has come; None if all go on waiting.

        `follow` was called before.
        """
        looks, over = [], [*self._lines.above_limit[location].values()]
        for group in self._lines.at(location):
            look, limit = self._look(group)
            if group.largest.size > limit:
                over += [line for line in group.lines.values() if line.largest.size > limit]
            elif group.oldest(look.most) is not None:
                looks.append(look)
        if over:
            return min(over, key=lambda line: line.number).largest, False
        if not looks:
            return None
        found = self._first(location, looks, now)
        return (found, True) if found else None

    def _look(self, group: LineGroup) -> tuple[Look, int]:
        """Look at a group. Return also what its requests may have at most: by a limit, or by a guarantee while asked.

        One of more bytes may not wait.
        """
        admission, name, (_, location, is_timed, is_trusted, is_asked, *_) = (
            self._books.admission,
            group.name,
            group.key,
        )
        bound = admission.bound(name, location, is_trusted)
        rooms = {level[0]: level[-1] for level in admission.levels(name, location, is_trusted, bound)}
        if group.key.alone is None:  # each model has its own limit: see `above_limit`
            rooms.pop(Reason.MODEL_LIMIT, None)
        room, guaranteed = min(rooms.values()), admission.guaranteed_room(name, location)
        most, limit = room, policy.MAX_BYTES
        if is_timed:
            limit = min([rooms[level] for level in rooms if level is not Reason.CAPACITY], default=policy.MAX_BYTES)
            if is_asked:
                limit = min(limit, max(room, guaranteed))
            if self._books.recallable.is_possible:
                most = policy.MAX_BYTES
        return Look(group, room, bound, guaranteed, most), limit

    def _first(self, location: Location, looks: Sequence[Look], now: int) -> DebitRequest | None:
        """Return the request to grant first; if requests without room come before those that have it, recall."""
        ready = _oldest([Reach(look.group, look.group, min(look.guaranteed, look.room)) for look in looks])
        if ready is not None:
            return ready
        reaches = [Reach(look.group, look.group, min(look.guaranteed, look.most)) for look in looks]
        demand = _demand(reaches, is_guaranteed=True)
        if demand is not None:
            if self._keeps_its_place(location, demand, now):
                return None
            looks = self._without_keepers(location, looks)
        looks = self._behind_an_aged_guest(location, looks, now)
        passed_over = demand is not None
        shares = self._current(location)
        ready = self._ready_within(looks, shares)
        within = []
        if self._books.recallable.is_possible:  # else nothing can be recalled for requests without room
            within = [
                Reach(look.group, self._entitled(look.group, shares), min(look.most, look.bound)) for look in looks
            ]
        oldest = _oldest(within)
        if ready is not None:
            aged = oldest is not None and now - oldest.since > 2 * self._books.rules.recall_ns
            if ready is oldest or not aged:
                return ready
        demand = _demand(within)
        if demand is not None:
            if self._keeps_its_place(location, demand, now):
                return None
            looks, passed_over = self._without_keepers(location, looks), True
        if ready is not None and any(look.group.key.tenant == ready.name.tenant for look in looks):
            return ready
        if passed_over:  # what is lent beyond a share would be recalled for them at once
            return None
        if self._takes_turns(location, looks, now):
            return None
        ready = self._beside_holds(location, looks, shares)
        if ready is not None:
            self.divide_again()  # a grant beyond a share changes the shares of the others
        return ready

    def _ready_within(self, looks: Sequence[Look], shares: Division) -> DebitRequest | None:
        """Return the oldest request that has room and stays within its model's share.

        Groups come in the order of their oldest request that has room, so the shares of later tenants are not needed.
        """
        found: DebitRequest | None = None
        reaches = [(look.group.oldest(min(look.most, look.room)), look) for look in looks]
        calls = [(request.event.call, number) for number, (request, _) in enumerate(reaches) if request is not None]
        for call, number in sorted(calls):
            if found is not None and found.event.call < call:
                break
            look = looks[number]
            request = self._entitled(look.group, shares).oldest(min(look.most, look.bound, look.room))
            if request is not None and (found is None or request.event.call < found.event.call):
                found = request
        return found

    def _beside_holds(self, location: Location, looks: Sequence[Look], shares: Division) -> DebitRequest | None:
        """Return the oldest request that has room beside what the holds of other models keep; of guests, by turn."""
        free, held = self._books.ledger.totals[location].free, self._held(location, shares)
        beside = free - self._held_beside(None, held)
        found = [look.group.oldest(min(look.room, beside)) for look in looks]
        by_group = {look.group.key: look for look in looks}
        for name in held:
            beside = free - self._held_beside(name, held)
            for line in self._lines.of_model(name, location):
                if line.group.key in by_group:
                    found.append(line.oldest(min(by_group[line.group.key].room, beside)))
        first = _first_of(found)
        if first is None or not first.is_guest:
            return first
        return min(
            [request for request in found if request is not None and request.is_guest],
            key=lambda request: self._turn(location, request),
        )

    def _takes_turns(self, location: Location, looks: Sequence[Look], now: int) -> bool:
        """Recall guests for the first one in turn that can run then. Say whether others must wait for it."""
        guests, known = self._in_turn(location, looks), GuestsThatCanGo()
        return any(
            self._has_its_turn(request, look, now, known) for request, look in guests if request.size > look.room
        )

    def _in_turn(self, location: Location, looks: Sequence[Look]) -> Sequence[tuple[DebitRequest, Look]]:
        """Return the guest of each line that has its turn first, of the tenant first whose last turn is longest ago.

        So a tenant does not have more turns than another one because it has more guests.
        """
        found = [(look.group.oldest(look.most), look) for look in looks if look.group.key.is_guest]
        guests = [(request, look) for request, look in found if request is not None]
        return sorted(guests, key=lambda each: self._turn(location, each[0]))

    def _turn(self, location: Location, request: DebitRequest) -> tuple[int, int]:
        return self._books.ledger.turns.get((request.name.tenant, location), -1), request.event.call

    def _behind_an_aged_guest(self, location: Location, looks: Sequence[Look], now: int) -> Sequence[Look]:
        """Leave out guests whose turn is after one that has waited longer than two slices, if it can run after them."""
        guests, slice_ns = self._in_turn(location, looks), self._books.rules.slice_ns
        known = GuestsThatCanGo()
        for place, (request, look) in enumerate(guests):
            if now - request.since <= 2 * slice_ns:
                continue
            short = self._short_of(request)
            if short > 0:
                can_run = bool(self._in_its_way(request, look, short, known, after_slices=True))
            else:  # but it may be a limit that keeps it
                can_run = request.size <= look.room or self._is_on_its_way(location)
            if can_run:
                later = {
                    after.group.key
                    for waiting, after in guests[place + 1 :]
                    if not self._books.recallable.begins_turn(waiting.name.tenant, location, now, slice_ns)
                }
                return [look for look in looks if look.group.key not in later]
        return looks

    def _has_its_turn(self, request: DebitRequest, look: Look, now: int, known: GuestsThatCanGo) -> bool:
        """Recall guests whose slices are over for a guest that waits, if it can run then. Say whether it can."""
        short = self._short_of(request)
        if short <= 0:  # what was asked for its turn is not all there yet, or is held for others
            return self._is_on_its_way(request.location)
        asked = self._in_its_way(request, look, short, known)
        if self._recalls.ask_guests([guest.borrower for guest in asked], now, request.name):
            known.clear()
        return bool(asked)

    def _short_of(self, request: DebitRequest) -> int:
        """Return how many bytes a request lacks that are neither free nor recalled already."""
        books, location = self._books, request.location
        unlent = books.admission.unlent_beside(request.name.tenant, location)
        return request.size - books.ledger.totals[location].free + unlent - books.recallable.coming(location)

    def _in_its_way(
        self, request: DebitRequest, look: Look, short: int, known: GuestsThatCanGo, *, after_slices: bool = False
    ) -> Sequence[GuestToAsk]:
        """Return which guests must go so that a guest can run that is `short` of so many bytes; none if it cannot.

        They are those whose slices are over; `after_slices`: or will be. `known` is kept until a guest is asked.
        """
        state, location, tenant = self._books.recallable, request.location, request.name.tenant
        beyond = request.size - look.bound - state.coming(location)
        key = tenant, after_slices
        if key not in known:
            can_go = state.that_can_go(location, wanted_by=tenant, after_slices=after_slices)
            for_all = state.that_can_go(location)
            known[key] = found = []
            for borrower in state.idlest(location):
                is_able = state.answers(borrower.session, borrower.name) and borrower not in state.recalls
                if is_able and borrower in can_go:
                    size = state.extents_of(borrower)
                    firm = 0 if state.bytes_of(borrower, for_all) else size  # but not for its own tenant
                    found.append(GuestToAsk(borrower, size, firm))
        others = [guest for guest in known[key] if guest.borrower.session != request.event.session]
        return _fewest(others, short, beyond)

    def _without_keepers(self, location: Location, looks: Sequence[Look]) -> list[Look]:
        """Leave out the lines of tenants that keep some of what was recalled: they do not borrow what came of it."""
        keeping = self._books.recallable.keeping(location)
        return [look for look in looks if look.group.key.tenant not in keeping]

    def _keeps_its_place(self, location: Location, demand: Demand, now: int) -> bool:
        """Recall what requests lack that come first. Say whether others must wait for them: something is on its way.

        Else nobody gains by waiting. Others are granted what is within their shares, which is not recalled from them.
        """
        self._recall(location, demand, now)
        return self._is_on_its_way(location)

    def _is_on_its_way(self, location: Location) -> bool:
        """Say whether a recall will bring bytes, or this step has asked as many sessions as one step may."""
        return self._books.recallable.coming(location) > 0 or self.is_left_over

    def _entitled(self, group: LineGroup, shares: Division) -> Entitled:
        """Return the requests of a group that stay within their models' shares, if there is room."""
        return group.entitled(shares.of_tenant(group.key.tenant), self._books.admission.lent)

    def _is_entitled(self, request: DebitRequest, shares: Mapping[ModelName, int]) -> bool:
        """Say whether a request stays within its model's share, and only the room is missing for it."""
        is_trusted = self._books.recallable.is_trusted(request.borrower, request.name, request.location)
        bound = self._books.admission.bound(request.name, request.location, is_trusted)
        return request.size <= min(
            bound, shares.get(request.name, 0) - self._books.admission.lent(request.name, request.location)
        )

    def _held(self, location: Location, shares: Mapping[ModelName, int]) -> Counter[ModelName]:
        """Return what the hold of each model keeps from requests of others that are beyond their shares."""
        lent = self._books.admission.lent
        found = {
            name: min(hold.size, shares.get(name, 0)) - lent(name, at)
            for (name, at), hold in self._holds.items()
            if at == location
        }
        return Counter({name: size for name, size in found.items() if size > 0})

    def _held_beside(self, name: ModelName | None, held: Counter[ModelName]) -> int:
        """Return what the holds keep from a model that is beyond its share; None: from one without a hold."""
        return held.total() - (held[name] if name is not None else 0)

    def may_go_ahead(self, request: DebitRequest) -> bool:
        """Say whether to grant a request ahead of need although others wait or have holds.

        Only if it is within a guarantee, and no request that waits is.
        """
        self.follow()
        admission, location = self._books.admission, request.location
        if not admission.is_guaranteed(request.name, location, request.size):
            return False
        return not any(
            group.size(admission.guaranteed_room(group.name, location)) for group in self._lines.at(location)
        )

    def leaves(self, request: DebitRequest) -> int:
        """Return how many free bytes the others leave to a request that is decided although its turn has not come.

        Without the others there would be room for it.
        """
        location, admission = request.location, self._books.admission
        free = self._books.ledger.totals[location].free
        is_possible = self._books.recallable.is_possible or self.has_holds
        if not is_possible or admission.is_guaranteed(request.name, location, request.size):
            return free
        shares = self.divide(location, beside=request)
        is_entitled = self._is_entitled(request, shares)
        first = 0
        keeps = request.name.tenant in self._books.recallable.keeping(location)
        counts = keeps or not is_entitled or self._is_on_its_way(location)
        for group in self._lines.at(location) if counts else ():
            name, (_, _, is_timed, is_trusted, *_) = group.name, group.key
            if not is_timed:
                continue
            most = admission.guaranteed_room(name, location)
            first += group.size(most)
            if not is_entitled:
                entitled, bound = self._entitled(group, shares), admission.bound(name, location, is_trusted)
                first += max(0, entitled.size(bound) - entitled.size(most))
        held = 0 if is_entitled else self._held_beside(request.name, self._held(location, shares))
        if not is_entitled and self._books.recallable.coming(location):
            guests = [group for group in self._lines.at(location) if group.key.is_guest and group.key.is_timed]
            first += max([group.largest.size for group in guests], default=0)  # others are recalled for its turn
        return max(0, free - first - held)

    def due(self, request: DebitRequest) -> int:
        """Return the bytes that requests with room could be granted now before one whose turn has not come.

        If that one is within its model's share, only those come before it that are, too.
        """
        location, due = request.location, 0
        shares = self.divide(location, beside=request)
        is_entitled = self._is_entitled(request, shares)
        for group in self._lines.at(location):
            if not group.key.is_timed:
                continue
            look, _ = self._look(group)
            size = group.size(look.room)
            if is_entitled:
                entitled = self._entitled(group, shares)
                size = min(entitled.room, entitled.size(min(look.bound, look.room)))
                size = max(size, group.size(min(look.guaranteed, look.room)))
            due += min(look.room, size)
        return due

    # --- shares ---

    def _current(self, location: Location) -> Division:
        if location not in self._divided:
            self._divided[location] = self.divide(location)
        return self._divided[location]

    def divide(
        self,
        location: Location,
        *,
        beside: DebitRequest | None = None,
        greedy: ModelName | None = None,
        less: int = 0,
        keepers: Collection[ModelName] = (),
    ) -> Division:
        """Return the share of every model, in bytes. The request `beside` is taken to wait, too.

        `greedy` is a model that is taken to want the whole capacity. The location is taken to be `less` bytes smaller
        than it is, and all that `keepers` have to be firm.
        """
        self.follow()
        wanted: dict[ModelName, int] = {}
        if beside is not None:
            wanted[beside.name] = self._wanted(beside.name, location, beside.size)
        if greedy is not None:
            wanted[greedy] = self._books.rules.capacities[location]
        return self._shares[self._books.recallable.is_possible].divide(location, wanted, less, keepers)

    def _wanted(self, name: ModelName, location: Location, more: int = 0) -> int:
        """Return what a model wants: for its requests, and `more`, or for its hold."""
        wanted = self._lines.shared(name, location) + more
        hold = self._holds.get((name, location))
        return wanted if hold is None else max(wanted, hold.size - self._books.admission.lent(name, location))

    # --- recalls ---

    def _recall(self, location: Location, demand: Demand, now: int) -> None:
        """Ask the models that have more than their share for what is lacking, and make what is on its way urgent."""
        self._ask_above_shares(location, demand, now)
        if demand.is_guaranteed:
            self._recalls.make_urgent(location, self._lacking(location, self._wanted_of(demand)), now)

    def _ask_above_shares(self, location: Location, demand: Demand, now: int) -> None:
        beside = demand.beside
        shares = self._current(location) if beside is None else self.divide(location, beside=beside)
        if not self._recalls.room or self._short(location, demand, shares) <= 0:
            return
        if not any(self._above(location, shares, now)):  # stops at the first one
            return
        for name, (requested, wanted) in self._demanded(demand).items():
            self._hold(name, location, requested, wanted, now)
        self.deadline = min([hold.until for hold in self._holds.values()], default=None)
        self.divide_again()
        shares = self._current(location) if beside is None else self.divide(location, beside=beside)
        self._ask_for(location, self._short(location, demand, shares), now, demand, shares)

    def _ask_for(
        self,
        location: Location,
        short: int,
        now: int,
        demand: Demand,
        shares: Division,
        less: int = 0,
    ) -> None:
        """Ask the models that have more than their share for `short` bytes.

        Models that do not release what they are asked for come last: before them, others are asked as if all that
        these keep were firm.
        """
        keepers = self._books.recallable.keepers(location)
        if keepers:
            others = self.divide(location, beside=demand.beside, less=less, keepers=keepers)
            short = self._ask(location, short, now, demand, others, keepers)
        self._ask(location, short, now, demand, shares)

    def _ask(
        self,
        location: Location,
        short: int,
        now: int,
        demand: Demand,
        shares: Division,
        keepers: Collection[ModelName] = (),
    ) -> int:
        """Ask for what models but `keepers` have above these shares. Return how many bytes are still lacking."""
        above = [entry for entry in self._above(location, shares, now) if entry[1] not in keepers]
        excess, is_guaranteed = sorted(above, key=lambda entry: (-entry[0], entry[1])), demand.is_guaranteed
        guests = self._guests(location, short, now, {name: more for more, name in excess}, shares)
        left = short - sum([guest.size for guest in guests])
        for more, name in excess:
            if left > 0:
                size = min(more, left)
                left -= self._recalls.ask(name, location, size, now, demand.first, is_guaranteed=is_guaranteed)
        borrowers = [guest.borrower for guest in guests]
        asked = self._recalls.ask_guests(borrowers, now, demand.first, is_guaranteed=is_guaranteed)
        return left + sum([guest.size for guest in guests]) - asked

    def _guests(
        self,
        location: Location,
        short: int,
        now: int,
        excess: Mapping[ModelName, int],
        shares: Mapping[ModelName, int],
    ) -> Sequence[GuestToAsk]:
        """Return the guests to ask, because what these models can release in pieces of their excess is not enough."""
        state = self._books.recallable
        if not state.guests:
            return []
        taken = Counter({name: min(more, state.in_pieces(name, location, now)) for name, more in excess.items()})
        short -= taken.total()
        found, left, can_go = list[GuestToAsk](), short, state.that_can_go(location)
        for borrower in state.idlest(location) if short > 0 else ():
            name, size = borrower.name, state.more_of(borrower, now, can_go)
            above = self._not_asked(name, location) - taken[name] - shares.get(name, 0)
            if name in excess and above > 0 and left > 0 and size:
                found.append(GuestToAsk(borrower, size))
                taken[name] += size
                left -= size
        return _fewest(found, short) or found

    def _ask_above(self, name: ModelName, location: Location, size: int, now: int) -> int:
        """Ask a model for what it has above a limit: guests if pieces do not suffice. Return how much is asked for."""
        limit = self._not_asked(name, location) - size
        guests = self._guests(location, size, now, {name: size}, {name: limit}) if size > 0 else []
        asked = self._recalls.ask(name, location, size - sum([guest.size for guest in guests]), now)
        return asked + self._recalls.ask_guests([guest.borrower for guest in guests], now)

    def _above(self, location: Location, shares: Division, now: int) -> Iterator[tuple[int, ModelName]]:
        """Yield how much models have above their shares; only models that can be asked for it now.

        It is asked of all that can be recalled, so it works out one tenant's shares after the other.
        """
        state, lent, by_tenant = (
            self._books.recallable,
            self._books.admission.lent,
            dict[str, Mapping[ModelName, int]](),
        )
        can_go = state.that_can_go(location) if state.guests else ()
        for name in state.models(location):
            if (own := by_tenant.get(name.tenant)) is None:
                own = by_tenant[name.tenant] = shares.of_tenant(name.tenant)
            more = lent(name, location) - state.asked_of_model(name, location) - own.get(name, 0)
            if more > 0 and state.is_able(name, location, now, can_go):
                yield more, name

    def _short(self, location: Location, demand: Demand, shares: Mapping[ModelName, int]) -> int:
        """Return how many of the bytes that requests and holds want are neither free nor recalled already."""
        reaches = {reach.group: reach for reach in demand.reaches}
        by_tenant = self._wanted_of(demand)
        for name, size in self._held(location, shares).items():
            found = [
                (line, reaches[line.group]) for line in self._lines.of_model(name, location) if line.group in reaches
            ]
            wanted = sum([request.size for line, reach in found for request in reach.requests.of(line, reach.most)])
            if demand.beside is not None and demand.beside.name == name:
                wanted += demand.beside.size
            by_tenant[name.tenant] += max(0, size - wanted)
        return self._lacking(location, by_tenant) - self._books.recallable.coming(location)

    def _wanted_of(self, demand: Demand) -> Counter[str]:
        """Return the bytes that requests want, by tenant."""
        by_tenant = Counter[str]()
        for reach in demand.reaches:
            by_tenant[reach.group.key.tenant] += reach.requests.size(reach.most)
        if demand.beside is not None:
            by_tenant[demand.beside.name.tenant] += demand.beside.size
        return by_tenant

    def _lacking(self, location: Location, by_tenant: Mapping[str, int]) -> int:
        """Return how many of these bytes are not free."""
        admission = self._books.admission
        needed = sum(max(0, size - admission.unlent(tenant, location)) for tenant, size in by_tenant.items())
        return needed - self._books.ledger.totals[location].free + admission.unlent_beside(None, location)

    def _demanded(self, demand: Demand) -> dict[ModelName, tuple[int, int]]:
        """Return what requests want that come first: by model their bytes, and what their sessions will want.

        Only of so many models as may begin a hold in one step.
        """
        if demand.beside is not None:
            return {demand.beside.name: (demand.beside.size, demand.beside.wanted)}
        models: dict[ModelName, tuple[int, int]] = {}
        reaches = {reach.group: reach for reach in demand.reaches}
        in_order = heapq.merge(*[reach.requests.lines_up_to(reach.most) for reach in demand.reaches], key=number_of)
        for line in itertools.islice(in_order, MOST_HELD):
            reach = reaches[line.group]
            before, (size, wanted) = models.get(line.key.name, (0, 0)), wanted_by(reach.requests.of(line, reach.most))
            models[line.key.name] = before[0] + size, before[1] + wanted
        return models

    def _hold(self, name: ModelName, location: Location, requested: int, wanted: int, now: int) -> None:
        """Begin a model's hold, or make it larger, because others are asked for memory for the model."""
        capacity, granule = self._books.rules.capacities[location], self._books.rules.granularity
        before = self._holds.get((name, location))
        step = min(2 * before.step, capacity // _MOST_STEP) if before else capacity // _LEAST_STEP
        needed = max(min(requested, capacity), step // granule * granule)
        wasted = self._wasted.get(name.tenant)
        is_believed = wasted is None or wasted.until <= now
        more = max(needed, min(wanted, capacity)) if is_believed else needed
        lent = self._books.admission.lent(name, location)
        size, hoped = lent + more, more - needed
        if before is not None:
            size, hoped = max(size, before.size), max(hoped, before.hoped)
        self._holds[name, location] = Hold(size, lent, step, now + HOLD_NS, hoped)
        self._books.ledger.touched.add((name, location))

    def refused(self, request: DebitRequest, now: int) -> None:
        """Recall memory for a refused request, so that the next one finds it: once in `recall_ns` for each model."""
        key, location = (request.name, request.location), request.location
        if not self._books.recallable.is_possible or self._asked_for.get(key, 0) > now:
            return
        self.divide_again()
        is_guaranteed = self._books.admission.is_guaranteed(request.name, location, request.size)
        if is_guaranteed or self._is_entitled(request, self.divide(location, beside=request)):
            # Models come and go: what is over is forgotten.
            self._asked_for = {other: until for other, until in self._asked_for.items() if until > now}
            self._asked_for[key] = now + self._books.rules.recall_ns
            self._recall(location, Demand(request.name, beside=request, is_guaranteed=is_guaranteed), now)
        self.divide_again()

    def recall_for_device(self, request: DebitRequest, now: int) -> None:
        """Recall as much as a guaranteed request wants: the books have room for it, but the device does not.

        Ask the models that would have more than their share if the device were smaller by as much.
        """
        short = request.size - self._books.recallable.coming(request.location)
        shares = self.divide(request.location, less=request.size)
        demand = Demand(request.name, is_guaranteed=True)
        self._ask_for(request.location, short, now, demand, shares, less=request.size)
        self._recalls.make_urgent(request.location, request.size, now)

    def recall_above_limits(self, now: int) -> None:
        """Recall what models and tenants have above their limits. A limit was lowered, or a kept part can be asked for
        again."""
        books = self._books
        if self.is_left_over:
            return
        books.limits_changed = False
        if not books.recallable.is_possible:
            return
        state, ledger = books.recallable, books.ledger
        for location in books.rules.capacities:
            names = sorted(state.models(location))
            for name in names:
                limit = policy.model_limit(ledger, books.rules, name, location)
                if limit is not None:
                    self._ask_above(name, location, self._not_asked(name, location) - limit, now)
            above = Counter[str]()
            for tenant in {name.tenant for name in names}:
                limit = policy.limit_of(ledger.quotas, books.rules, (tenant, None, location))
                if limit is not None:
                    not_asked = ledger.tenant_lent(tenant, location) - state.asked_of_tenant(tenant, location)
                    above[tenant] = not_asked - limit
            for name in sorted(names, key=lambda name: -state.of_model(name, location)):
                if above[name.tenant] > 0:
                    above[name.tenant] -= self._ask_above(name, location, above[name.tenant], now)
        books.limits_changed = self.is_left_over

    def _not_asked(self, name: ModelName, location: Location) -> int:
        """Return what a model is charged and not asked for."""
        return self._books.admission.lent(name, location) - self._books.recallable.asked_of_model(name, location)


def _oldest(reaches: Sequence[Reach]) -> DebitRequest | None:
    """Return the oldest of these requests."""
    return _first_of([each.requests.oldest(each.most) for each in reaches])


def _first_of(found: Sequence[DebitRequest | None]) -> DebitRequest | None:
    """Return the oldest of these requests, if there is one."""
    return min([request for request in found if request is not None], key=call_of, default=None)


def _fewest(found: Sequence[GuestToAsk], short: int, firm: int = 0) -> Sequence[GuestToAsk]:
    """Return the first of these guests that have `short` bytes and `firm` firm ones, or none if all do not.

    Those are left out that are not needed beside the later ones, such as a small one before a large one.
    """
    chosen = list[GuestToAsk]()
    for guest in found:
        if short <= 0 and firm <= 0:
            break
        chosen.append(guest)
        short, firm = short - guest.size, firm - guest.firm
    if short > 0 or firm > 0:
        return []
    needed = list[GuestToAsk]()
    for guest in reversed(chosen):
        if short + guest.size <= 0 and firm + guest.firm <= 0:
            short, firm = short + guest.size, firm + guest.firm
        else:
            needed.append(guest)
    return needed[::-1]


def _demand(reaches: Sequence[Reach], *, is_guaranteed: bool = False) -> Demand | None:
    """Return what these requests want together."""
    oldest = _oldest(reaches)
    return None if oldest is None else Demand(oldest.name, reaches, is_guaranteed=is_guaranteed)
