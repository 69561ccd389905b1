"""What a person reads, and a program: the tables as text or Markdown, and the JSON. Owns no figure.

Tables are the command line's own: with lines on a terminal, plain text elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from membroker.cli.tables import NONE, TextTable
from membroker.vmm.sizes import GIB

from ..report import folded, markdown, print_tables
from .figures import OFFLOAD, WORKERS, Row, Section, Share
from .targets import Goal

TARGETS = "Beside the targets, at p50"
TARGETS_NOTE = (
    "Ratios are to the driver in process in the same run. A figure that misses its target fails nothing. 'two "
    "processes' is what lending takes there without any broker: see the rows of that name."
)
SHARES_NOTE = (
    "Means of both calls together. broker is from a request's arrival to its answer, by its histograms: driver, core, "
    "journal and transport are its parts. outside is the rest of the caller's time: sockets, wake-ups, frames, and "
    "what its own driver does. for stock is what the broker's driver did meanwhile to fill its stock. The core steps "
    "outside of requests too (an acknowledgement, an extent of the stock), so transport is a little more than it says. "
    "'-' is what this daemon does not tell: without the core's histogram transport has the core's share, and without a "
    "count of the stock the driver calls cannot be told apart."
)


def show(facts: Mapping[str, str], sections: Sequence[Section], goals: Sequence[Goal], stream: TextIO) -> None:
    """Print everything."""
    print_tables([_facts_table(facts)], stream)
    for title, note, tables in _chapters(sections, goals):
        print(f"\n{title}\n{folded(note)}\n", file=stream)
        print_tables(tables, stream)


def show_markdown(facts: Mapping[str, str], sections: Sequence[Section], goals: Sequence[Goal], stream: TextIO) -> None:
    """Print everything as Markdown."""
    print(markdown(_facts_table(facts)), file=stream)
    for title, note, tables in _chapters(sections, goals):
        print(f"\n### {title}\n\n{folded(note)}", file=stream)
        for table in tables:
            print(f"\n{markdown(table)}", file=stream)


def write_json(facts: Mapping[str, str], sections: Sequence[Section], goals: Sequence[Goal], path: Path) -> None:
    """Write everything, times in nanoseconds."""
    document = {
        "machine": dict(facts),
        "targets": [{**asdict(goal), "reached": goal.reached} for goal in goals],
        "sections": [asdict(section) for section in sections],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _chapters(sections: Sequence[Section], goals: Sequence[Goal]) -> Iterator[tuple[str, str, list[TextTable]]]:
    if goals:
        yield TARGETS, TARGETS_NOTE, [_goals_table(goals)]
    for section in sections:
        before, after = section.others_percent
        note = f"{section.note} Others kept the processors busy: {before:.0f}% just before, {after:.0f}% just after."
        if section.failure:
            note += f" It FAILED here, and what stands below is what was seen before: {section.failure}"
        tables = []
        if section.rows:
            tables.append(_TABLES.get(section.key, _rows_table)(section))
        yield section.title, note, tables
        if any(row.share for row in section.rows):
            yield f"{section.title}: the broker's own share", SHARES_NOTE, [_shares_table(section)]


def _facts_table(facts: Mapping[str, str]) -> TextTable:
    return TextTable(("machine", ""), [list(fact) for fact in facts.items()])


def _goals_table(goals: Sequence[Goal]) -> TextTable:
    rows = [
        [
            goal.what,
            _gap(goal.gap_ms),
            f"{goal.value:.2f}",
            f"{'at least' if goal.at_least else 'at most'} {goal.target:g}",
            goal.unit,
            "-" if goal.pair is None else f"{goal.pair:.2f}",
            "yes" if goal.reached else "NO",
        ]
        for goal in goals
    ]
    return TextTable(("what", ">gap", ">figure", ">target", "", ">two processes", "reached"), rows)


def _rows_table(section: Section) -> TextTable:
    take, give = section.calls
    columns = (
        *("work", ">gap", "by", ">n", f">{take} p50 us", ">p99 us", ">x"),
        *(f">{give} p50 us", ">p99 us", ">x", ">from stock"),
    )
    rows = [
        [
            *(row.work, _gap(row.gap_ms), row.by, f"{row.count:,}"),
            *(_us(row.take.p50_ns), _us(row.take.p99_ns), _ratio(row.take_ratio)),
            *(_us(row.give.p50_ns), _us(row.give.p99_ns), _ratio(row.give_ratio)),
            NONE if row.hit_percent is None else f"{row.hit_percent:.0f}%",
        ]
        for row in section.rows
    ]
    return TextTable(columns, rows)


def _crowd_table(section: Section) -> TextTable:
    take, give = section.calls
    columns = (
        *("at once", "by", ">n", ">rate", ">of bare", f">{take} p50 us", ">p99 us", ">x"),
        *(f">{give} p50 us", ">p99 us", ">x"),
    )
    rows = [
        [
            *(row.work, row.by, f"{row.count:,}", f"{row.per_second or 0:,.0f}", _ratio(row.rate_ratio)),
            *(_us(row.take.p50_ns), _us(row.take.p99_ns), _ratio(row.take_ratio)),
            *(_us(row.give.p50_ns), _us(row.give.p99_ns), _ratio(row.give_ratio)),
        ]
        for row in section.rows
    ]
    return TextTable(columns, rows)


def _speeds_table(section: Section) -> TextTable:
    take, give = section.calls
    columns = (
        *("work", ">gap", "by", ">n", f">{take} p50 ms", ">p99 ms", ">GiB/s", ">x"),
        *(f">{give} p50 ms", ">p99 ms", ">GiB/s", ">x"),
    )
    rows = [
        [
            *(row.work, _gap(row.gap_ms), row.by, f"{row.count:,}"),
            *(_ms(row.take.p50_ns), _ms(row.take.p99_ns), _speed(section, row.take.p50_ns), _ratio(row.take_ratio)),
            *(_ms(row.give.p50_ns), _ms(row.give.p99_ns), _speed(section, row.give.p50_ns), _ratio(row.give_ratio)),
        ]
        for row in section.rows
    ]
    return TextTable(columns, rows)


_TABLES: Mapping[str, Callable[[Section], TextTable]] = {WORKERS: _crowd_table, OFFLOAD: _speeds_table}
"""Scenes whose rows show something else than most."""


def _shares_table(section: Section) -> TextTable:
    columns = (
        *("work", ">gap", "by", ">caller us", ">broker us", ">driver us", ">core us", ">journal us", ">transport us"),
        *(">outside us", ">for stock us"),
    )
    rows = [_share_row(row, row.share) for row in section.rows if row.share]
    return TextTable(columns, rows)


def _share_row(row: Row, share: Share) -> list[str]:
    parts = (share.driver, share.core, share.journal, share.transport, share.outside, share.for_stock)
    return [row.work, _gap(row.gap_ms), row.by, _us(share.caller), _us(share.broker), *map(_us, parts)]


def _us(nanoseconds: float | None) -> str:
    return NONE if nanoseconds is None else f"{nanoseconds / 1e3:,.1f}"


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.2f}"


def _speed(section: Section, nanoseconds: float) -> str:
    return f"{section.moved_bytes / nanoseconds * 1e9 / GIB:.1f}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _gap(milliseconds: float) -> str:
    return f"{milliseconds:g} ms" if milliseconds else "none"
