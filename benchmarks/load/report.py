"""What a person reads, and a program: the tables and the JSON.

Tables are the command line's own: with lines on a terminal, plain text elsewhere. Owns no figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from membroker.cli.tables import NONE, TextTable

from ..goals import table
from ..report import folded, print_tables
from .figures import Figure, Section, Timing
from .targets import goals


def show(facts: Mapping[str, str], sections: Sequence[Section], stream: TextIO) -> None:
    """Print everything."""
    print_tables([TextTable(("machine", ""), list(facts.items()))], stream)
    for section in sections:
        print(f"\n{section.title}\n{folded(section.note)}\n", file=stream)
        tables = [TextTable(_TIMING_COLUMNS, [_timing_row(row) for row in section.timings])]
        if section.figures:
            tables.append(TextTable(("what", ">figure", ""), [_figure_row(row) for row in section.figures]))
        print_tables(tables, stream)
        before, after = section.others_percent
        print(f"\nothers kept the processors busy: {before:.0f}% just before, {after:.0f}% just after", file=stream)
    print(file=stream)
    print_tables([table(goals(sections))], stream)


def write_json(facts: Mapping[str, str], sections: Sequence[Section], path: Path) -> None:
    """Write everything, times in nanoseconds."""
    document = {
        "machine": dict(facts),
        "sections": [asdict(section) for section in sections],
        "goals": [asdict(goal) | {"reached": goal.reached} for goal in goals(sections)],
    }
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
