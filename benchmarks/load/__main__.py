"""`make bench`, and `python -m benchmarks.load`: the command line of the load figures."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import grpc

from membroker.errors import MembrokerError

from .. import machine
from ..crew import WorkerFailed
from ..daemon import DaemonFailed
from ..report import progress
from . import recalls, report, scenes, stage
from .figures import Section

_DESCRIPTION = """\
What the broker costs on this machine, on the host driver: no GPU, no root. It starts a daemon of its own for each
scene, measures it with real processes over real sockets, and beside it the bare work without a broker, in the same run.

scenes:
  1  one caller: echoes of packets, packets with a descriptor, and gRPC, beside raw frames and the library
  2  500 sessions open and idle, while one worker works: its times, the daemon's memory and CPU
  3  100,000 extents in the books: time to fill and to empty, memory, and what everybody else feels of it
  4  64 workers at once, and 64 processes that do the bare work
  5  1,000 models in /metrics, scraped while one worker works
  6  a refusal for want of room, alone and beside 16 neighbours that borrow and release
  7  a request that is entitled to memory, when others have borrowed all of it and answer recalls
  8  the core alone: one extent, and one look at 64 requests that wait"""

_EPILOG = """\
how to read it:
  n, p50, p99   how many calls, and what half and 99 of 100 of them did not exceed, in microseconds
  x             this row's p50 over that of the row named under `beside`: the broker's own share
  calls/s       of the whole job only; a part of one is never done alone

Under each scene stands how busy the processors were just before it and just after, when the benchmark itself did
nothing: with others at work the times are theirs too, and only a ratio, measured in turns, is worth something.

A bare server is one thread that polls, and knows nothing: the ratio to it holds protobuf, asyncio, the driver thread,
the books, and in the library the import and the map. What waking a sleeping core costs is a matter of the machine, most
of all a virtual one, so the bare packets are shown on one core and on two, and the ratio is to two. Python's garbage
collector stays on. No figure is a pass or a failure; compare with a run of the same machine, when it is quiet. The last
table has the figures that have a target, which holds for a machine that does nothing else.

examples:
  make bench                                     all of it, in three or four minutes; writes nothing
  make bench OPTIONS='--json before.json'        the same, kept for later
  make bench OPTIONS='--before ../old'           also what one extent costs there, in turns
  python -m benchmarks.load --quick              every row in some seconds, with numbers that mean little"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    path: Path | None = options.json
    if path is not None and not path.absolute().parent.is_dir():
        parser.error(f"--json {path}: there is no directory {path.absolute().parent}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all that was started is ended
    facts = machine.facts()
    try:
        sections = _measure(stage.QUICK if options.quick else stage.FULL, options.before)
        report.show(facts, sections, sys.stdout)
        if path is not None:
            report.write_json(facts, sections, path)
    except (WorkerFailed, DaemonFailed, MembrokerError, grpc.RpcError, subprocess.TimeoutExpired, OSError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _measure(scale: stage.Scale, before: Path | None) -> list[Section]:
    sections = []
    played = [*scenes.SCENES, recalls.recalls, partial(recalls.the_core, before=before)]
    if before is not None:
        played.append(partial(recalls.beside, before=before))
    with progress(len(played)) as (tell, done):
        busy_before = machine.busy_percent(scale.look_seconds)
        for scene in played:
            section = scene(scale, tell)
            busy_after = machine.busy_percent(scale.look_seconds)
            section.others_percent = (busy_before, busy_after)
            sections.append(section)
            busy_before = busy_after
            done(section.title)
    return sections


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds, with small numbers")
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout that is measured beside this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, times in nanoseconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
