"""Reads a trace, or a journal, as parts: the rules at the beginning of each, and its rows in order.

A file may come from anywhere. What is read is bounded, and what this version does not know is an error and never a
guess; `Unusable` continues the sentence "FILE …".
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..ext import Location, files, policy, records
from ..ext import facts as ft
from . import trace

MAX_FILE_BYTES = 64 << 20
"""Twice what the daemon lets a file of a trace grow to."""
MAX_ROWS = 1_000_000
RECORD_NS = 1_000_000
"""A journal has no times: its records are replayed a millisecond apart."""
REQUESTS = (b"contexttokens", b"request tokens", b'"input_length"')
"""What the first line of a published trace of requests has: Azure's, BurstGPT's, Mooncake's."""


@dataclass(frozen=True, slots=True)
class CreditedRuns:
    """`facts.Credited` in runs of ids: a trace of one day may have released each extent of a GPU a thousand times."""

    runs: tuple[range, ...]
    cause: str


@dataclass(slots=True)
class TracePart:
    """Rows with their times, in nanoseconds, from one beginning to the next.

    A journal has no rules, no times and no requests: each debit in it is taken for a request that was granted.
    """

    begin: trace.Begin
    rows: list[tuple[int, trace.Row | CreditedRuns]] = field(default_factory=list)
    is_journal: bool = False
    _held: int = 0
    """Extents that were lent, less those that were released."""

    def add(self, at: int, row: trace.Row) -> None:
        """Add a row; time never goes back. Raises `Unusable`."""
        kept: trace.Row | CreditedRuns = row
        if isinstance(row, ft.Debited):
            self._held += row.count
        elif isinstance(row, ft.Credited):
            self._held -= len(row.ids)
            if self._held < 0:
                raise records.Unusable("broken", "has fewer lent than released extents, which no daemon writes")
            kept = CreditedRuns(
                tuple(range(first, first + count) for first, count in records.runs_of(row.ids)), row.cause
            )
        self.rows.append((max(at, self.rows[-1][0]) if self.rows else at, kept))


def read(path: Path) -> list[TracePart]:
    """Return the parts of a file. Raises `OSError` and `Unusable`."""
    data = files.read_file(path, MAX_FILE_BYTES, follow=True)
    if not data.strip(b"\0\n"):
        raise records.Unusable("broken", "is empty: nothing was recorded yet")
    if records.split(data[: 1 << 16])[0]:
        return [_read_journal(data.rstrip(b"\0"))]
    return list(_parts(data))


def _parts(data: bytes) -> Iterator[TracePart]:
    part: TracePart | None = None
    torn: records.Unusable | None = None
    for number, raw in enumerate(io.BytesIO(data), 1):
        if number > MAX_ROWS:
            raise records.Unusable("broken", f"has more than {MAX_ROWS:,} lines, which no daemon writes")
        if raw.isspace():
            continue
        found = _read_line(raw, number)
        if isinstance(found, records.Unusable):
            if torn or part is None:
                raise torn or records.Unusable("broken", _not_a_trace(raw))
            torn = found
        elif isinstance(found, trace.Begin):  # a daemon that was killed leaves half a line before it
            torn = None
            if part is not None:
                yield part
            part = TracePart(found)
        elif torn or part is None:
            raise torn or records.Unusable(
                "broken", "is not a trace: its first line does not say with which rules it begins"
            )
        else:
            microseconds, row = found
            part.add(part.begin.now + microseconds * 1_000, row)
    if part is not None:
        yield part


def _not_a_trace(first_line: bytes) -> str:
    """Say what a file is instead, if its first line shows it."""
    if any(word in first_line[:256].lower() for word in REQUESTS):
        return "is a trace of requests to a language model, which `python -m benchmarks.serving --requests` plays"
    return "is not a trace"


def _read_line(raw: bytes, number: int) -> trace.Begin | tuple[int, trace.Row] | records.Unusable:
    try:
        if len(raw) > trace.MAX_LINE_BYTES:
            raise records.Unusable("broken", "has a line that is too long")
        return trace.read_line(raw.decode())
    except records.Unusable as error:
        if error.reason == "other-version":
            raise
        return records.Unusable("broken", f"{error} (line {number})")
    except UnicodeDecodeError:
        return records.Unusable("broken", f"is no text (line {number})")


def _read_journal(data: bytes) -> TracePart:
    found, _ = records.split(data)
    header = records.parse(records.header_of(data, found[:1]))
    if header[:2] != ["membroker journal", 1]:
        raise records.Unusable("other-format", "is a journal in a format that this version does not know")
    # It has no rules: there is no limit, and no capacity until one is given.
    part = TracePart(trace.Begin("a journal", 0, 0, policy.Rules(1, {"device": 0})), is_journal=True)
    sizes: dict[Location, int] = {}
    for number, record in enumerate(found[1:]):
        for fact in records.decode(data[record.begin : record.end]):
            if isinstance(fact, ft.Debited | ft.SegmentBegan):
                sizes[fact.location] = math.gcd(sizes.get(fact.location, 0), fact.extent_bytes)
            part.add(number * RECORD_NS, fact)
            if len(part.rows) > MAX_ROWS:
                raise records.Unusable("broken", f"has more than {MAX_ROWS:,} facts")
    if sizes:
        part.begin = replace(part.begin, rules=policy.Rules(math.gcd(*sizes.values()), dict.fromkeys(sizes, 0)))
    return part
