"""Settling: a dead session's bytes are charged until the device shows them free, or a limit of time has passed.

Neither the end of a connection nor the death of a process is the end of its memory: a forked child, or a packet that
nobody read, can keep it. Only the device's own figure is proof, and from that figure alone the rule is made. What
the device has used beyond the books is `unaccounted`; when a dead session's memory goes, it falls by that session's
bytes, and then the session is credited whole. So each death takes a reference to fall from. A credit raises
`unaccounted` again by what it paid, so that one fall pays once; several workers that die together are settled
together. What can credit a death early is a stranger's fall of at least its size while its memory is still held; the
books are then wrong until the holder ends, which shows as unaccounted, and the device gate stands behind them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from . import effects as fx
from . import events as ev
from . import facts as ft
from .books import Books
from .ledger import SegmentRow, SessionRow
from .lending import Lending
from .resuming import Resuming
from .segments import Segments
from .sessions import Sessions

NOTICE_NS = 1_000_000_000
"""How late a death may be told after its memory is gone: as long as between two audits at rest."""
NAMING_NS = 1_000_000_000
"""So long after suspects were named none are: who lies again and again must not keep the driver busy with it."""


@dataclass(slots=True)
class Death:
    """Bytes at one location of a dead session or a dropped segment. `reference`: None where the device cannot say."""

    owner: int
    location: ev.Location
    died_at: int
    reference: int | None


class Settling:
    """The deaths that are not settled, newest last, and what the last audit saw."""

    def __init__(
        self, books: Books, lending: Lending, segments: Segments, sessions: Sessions, resuming: Resuming
    ) -> None:
        self._books = books
        self._lending = lending
        self._segments = segments
        self._sessions = sessions
        self._resuming = resuming
        self._deaths: list[Death] = []
        self._used: dict[ev.Location, int | None] = dict.fromkeys(books.rules.capacities)
        self._at_audit: dict[ev.Location, int | None] = dict.fromkeys(books.rules.capacities)
        self._at_look = self._at_audit
        """As `_at_audit`, of an audit or a death, whichever was later."""
        self._lately: deque[tuple[int, dict[ev.Location, int | None]]] = deque()
        self._baseline: int | None = None
        """What of the device's `unaccounted` was there from the start, or has had its suspects named."""
        self._name_again_at = 0

    @property
    def waiting(self) -> bool:
        """Bytes are releasing: the device is to be asked often."""
        return bool(self._deaths)

    def shown(self, location: ev.Location) -> int | None:
        """Return `unaccounted` as it was when the device was last asked: figures of one moment, for people."""
        return self._at_audit[location]

    def unaccounted(self, location: ev.Location) -> int | None:
        """Return what the device has used beyond the books, in bytes and signed; None where it cannot say.

        A debit of which nothing may exist yet is not expected of the device.
        """
        used = self._used[location]
        if used is None:
            return None
        total = self._books.ledger.totals[location]
        anchor = self._books.rules.anchor_bytes if location == "device" else 0
        return used - (total.charged + total.stock + anchor - self._books.making[location])

    def process_died(self, event: ev.ProcessDied, now: int) -> None:
        """Turn a session's charges to releasing, and take the references that their end is known by."""
        row = self._books.ledger.sessions.get(event.session)
        if row is None or row.state == "releasing":
            return
        self._see(event.seen)
        references = {location: self._reference(location, now) for location in self._used}
        self._resuming.give_up(row.session)
        self._books.record(ft.SessionMoved(row.session, "process died", now))
        self._lending.give_up(row)
        self._segments.give_up(row.session)
        self._segments.leave_all(row, "holder died")
        for location, reference in references.items():
            self._deaths.append(Death(row.session, location, now, reference))
        self._settle(now)
        self._at_look = self._unaccounted_everywhere()

    def segment_dropped(self, row: SegmentRow, now: int) -> None:
        """Turn a segment's charge to releasing: a holder died, so somebody may still have it mapped.

        The broker itself had it until now, so its reference is of the last look. What was lent or given back since
        then is in the books and not in the figure, and would be taken for this segment's: the next look decides.
        """
        self._books.record(ft.SegmentMoved(row.segment, "dropped after a death"))
        self._deaths.append(Death(row.segment, row.location, now, self._at_look[row.location]))

    def restarted(self, seen: ev.Seen, now: int) -> None:
        """Go on with the deaths of a daemon that is dead; what died meanwhile falls from what that one saw last.

        What it had booked and never made, and what its store has lost, looks like a fall until it is credited: so a
        death can be credited early, as by a stranger's fall.
        """
        ledger = self._books.ledger
        self._lately.append((now, {location: ledger.totals[location].unaccounted for location in self._used}))
        self._see(seen)
        self._at_audit = self._at_look = self._unaccounted_everywhere()
        owners: list[SessionRow | SegmentRow] = [*ledger.sessions.values(), *ledger.segments.values()]
        for row in [row for row in owners if row.state == "releasing"]:
            owner = row.session if isinstance(row, SessionRow) else row.segment
            locations = list(self._used) if isinstance(row, SessionRow) else [row.location]
            for location in locations:
                self._deaths.append(Death(owner, location, now, self._reference(location, now)))

    def _note(self) -> None:
        """Keep for a later daemon what is seen now, to less than a granule."""
        for location, seen in self._at_audit.items():
            noted = self._books.ledger.totals[location].unaccounted
            if seen is not None and (noted is None or abs(seen - noted) >= self._books.rules.granularity):
                self._books.record(ft.UnaccountedSeen(location, seen))

    def _reference(self, location: ev.Location, now: int) -> int | None:
        lately = [seen[location] for at, seen in self._lately if now - at <= NOTICE_NS]
        known = [size for size in (self.unaccounted(location), self._at_audit[location], *lately) if size is not None]
        return max(known) if known else None

    def audit(self, event: ev.Audit, now: int) -> None:
        """Take what the device shows, credit who is shown gone, and end what has been idle for its grace."""
        self._see(event.seen)
        self._settle(now)
        before = self._at_audit["device"]
        self._at_audit = self._at_look = self._unaccounted_everywhere()
        self._note()
        self._notice_rise(before, self._at_audit["device"], now)
        self._lately.append((now, self._at_audit))
        while now - self._lately[0][0] > NOTICE_NS:
            self._lately.popleft()

    def _notice_rise(self, before: int | None, seen: int | None, now: int) -> None:
        """Have suspects named when two audits in a row show `unaccounted` a granule or more above the baseline.

        One is not enough, for a rise nor for a fall: it may have been read between a worker's unmap and its word for
        it. Below zero lie declarations that are not used yet; what fills them is in the books.
        """
        if before is None or seen is None:
            return
        seen = max(0, seen)
        low, high = sorted((max(0, before), seen))
        baseline = low if self._baseline is None else min(self._baseline, high)
        if low - baseline >= self._books.rules.granularity and now >= self._name_again_at:
            self._books.emit(fx.NameSuspects(seen, seen - baseline))
            baseline, self._name_again_at = seen, now + NAMING_NS
        self._baseline = baseline

    def _unaccounted_everywhere(self) -> dict[ev.Location, int | None]:
        return {location: self.unaccounted(location) for location in self._used}

    def _see(self, seen: ev.Seen) -> None:
        for location in self._used:
            self._used[location] = seen.get(location)

    def _settle(self, now: int) -> None:
        """Credit deaths, newest first, until none of them is due."""
        while True:
            due = next((death for death in reversed(self._deaths) if self._is_due(death, now)), None)
            if due is None:
                return
            self._credit(due, now)

    def _is_due(self, death: Death, now: int) -> bool:
        row = self._row(death)
        if isinstance(row, SessionRow) and self._lending.making_of(row.session):
            return False
        charged = row.charged(death.location)
        return not charged or self._proven(death, charged) or now - death.died_at >= self._books.rules.settle_ns

    def _proven(self, death: Death, charged: int) -> bool:
        """Say whether the device shows the bytes gone, to less than a granule.

        A card keeps some of its own beside an extent: 64 KiB more were in use after a worker's 4 GiB had gone than
        before they came (H200, 580.159).
        """
        unaccounted = self.unaccounted(death.location)
        if death.reference is None or unaccounted is None:
            return False
        return unaccounted < death.reference - charged + self._books.rules.granularity

    def _row(self, death: Death) -> SessionRow | SegmentRow:
        ledger = self._books.ledger
        return ledger.sessions.get(death.owner) or ledger.segments[death.owner]

    def _credit(self, death: Death, now: int) -> None:
        row = self._row(death)
        charged = row.charged(death.location)
        proven = self._proven(death, charged)
        self._deaths.remove(death)
        if isinstance(row, SegmentRow):
            self._books.record(ft.SegmentEnded(row.segment, proven))
            return
        if charged:
            self._books.record(ft.LocationSettled(row.session, death.location, proven))
        if not any(other.owner == row.session for other in self._deaths):
            self._end(row, now)

    def _end(self, row: SessionRow, now: int) -> None:
        self._books.record(ft.SessionMoved(row.session, "settled", now))
        self._sessions.end(row, now)
