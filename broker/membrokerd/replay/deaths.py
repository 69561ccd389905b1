"""What the device of a replay shows: the books' bytes, and those of the dead until they were seen to be free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ..ext import Broker, Location, SessionRow
from ..ext import events as ev


class Deaths:
    """The figures of the device. `tell` gives the core an event."""

    def __init__(self, broker: Broker, tell: Callable[[ev.Event], None]) -> None:
        self._broker = broker
        self._tell = tell
        self._gone: dict[Location, int] = defaultdict(int)
        """Bytes of the dead that the device shows free, and that are not credited."""

    def settled(self, row: SessionRow | None, location: Location | None) -> None:
        """Let the device show the memory of a dead session free, as it did; None: at all locations."""
        if row is None or row.state != "releasing":
            return
        for where in self._broker.ledger.totals:
            if location in (None, where):
                self._gone[where] += row.charged(where)
        self.audit()

    def audit(self) -> None:
        """Tell the core what the device shows."""
        totals = self._broker.ledger.totals
        before = {where: total.charged for where, total in totals.items()}
        self._tell(ev.Audit(self.seen()))
        for where, charged in before.items():
            self._gone[where] = max(0, self._gone[where] - max(0, charged - totals[where].charged))

    def seen(self) -> ev.Seen:
        """Return the bytes in use."""
        books = self._broker.books
        anchor = {"device": books.rules.anchor_bytes}
        return {
            where: total.charged + total.stock + anchor.get(where, 0) - books.making[where] - self._gone[where]
            for where, total in books.ledger.totals.items()
        }
