"""Whose turn it is among the requests that wait, and which models are asked for memory on their behalf.

A request within its model's guarantee goes first, then one within its model's share, then the others; among equals the
oldest. While sessions answer recalls, what is missing for a higher class is recalled from the models that have more
than their share, after free bytes and what open recalls will bring are counted. Until it comes, a request of a lower
class is not granted; if nothing is on its way, because all that could be asked keep what they have, nobody waits for
anybody. At its deadline a request gets what the higher classes leave. Once the oldest request within its share has
waited longer than two rounds of recalls, only guaranteed ones overtake it, as long as something is on its way. A
request that does not wait has memory recalled too, at most once in `recall_seconds` for each model, so that its next
try finds it.

A model that grows page by page would recall page by page. So others are asked for more than it wants now: for 1/64 of
the capacity, doubled with each further recall, up to 1/8; or for what the session says that it will want, within the
model's share. A hold keeps what came beyond the request from requests beyond their share. If the model has borrowed
less than half of what its sessions said when the hold ends, others gave it back for nothing. Then what the tenant's
sessions say counts for nothing, for two seconds, and twice as long each time.

Owns the holds. Must never keep a request: `waiting` owns them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from . import policy
from .admission import Level
from .books import Books
from .denied import Reason
from .names import Location, ModelName
from .recalls import Recalls, doubled
from .requests import DebitRequest
from .shares import Shares

HOLD_NS = 500_000_000
"""How long a model's hold lasts, and how much longer each time while a recall for the model is open. Longer holds cost
use of the GPU; without them a growing model recalls page by page, and a simulation showed eight times the waits."""
_LEAST_STEP, _MOST_STEP = 64, 8
"""A hold grows in steps of 1/64 of the capacity, doubled with each recall, to at most 1/8."""


class Hold(NamedTuple):
    """Up to `size` bytes a model will probably want, because it grows and others were asked for memory for it.

    Recalls ask for as much at once, and requests beyond their share get none of it. A hold is not a debit. `hoped` of
    the bytes are there only because the model's sessions say that they will want them.
    """

    size: int
    step: int
    until: int
    hoped: int


class Wasted(NamedTuple):
    """How often in a row a tenant did not borrow what it said that it will want, and until when it is not believed."""

    times: int
    until: int


def _wanted_by(waiting: Iterable[DebitRequest]) -> tuple[int, int]:
    """Return the size of requests together, and what they want. Each says what its whole session will want."""
    sessions: dict[int, tuple[int, int]] = {}
    for one in waiting:
        size, most = sessions.get(one.event.session, (0, 0))
        sessions[one.event.session] = size + one.size, max(most, one.wanted)
    return sum(size for size, _ in sessions.values()), sum(max(size, most) for size, most in sessions.values())


class Schedule:
    """The order of the requests that wait at each location."""

    def __init__(self, books: Books, recalls: Recalls) -> None:
        self._books = books
        self._recalls = recalls
        self._divided: dict[Location, dict[ModelName, int]] = {}
        """The shares at each location. A grant within a share does not change them, since the model then has what it
        waited for, and a share is of both together. So they are computed once for all such grants of a step."""
        self._holds: dict[tuple[ModelName, Location], Hold] = {}
        self._wasted: dict[str, Wasted] = {}
        """By tenant."""
        self._asked_for: dict[tuple[ModelName, Location], int] = {}
        """Until when no more is recalled for the refused requests of a model that does not wait."""

    def divide_again(self) -> None:
        """Forget the shares: something has changed that they depend on."""
        self._divided.clear()

    @property
    def deadline(self) -> int | None:
        """When the first hold ends, in nanoseconds."""
        return min((hold.until for hold in self._holds.values()), default=None)

    def elapsed(self, now: int) -> None:
        """End the holds whose time is over. One goes on while a recall for its model is open: it is for those bytes."""
        for key, hold in list(self._holds.items()):
            if hold.until <= now:
                if self._books.recallable.is_coming_for(key[0]):
                    self._holds[key] = hold._replace(until=now + HOLD_NS)
                else:
                    del self._holds[key]
                    self._judge_use(key, hold, now)
                    self.divide_again()

    def _judge_use(self, key: tuple[ModelName, Location], hold: Hold, now: int) -> None:
        """Note whether a model has borrowed at least half of what its sessions said that they will want."""
        tenant = key[0].tenant
        if not hold.hoped:
            return
        if 2 * (hold.size - self._books.admission.lent(*key)) <= hold.hoped:
            self._wasted.pop(tenant, None)
        else:
            times = self._wasted[tenant].times + 1 if tenant in self._wasted else 1
            # Tenants come and go: what is long over is forgotten.
            self._wasted = {name: one for name, one in self._wasted.items() if now < one.until + doubled(one.times)}
            self._wasted[tenant] = Wasted(times, now + doubled(times))

    @property
    def is_left_over(self) -> bool:
        """Whether this step has asked as many sessions as one step may. The next step asks the others, if needed."""
        return not self._recalls.room

    @property
    def has_holds(self) -> bool:
        """Whether a hold is in force."""
        return bool(self._holds)

    # --- whose turn it is ---

    def next(self, location: Location, waiters: Iterable[DebitRequest], now: int) -> tuple[DebitRequest, bool] | None:
        """Return the request to decide next, and whether its turn has come; None if all go on waiting."""
        books = self._books
        waiters = [one for one in waiters if one.location == location]
        possible = books.recallable.is_possible
        levels: dict[tuple[ModelName, int | None], list[Level]] = {}
        wanting, ready = [], set()
        for one in waiters:
            left = one.name not in books.ledger.sessions[one.event.session].models
            if left or (one.met_full_device and self.is_asked(one)):
                return one, False
            if one.met_full_device:
                continue
            key = one.name, one.borrower
            if key not in levels:
                levels[key] = books.admission.levels(one.name, location, one.borrower)
            refusing = [level[0] for level in levels[key] if one.size > level[-1]]
            if not refusing:
                ready.add(one)
            elif one.deadline is None:
                continue
            elif refusing[0] is not Reason.CAPACITY or self.is_asked(one):
                return one, False
            elif not possible:
                continue
            wanting.append(one)
        if not wanting:
            return None
        if len(wanting) == 1 and not possible:
            return wanting[0], True
        found = self._first(location, wanting, ready, waiters, now)
        return (found, True) if found else None

    def is_asked(self, one: DebitRequest) -> bool:
        """Say whether a request exceeds its model's guarantee while its session is asked for memory of the model."""
        name, location = one.name, one.location
        asked = self._books.recallable.asked_of(one.event.session, name, location)
        return asked > 0 and not self._books.admission.is_guaranteed(name, location, one.size)

    def _first(
        self,
        location: Location,
        wanting: Sequence[DebitRequest],
        ready: Collection[DebitRequest],
        waiters: Sequence[DebitRequest],
        now: int,
    ) -> DebitRequest | None:
        """Return the request to grant first, one of `ready`; if requests without room come before these, recall."""
        guaranteed = self._guaranteed(location, wanting)
        for one in guaranteed:
            if one in ready:
                return one
        if guaranteed and self._keeps_its_place(location, guaranteed, waiters, now):
            return None
        shares = self._shares(location, waiters)
        within: dict[tuple[ModelName, int | None], int] = {}
        entitled: list[DebitRequest] = []
        for one in wanting:
            key = one.name, one.borrower
            if key not in within:
                within[key] = self._within_share(one, shares)
            if one.size <= within[key]:
                entitled.append(one)
        oldest = next((one for one in entitled if one in ready), None)
        if oldest is not None:
            aged = now - entitled[0].since > 2 * self._books.rules.recall_ns
            if oldest is entitled[0] or not aged:
                return oldest
        if entitled and self._keeps_its_place(location, entitled, waiters, now):
            return None
        if oldest is not None:
            return oldest
        free = self._books.ledger.totals[location].free
        for one in wanting:
            if one in ready and one.size <= free - self._held_beside(one, shares):
                self.divide_again()  # a grant beyond a share changes the shares of the others
                return one
        return None

    def _keeps_its_place(
        self, location: Location, first: Sequence[DebitRequest], waiters: Sequence[DebitRequest], now: int
    ) -> bool:
        """Recall what requests lack that come first. Say whether others must wait for them: something is on its way.

        Else nobody gains by it. What others are granted meanwhile can be recalled, or is beside all guarantees.
        """
        self._recall(location, first, waiters, now)
        return self._is_on_its_way(location)

    def _is_on_its_way(self, location: Location) -> bool:
        """Say whether a recall will bring bytes, or this step has asked as many sessions as one step may."""
        return self._books.recallable.coming(location) > 0 or self.is_left_over

    def _guaranteed(self, location: Location, waiters: Iterable[DebitRequest]) -> list[DebitRequest]:
        admission = self._books.admission
        if not admission.tenants(location):
            return []
        return [one for one in waiters if admission.is_guaranteed(one.name, location, one.size)]

    def _is_entitled(self, one: DebitRequest, shares: Mapping[ModelName, int]) -> bool:
        """Say whether a request stays within its model's share, and only the room is missing for it."""
        return one.size <= self._within_share(one, shares)

    def _within_share(self, one: DebitRequest, shares: Mapping[ModelName, int]) -> int:
        """Return how much more a request's session can have within its model's share, if there is room."""
        admission, location = self._books.admission, one.location
        left = shares.get(one.name, 0) - admission.lent(one.name, location)
        return min(left, admission.bound(one.name, location, one.borrower))

    def _held_beside(self, one: DebitRequest, shares: Mapping[ModelName, int]) -> int:
        """Return what the holds of other models keep from a request that is beyond its share."""
        location, admission = one.location, self._books.admission
        return sum(
            max(0, min(hold.size, shares.get(name, 0)) - admission.lent(name, location))
            for (name, at), hold in self._holds.items()
            if at == location and name != one.name
        )

    def may_go_ahead(self, request: DebitRequest, waiters: Iterable[DebitRequest]) -> bool:
        """Say whether to grant a request ahead of need although others wait or have holds.

        Only if it is within a guarantee, and no request that waits is.
        """
        location = request.location
        if not self._books.admission.is_guaranteed(request.name, location, request.size):
            return False
        return not self._guaranteed(location, (one for one in waiters if one.location == location))

    def leaves(self, one: DebitRequest, waiters: Iterable[DebitRequest]) -> int:
        """Return how many free bytes the others leave to a request that is decided although its turn has not come.

        Without the others there would be room for it.
        """
        location = one.location
        free = self._books.ledger.totals[location].free
        if not (self._books.recallable.is_possible or self._holds) or self._guaranteed(location, [one]):
            return free
        waiters = list(waiters)
        here = (other for other in waiters if other.deadline and other.location == location)
        others = [other for other in here if not other.met_full_device]
        on_its_way = self._is_on_its_way(location)
        first = set(self._guaranteed(location, others)) if on_its_way else set()
        shares = self.divide(location, [*waiters, one])
        held = 0
        if not self._is_entitled(one, shares):
            if on_its_way:
                first |= {other for other in others if self._is_entitled(other, shares)}
            held = self._held_beside(one, shares)
        return max(0, free - sum(other.size for other in first) - held)

    # --- shares ---

    def _shares(self, location: Location, waiters: Iterable[DebitRequest]) -> dict[ModelName, int]:
        if location not in self._divided:
            self._divided[location] = self.divide(location, waiters)
        return self._divided[location]

    def divide(
        self,
        location: Location,
        waiters: Iterable[DebitRequest],
        greedy: ModelName | None = None,
        less: int = 0,
        keepers: Collection[ModelName] = (),
    ) -> dict[ModelName, int]:
        """Return the share of every model, in bytes. `greedy` is a model that is taken to want the whole capacity.

        The location is taken to be `less` bytes smaller than it is, and all that `keepers` have to be firm.
        """
        books = self._books
        wanted: Counter[ModelName] = Counter()
        for one in waiters:
            if one.location == location:
                wanted[one.name] += one.size
        for (name, at), hold in self._holds.items():
            if at == location:
                wanted[name] = max(wanted[name], hold.size - books.admission.lent(name, location))
        if greedy is not None:
            wanted[greedy] = books.rules.capacities[location]
        return Shares(books.ledger, books.rules, books.admission, books.recallable).divide(
            location, wanted, less, keepers
        )

    # --- recalls ---

    def _recall(
        self, location: Location, waiting: Sequence[DebitRequest], waiters: Sequence[DebitRequest], now: int
    ) -> None:
        """Ask the models that have more than their share for what these requests lack."""
        shares = self._shares(location, waiters)
        lacking = self._short(location, waiting, shares) > 0 and self._excess(location, shares, now)
        if not lacking or not self._recalls.room:
            return
        for name in {one.name for one in waiting}:
            self._hold(name, location, *_wanted_by([one for one in waiting if one.name == name]), now)
        self.divide_again()
        shares = self._shares(location, waiters)
        short = self._short(location, waiting, shares)
        self._ask_for(location, short, waiters, now, waiting[0].name)

    def _ask_for(
        self,
        location: Location,
        short: int,
        waiters: Iterable[DebitRequest],
        now: int,
        wanted_by: ModelName,
        less: int = 0,
    ) -> None:
        """Ask the models that have more than their share for `short` bytes.

        Models that do not release what they are asked for come last: before them, others are asked as if all that
        these keep were firm.
        """
        waiters = list(waiters)
        keepers = self._books.recallable.keepers(location)
        for firm in (keepers, ()) if keepers else ((),):
            is_known = not less and not firm
            shares = self._shares(location, waiters) if is_known else self.divide(location, waiters, None, less, firm)
            for more, name in self._excess(location, shares, now):
                if short > 0 and name not in firm:
                    short -= self._recalls.ask(name, location, min(more, short), now, wanted_by)

    def _excess(self, location: Location, shares: Mapping[ModelName, int], now: int) -> list[tuple[int, ModelName]]:
        """Return how much models have above their shares, the most first; only models that can be asked for it now."""
        models, is_able = self._books.ledger.models, self._books.recallable.is_able
        excess = [(self._not_asked(name, location) - shares.get(name, 0), name) for name in models]
        found = [one for one in excess if one[0] > 0 and is_able(one[1], location, now)]
        return sorted(found, key=lambda one: (-one[0], one[1]))

    def _short(self, location: Location, waiting: Iterable[DebitRequest], shares: Mapping[ModelName, int]) -> int:
        """Return how many of the bytes that requests and holds want are neither free nor recalled already."""
        admission = self._books.admission
        wanted: Counter[ModelName] = Counter()
        for one in waiting:
            wanted[one.name] += one.size
        for (name, at), hold in self._holds.items():
            if at == location:
                lent = admission.lent(name, location)
                wanted[name] = max(wanted[name], min(hold.size, shares.get(name, 0)) - lent)
        by_tenant: defaultdict[str, int] = defaultdict(int)
        for name, size in wanted.items():
            by_tenant[name.tenant] += size
        needed = sum(max(0, size - admission.unlent(tenant, location)) for tenant, size in by_tenant.items())
        free = self._books.ledger.totals[location].free - admission.unlent_beside(None, location)
        return needed - free - self._books.recallable.coming(location)

    def _hold(self, name: ModelName, location: Location, requested: int, wanted: int, now: int) -> None:
        """Begin a model's hold, or make it larger, because others are asked for memory for the model."""
        capacity, granule = self._books.rules.capacities[location], self._books.rules.granularity
        before = self._holds.get((name, location))
        step = min(2 * before.step, capacity // _MOST_STEP) if before else capacity // _LEAST_STEP
        needed = max(min(requested, capacity), step // granule * granule)
        wasted = self._wasted.get(name.tenant)
        is_believed = wasted is None or wasted.until <= now
        more = max(needed, min(wanted, capacity)) if is_believed else needed
        size, hoped = self._books.admission.lent(name, location) + more, more - needed
        if before is not None:
            size, hoped = max(size, before.size), max(hoped, before.hoped)
        self._holds[name, location] = Hold(size, step, now + HOLD_NS, hoped)

    def refused(self, one: DebitRequest, waiters: Sequence[DebitRequest], now: int) -> None:
        """Recall memory for a refused request, so that the next one finds it: once in `recall_ns` for each model."""
        key, location = (one.name, one.location), one.location
        if not self._books.recallable.is_possible or self._asked_for.get(key, 0) > now:
            return
        everyone = [*waiters, one]
        self.divide_again()
        if self._guaranteed(location, [one]) or self._is_entitled(one, self._shares(location, everyone)):
            # Models come and go: what is over is forgotten.
            self._asked_for = {other: until for other, until in self._asked_for.items() if until > now}
            self._asked_for[key] = now + self._books.rules.recall_ns
            self._recall(location, [one], everyone, now)
        self.divide_again()

    def recall_for_device(self, one: DebitRequest, waiters: Iterable[DebitRequest], now: int) -> None:
        """Recall as much as a guaranteed request wants: the books have room for it, but the device does not.

        Ask the models that would have more than their share if the device were smaller by as much.
        """
        location = one.location
        short = one.size - self._books.recallable.coming(location)
        self._ask_for(location, short, waiters, now, one.name, less=one.size)

    def recall_above_limits(self, now: int) -> None:
        """Recall what models and tenants have above their limits. A limit was lowered, or a kept part can be asked for
        again."""
        books = self._books
        if self.is_left_over:
            return
        books.limits_changed = False
        if not books.recallable.is_possible:
            return
        for location in books.rules.capacities:
            above: Counter[str] = Counter()
            for name in books.ledger.models:
                limit = policy.model_limit(books.ledger, books.rules, name, location)
                if limit is not None:
                    self._recalls.ask(name, location, self._not_asked(name, location) - limit, now)
                above[name.tenant] += self._not_asked(name, location)
            for name in sorted(books.ledger.models, key=lambda name: -books.recallable.of_model(name, location)):
                limit = policy.limit_of(books.ledger.quotas, books.rules, (name.tenant, None, location))
                if limit is not None and above[name.tenant] > limit:
                    above[name.tenant] -= self._recalls.ask(name, location, above[name.tenant] - limit, now)
        books.limits_changed = self.is_left_over

    def _not_asked(self, name: ModelName, location: Location) -> int:
        """Return what a model is charged and not asked for."""
        return self._books.admission.lent(name, location) - self._books.recallable.asked_of_model(name, location)
