"""The takeover: a daemon continues with its predecessor's books, descriptors and processes to watch.

It tells the core what was found. It must never decide what the core decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from membroker.vmm import format_size
from membroker.wire.names import MAX_BYTES

from ..core import facts as ft
from ..core import policy
from ..core.books import COUNTER_BITS
from ..core.checkpoint import checkpoint_facts
from ..core.ledger import Ledger
from ..core.names import LOCATIONS, Location
from ..core.recount import recount
from ..device.executor import OWN, Executor
from ..device.suspects import MOST_NAMED, command_of
from ..system import logs
from .descriptor_store import Store, StoredDescriptors
from .process_watch import Watch
from .records import MAX_IDS


class PredecessorBooks(NamedTuple):
    """The predecessor's books.

    `charged` has the bytes of each location that is in use. They may be 0: a segment whose create failed has a row
    until its name is free. `by_pid` is what the sessions of each process are charged on the device. `epoch` is the
    latest epoch of all ids in the books.
    """

    facts: list[ft.Fact]
    charged: dict[Location, int]
    by_pid: Mapping[int, int]
    epoch: int


def rebuild_books(facts: Iterable[ft.Fact]) -> PredecessorBooks:
    """Return the books that result from these facts, with the fewest facts that make them.

    Raises `AssertionError` or `KeyError` if the facts contradict each other.
    """
    ledger = Ledger(dict.fromkeys(LOCATIONS, MAX_BYTES))
    for fact in _bounded(facts, ledger):
        ledger.apply(fact)
    recount(ledger)
    segments = {row.location for row in ledger.segments.values()}
    charged = {where: total.charged for where, total in ledger.totals.items() if total.charged or where in segments}
    by_pid: Counter[int] = Counter()
    for row in ledger.sessions.values():
        by_pid[row.pid] += row.charged("device")
    return PredecessorBooks(
        list(checkpoint_facts(ledger)), charged, by_pid, max(_ids(ledger), default=0) >> COUNTER_BITS
    )


def _bounded(facts: Iterable[ft.Fact], ledger: Ledger) -> Iterator[ft.Fact]:
    """Yield the facts, and fail if the ledger, which has a row for each extent, would have more than MAX_IDS of them.

    Credits are taken into account only once the debits alone exceed the bound.
    """
    extents = 0
    for fact in facts:
        if isinstance(fact, ft.Debited):
            extents += fact.count
            if extents > MAX_IDS:
                extents = fact.count + sum(len(row.extents) for row in ledger.sessions.values())
                assert extents <= MAX_IDS, f"{extents} extents are lent at once, more than {MAX_IDS}"
        yield fact


def _ids(ledger: Ledger) -> Iterator[int]:
    """Yield all ids in the books; of a segment's, only the largest."""
    yield from chain(ledger.sessions, ledger.segments)
    for row in ledger.sessions.values():
        yield from row.extents
    for segment in ledger.segments.values():
        yield segment.ids[-1]


def last_epoch(kept: StoredDescriptors) -> int:
    """Return the latest epoch of the ids in a descriptor store."""
    ids = chain(kept.processes, kept.segments, *kept.segments.values())
    return max(ids, default=0) >> COUNTER_BITS


def warn_of_holders(listed: Iterable[tuple[int, int]], by_pid: Mapping[int, int]) -> None:
    """Log the processes that use more of the device than these incomplete books charge them.

    `listed` are (pid, bytes) from the driver. Only the largest are named.
    """
    holders = sorted(((size, pid) for pid, size in listed if size > by_pid.get(pid, 0)), reverse=True)
    for size, pid in holders[:MOST_NAMED]:
        logs.warn(
            "a worker of an earlier daemon may still hold memory, which counts as unaccounted until the worker ends",
            pid=pid,
            command=command_of(pid),
            holds=format_size(size),
        )
    if len(holders) > MOST_NAMED:
        logs.warn("more processes may hold memory: `membroker processes` lists them", count=len(holders) - MOST_NAMED)


def cover_lent(capacities: Mapping[Location, int], charged: Mapping[Location, int]) -> dict[Location, int]:
    """Return the capacities, each raised to at least what is lent already: workers have that memory."""
    raised = dict(capacities)
    for where, size in charged.items():
        if size > raised.get(where, -1):
            logs.warn(
                "more is lent than the configured capacity: until the next start, the capacity is the amount lent now",
                location=where,
                capacity_bytes=raised.get(where, 0),
                lent_bytes=size,
            )
            raised[where] = size
    return raised


def take_descriptors(ledger: Ledger, store: Store, executor: Executor, kept: StoredDescriptors) -> frozenset[int]:
    """Make the store agree with the books. Return the segments with missing descriptors."""
    for session in kept.processes.keys() - ledger.sessions.keys():
        store.forget_process(session)
    unknown = [segment for segment in kept.segments if segment not in ledger.segments]
    for segment in unknown:
        executor.close(OWN, store.give_up(segment))
    if unknown:
        logs.log("closed descriptors of segments that are not in the books", segments=len(unknown))
    lost = [
        row
        for row in ledger.segments.values()
        if row.state in policy.ATTACHABLE
        and not all(extent in kept.segments.get(row.segment, {}) for extent in row.ids)
    ]
    for row in lost:
        logs.warn(
            "some descriptors of a segment are missing: the segment was still being created, or the descriptor store "
            "lost them; the segment cannot be attached any more",
            segment=str(row.full_name()),
            state=row.state,
        )
    return frozenset(row.segment for row in lost)


def watch_processes(ledger: Ledger, watch: Watch, kept: StoredDescriptors) -> None:
    """Watch the processes of the sessions that are taken over."""
    for row in list(ledger.sessions.values()):
        if row.state != "releasing":
            watch.inherit(row.session, row.pid, row.process, kept.processes.get(row.session))


def warn_of_removed_tenants(ledger: Ledger, endpoints: Collection[str]) -> None:
    """Log the sessions that cannot resume, because their endpoint is not among these."""
    lost = Counter(row.endpoint for row in ledger.sessions.values() if row.state != "releasing" and row.endpoint)
    for endpoint in sorted(lost.keys() - set(endpoints)):
        logs.warn(
            "a tenant that is not configured any more has sessions: they cannot resume, and stay charged until their "
            "processes end; configure the tenant again and restart, or end the processes",
            tenant=endpoint,
            sessions=lost[endpoint],
        )
