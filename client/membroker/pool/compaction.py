"""Compaction: runs of used pages move to lower addresses, so that the free addresses lie together.

Owns the order of the moves. A run moves whole or not at all, and no byte is copied.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import CompactionFailed
from ..interrupts import Operation
from ..memory.lifetime import MappedMemory
from ..types import Move
from ..vmm.driver import Driver, DriverError
from .claims import Claims
from .page_table import FIXED, FREE, USED, PageTable

_RUN = re.compile(b"[^%c]+" % FREE)


class Compaction:
    """The compaction of one pool."""

    def __init__(self, table: PageTable, holding: MappedMemory, claims: Claims, driver: Driver) -> None:
        self._table = table
        self._holding = holding
        self._claims = claims
        self._driver = driver

    def plan(self) -> list[Move]:
        """Return the moves that `run` would make now. They may differ later, because the lock is released."""
        with self._claims.lock:
            layout = self._table.layout(self._claims.pinned(), spare=FREE)
        moves, cursor = [], 0
        while step := next_move(layout, cursor):
            pages, to = step
            layout[pages.start : pages.stop] = bytes(len(pages))
            layout[to.start : to.stop] = bytes((USED,)) * len(to)
            moves.append(self._as_move(pages, to))
            cursor = pages.stop
        return moves

    def run(self, on_move: Callable[[Move], object]) -> list[Move]:
        """Move runs, one after the other, and return the moves."""
        moves: list[Move] = []
        with Operation(self._holding):
            cursor: int | None = 0
            while cursor is not None:
                try:
                    cursor = self._move_next(cursor, on_move, moves)
                except DriverError as error:
                    raise CompactionFailed(f"after {len(moves)} moves: {error}", moves) from error
        return moves

    def _move_next(self, cursor: int, on_move: Callable[[Move], object], moves: list[Move]) -> int | None:
        """Make the next move from page `cursor` on, and return the page to continue at; None if no run can move.

        The old and the new pages stay claimed until `on_move` has returned. When a run moves over itself, an old
        address would otherwise have other bytes before the user knows of the move.
        """
        claimed: list[range] = []
        try:
            with self._claims.lock:
                step = next_move(self._table.layout(self._claims.pinned(), spare=FIXED), cursor)
                if step is None:
                    return None
                for run in step:
                    self._table.claim(run, claimed)
            pages, to = step
            move = self._as_move(pages, to)
            self._driver.synchronize()
            self._holding.region.move(move.old_offset, move.new_offset, self._table.page_size, len(to))
            with self._claims.lock:
                self._table.move(pages, to)
            moves.append(move)
            on_move(move)
            return pages.stop
        finally:
            self._claims.release(claimed)

    def _as_move(self, pages: range, to: range) -> Move:
        size = self._table.page_size
        return Move(pages.start * size, to.start * size, len(pages) * size)


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
