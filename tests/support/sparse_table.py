"""The sizes of a sparse array's rows and tiles, and the bytes of a row."""

from __future__ import annotations

from tests.support.fake_lender import PAGE

ROW = 1024
"""Bytes of a row of 256 floats."""
ROWS = PAGE // ROW
"""Rows of a tile of one page."""
COUNT = 10 * ROWS - 5
"""Rows of the table: ten tiles, the last one not full."""


def row(value: int, count: int = 1) -> bytes:
    return bytes([value]) * (ROW * count)
