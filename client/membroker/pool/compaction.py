"""Compaction: runs of used pages move to lower addresses, so that the free addresses lie together.

Owns the order of the moves. A run moves whole or not at all, and no byte is copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import CompactionFailed
from ..interrupts import Operation, Step
from ..types import Move
from ..vmm.driver import DriverError
from .page_table import FIXED, FREE, USED, PageTable

_RUN = re.compile(b"[^%c]+" % FREE)


def plan(table: PageTable) -> list[Move]:
    """Return the moves that `compact` would make now. They may differ later, because the lock is released."""
    with table.lock:
        layout = table.layout(table.pinned(), spare=FREE)
    moves, cursor = [], 0
    while step := next_move(layout, cursor):
        pages, to = step
        layout[pages.start : pages.stop] = bytes(len(pages))
        layout[to.start : to.stop] = bytes((USED,)) * len(to)
        moves.append(_as_move(step, table.page_size))
        cursor = pages.stop
    return moves


def compact(table: PageTable, on_move: Callable[[Move], object] | None) -> list[Move]:
    """Move runs, one after the other, and return the moves."""
    moves: list[Move] = []
    with Operation(table.holding):
        cursor: int | None = 0
        while cursor is not None:
            try:
                cursor = _move_next(table, cursor, on_move, moves)
            except DriverError as error:
                raise CompactionFailed(f"after {len(moves)} moves: {error}", moves) from error
    return moves


def _move_next(
    table: PageTable, cursor: int, on_move: Callable[[Move], object] | None, moves: list[Move]
) -> int | None:
    """Make the next move from page `cursor` on, and return the page to continue at; None if no run can move.

    The old and the new pages stay claimed until `on_move` has returned. When a run moves over itself, an old
    address would otherwise have other bytes before the user knows of the move.
    """
    region, ends = table.holding.region, list[Step]()
    try:
        with table.lock:
            step = next_move(table.layout(table.pinned(), spare=FIXED), cursor)
            if step is None:
                return None
            table.claim(ends, step)
        pages, to = step
        move = _as_move(step, table.page_size)
        table.holding.source.driver.synchronize()
        region.move(move.old_offset, move.new_offset, table.page_size, len(to))
        with table.lock:
            table.move(pages, to)
        moves.append(move)
        if on_move is not None:
            on_move(move)
        return pages.stop
    finally:
        for end in ends:
            end()


def _as_move(step: tuple[range, range], page_size: int) -> Move:
    pages, to = step
    return Move(pages.start * page_size, to.start * page_size, len(pages) * page_size)


def next_move(layout: bytearray, cursor: int) -> tuple[range, range] | None:
    """Return the first run from page `cursor` on that can move lower, and its new pages; None if no run can.

    `layout` has `FREE`, `USED` or `FIXED` for each page. A run with a fixed page stays. A run moves to the lowest hole
    that holds all of it. Otherwise it moves down into the hole directly below it, over itself.
    """
    if cursor and layout[cursor - 1 : cursor] != bytes((FREE,)):  # the run here was examined before: skip the rest
        cursor = len(layout) - len(layout[cursor:].lstrip(bytes((USED, FIXED))))
    for run in _RUN.finditer(layout, cursor):
        start, length = run.start(), len(run[0])
        if FIXED in run[0]:
            continue
        target = layout.find(bytes(length), 0, start)
        if target < 0:
            target = len(layout[:start].rstrip(bytes((FREE,))))
        if target < start:
            return range(start, start + length), range(target, target + length)
    return None
