"""Holds: what a growing model will probably want, and what others were asked for on its behalf.

A model that grows page by page would recall page by page. So others are asked for more than it wants now: for 1/64 of
the capacity, doubled with each further recall, up to 1/8; or for what the session says that it will want, within the
model's share. A hold keeps what came beyond the request from requests beyond their share. If the model has borrowed
less than half of what its sessions said when the hold ends, others gave it back for nothing. Then what the tenant's
sessions say counts for nothing, for two seconds, and twice as long each time.

Owns the holds, and which tenants are not believed. Must never ask for memory itself: `schedule` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .books import Books
from .names import Location, ModelName
from .recalls import doubled

HOLD_NS = 500_000_000
"""How long a model's hold lasts, and how much longer each time while a recall for the model is open. Longer holds cost
use of the GPU; without them a growing model recalls page by page, and a simulation showed eight times the waits."""
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


class ModelHolds:
    """The holds of all models."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._holds: dict[tuple[ModelName, Location], Hold] = {}
        self._wasted: dict[str, Wasted] = {}
        """By tenant."""
        self.deadline: int | None = None
        """When the first hold ends, in nanoseconds; None without holds."""

    def __bool__(self) -> bool:
        """Whether a hold is in force."""
        return bool(self._holds)

    @property
    def keys(self) -> Collection[tuple[ModelName, Location]]:
        """The models that have holds, and where."""
        return self._holds.keys()

    def begin(self, location: Location, demanded: Mapping[ModelName, tuple[int, int]], now: int) -> None:
        """Begin holds, or make them larger, because others are asked for memory for these models.

        By model: the bytes that its requests want, and those that its sessions will want.
        """
        for name, (requested, wanted) in demanded.items():
            self._begin(name, location, requested, wanted, now)
        self._set_deadline()

    def _begin(self, name: ModelName, location: Location, requested: int, wanted: int, now: int) -> None:
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

    def elapsed(self, now: int) -> bool:
        """End the holds whose time is over, and return whether there were any.

        One goes on while a recall for its model is open: it is for those bytes.
        """
        if self.deadline is None or self.deadline > now:
            return False
        before = len(self._holds)
        for key, hold in list(self._holds.items()):
            if hold.until <= now:
                self._books.ledger.touched.add(key)
                if self._books.recallable.is_coming_for(key[0]):
                    self._holds[key] = hold._replace(until=now + HOLD_NS)
                else:
                    del self._holds[key]
                    self._judge_use(key, hold, now)
        self._set_deadline()
        return len(self._holds) < before

    def _set_deadline(self) -> None:
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

    def shrink(self, name: ModelName, location: Location) -> None:
        """Take what a model has released from its hold: it does not grow by that, so nothing is kept for it."""
        if (hold := self._holds.get((name, location))) is not None:
            lent = self._books.admission.lent(name, location)
            if lent != hold.lent:
                self._holds[name, location] = hold._replace(size=hold.size - max(0, hold.lent - lent), lent=lent)

    def kept(self, location: Location, shares: Mapping[ModelName, int]) -> Counter[ModelName]:
        """Return the bytes that the hold of each model keeps from requests of others that are beyond their shares."""
        lent = self._books.admission.lent
        found = {
            name: min(hold.size, shares.get(name, 0)) - lent(name, at)
            for (name, at), hold in self._holds.items()
            if at == location
        }
        return Counter({name: size for name, size in found.items() if size > 0})

    def wanted(self, name: ModelName, location: Location) -> int:
        """Return what a model has not borrowed of its hold, in bytes: 0 or less if it has all."""
        hold = self._holds.get((name, location))
        return 0 if hold is None else hold.size - self._books.admission.lent(name, location)
