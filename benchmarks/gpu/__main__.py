"""`make bench-gpu`, and `python -m benchmarks.gpu`: the command line of the GPU benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from membroker.vmm import DriverUnavailable, open_driver

from ..harness import command, machine
from . import plot, report, scenes
from .bare import open_bare
from .targets import goals

_DESCRIPTION = """\
What a borrowed extent costs on this machine's GPU, beside the same work done by the driver in process. It starts
daemons of its own, one without stock and one with the default stock, borrows by both transports, and measures the
driver in turns with them, in a tight loop and with a gap of 2 ms before each call.

scenes:
  extents  one extent of 2 MiB, 64 MiB, 1 GiB: allocate and map, and free
  pages    1 GiB by pages of 2 and 64 MiB: grow and shrink
  pool     an allocation from pages that a pool holds
  attach   a segment of 1, 16, 64 GiB: attach and close
  offload  a pool of 2 GiB to the host and back
  workers  1 to 32 processes at once"""

_EPILOG = """\
how to read it:
  p50, p99     what half and 99 of 100 calls did not exceed
  x, of bare   this row's p50, or its rate, over that of the driver in process in the same turns
  from stock   how many of the extents were ready; the daemon must count them (membroker_stock_extents_total)
  caller ...   where the time goes, by the broker's own histograms: means of both calls of a work together

Memory is made of the broker's kind in process too: exportable, and RDMA-capable where the GPU is. Nothing else should
use the GPU meanwhile. No figure is a pass or a failure.

examples:
  make bench-gpu OPTIONS='--json FILE --plot FILE.png'   all of it, in four or five minutes
  python -m benchmarks.gpu --markdown > results.md       the tables as Markdown
  python -m benchmarks.gpu --only workers                one scene
  python -m benchmarks.gpu --driver host --quick         every row, on the host driver: numbers that mean little"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    parser = command.parser("benchmarks.gpu", _DESCRIPTION, _EPILOG, ("quick", "json", "plot", "markdown"))
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda", help="a GPU, or the host driver")
    parser.add_argument(
        "--only", action="append", choices=tuple(scenes.SCENES), metavar="SCENE", help="this scene; may be repeated"
    )
    options = command.parse(parser, arguments)
    try:
        open_driver(options.driver).close()
    except DriverUnavailable as error:
        print(f"benchmarks: {error}; --driver host needs no GPU", file=sys.stderr)
        return 1
    with closing(open_bare(options.driver)) as bare:
        facts = machine.facts(bare.driver)
    return command.run(
        "benchmarks.gpu",
        [scene for key, scene in scenes.SCENES.items() if not options.only or key in options.only],
        facts,
        options,
        driver=options.driver,
        look_seconds=0.05 if options.quick else 1,
        goals=goals,
        goals_key="targets",
        chapters=report.chapters,
        draw=plot.draw,
    )


if __name__ == "__main__":
    sys.exit(main())
