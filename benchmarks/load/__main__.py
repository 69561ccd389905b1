"""`make bench`, and `python -m benchmarks.load`: the command line of the load figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..harness import command, machine
from . import recalls, scenes
from .figures import chapters
from .targets import goals

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
  7  a worker beside five tenants that flood, with 1, 16 and 160 connections each
  8  a request that is entitled to memory, when others have borrowed all of it and answer recalls
  9  the core alone: one extent, and one look at 64 requests that wait"""

_EPILOG = """\
how to read it:
  n, p50, p99   how many calls, and what half and 99 of 100 of them did not exceed, in microseconds
  x             this row's p50 over that of the row named under `beside`: the broker's own share
  calls/s       of the whole job only; a part of one is never done alone

Above each table stands how busy the processors were just before and just after, when the benchmark itself did
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
    parser = command.parser("benchmarks.load", _DESCRIPTION, _EPILOG, ("quick", "json", "markdown"))
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout that is measured beside this one")
    options = command.parse(parser, arguments)
    before: Path | None = options.before
    played = [*scenes.SCENES, recalls.recalls, partial(recalls.the_core, before=before)]
    if before is not None:
        played.append(partial(recalls.beside, before=before))
    return command.run(
        "benchmarks.load",
        played,
        machine.facts(),
        options,
        look_seconds=0.1 if options.quick else 2,
        goals=goals,
        goals_key="goals",
        chapters=chapters,
    )


if __name__ == "__main__":
    sys.exit(main())
