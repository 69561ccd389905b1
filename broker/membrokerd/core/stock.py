"""The stock: a warm pool of new extents in the sizes that were requested lately.

It takes the driver's create and export off the path of a small Allocate. Stock is free in the books but in use on the
device, so it is made only while no packet is being made and the capacity has room for it, and it is released before
any request is refused because of it. An extent of the stock was never lent before. The stock ends with the daemon.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .books import Books
from .names import Location

LATELY_NS = 10_000_000_000
"""How long a size is kept ready after it was last requested."""
JUST_NOW_NS = 1_000_000_000
"""How long a size keeps its stock when another size wants the room."""
SIZES = 8
"""How many sizes are remembered."""

Kind = tuple[Location, int]
"""A location, and the size of an extent."""


@dataclass(slots=True)
class Wish:
    """How many extents of a kind to keep ready, and when it was last requested."""

    count: int
    asked_at: int


class WarmPool:
    """The extents that are kept ready, and the kinds that are wanted."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._ready: dict[Kind, int] = {}
        self._extents = self._bytes = 0
        """What is ready, all kinds together."""
        self._wishes: OrderedDict[Kind, Wish] = OrderedDict()
        """In the order of the last requests: the kind that was requested last is the last one."""
        self._making = False
        self.changes: Counter[str] = Counter()
        """How many extents were made, used and dropped since the daemon started."""

    def asked(self, location: Location, extent_bytes: int, count: int, now: int) -> None:
        """Record a request: the next one is likely to have the same size."""
        rules = self._books.rules
        if not rules.stock_extents:
            return
        most = min(rules.stock_extents, rules.stock_bytes // extent_bytes, policy.PACKET_EXTENTS)
        if most:
            kind, count = (location, extent_bytes), min(most, 2 * count)
            wish = self._wishes.get(kind)
            if wish is None:
                self._wishes[kind] = Wish(count, now)
            else:
                wish.count, wish.asked_at = count, now
            if len(self._wishes) > 1:
                self._wishes.move_to_end(kind)
                self._give_way(kind, now)
            if len(self._wishes) > SIZES:
                self._drop_kind(self._wishes.popitem(last=False)[0])

    def _give_way(self, kind: Kind, now: int) -> None:
        """Drop stock of kinds that were not requested just now, as far as the bounds require it for this kind.

        Kinds that are requested in turn keep their stock; otherwise each would evict the other.
        """
        rules, wish = self._books.rules, self._wishes[kind]
        for other in [kind for kind, asked in self._wishes.items() if now - asked.asked_at > JUST_NOW_NS]:
            missing = wish.count - self._ready.get(kind, 0)
            extents = self._extents + missing - rules.stock_extents
            excess = self._bytes + missing * kind[1] - rules.stock_bytes
            surplus = max(extents, -(-excess // other[1]))
            if surplus <= 0:
                return
            if self._ready.get(other):
                self._drop(other, min(self._ready[other], surplus))

    def take(self, location: Location, extent_bytes: int, count: int) -> bool:
        """Use extents of the stock for a whole packet, or for none of it. A daemon that stops has closed its stock."""
        found = self._ready.get((location, extent_bytes), 0) >= count and not self._books.stopping
        if found:
            self._change((location, extent_bytes), -count, "used")
        return found

    def make_room(self, location: Location) -> None:
        """Drop as much as the capacity requires, least recently requested first."""
        total = self._books.ledger.totals[location]
        if total.charged + total.stock <= total.capacity:
            return
        for kind in [*self._wishes, *self._ready]:
            excess = total.charged + total.stock - total.capacity
            if excess <= 0:
                return
            if kind[0] == location and self._ready.get(kind):
                self._drop(kind, min(self._ready[kind], -(-excess // kind[1])))

    def drop_all(self, location: Location) -> bool:
        """Drop all stock of a location: the device is full, draining or lost. Say whether there was any."""
        kinds = [kind for kind in self._ready if kind[0] == location]
        for kind in kinds:
            self._drop_kind(kind)
            self._wishes.pop(kind, None)
        return bool(kinds)

    def forget_stale(self, now: int) -> None:
        """Drop the kinds that were not requested lately."""
        for kind in [kind for kind, wish in self._wishes.items() if now - wish.asked_at > LATELY_NS]:
            del self._wishes[kind]
            self._drop_kind(kind)

    def fill(self) -> None:
        """Ask for one more extent, if one is wanted and no packet is being made."""
        if self._making or not self._wishes or self._unwanted or any(self._books.making.values()):
            return
        for kind in reversed(self._wishes):
            if self._wants(kind):
                self._making = True
                location, size = kind
                self._books.emit(fx.Stock(location, size))
                return

    @property
    def _unwanted(self) -> bool:
        """Whether the daemon stops or drains or its device is lost, so that no stock is kept."""
        return self._books.stopping or self._books.draining or bool(self._books.device_lost)

    def _wants(self, kind: Kind) -> bool:
        location, size = kind
        rules, total = self._books.rules, self._books.ledger.totals[location]
        return (
            self._ready.get(kind, 0) < self._wishes[kind].count
            and self._extents < rules.stock_extents
            and self._bytes + size <= rules.stock_bytes
            and total.lent + total.releasing + total.stock + size <= total.capacity
        )

    def stocked(self, event: ev.Stocked) -> None:
        """Take in a new extent; if making it failed, no more of its kind is wanted until the next request."""
        self._making = False
        kind = (event.location, event.extent_bytes)
        if not event.made:
            if kind in self._wishes:  # keep the wish, so that the stock left of it goes stale in time
                self._wishes[kind].count = self._ready.get(kind, 0)
            return
        self._change(kind, 1, "made")
        if kind not in self._wishes or self._unwanted:
            self._drop_kind(kind)
        self.make_room(event.location)
        self.fill()

    def _drop_kind(self, kind: Kind) -> None:
        if self._ready.get(kind):
            self._drop(kind, self._ready[kind])

    def _drop(self, kind: Kind, count: int) -> None:
        self._change(kind, -count, "dropped")
        location, size = kind
        self._books.emit(fx.DropStock(location, size, count))

    def _change(self, kind: Kind, change: int, cause: str) -> None:
        location, size = kind
        ready = self._ready.get(kind, 0) + change
        if ready:
            self._ready[kind] = ready
        else:
            del self._ready[kind]
        self._extents += change
        self._bytes += change * size
        self.changes[cause] += abs(change)
        self._books.record(ft.StockChanged(location, size, change, cause))
