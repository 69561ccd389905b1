"""What a daemon takes over from the one before it: the books, the descriptors, and the processes to watch.

Nothing is decided here that the core decides: it learns what there is, and goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from membroker.vmm import format_size
from membroker.vmm.sizes import MAX_BYTES

from ..core import facts as ft
from ..core import policy
from ..core.books import COUNTER_BITS
from ..core.events import LOCATIONS, Location
from ..core.facts_of import story
from ..core.ledger import Ledger
from ..core.recount import recount
from ..executor import Executor
from ..observe import logs
from ..observe.suspects import MOST_NAMED, command_of
from .descriptor_store import Kept, Store
from .process_watch import Watch
from .records import MAX_IDS


class Books(NamedTuple):
    """What the daemon before this one has left, as this one needs it.

    `charged` has each location that has anything on file. That may be nothing: a segment whose create has failed has a
    row until its name is free. `by_pid` is what the sessions of each process are charged at the device. No id on file
    is of a later epoch than `epoch`.
    """

    story: list[ft.Fact]
    charged: dict[Location, int]
    by_pid: Mapping[int, int]
    epoch: int


def condense(told: Iterable[ft.Fact]) -> Books:
    """Return the books that these facts make, as the shortest story of them.

    Raises `AssertionError` or `KeyError` where the facts contradict each other.
    """
    ledger = Ledger(dict.fromkeys(LOCATIONS, MAX_BYTES))
    for fact in _bounded(told, ledger):
        ledger.apply(fact)
    recount(ledger)
    segments = {row.location for row in ledger.segments.values()}
    charged = {where: total.charged for where, total in ledger.totals.items() if total.charged or where in segments}
    by_pid: Counter[int] = Counter()
    for row in ledger.sessions.values():
        by_pid[row.pid] += row.charged("device")
    return Books(list(story(ledger)), charged, by_pid, max(_ids(ledger), default=0) >> COUNTER_BITS)


def _bounded(told: Iterable[ft.Fact], ledger: Ledger) -> Iterator[ft.Fact]:
    """Yield the facts while the ledger has at most MAX_IDS extents: it has a row for each.

    What is credited meanwhile is counted only when that may matter.
    """
    extents = 0
    for fact in told:
        if isinstance(fact, ft.Debited):
            extents += fact.count
            if extents > MAX_IDS:
                extents = fact.count + sum(len(row.extents) for row in ledger.sessions.values())
                assert extents <= MAX_IDS, f"{extents} extents are lent at once, and {MAX_IDS} may be"
        yield fact


def _ids(ledger: Ledger) -> Iterator[int]:
    """Yield the largest ids on file."""
    yield from chain(ledger.sessions, ledger.segments)
    for row in ledger.sessions.values():
        yield from row.extents
    for segment in ledger.segments.values():
        yield segment.ids[-1]


def last_epoch(kept: Kept) -> int:
    """Return the latest epoch of the ids that a descriptor store knows."""
    ids = chain(kept.processes, kept.segments, *kept.segments.values())
    return max(ids, default=0) >> COUNTER_BITS


def warn_of_holders(listed: Iterable[tuple[int, int]], by_pid: Mapping[int, int]) -> None:
    """Name the processes that use more of the device than these books, from which something is missing, charge them.

    `listed` are the driver's (pid, bytes). The largest are named.
    """
    holders = sorted(((size, pid) for pid, size in listed if size > by_pid.get(pid, 0)), reverse=True)
    for size, pid in holders[:MOST_NAMED]:
        logs.warn(
            "an earlier daemon's worker may still hold memory; until it ends it counts as unaccounted",
            pid=pid,
            command=command_of(pid),
            holds=format_size(size),
        )
    if len(holders) > MOST_NAMED:
        logs.warn("more processes may hold memory: `membroker processes` lists them", count=len(holders) - MOST_NAMED)


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
