"""What a person reads, and a program: progress, chapters of text and tables, and the JSON.

Tables are the command line's own: with lines on a terminal, plain text elsewhere. Owns no figure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from membroker.cli.tables import NONE, TextTable, render

from .goals import Goal, goals_table

Tell = Callable[[str], None]
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


@dataclass(frozen=True, slots=True)
class Chapter:
    """A title, some text and tables."""

    title: str
    note: str = ""
    tables: Sequence[TextTable] = ()


def goals_chapter(goals: Sequence[Goal], note: str = "") -> Iterator[Chapter]:
    """Yield the chapter of what has a target, if anything has."""
    if goals:
        yield Chapter("Beside the targets", note, [goals_table(goals)])


def show(facts: Mapping[str, str], chapters: Iterable[Chapter], *, as_markdown: bool, stream: TextIO) -> None:
    """Print everything, as text or as Markdown."""
    for chapter in (Chapter("", "", [TextTable(("machine", ""), [list(fact) for fact in facts.items()])]), *chapters):
        if chapter.title:
            print(f"\n{'### ' * as_markdown}{chapter.title}", file=stream)
        if chapter.note:
            print(f"{chr(10) * as_markdown}{folded(chapter.note)}", file=stream)
        for table in chapter.tables:
            print(f"\n{markdown(table)}" if as_markdown else f"\n{render(table, stream).rstrip()}", file=stream)
    stream.flush()


def write_json(path: Path, **parts: Any) -> None:
    """Write everything that was measured. JSON has no form for infinite times: they are null."""
    path.write_text(json.dumps(_plain(parts), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value) | ({"reached": value.reached} if isinstance(value, Goal) else {}))
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def folded(text: str, width: int = 120) -> str:
    """Return the text in lines of at most `width` characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def markdown(table: TextTable) -> str:
    """Return a table as Markdown."""
    heads = [column.lstrip(">") for column in table.columns]
    lines = [heads, ["---:" if column.startswith(">") else "---" for column in table.columns], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def scaled(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
    """Return a number in a unit, or the sign for none."""
    return NONE if value is None else f"{value / unit:,.{digits}f}"
