"""What a daemon takes over from the one before it: the books, the descriptors, and the processes to watch.

Nothing is decided here that the core decides: it learns what there is, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import logs
from .core import facts as ft
from .core import policy
from .core.events import LOCATIONS, Location
from .core.ledger import Ledger, replay
from .core.story import story
from .executor import Executor
from .handoff.watch import Watch
from .store import Kept, Store


def condense(told: Iterable[ft.Fact]) -> tuple[list[ft.Fact], dict[Location, int]]:
    """Return the shortest story of the same books, and what is charged at each location that has anything on file.

    That may be nothing: a segment whose create has failed has a row until its name is free.
    """
    ledger = replay(dict.fromkeys(LOCATIONS, 0), told)
    segments = {row.location for row in ledger.segments.values()}
    charged = {where: total.charged for where, total in ledger.totals.items() if total.charged or where in segments}
    return story(ledger), charged


def hold_what_is_lent(capacities: Mapping[Location, int], charged: Mapping[Location, int]) -> dict[Location, int]:
    """Return the capacities, each at least what is lent already: that is out, whatever the configuration says now."""
    held = dict(capacities)
    for where, size in charged.items():
        if size > held.get(where, -1):
            logs.warn(
                "more is lent than the configuration allows now: the capacity stays at that until the next start",
                location=where,
                capacity_bytes=held.get(where, 0),
                lent_bytes=size,
            )
            held[where] = size
    return held


def take_descriptors(ledger: Ledger, store: Store, executor: Executor, kept: Kept) -> frozenset[int]:
    """Make the store agree with the books; return the segments of which it has not every descriptor."""
    for session in kept.processes.keys() - ledger.sessions.keys():
        store.forget_process(session)
    strangers = [segment for segment in kept.segments if segment not in ledger.segments]
    for segment in strangers:
        executor.close(store.give_up(segment), lambda _: None)
    if strangers:
        logs.log("descriptors of segments that the books do not know are closed", segments=len(strangers))
    lost = [
        row
        for row in ledger.segments.values()
        if row.state in policy.ATTACHABLE
        and not all(extent in kept.segments.get(row.segment, {}) for extent in row.ids)
    ]
    for row in lost:
        logs.warn(
            "not every descriptor of a segment was kept: it was still being made, or the descriptor store lost it; "
            "nobody can attach it any more",
            segment=str(row.full_name()),
            state=row.state,
        )
    return frozenset(row.segment for row in lost)


def watch_processes(ledger: Ledger, watch: Watch, kept: Kept) -> None:
    """Watch the processes of the sessions that go on."""
    for row in list(ledger.sessions.values()):
        if row.state != "releasing":
            watch.inherit(row.session, row.pid, row.process, kept.processes.get(row.session))
