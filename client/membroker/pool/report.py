"""What a pool tells of itself: its figures, a row for each run of equal pages, and a picture of them.

It reads the table under its lock, and works out the rest without it. It must never change anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from html import escape
from itertools import groupby

from ..types import MemoryStats, PoolMapping
from ..vmm.driver import AccessFlags
from ..vmm.sizes import format_size
from .page_table import OFFLOADED, SPARE, PageTable

_CELLS = 64
_MOST_PARTS = 1_000
_SIGNS = {"used": "#", "pinned": "P", "spare": "s", "offloaded": "o", "changing": "?"}
_COLOURS = {"used": "#3b7dbd", "pinned": "#1d3f66", "spare": "#a9cbe8", "offloaded": "#c9a227", "changing": "#999"}
_STATES = {SPARE: "spare", OFFLOADED: "offloaded"}


def stats(table: PageTable) -> MemoryStats:
    """Return the present figures."""
    page_size = table.page_size
    with table.lock:
        mapped, spare, offloaded = len(table.holding.region.extents), table.spare, table.offloaded()
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


def mappings(table: PageTable, *, by_page: bool) -> list[PoolMapping]:
    """Return a row for each run of equal pages, or for each page, by offset."""
    page_size = table.page_size
    with table.lock:
        runs, pins = list(table.runs()), table.pinned(pages_only=True)
        extents, restricted = table.holding.extents, table.restricted.copy()
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


def text_map(rows: Sequence[PoolMapping], page_size: int) -> str:
    """Draw mappings as a line of at most 64 cells up to the end of the last one, with what a cell is."""
    pages = -(-max((row.offset + row.size for row in rows), default=0) // page_size)
    if not pages:
        return "nothing is allocated"
    cell = -(-pages // _CELLS) * page_size
    counts = [Counter[str]() for _ in range(-(-pages * page_size // cell))]
    for row in rows:
        for number in range(row.offset // cell, -(-(row.offset + row.size) // cell)):
            inside = min(row.offset + row.size, (number + 1) * cell) - max(row.offset, number * cell)
            counts[number][row.state] += inside
    line = "".join(_SIGNS[count.most_common(1)[0][0]] if count else "." for count in counts)
    states = [f"{sign} {state}" for state, sign in _SIGNS.items() if sign in line]
    return f"|{line}| {', '.join(states)}; a cell is {format_size(cell)}"


def html_map(title: str, rows: Sequence[PoolMapping]) -> str:
    """Draw mappings as a bar, for a notebook; at most the first 1,000 of them."""
    end = max((row.offset + row.size for row in rows), default=1)
    parts = [
        f'<rect x="{row.offset / end * 1000:.3f}" width="{row.size / end * 1000:.3f}" height="24" '
        f'fill="{_COLOURS[row.state]}"><title>{row.offset} + {format_size(row.size)}: {row.state}, {row.access}</title>'
        "</rect>"
        for row in rows[:_MOST_PARTS]
    ]
    left_out = f"<br>and {len(rows) - _MOST_PARTS} more" if len(rows) > _MOST_PARTS else ""
    bar = f'<svg viewBox="0 0 1000 24" width="100%" height="24" preserveAspectRatio="none">{"".join(parts)}</svg>'
    return f"<div>{escape(title)}<br>{bar}{left_out}</div>"


def _alike(pages: range, pinned: Set[int], restricted: Mapping[int, AccessFlags]) -> Iterator[range]:
    """Split a run at the boundaries of pins, and where the access changes."""
    if not (pinned or restricted):
        yield pages
        return
    for _, run in groupby(pages, lambda page: (page in pinned, restricted.get(page))):
        first, *rest = run
        yield range(first, first + len(rest) + 1)
