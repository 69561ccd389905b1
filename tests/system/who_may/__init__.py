"""Who may do what: the table that docs/trust.md shows, with the action behind each row.

`table` says what a row is, `calls` and `kernel` have the rows, in their order. Run as a program it is one of the
parties.
"""

from __future__ import annotations

from . import calls, kernel  # noqa: F401 - they put their rows into the table
from .table import BOTH, GROUPS, KINDS, MARK, PAGE, ROWS, WHO, Party, Row, needs_root, obey

__all__ = ["BOTH", "GROUPS", "KINDS", "MARK", "PAGE", "ROWS", "WHO", "Party", "Row", "needs_root", "obey"]
