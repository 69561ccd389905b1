"""`python -m benchmarks.pressure`: three tenants with more work than memory, and what guarantees and recalls change."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from membroker.arguments import bytes_of
from membroker.vmm.sizes import format_size

from .. import machine
from ..daemon import Daemon

_DESCRIPTION = """\
Three engines of three tenants grow and shrink page by page on one device, as language models do, and want more than
there is. One is killed and started again in the middle, the daemon as well. Each page's contents are checked.

Each tenant is guaranteed a quarter of the capacity. The rest is shared by weight."""
_EPILOG = """\
how to read it:
  refused        requests for one page within the guarantee, within the tenant's static share, and beyond that
  ready          calls that took less than 60 us: their pages were borrowed ahead, or kept
  grow           the time of a call that allocates one page, in microseconds, waits included
  waited >2 ms   how many of the calls that were granted took longer, and their p99 in milliseconds
  in use         the mean part of the capacity that was lent

examples:
  python -m benchmarks.pressure                                       on the host driver, in a minute
  python -m benchmarks.pressure --driver cuda --capacity 24GiB --beside ../before"""
TENANTS = 3
READY_NS = 60_000
"""A call of the broker takes longer than this, and a page that is ready less."""
KINDS = ("guaranteed", "share", "beyond")


class Way(NamedTuple):
    """One run of the trace: how it is called, whether with guarantees and recalls, and on which tree."""

    title: str
    recalls: bool
    tree: Path | None


class Numbers(NamedTuple):
    """The sizes of a run, in bytes and seconds."""

    driver: str
    capacity: int
    page: int
    seconds: float
    seed: int

    @property
    def guarantee(self) -> int:
        """What each tenant is guaranteed."""
        return self.capacity // 4 // self.page * self.page

    @property
    def share(self) -> int:
        """The static share of each tenant: its guarantee, and its part of what is guaranteed to nobody."""
        return self.guarantee + (self.capacity - TENANTS * self.guarantee) // TENANTS


def _config(numbers: Numbers, way: Way) -> str:
    tenants = "".join(
        f"[tenants.t{i}]\n" + (f"guarantee = {numbers.guarantee}\n" if way.recalls else "") for i in range(TENANTS)
    )
    return f'driver = "{numbers.driver}"\ncapacity = {numbers.capacity}\n[metrics]\nport = 0\n{tenants}'


def _environment(way: Way) -> dict[str, str]:
    root = way.tree or Path(__file__).resolve().parents[2]
    paths = [
        f"{root}/client",
        f"{root}/broker",
        str(Path(__file__).resolve().parents[2]),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Run:
    """One way through the trace."""

    def __init__(self, directory: Path, numbers: Numbers, way: Way) -> None:
        self._directory, self._numbers, self._way = directory, numbers, way
        self.lent: list[float] = []
        self._ended = threading.Event()
        self.daemon = self._start_daemon()
        self._begin = time.monotonic() + 1.0
        self.engines: dict[int, subprocess.Popen[str]] = {i: self._start(i) for i in range(TENANTS)}

    def _start_daemon(self) -> Daemon:
        with suppress(FileNotFoundError):
            (self._directory / "notify").unlink()
        return Daemon(
            self._directory, _config(self._numbers, self._way), {"PYTHONPATH": _environment(self._way)["PYTHONPATH"]}
        )

    def _start(self, tenant: int) -> subprocess.Popen[str]:
        numbers = self._numbers
        fields = numbers._asdict() | {"guarantee": numbers.guarantee, "share": numbers.share, "tenant": tenant}
        fields |= {"begin": self._begin, "endpoint": self.daemon.endpoint(f"t{tenant}")}
        del fields["driver"]
        options = [f"--{name}={value}" for name, value in fields.items()] + ["--recalls"] * self._way.recalls
        command = [sys.executable, "-m", "benchmarks.pressure.engine", *options]
        return subprocess.Popen(command, env=_environment(self._way), stdout=subprocess.PIPE, text=True)

    def play(self) -> list[dict[str, Any]]:
        """Run the trace to its end, with a death of an engine and of the daemon; return what each engine tells."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            self._sleep_until(self._numbers.seconds / 3)
            self.engines[1].kill()
            self.engines[1].communicate()
            self.engines[1] = self._start(1)
            self._sleep_until(2 * self._numbers.seconds / 3)
            self.daemon.process.send_signal(signal.SIGKILL)
            self.daemon.process.wait()
            self.daemon = self._start_daemon()
            told = [engine.communicate(timeout=self._numbers.seconds + 60)[0] for engine in self.engines.values()]
        finally:
            self._ended.set()
            watcher.join()
        return [json.loads(text) for text in told]

    def _sleep_until(self, elapsed: float) -> None:
        time.sleep(max(0.0, self._begin + elapsed - time.monotonic()))

    def _watch(self) -> None:
        """Note every 50 ms which part of the capacity is lent."""
        while not self._ended.wait(0.05):
            with suppress(Exception):  # the daemon is killed in between
                books = self.daemon.device().locations[0]
                self.lent.append(books.lent_bytes / books.capacity_bytes)

    def close(self) -> None:
        """End everything."""
        for engine in self.engines.values():
            engine.kill()
            engine.wait()
        self.daemon.kill()


def _quantile(times: Sequence[int], part: float) -> float:
    return float(sorted(times)[min(len(times) - 1, int(part * len(times)))]) if times else 0.0


def summary(way: Way, told: Sequence[Mapping[str, Any]], lent: Sequence[float]) -> dict[str, str]:
    """Return the numbers of one way, by their names in the table."""
    grown = [time for one in told for time in one["grown"]]
    refused = {kind: sum(one["refused"][kind] for one in told) for kind in KINDS}
    waits = {kind: [time for one in told for time in one["waited"][kind] if time > 2_000_000] for kind in KINDS}
    row = {
        "": way.title,
        "pages": f"{len(grown):,}",
        "finished": f"{sum(one['finished'] for one in told):,}",
        "preempted": f"{sum(one['preempted'] for one in told):,}",
        "recalls": f"{sum(one['recalls'] for one in told):,}",
    }
    row |= {f"refused: {kind}": f"{refused[kind]:,}" for kind in KINDS}
    ready = sum(time < READY_NS for time in grown)
    row["from pages that were ready"] = f"{100 * ready / max(1, len(grown)):.1f} %"
    row |= {"grow p50": f"{_quantile(grown, 0.5) / 1e3:,.0f}", "grow p99": f"{_quantile(grown, 0.99) / 1e3:,.0f}"}
    for kind in KINDS:
        row[f"waited >2 ms: {kind}"] = f"{len(waits[kind]):,} (p99 {_quantile(waits[kind], 0.99) / 1e6:,.0f} ms)"
    row["in use"] = f"{100 * sum(lent) / max(1, len(lent)):.0f} %"
    row["wrong"] = str(sum(one["wrong"] for one in told))
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each way, and print a table of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pressure",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--driver", choices=("host", "cuda"), default="host")
    parser.add_argument("--capacity", default="1GiB", metavar="SIZE", help="what the three share; by default 1GiB")
    parser.add_argument("--page", default="2MiB", metavar="SIZE", help="the size of a page; by default 2MiB")
    parser.add_argument("--seconds", type=float, default=20.0, help="the length of the trace; by default 20")
    parser.add_argument("--seed", type=int, default=1, help="of the trace; by default 1")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another checkout, to run the same trace on")
    options = parser.parse_args(arguments)
    numbers = Numbers(
        options.driver,
        bytes_of("a capacity", options.capacity),
        bytes_of("a page", options.page),
        options.seconds,
        options.seed,
    )
    ways = [Way("guarantees and recalls", True, None), Way("first come, first served", False, None)]
    if options.beside is not None:
        ways.append(Way(f"the tree {options.beside.name}", False, options.beside.resolve()))
    facts = machine.facts() | {"seed": str(numbers.seed), "capacity": format_size(numbers.capacity)}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    rows = []
    for way in ways:
        print(f"... {way.title}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="membroker-bench-") as directory:
            run = Run(Path(directory), numbers, way)
            try:
                rows.append(summary(way, run.play(), run.lent))
            finally:
                run.close()
    for name in rows[0]:
        print(f"| {name} | " + " | ".join(row[name] for row in rows) + " |")
        if not name:
            print("|---" * (len(rows) + 1) + "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
