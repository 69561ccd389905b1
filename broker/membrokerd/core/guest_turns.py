"""Guests: whose turn it is among those that wait, and which others are asked to go for it.

Guests are recalled as a whole, and only when all pieces that models have beyond their shares do not suffice: those that
have declared nothing for the longest time, as many as suffice. Of these, a guest is left alone if the later ones
suffice without it. Then only those pieces are recalled that are lacking besides. A guest that waits beyond its share
has its turn after all requests within theirs: other guests whose slices are over are recalled for it, if it can run
then. Once it has waited longer than two slices, guests whose turn is later wait until it has had its turn, also those
within their shares, if it can run when all slices are over. The turn is first that of the tenant whose guests had none
for the longest time, then that of its oldest request. So tenants whose guests do not fit together divide the time,
however many guests each has. A guest is lent nothing that is guaranteed to others: while its slice lasts, it is firm.

Owns nothing. Must never ask for a piece of a model's memory: `schedule` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .books import Books
from .names import Location, ModelName
from .recallable import Borrower
from .recalls import Recalls
from .request_lines import Look
from .requests import DebitRequest


class GuestToAsk(NamedTuple):
    """A guest that could be asked for all that it has. `firm` of that cannot be recalled for other tenants."""

    borrower: Borrower
    size: int
    firm: int = 0


class GuestsThatCanGo(dict[tuple[str, bool], list[GuestToAsk]]):
    """Which guests could be asked for a guest of a tenant; True: or will be when their slices are over."""


class GuestTurns:
    """The order of the guests that wait, and of those that can go."""

    def __init__(self, books: Books, recalls: Recalls) -> None:
        self._books = books
        self._recalls = recalls

    def take(self, location: Location, looks: Sequence[Look], now: int) -> bool:
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
        return sorted(guests, key=lambda each: self.turn(location, each[0]))

    def turn(self, location: Location, request: DebitRequest) -> tuple[int, int]:
        """Return what guests are ordered by: when their tenant had its last turn, and then their age."""
        return self._books.ledger.turns.get((request.name.tenant, location), -1), request.event.call

    def behind_an_aged_one(self, location: Location, looks: Sequence[Look], now: int) -> Sequence[Look]:
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
                can_run = request.size <= look.room or self._recalls.is_on_its_way(location)
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
            return self._recalls.is_on_its_way(request.location)
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

    def beside_pieces(
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
            above = self._recalls.not_asked(name, location) - taken[name] - shares.get(name, 0)
            if name in excess and above > 0 and left > 0 and size:
                found.append(GuestToAsk(borrower, size))
                taken[name] += size
                left -= size
        return _fewest(found, short) or found


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
