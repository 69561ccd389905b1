"""The books as facts: the shortest list that, replayed, makes the current books.

A journal that begins with it is as short as the books, however long the daemon has run. It leaves out the stock,
which ends with the daemon, and quotas, which are kept elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from . import facts as ft
from . import lifecycles
from .ledger import Ledger
from .rows import Loan, ModelRow, SegmentRow, SessionRow


def checkpoint_facts(ledger: Ledger) -> Iterator[ft.Fact]:
    """Return facts that, replayed, make every row and total of `ledger` but its revision, its stock and its quotas.

    The rows are copied at once, and told as the facts are asked for: meanwhile the ledger may change.
    """
    sessions = [_copy(row) for row in ledger.sessions.values()]
    segments = [replace(row, holders=dict(row.holders)) for row in ledger.segments.values()]
    began = [ft.ModelBegan(row.name, row.virtual_capacity, row.limits) for row in ledger.models.values()]
    carried = [_carry(row) for row in ledger.models.values()]
    turns = [ft.TurnBegan(tenant, location, at) for (tenant, location), at in ledger.turns.items()]
    unaccounted = [
        ft.UnaccountedSeen(where, total.unaccounted)
        for where, total in ledger.totals.items()
        if total.unaccounted is not None
    ]
    return _tell(sessions, segments, began, [*carried, *turns, *unaccounted])


def _copy(row: SessionRow) -> SessionRow:
    declared = {key: replace(charge) for key, charge in row.charges.items() if charge.declared}
    return replace(row, models=set(row.models), extents=dict(row.extents), charges=declared, guests=dict(row.guests))


def _tell(
    sessions: list[SessionRow], segments: list[SegmentRow], first: Iterable[ft.Fact], last: Iterable[ft.Fact]
) -> Iterator[ft.Fact]:
    yield from first
    for session in sessions:
        yield from _begin_session(session)
    for segment in segments:
        yield from _tell_segment(segment)
    for session in sessions:
        yield from (ft.SessionMoved(session.session, cause, session.began_at) for cause in _causes(session))
    yield from last


def _begin_session(row: SessionRow) -> Iterator[ft.Fact]:
    """Yield all facts of a session, except its holds of segments and its state.

    The state is told after the holds, because the death of a session turns its charges to releasing.
    """
    yield ft.SessionBegan(
        session=row.session,
        tenant=row.tenant,
        pid=row.pid,
        uid=row.uid,
        process=row.process,
        observer=row.observer,
        client=row.client,
        at=row.began_at,
        endpoint=row.endpoint,
        token_hash=row.token_hash,
    )
    for name in sorted(row.models):
        yield ft.ModelJoined(name, row.session)
    for first, count, (name, location, size) in _runs(row.extents.items()):
        yield ft.Debited(row.session, name, location, size, first, count)
    for (name, location), charge in row.charges.items():
        yield ft.DeclarationSet(row.session, name, location, charge.declared)
    for (name, location), times in row.guests.items():
        yield ft.GuestSet(row.session, name, location, times.used_at, times.slice_until)


def _runs(extents: Iterable[tuple[int, Loan]]) -> Iterator[tuple[int, int, Loan]]:
    """Yield (first id, count, loan) of extents that follow each other with equal loans."""
    first, count, last = 0, 0, None
    for extent, loan in extents:
        if extent == first + count and loan == last:
            count += 1
            continue
        if last is not None:
            yield first, count, last
        first, count, last = extent, 1, loan
    if last is not None:
        yield first, count, last


def _tell_segment(row: SegmentRow) -> Iterator[ft.Fact]:
    yield ft.SegmentBegan(
        segment=row.segment,
        name=row.name,
        label=row.label,
        location=row.location,
        extent_bytes=row.extent_bytes,
        last_bytes=row.last_bytes,
        first=row.ids.start,
        count=len(row.ids),
        writer=row.writer,
        at=row.began_at,
    )
    if row.delete_when_left:
        yield ft.SegmentBound(row.segment)
    if credited := len(row.ids) - row.extents:
        yield ft.SegmentCredited(row.segment, _credited(row, credited))
    if row.uncertain:
        yield ft.SegmentDoubted(row.segment)
    for session, times in row.holders.items():
        yield ft.SegmentHeld(row.segment, session)
        if times > 1:
            yield ft.SegmentHeldAgain(row.segment, session, times - 1)
    for cause in _causes(row):
        yield ft.SegmentMoved(row.segment, cause)


def _credited(row: SegmentRow, count: int) -> range:
    """Return `count` extents that add up to the bytes already credited; the books do not say which they were."""
    behind = row.ids[len(row.ids) - count :]
    return behind if row.size_of(row.ids) - row.size_of(behind) == row.bytes else row.ids[:count]


def _causes(row: SessionRow | SegmentRow) -> list[str]:
    """Return the shortest way through its lifecycle to where a row is."""
    table = lifecycles.SESSION if isinstance(row, SessionRow) else lifecycles.SEGMENT
    ways: deque[tuple[str, list[str]]] = deque([(next(iter(table)), [])])
    while ways[0][0] != row.state:
        state, causes = ways.popleft()
        ways += ((following, [*causes, cause]) for cause, following in table[state].items())
    return ways[0][1]


def _carry(row: ModelRow) -> ft.ModelCarried:
    peaks = {location: charge.peak for location, charge in row.charges.items()}
    return ft.ModelCarried(row.name, peaks, row.allocations, row.releases, row.idle_since)
