"""Deaths: a dead session's bytes stay charged until the device shows them free, or a time limit has passed.

Memory can outlive its connection and its process: a forked child, or a packet that was never read, can keep it alive.
Only the device's own figure is proof, and the rule uses that figure alone. `unaccounted` is what the device has in use
beyond the books. When a dead session's memory is freed, `unaccounted` falls by that session's bytes, and the session
is credited as a whole; so each death records a reference to measure the fall from. A credit raises `unaccounted`
again by the bytes it credits, so one fall pays for one death only; workers that die together are settled together.

A death can be credited too early: when another process frees at least as much while the dead session's memory is
still held. The books are then wrong until the last holder ends. The bytes show as `unaccounted` meanwhile, and the
device gate still refuses what does not fit.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass

from . import effects as fx
from . import events as ev
from . import facts as ft
from .books import Books
from .lending import Lending
from .names import Location
from .rows import SegmentRow, SessionRow
from .segments import Segments
from .sessions import Sessions

NOTICE_NS = 1_000_000_000
"""How long before a death is reported its memory may be freed: its reference is taken from audits of that time."""
CREDITS_AT_ONCE = 64
"""Deaths credited in one step. The rest wait for the next audit, so that other events get their turn."""
NAMING_NS = 1_000_000_000
"""Minimum interval between two listings of suspects, which cost a driver query."""


@dataclass(slots=True, eq=False)
class Death:
    """Bytes at one location of a dead session or a dropped segment. `reference`: None where the device cannot say."""

    owner: int
    location: Location
    died_at: int
    reference: int | None


class Releasing:
    """The deaths that are not settled, newest last, and the figures of the last audit."""

    def __init__(self, books: Books, lending: Lending, segments: Segments, sessions: Sessions) -> None:
        self.unproven: Counter[Location] = Counter()
        """Credits made by the time limit and not by the device's figure: those bytes may still be held."""
        self._books = books
        self._lending = lending
        self._segments = segments
        self._sessions = sessions
        self.deaths: list[Death] = []
        """While there are any, the device must be audited often."""
        self._used: dict[Location, int | None] = dict.fromkeys(books.rules.capacities)
        self._at_audit: dict[Location, int | None] = dict.fromkeys(books.rules.capacities)
        self._at_look = self._at_audit
        """As `_at_audit`, but of the last audit or death, whichever was later."""
        self._before_drop: dict[int, int | None] = {}
        """By segment: the last figure from before its drop began, if there was another one since."""
        self._lately: deque[tuple[int, dict[Location, int | None]]] = deque()
        self._baseline: int | None = None
        """The part of the device's `unaccounted` that was there at the start, or for which suspects were named."""
        self._name_again_at = 0

    def shown(self, location: Location) -> int | None:
        """Return `unaccounted` as of the last audit, for listings: figures of one moment."""
        return self._at_audit[location]

    def unaccounted(self, location: Location) -> int | None:
        """Return the bytes in use on the device beyond the books, signed; None where the device cannot say.

        Debited bytes that may not exist yet do not count as expected.
        """
        used = self._used[location]
        if used is None:
            return None
        total = self._books.ledger.totals[location]
        anchor = self._books.rules.anchor_bytes if location == "device" else 0
        return used - (total.charged + total.stock + anchor - self._books.making[location])

    def process_died(self, event: ev.ProcessDied, now: int) -> None:
        """Turn a session's charges to releasing, and record the references that their release is measured from."""
        row = self._books.ledger.sessions.get(event.session)
        if row is None or row.state == "releasing":
            return
        self._keep_references()
        self._see(event.seen)
        references = {location: self._reference(location, now) for location in self._used}
        self._sessions.give_up(row.session)
        self._books.record(ft.SessionMoved(row.session, "process died", now))
        self._lending.give_up(row, now)
        self._segments.attaches.give_up(row.session)
        with self._books.recallable.guests_counted_once():
            self._segments.leave_all(row, "holder died")
        for location, reference in references.items():
            self.deaths.append(Death(row.session, location, now, reference))
        self._settle(now)
        self._at_look = self._unaccounted_everywhere()

    def segment_dropped(self, row: SegmentRow, now: int) -> None:
        """Turn a segment's charge to releasing: a holder died, so a process may still have it mapped.

        The broker itself held it until the drop began, so its reference is the last figure before that. What was lent
        or released since then is in the books but not in that figure, and would pass for this segment's memory: the
        next audit decides.
        """
        self._books.record(ft.SegmentMoved(row.segment, "dropped after a death"))
        reference = self._before_drop.pop(row.segment, self._at_look[row.location])
        self.deaths.append(Death(row.segment, row.location, now, reference))

    def _keep_references(self) -> None:
        """Keep the last figure for the segments that are being dropped: the next one may show their memory free."""
        for row in self._books.ledger.segments.values():
            if row.state == "dropping" and row.uncertain:
                self._before_drop.setdefault(row.segment, self._at_look[row.location])

    def restarted(self, seen: ev.Seen, now: int) -> None:
        """Take over the deaths of an earlier daemon; later ones are measured from the last figure that it recorded.

        Bytes that it had booked but never made, or that its descriptor store has lost, look like a fall until they
        are credited. So a death can be credited early, as by another process's fall.
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
                self.deaths.append(Death(owner, location, now, self._reference(location, now)))

    def _note(self) -> None:
        """Record the current figure for a later daemon, when it has changed by a granule or more."""
        for location, seen in self._at_audit.items():
            noted = self._books.ledger.totals[location].unaccounted
            if seen is not None and (noted is None or abs(seen - noted) >= self._books.rules.granularity):
                self._books.record(ft.UnaccountedSeen(location, seen))

    def _reference(self, location: Location, now: int) -> int | None:
        lately = [seen[location] for at, seen in self._lately if now - at <= NOTICE_NS]
        known = [size for size in (self.unaccounted(location), self._at_audit[location], *lately) if size is not None]
        return max(known) if known else None

    def audit(self, event: ev.Audit, now: int) -> None:
        """Take the device's figures, and credit the deaths that they prove."""
        self._keep_references()
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

        One audit is not enough, for a rise or a fall: it may fall between a worker's unmap and its Release. Negative
        figures are declarations that are not in use yet; memory that fills them is in the books.
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

    def _unaccounted_everywhere(self) -> dict[Location, int | None]:
        return {location: self.unaccounted(location) for location in self._used}

    def _see(self, seen: ev.Seen) -> None:
        self._used = {location: seen.get(location) for location in self._used}

    def _settle(self, now: int) -> None:
        """Credit the deaths that are due, newest first, up to the bound of one step.

        Each is looked at once: a credit proves no other death, because it raises `unaccounted`.
        """
        due = (death for death in reversed(self.deaths.copy()) if self._is_due(death, now))
        for death in itertools.islice(due, CREDITS_AT_ONCE):
            self._credit(death, now)

    def _is_due(self, death: Death, now: int) -> bool:
        row = self._row(death)
        if isinstance(row, SessionRow) and self._lending.making_of(row.session):
            return False
        charged = row.charged(death.location)
        return not charged or self._proven(death, charged) or now - death.died_at >= self._books.rules.settle_ns

    def _proven(self, death: Death, charged: int) -> bool:
        """Say whether the device shows the bytes free, to less than a granule.

        A GPU keeps some memory of its own for an extent: after a worker's 4 GiB were freed, 64 KiB more were in use
        than before they were allocated (H200, driver 580.159).
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
        self.deaths.remove(death)
        if charged and not proven:
            self.unproven[death.location] += 1
        if isinstance(row, SegmentRow):
            self._books.record(ft.SegmentEnded(row.segment, proven))
            return
        if charged:
            self._books.record(ft.LocationSettled(row.session, death.location, proven))
        if not any(other.owner == row.session for other in self.deaths):
            self._books.record(ft.SessionMoved(row.session, "settled", now))
            self._sessions.end(row, now)
