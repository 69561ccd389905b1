"""Whose turn it is among the requests that wait, and which models are asked for memory on their behalf.

A request within its model's guarantee goes first, then one within its model's share, then the others; among equals the
oldest. While sessions answer recalls, what is missing for a higher class is recalled from the models that have more
than their share, after free bytes and what open recalls will bring are counted. Until it comes, a request of a lower
class is not granted; if nothing is on its way, because all that could be asked keep what they have, those within their
shares are. At its deadline a request gets what the higher classes leave. Once the oldest request within its share has
waited longer than two rounds of recalls, only guaranteed ones overtake it, as long as something is on its way. A
request that does not wait has memory recalled too, at most once in `recall_seconds` for each model, so that its next
try finds it.

A model that grows has a hold: see `model_holds`. Guests have turns of their own: see `guest_turns`.

Owns the shares of each step. Must never keep a request: `waiting` owns them.
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
from .guest_turns import GuestTurns
from .model_holds import ModelHolds
from .names import Location, ModelName
from .recalls import Recalls
from .request_lines import Entitled, LineGroup, Look, RequestLines, call_of, number_of, wanted_by
from .requests import DebitRequest
from .shares import Division, Shares

MOST_HELD = 256
"""Of how many lines of requests the models begin or renew holds in one step: those that have waited longest."""


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


class Schedule:
    """The order of the requests that wait at each location."""

    def __init__(self, books: Books, recalls: Recalls, lines: RequestLines) -> None:
        self._books = books
        self._recalls = recalls
        self._lines = lines
        self._divided: dict[Location, Division] = {}
        """The shares at each location. A grant within a share does not change them, since the model then has what it
        waited for, and a share is of both together. So they are computed once for all such grants of a step."""
        self.holds = ModelHolds(books)
        """What growing models will probably want."""
        self._turns = GuestTurns(books, recalls)
        self._asked_for: dict[tuple[ModelName, Location], int] = {}
        """Until when no more is recalled for the refused requests of a model that does not wait."""
        self._admission = books.admission
        """The guarantees by which the lines are grouped, and `_shares` divides."""
        self._shares = self._new_shares()

    def divide_again(self) -> None:
        """Forget the shares: something has changed that they depend on."""
        self._divided.clear()

    @property
    def is_left_over(self) -> bool:
        """Whether this step has asked as many sessions as one step may. The next step asks the others, if needed."""
        return not self._recalls.room

    # --- whose turn it is ---

    def follow(self) -> None:
        """Follow all that has changed about models."""
        books, touched = self._books, self._books.ledger.touched
        if books.admission is not self._admission:
            self._admission, self._shares = books.admission, self._new_shares()
            touched.clear()  # all models that are charged are worked out again
            touched.update(self.holds.keys)
            touched.update((name, location) for location, names in self._lines.wanted.items() for name in names)
        for name, location in touched:
            self.holds.shrink(name, location)
            for shares in self._shares.values():
                shares.changed(name, location)
            self._lines.changed(name, location)
        touched.clear()

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
        looks = self._turns.behind_an_aged_one(location, looks, now)
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
            return self._ready_within(self._without_keepers(location, looks), shares)
        if passed_over:  # what is lent beyond a share would be recalled for them at once
            return None
        if self._turns.take(location, looks, now):
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
        free, held = self._books.ledger.totals[location].free, self.holds.kept(location, shares)
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
            key=lambda request: self._turns.turn(location, request),
        )

    def _without_keepers(self, location: Location, looks: Sequence[Look]) -> list[Look]:
        """Leave out the lines of tenants that keep some of what was recalled: they do not borrow what came of it.

        They borrow nothing within their shares either. While a session does not return what is guaranteed to others,
        the shares of all add up to more than the capacity.
        """
        keeping = self._books.recallable.keeping(location)
        return [look for look in looks if look.group.key.tenant not in keeping]

    def _keeps_its_place(self, location: Location, demand: Demand, now: int) -> bool:
        """Recall what requests lack that come first. Say whether others must wait for them: something is on its way.

        Else nobody gains by waiting. Others are granted what is within their shares, which is not recalled from them.
        """
        self._recall(location, demand, now)
        return self._recalls.is_on_its_way(location)

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
        is_possible = self._books.recallable.is_possible or bool(self.holds)
        if not is_possible or admission.is_guaranteed(request.name, location, request.size):
            return free
        shares = self.divide(location, beside=request)
        is_entitled = self._is_entitled(request, shares)
        first = 0
        keeps = request.name.tenant in self._books.recallable.keeping(location)
        counts = keeps or not is_entitled or self._recalls.is_on_its_way(location)
        for group in self._lines.at(location) if counts else ():
            name, (_, _, is_timed, is_trusted, *_) = group.name, group.key
            if not is_timed:
                continue
            most = admission.guaranteed_room(name, location)
            first += group.size(most)
            if not is_entitled:
                entitled, bound = self._entitled(group, shares), admission.bound(name, location, is_trusted)
                first += max(0, entitled.size(bound) - entitled.size(most))
        held = 0 if is_entitled else self._held_beside(request.name, self.holds.kept(location, shares))
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
        return max(self._lines.shared(name, location) + more, self.holds.wanted(name, location))

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
        self.holds.begin(location, self._demanded(demand), now)
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
        if keepers and any(name not in keepers for name in self._books.recallable.models(location)):
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
        guests = self._turns.beside_pieces(location, short, now, {name: more for more, name in excess}, shares)
        left = short - sum([guest.size for guest in guests])
        for more, name in excess:
            if left > 0:
                size = min(more, left)
                left -= self._recalls.ask(name, location, size, now, demand.first, is_guaranteed=is_guaranteed)
        borrowers = [guest.borrower for guest in guests]
        asked = self._recalls.ask_guests(borrowers, now, demand.first, is_guaranteed=is_guaranteed)
        return left + sum([guest.size for guest in guests]) - asked

    def _ask_above(self, name: ModelName, location: Location, size: int, now: int) -> int:
        """Ask a model for what it has above a limit: guests if pieces do not suffice. Return how much is asked for."""
        limit = self._recalls.not_asked(name, location) - size
        guests = self._turns.beside_pieces(location, size, now, {name: size}, {name: limit}) if size > 0 else []
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
        for name, size in self.holds.kept(location, shares).items():
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
                    self._ask_above(name, location, self._recalls.not_asked(name, location) - limit, now)
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


def _oldest(reaches: Sequence[Reach]) -> DebitRequest | None:
    """Return the oldest of these requests."""
    return _first_of([each.requests.oldest(each.most) for each in reaches])


def _first_of(found: Sequence[DebitRequest | None]) -> DebitRequest | None:
    """Return the oldest of these requests, if there is one."""
    return min([request for request in found if request is not None], key=call_of, default=None)


def _demand(reaches: Sequence[Reach], *, is_guaranteed: bool = False) -> Demand | None:
    """Return what these requests want together."""
    oldest = _oldest(reaches)
    return None if oldest is None else Demand(oldest.name, reaches, is_guaranteed=is_guaranteed)
