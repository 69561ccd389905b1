"""`python -m benchmarks.pressure`: three tenants with more work than memory, and what guarantees and recalls change."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from membroker.arguments import bytes_of
from membroker.cli.tables import TextTable, render
from membroker.vmm.sizes import MIB, format_size

from ..harness import command, machine
from ..harness.child import Child
from ..harness.daemon import Daemon, configuration, sources
from ..harness.goals import Goal, goals_table
from ..harness.report import markdown
from ..harness.samples import quantile
from . import plot
from .trace import TENANTS, Numbers

_DESCRIPTION = """\
Three engines of three tenants grow and shrink page by page on one device, as language models do, and want more than
there is. One is killed and started again in the middle, the daemon as well. Each page's contents are checked.

Each tenant is guaranteed a quarter of the capacity. The rest is shared by weight. The same trace is also run with
memory for everybody, and first come, first served."""
_EPILOG = """\
how to read it:
  refused        requests for one page within the guarantee, within the tenant's static share, and beyond that
  ready          calls that took less than 60 us: their pages were borrowed ahead, or kept
  grow           the time of a call that allocates one page, in microseconds, waits included
  waited >2 ms   how many of the calls that were granted took longer, and their p99 in milliseconds
  most spare     the most that an engine had borrowed ahead or kept, beside what it used
  in use         the mean part of the capacity that was lent

The last table has the figures that have a target, which holds for a machine that does nothing else.

examples:
  python -m benchmarks.pressure                                       on the host driver, in a minute
  python -m benchmarks.pressure --calm --plot pressure.png            nothing is killed; draws what each tenant had
  python -m benchmarks.pressure --driver cuda --capacity 24GiB --beside ../before"""
READY_NS = 60_000
"""A call of the broker takes longer than this, and a page that is ready less."""
WAITED_NS = 2_000_000
ROOM = 3
"""As many times the capacity hold all that the three want."""
KINDS = ("guaranteed", "share", "beyond")


class Variant(NamedTuple):
    """One run of the trace: how it is called, whether with guarantees and recalls, and on which tree.

    `room` is how many times the capacity that the trace is for can be lent.
    """

    title: str
    recalls: bool
    tree: Path | None
    room: int = 1


class PressureRun:
    """One way through the trace."""

    def __init__(self, directory: Path, numbers: Numbers, variant: Variant) -> None:
        self._directory, self._numbers, self._variant = directory, numbers, variant
        self.lent: list[float] = []
        self.used: list[tuple[float, dict[str, int]]] = []
        self._ended = threading.Event()
        self._begin = 0.0
        self.daemon = self._start_daemon()
        self.engines = {tenant: self._start(tenant) for tenant in range(TENANTS)}

    def _start_daemon(self) -> Daemon:
        numbers, variant = self._numbers, self._variant
        guarantee = {"guarantee": numbers.guarantee} if variant.recalls else {}
        tables = {f"tenants.t{tenant}": guarantee for tenant in range(TENANTS)}
        config = configuration(numbers.driver, tables, capacity=numbers.capacity * variant.room)
        return Daemon(self._directory, config, variant.tree)

    def _start(self, tenant: int) -> Child:
        numbers = self._numbers
        setup = numbers._asdict() | {"guarantee": numbers.guarantee, "share": numbers.share, "tenant": tenant}
        setup |= {"endpoint": str(self.daemon.endpoint(f"t{tenant}")), "recalls": self._variant.recalls}
        return Child("benchmarks.pressure.engine", setup, sources(self._variant.tree))

    def play(self, *, deaths: bool = True) -> list[dict[str, Any]]:
        """Run the trace to its end, with a death of an engine and of the daemon; return what each engine tells."""
        for engine in self.engines.values():
            engine.hear()  # it has connected: on a busy machine that takes longer than a short trace
        self._begin = time.monotonic()
        for engine in self.engines.values():
            engine.tell({"begin": self._begin})
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            if deaths:
                self._end_processes()
            return [engine.hear(self._numbers.seconds + 60) for engine in self.engines.values()]
        finally:
            self._ended.set()
            watcher.join()

    def _end_processes(self) -> None:
        self._sleep_until(self._numbers.seconds / 3)
        self.engines[1].close(0)
        self.engines[1] = self._start(1)
        self.engines[1].hear()
        self.engines[1].tell({"begin": self._begin})
        self._sleep_until(2 * self._numbers.seconds / 3)
        self.daemon.process.send_signal(signal.SIGKILL)
        self.daemon.process.wait()
        self.daemon = self._start_daemon()

    def _sleep_until(self, elapsed: float) -> None:
        time.sleep(max(0.0, self._begin + elapsed - time.monotonic()))

    def _watch(self) -> None:
        """Note every 50 ms which part of the capacity is lent, and how many bytes each tenant is charged."""
        while not self._ended.wait(0.05):
            with suppress(Exception):  # the daemon is killed in between
                books = self.daemon.device().locations[0]
                self.lent.append(books.lent_bytes / books.capacity_bytes)
                used = {model.name.split("/")[1]: model.books[0].used_bytes for model in self.daemon.models()}
                self.used.append((time.monotonic() - self._begin, used))

    def close(self) -> None:
        """End everything."""
        for engine in self.engines.values():
            engine.close(0)
        self.daemon.kill()


def _quantile(times: Sequence[int], part: float) -> float:
    return quantile(times, part) if times else 0.0


class Told:
    """What the engines of one run told, together."""

    def __init__(self, told: Sequence[Mapping[str, Any]]) -> None:
        grown = [time for one in told for time in one["grown"]]
        self.pages = len(grown)
        self.counts = {name: sum(one[name] for one in told) for name in ("finished", "preempted", "recalls", "wrong")}
        self.refused = {kind: sum(one["refused"][kind] for one in told) for kind in KINDS}
        self.waited = {
            kind: [time for one in told for time in one["waited"][kind] if time > WAITED_NS] for kind in KINDS
        }
        self.ready_percent = 100 * sum(time < READY_NS for time in grown) / max(1, len(grown))
        self.grow_us = _quantile(grown, 0.5) / 1e3, _quantile(grown, 0.99) / 1e3
        self.waited_ms = {kind: _quantile(times, 0.99) / 1e6 for kind, times in self.waited.items()}
        self.spare = max(one["spare"] for one in told)


def summary(variant: Variant, told: Sequence[Mapping[str, Any]], lent: Sequence[float]) -> dict[str, str]:
    """Return the numbers of one run, by their names in the table."""
    all_told = Told(told)
    row = {"": variant.title, "pages": f"{all_told.pages:,}"}
    row |= {name: f"{all_told.counts[name]:,}" for name in ("finished", "preempted", "recalls")}
    row |= {f"refused: {kind}": f"{count:,}" for kind, count in all_told.refused.items()}
    row["from pages that were ready"] = f"{all_told.ready_percent:.1f} %"
    row |= {f"grow {name}": f"{time:,.0f}" for name, time in zip(("p50", "p99"), all_told.grow_us, strict=True)}
    for kind, times in all_told.waited.items():
        row[f"waited >2 ms: {kind}"] = f"{len(times):,} (p99 {all_told.waited_ms[kind]:,.0f} ms)"
    row["most spare of an engine"] = format_size(all_told.spare)
    row["in use"] = f"{100 * sum(lent) / max(1, len(lent)):.0f} %"
    row["wrong"] = str(all_told.counts["wrong"])
    return row


def goals(variant: Variant, told: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return what has a target of a run: pages that are ready where there is room, else the promises too."""
    if not variant.recalls:
        return []
    all_told = Told(told)
    p50, p99 = all_told.grow_us
    ready, spare = all_told.ready_percent, all_told.spare / MIB
    if variant.room > 1:
        found = [Goal("pages that were ready", ready, 99, "%", at_least=True)]
        found += [Goal("grow p50", p50, 5, "us"), Goal("grow p99", p99, 60, "us")]
    else:
        found = [Goal("refused within the guarantee", all_told.refused["guaranteed"], 0, "")]
        found.append(Goal("waited >2 ms within the share, p99", all_told.waited_ms["share"], 100, "ms"))
        found += [Goal("pages that were ready", ready, 98, "%", at_least=True), Goal("grow p99", p99, 500, "us")]
    found.append(Goal("most spare of an engine", spare, 1024, "MiB"))
    return [replace(goal, what=f"{variant.title}: {goal.what}") for goal in found]


def _variants(beside: Path | None) -> list[Variant]:
    variants = [
        Variant("guarantees and recalls", True, None),
        Variant("memory for everybody", True, None, ROOM),
        Variant("first come, first served", False, None),
    ]
    return variants if beside is None else [*variants, Variant(f"the tree {beside.name}", False, beside.resolve())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each variant, and print a table of them."""
    parser = command.parser("benchmarks.pressure", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("--driver", choices=("host", "cuda"), default="host")
    add("--capacity", default="1GiB", metavar="SIZE", help="what the three share; by default 1GiB")
    add("--page", default="2MiB", metavar="SIZE", help="the size of a page; by default 2MiB")
    add("--seconds", type=float, default=20.0, help="the length of the trace; by default 20")
    add("--seed", type=int, default=1, help="of the trace; by default 1")
    add("--calm", action="store_true", help="kill neither an engine nor the daemon")
    add("--plot", type=Path, metavar="FILE", help="draw the first run there; needs matplotlib")
    add("--beside", type=Path, metavar="TREE", help="another checkout, to run the same trace on")
    options = command.parse(parser, arguments)
    sizes = [bytes_of("a capacity", options.capacity), bytes_of("a page", options.page)]
    numbers = Numbers(options.driver, *sizes, options.seconds, options.seed)
    facts = machine.facts() | {"seed": str(numbers.seed), "capacity": format_size(numbers.capacity)}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    columns, reached = [], []
    for variant in _variants(options.beside):
        print(f"... {variant.title}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
            run = PressureRun(Path(directory), numbers, variant)
            try:
                told = run.play(deaths=not options.calm)
            finally:
                run.close()
        columns.append(summary(variant, told, run.lent))
        reached += goals(variant, told)
        if options.plot is not None and len(columns) == 1:
            plot.draw(numbers, run.used, options.plot)
    first, *rows = ([name, *(column[name] for column in columns)] for name in columns[0])
    print(f"{markdown(TextTable(first, rows))}\n")
    print(render(goals_table(reached), sys.stdout), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
