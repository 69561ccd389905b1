"""What a pool tells of itself: its figures, and a row for each run of equal pages.

It reads the table under its lock, and works out the rest without it. It must never change anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from itertools import groupby

from ..types import MemoryStats, PoolMapping
from ..vmm.driver import AccessFlags
from .claims import Claims
from .page_table import OFFLOADED, SPARE

_STATES = {SPARE: "spare", OFFLOADED: "offloaded"}


def stats(claims: Claims) -> MemoryStats:
    """Return the present figures."""
    table, page_size = claims.table, claims.table.page_size
    with claims.lock:
        mapped, spare, offloaded = len(claims.holding.region.extents), table.spare, table.offloaded()
        largest, free = table.largest_free_run()
    return MemoryStats(
        virtual_capacity_bytes=table.count * page_size,
        physical_usage_bytes=mapped * page_size,
        mapped_pages=mapped,
        largest_free_run_bytes=largest * page_size,
        fragmentation_ratio=1 - largest / free if free else 0.0,
        spare_pages=spare,
        offloaded_bytes=offloaded * page_size,
    )


def mappings(claims: Claims, *, by_page: bool) -> list[PoolMapping]:
    """Return a row for each run of equal pages, or for each page, by offset."""
    page_size = claims.table.page_size
    with claims.lock:
        runs, pins = list(claims.table.runs()), claims.pinned(pages_only=True)
        extents, restricted = claims.holding.extents, claims.table.restricted.copy()
    # The lock is released here: the rest takes long with many pages, and allocations go on meanwhile.
    pinned = {page for pages in pins for page in pages}
    rows = []
    for pages, state, busy in runs:
        common = "changing" if busy else _STATES.get(state)
        single = (range(page, page + 1) for page in pages)
        for run in single if by_page else _alike(pages, pinned, restricted):
            offset, end = run.start * page_size, run.stop * page_size
            access = restricted.get(run.start, AccessFlags.READ_WRITE)
            behind = map(extents.get, range(offset, end, page_size))
            rows.append(
                PoolMapping(
                    offset,
                    end - offset,
                    common or ("pinned" if run.start in pinned else "used"),
                    access.name.lower(),
                    tuple(extent for extent in behind if extent is not None),
                )
            )
    return rows


def _alike(pages: range, pinned: Set[int], restricted: Mapping[int, AccessFlags]) -> Iterator[range]:
    """Split a run at the boundaries of pins, and where the access changes."""
    if not (pinned or restricted):
        yield pages
        return
    for _, run in groupby(pages, lambda page: (page in pinned, restricted.get(page))):
        first, *rest = run
        yield range(first, first + len(rest) + 1)
