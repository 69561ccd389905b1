"""The command lines: what their options have in common, and a run of scenes from the first to the report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from membroker.wire.help_text import HelpFormatter

from . import crew
from .goals import Goal
from .plotting import NoMatplotlib, load
from .report import Chapter, show, write_json
from .stage import Scene, Section, play

_S = TypeVar("_S", bound=Section)
_OUTPUTS = {
    "json": {"type": Path, "metavar": "FILE", "help": "write the figures there too, times in nanoseconds"},
    "plot": {"type": Path, "metavar": "FILE.png", "help": "draw them there; needs matplotlib"},
    "markdown": {"action": "store_true", "help": "print the tables as Markdown"},
    "quick": {"action": "store_true", "help": "a smoke run of some seconds, with small numbers"},
}


def parser(program: str, description: str, epilog: str = "", outputs: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser that has some of the options that several benchmarks have."""
    found = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    found.set_defaults(json=None, plot=None)
    for name in outputs:
        found.add_argument(f"--{name}", **_OUTPUTS[name])  # type: ignore[arg-type]
    return found


def parse(found: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. What cannot be written or drawn is told before anything is measured."""
    options = found.parse_args(arguments)
    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            found.error(f"{path}: there is no directory {path.absolute().parent}")
    try:
        if options.plot is not None:
            load()
    except NoMatplotlib as error:
        found.error(str(error))
    return options


def end_on_sigterm() -> None:
    """Make SIGTERM an exception, so that all that was started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run(
    package: str,
    scenes: Sequence[Scene[_S]],
    facts: Mapping[str, str],
    options: argparse.Namespace,
    *,
    driver: str = "host",
    look_seconds: float,
    goals: Callable[[Sequence[_S]], Sequence[Goal]],
    goals_key: str,
    chapters: Callable[[Sequence[_S], Sequence[Goal]], Iterator[Chapter]],
    draw: Callable[[Mapping[str, str], Sequence[_S], Sequence[Goal], Path], None] | None = None,
) -> int:
    """Play all scenes, write and print what they saw, and return the exit status."""
    end_on_sigterm()
    crew.preload(f"{package}.__main__")
    sections: list[_S] = []
    found: Sequence[Goal] = ()
    try:
        sections.extend(play(scenes, options.quick, driver, look_seconds))
    except KeyboardInterrupt:
        return 130
    finally:
        found = goals(sections)
        if options.json is not None:
            write_json(options.json, machine=facts, sections=sections, **{goals_key: found})
    show(facts, chapters(sections, found), as_markdown=options.markdown, stream=sys.stdout)
    if options.plot is not None and draw is not None:
        draw(facts, sections, found, options.plot)
    return 1 if any(section.failure for section in sections) else 0
