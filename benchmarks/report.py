"""What both benchmarks show while they run: progress, and text of a page's width."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from membroker.cli.tables import TextTable, render

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


def folded(text: str, width: int = 120) -> str:
    """Return the text in lines of at most `width` characters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def print_tables(tables: Iterable[TextTable], stream: TextIO) -> None:
    """Write tables with an empty line between them."""
    stream.write("\n".join(render(table, stream) for table in tables))
    stream.flush()


def markdown(table: TextTable) -> str:
    """Return a table as Markdown."""
    heads = [column.lstrip(">") for column in table.columns]
    lines = [heads, ["---:" if column.startswith(">") else "---" for column in table.columns], *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
