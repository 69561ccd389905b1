"""Where runs of pages go when holes are closed: pure, on a picture of the pages.

Owns the one rule: a run of used pages without a gap moves as one, or not at all, so addresses that are next to each
other stay next to each other. It must never touch memory, and knows no pool.
"""

from __future__ import annotations

import re

from .page_table import FIXED, FREE, USED

_RUN = re.compile(b"[^%c]+" % FREE)


def next_move(layout: bytearray, cursor: int) -> tuple[range, range] | None:
    """Return the first run from `cursor` on that can go lower, and where to; None when there is none.

    `layout` has `FREE`, `USED` or `FIXED` for each page; a run with a fixed page in it stays. A run goes to the lowest
    hole that holds all of it, else down the hole below it, over itself.
    """
    if cursor and layout[cursor - 1 : cursor] != bytes((FREE,)):  # no new run: its beginning was looked at before
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
