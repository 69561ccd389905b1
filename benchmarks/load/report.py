"""What a person reads, and a program: what is being done, the tables, the JSON.

Tables are the command line's own: with lines on a terminal, plain text elsewhere. Owns no figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from membroker.cli.tables import NONE, Table, print_tables

from .figures import Figure, Section, Timing
from .scenes import Tell

REFRESH_PER_SECOND = 2
"""Showing progress takes time of the processors that are being measured."""


@contextmanager
def progress(scenes: int) -> Iterator[tuple[Tell, Tell]]:
    """Yield what shows progress, and the end of each scene: a bar on a terminal, else lines."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda what: print(f"... {what}", file=sys.stderr, flush=True), lambda _: None
        return
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True) as bar:
        task = bar.add_task("", total=scenes)
        yield lambda what: bar.update(task, description=what), lambda _: bar.advance(task)


def show(facts: Mapping[str, str], sections: Iterable[Section], stream: TextIO) -> None:
    """Print everything."""
    print_tables([Table(("machine", ""), list(facts.items()))], stream)
    for section in sections:
        print(f"\n{section.title}\n{_folded(section.note)}\n", file=stream)
        tables = [Table(_TIMING_COLUMNS, [_timing_row(row) for row in section.timings])]
        if section.figures:
            tables.append(Table(("what", ">figure", ""), [_figure_row(row) for row in section.figures]))
        print_tables(tables, stream)
        before, after = section.others_percent
        print(f"\nothers kept the processors busy: {before:.0f}% just before, {after:.0f}% just after", file=stream)


def write_json(facts: Mapping[str, str], sections: Iterable[Section], path: Path) -> None:
    """Write everything, times in nanoseconds."""
    document = {"machine": dict(facts), "sections": [asdict(section) for section in sections]}
    path.write_text(json.dumps(document, indent=1) + "\n")


_TIMING_COLUMNS = ("what", ">n", ">p50 us", ">p99 us", ">calls/s", ">x", "beside")


def _timing_row(row: Timing) -> list[str]:
    return [
        row.name,
        f"{row.count:,}",
        f"{row.p50_ns / 1e3:,.1f}",
        f"{row.p99_ns / 1e3:,.1f}",
        NONE if row.per_second is None else f"{row.per_second:,.0f}",
        NONE if row.ratio is None else f"{row.ratio:.2f}",
        row.beside or "",
    ]


def _figure_row(row: Figure) -> list[str]:
    return [row.name, f"{row.value:,.0f}" if row.value == round(row.value) else f"{row.value:,.2f}", row.unit]


def _folded(text: str, width: int = 120) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)
