"""Requests that a real service had: Azure's CSV, BurstGPT's CSV and Mooncake's JSONL, as traces of the benchmark.

Owns the reading of these files. Each row is an arrival, the tokens of a prompt and those of its answer; nothing else is
read. Arrivals are those of the file, `load` times as fast. What a file must not do is bounded: lines, rows, numbers.

- Azure LLM inference: TIMESTAMP, ContextTokens, GeneratedTokens (github.com/Azure/AzurePublicDataset).
- BurstGPT: Timestamp in seconds, Model, Request tokens, Response tokens, … (github.com/HPMLL/BurstGPT). The answers of
  requests that failed have 0 tokens; they are left out.
- Mooncake: {"timestamp": milliseconds, "input_length": …, "output_length": …, "hash_ids": […]} a line
  (github.com/kvcache-ai/Mooncake). Prefixes that requests share are not: the benchmark has no prefix cache.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from .traces import Request, Scale, Trace, Work

SECONDS: Final = 90.0
"""How long the trace is that is made of a file, at `--time 1`."""
MOST_LINE_BYTES: Final = 1 << 16
MOST_ROWS: Final = 10_000_000
MOST_REQUESTS: Final = 500_000
"""Of one file, within the window."""
MOST_TOKENS: Final = 1 << 24

Row = tuple[float, int, int]
"""An arrival in seconds, and the tokens of a prompt and of its answer."""


class Unreadable(ValueError):
    """The file is in none of these formats, or no request of it is in the window. The message names the file."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests of a file from a moment on, in the order of their arrival since that moment."""

    name: str
    rows: tuple[Row, ...]
    failed: int = 0
    """Requests within the window that had no answer."""

    def work(self, scale: Scale, seconds: float) -> Work:
        """Return what a model gets in so many seconds."""
        mine = [row for row in self.rows if row[0] / scale.load < seconds]
        if not mine:
            raise Unreadable(f"{self.name} has no request in its {seconds * scale.load:g} seconds")
        return Work(tuple(Request(at / scale.load, *scale.lengths(prompt, answer)) for at, prompt, answer in mine))

    def about(self, scale: Scale) -> str:
        """Say what a reader must know of it."""
        whole = replace(scale, longest=4 * MOST_TOKENS)
        cut = sum(scale.lengths(*row[1:]) != whole.lengths(*row[1:]) for row in self.rows)
        return f"{self.name}: {len(self.rows)} requests ({cut} cut to the longest), {self.failed} that failed left out"


def play(recorded: Sequence[Recorded], scale: Scale) -> Trace:
    """Return the trace of several files, one for each model. Raises `Unreadable`."""
    seconds = SECONDS * scale.time
    return Trace("recorded", seconds, tuple(one.work(scale, seconds) for one in recorded))


def read(text: str, seconds: float) -> Recorded:
    """Read `FILE` or `FILE@START`, for so many seconds from START on. Raises `OSError` and `Unreadable`."""
    file, start = _window(text)
    rows: list[Row] = []
    first: float | None = None
    failed = 0
    for number, (at, prompt, answer) in _rows(file):
        if first is None:
            first = at
        at -= first
        if at < 0:
            raise Unreadable(f"{file}, line {number}: it comes before the first request")
        if not start <= at < start + seconds:
            continue
        if answer == 0:
            failed += 1
            continue
        if len(rows) == MOST_REQUESTS:
            raise Unreadable(f"{text} has more than {MOST_REQUESTS:,} requests in its {seconds:g} seconds")
        rows.append((at - start, max(1, prompt), answer))
    if not rows:
        raise Unreadable(f"{text} has no request in its {seconds:g} seconds")
    return Recorded(f"{file.name}@{start:g}" if start else file.name, tuple(sorted(rows)), failed)


def _window(text: str) -> tuple[Path, float]:
    """Divide `FILE@START`. A name that has another `@` is a file's."""
    name, at, after = text.rpartition("@")
    try:
        start = float(after) if at else 0.0
    except ValueError:
        return Path(text), 0.0
    if not (math.isfinite(start) and start >= 0):
        raise Unreadable(f"{text}: a window begins at a number of seconds, 0 or more")
    return Path(name if at else text), start


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row with the number of its line."""
    with file.open("rb") as stream:
        head = _line(file, 1, stream)
        read_row = _mooncake if head.startswith("{") else _table(head)
        if read_row is None:
            raise Unreadable(
                f"{file} is no trace of requests: its first line has neither the columns of Azure's or BurstGPT's, nor "
                "an object as Mooncake's"
            )
        number, line = (1, head) if read_row is _mooncake else (2, _line(file, 2, stream))
        while line:
            if line.strip():
                try:
                    yield number, read_row(line)
                except (ValueError, LookupError, TypeError, OverflowError, RecursionError, csv.Error) as error:
                    raise Unreadable(f"{file}, line {number} is no request: {line.strip()[:60]!r}") from error
            number += 1
            line = _line(file, number, stream)


def _line(file: Path, number: int, stream: IO[bytes]) -> str:
    """Return the next line; nothing at the end."""
    found = stream.readline(MOST_LINE_BYTES + 1)
    if len(found) > MOST_LINE_BYTES or number > MOST_ROWS:
        what = (
            f"line {number} has more than {MOST_LINE_BYTES:,} bytes"
            if number <= MOST_ROWS
            else f"more than {MOST_ROWS:,} lines"
        )
        raise Unreadable(f"{file} is no trace of requests: {what}")
    return found.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace")


def _table(head: str) -> Callable[[str], Row] | None:
    """Return what reads a row of a table with these columns, in whatever order; None if it has none of them."""
    names = [name.strip().casefold() for name in head.split(",")]
    for wanted, moment in _TABLES:
        if all(name in names for name in wanted):
            places = [names.index(name) for name in wanted]

            def read_row(line: str, places: list[int] = places, moment: Callable[[str], float] = moment) -> Row:
                fields = next(csv.reader([line]))
                at, prompt, answer = (fields[place].strip() for place in places)
                return _row(moment(at), int(prompt), int(answer))

            return read_row
    return None


def _mooncake(line: str) -> Row:
    found = json.loads(line)
    return _row(found["timestamp"] / 1000, found["input_length"], found["output_length"])


def _row(at: float, prompt: int, answer: int) -> Row:
    if not (math.isfinite(at) and isinstance(prompt, int) and isinstance(answer, int)):
        raise ValueError("not a number")
    if not (0 <= prompt <= MOST_TOKENS and 0 <= answer <= MOST_TOKENS):
        raise ValueError("too many tokens")
    return at, prompt, answer


def _moment(text: str) -> float:
    """Return the seconds of a time as Azure writes it. Without a zone it is UTC."""
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


_TABLES: Final = (
    (("timestamp", "contexttokens", "generatedtokens"), _moment),
    (("timestamp", "request tokens", "response tokens"), float),
)
"""Columns of an arrival, a prompt and an answer, and how the first is written: Azure's and BurstGPT's."""
