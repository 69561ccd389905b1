"""`make bench-gpu`, and `python -m benchmarks.gpu`: the command line of the GPU benchmarks."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from membroker.vmm import DriverUnavailable, open_driver

from ..machine import busy_percent
from ..plotting import NoMatplotlib, load
from ..report import progress
from . import machine, plot, report, scenes, stage
from .figures import Section
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
    parser = _parser()
    options = parser.parse_args(arguments)
    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no directory {path.absolute().parent}")
    try:
        if options.plot is not None:
            load()
        open_driver(options.driver).close()
    except NoMatplotlib as error:
        parser.error(str(error))
    except DriverUnavailable as error:
        print(f"benchmarks: {error}; --driver host needs no GPU", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that all that was started is ended
    with stage.bare_driver(options.driver) as bare:
        facts = machine.facts(bare)
    sections: list[Section] = []
    try:
        _measure(options.driver, stage.QUICK if options.quick else stage.FULL, options.only, sections)
    except KeyboardInterrupt:
        return 130
    finally:
        found = goals(sections)
        if options.json is not None:
            report.write_json(facts, sections, found, options.json)
    show = report.show_markdown if options.markdown else report.show
    show(facts, sections, found, sys.stdout)
    if options.plot is not None:
        plot.draw(facts, sections, found, options.plot)
    return 1 if any(section.failure for section in sections) else 0


def _measure(driver: str, scale: stage.Scale, only: Sequence[str] | None, sections: list[Section]) -> None:
    """Measure scene by scene, into `sections`. One that fails says so, and the next one has daemons of its own."""
    chosen = [scene for key, scene in scenes.SCENES.items() if not only or key in only]
    with progress(len(chosen)) as (tell, done):
        played = stage.Stage(driver, scale, tell)
        before = busy_percent(scale.look_seconds)
        for scene in chosen:
            measuring = scene(played)
            section = next(measuring)
            sections.append(section)
            try:
                next(measuring, None)
            except Exception as error:  # noqa: BLE001 - what the other scenes see is worth having
                traceback.print_exc()
                section.failure = f"{type(error).__name__}: {error}"
            after = busy_percent(scale.look_seconds)
            section.others_percent = (before, after)
            before = after
            done(section.title)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--driver", choices=("cuda", "host"), default="cuda", help="a GPU, or the host driver")
    parser.add_argument(
        "--only", action="append", choices=tuple(scenes.SCENES), metavar="SCENE", help="this scene; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds, with small numbers")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, times in nanoseconds")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them there; needs matplotlib")
    return parser


if __name__ == "__main__":
    sys.exit(main())
