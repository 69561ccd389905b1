"""What a person reads of the runs, a table for each trace, and what a program has written. Owns no figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from membroker.cli.tables import NONE, TextTable
from membroker.vmm.sizes import GIB

from ..harness.goals import Goal
from ..harness.report import Chapter, goals_chapter, scaled
from .figures import ModelFigures, Run, Sample
from .summary import Total, break_even, totals

NOTE = (
    "TTFT in seconds from the moment at which a request was due; one that was not answered in full counts as never "
    "answered ('never'). TPOT in milliseconds. good/s: requests a second with TTFT of 1 s and TPOT of 50 ms or less. "
    "KV bytes in GiB: at most, on average over the trace, and one second after the last answer. starved: how long a "
    "model waited for memory within its guarantee. wrong: answers that differ from plain vLLM's, of those asked one at "
    "a time before and after the load. same: answers under load that are plain vLLM's; other batches round otherwise, "
    "so all are the same with --exact only."
)
SEEDS = "Of several seeds: the median, and the range."
TOTALS = (
    *("trace", ">load", "arm", ">TTFT p50 s", ">TTFT p99 s", ">TPOT p99 ms", ">good/s", ">good/s at 5x unloaded"),
    *(">tokens/s", ">KV GiB mean"),
)
STARTS = (
    *("arm", "vLLM", ">engines up after s", ">KV tokens at most", ">TTFT alone ms", ">TPOT alone ms", ">GPU most GiB"),
)
COLUMNS = (
    *("arm", "model", ">requests", ">TTFT p50", ">p90", ">p99", ">in 1 s", ">TPOT p50", ">p99", ">good/s", ">tokens/s"),
    *(">unfinished", ">preempted", ">KV most", ">mean", ">idle", ">starved s", ">refused", ">wrong", ">same"),
)


def tables(runs: Sequence[Run]) -> Iterator[tuple[str, TextTable]]:
    """Yield a title and a table for each trace at each load and seed."""
    for trace, load, seed in dict.fromkeys((run.trace, run.load, run.seed) for run in runs):
        mine = [run for run in runs if (run.trace, run.load, run.seed) == (trace, load, seed)]
        title = f"{trace.upper()}, {mine[0].seconds:g} seconds, load x{load:g}, seed {seed}"
        yield title, TextTable(COLUMNS, [_row(run.arm, figures) for run in mine for figures in run.models])


def starts(runs: Sequence[Run]) -> TextTable:
    """Return how long the engines took to start, and what the device had in use at most."""
    first = {run.arm: run for run in reversed(runs)}
    rows = [
        [
            run.arm,
            run.engine or NONE,
            ", ".join(f"{one:.0f}" for one in run.start_seconds),
            ", ".join(f"{one:,}" for one in run.cache_tokens),
            f"{1000 * run.unloaded[0]:.0f}",
            f"{1000 * run.unloaded[1]:.2f}",
            _gib(max((one.peak_in_use or 0 for one in runs if one.arm == run.arm), default=0) or None),
        ]
        for run in reversed(first.values())
    ]
    return TextTable(
        (
            "arm",
            "vLLM",
            ">engines up after s",
            ">KV tokens at most",
            ">TTFT alone ms",
            ">TPOT alone ms",
            ">GPU most GiB",
        ),
        rows,
    )


def read_json(path: Path) -> tuple[dict[str, str], list[Run]]:
    """Return the machine and the runs that were written with --json. Raises `ValueError` for another file."""
    try:
        document = json.loads(path.read_text())
        return document["machine"], [_run(one) for one in document["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what --json of this version writes: {error!r}") from error


def _run(told: dict[str, Any]) -> Run:
    def times(values: Sequence[float | None]) -> tuple[float, ...]:
        return tuple(math.inf if value is None else value for value in values)

    models = [ModelFigures(**{**one, "ttft": times(one["ttft"]), "tpot": times(one["tpot"])}) for one in told["models"]]
    return Run(**{**told, "models": models, "samples": [Sample(**one) for one in told["samples"]]})


def chapters(runs: Sequence[Run], goals: Sequence[Goal]) -> Iterator[Chapter]:
    """Yield what a person reads: at the end where membroker wins, for each trace that was run at several loads."""
    yield Chapter("What was measured", NOTE)
    for title, table in tables(runs):
        yield Chapter(title, tables=[table])
    rows = [_total(one) for one in totals(runs)]
    yield Chapter(f"All models together; TTFT and TPOT of the worst one. {SEEDS}", tables=[TextTable(TOTALS, rows)])
    yield Chapter("The start, and one request at a time", tables=[starts(runs)])
    yield from goals_chapter(goals)
    for trace in dict.fromkeys(run.trace for run in runs):
        if len({run.load for run in runs if run.trace == trace}) > 1 and (sentence := break_even(runs, trace)):
            yield Chapter("", sentence)


def _total(one: Total) -> list[str]:
    return [
        *(one.trace.upper(), f"x{one.load:g}", one.arm, _over(one.ttft_p50), _over(one.ttft_p99)),
        *(_over([1000 * time for time in one.tpot_p99]), _over(one.good), _over(one.good_relative)),
        *(_over(one.tokens), _over([size / GIB for size in one.mean_bytes])),
    ]


def _over(values: Sequence[float]) -> str:
    """Return the median of the seeds, and their range."""
    middle = _seconds(statistics.median(values))
    return middle if len(values) < 2 else f"{middle} ({_seconds(min(values))}-{_seconds(max(values))})"


def _row(arm: str, one: ModelFigures) -> list[str]:
    return [
        *(arm, f"m{one.model}", f"{one.requests:,}", *map(_seconds, one.ttft), f"{100 * one.within:.0f} %"),
        *(*(f"{1000 * time:.1f}" for time in one.tpot), f"{one.good_per_second:.1f}", f"{one.tokens_per_second:,.0f}"),
        *(f"{one.unfinished:,}", f"{one.preemptions:,}", _gib(one.peak_bytes or None), _gib(one.mean_bytes or None)),
        *(
            _gib(one.idle_bytes),
            f"{one.starved_seconds:.1f}",
            f"{one.refusals:,}",
            NONE if one.wrong is None else str(one.wrong),
        ),
        NONE if one.same is None else f"{one.same[0]} of {one.same[1]}",
    ]


def _seconds(time: float) -> str:
    return "never" if math.isinf(time) else NONE if math.isnan(time) else f"{time:.2f}"


def _gib(size: float | None) -> str:
    return scaled(size, GIB)
