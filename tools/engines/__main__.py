"""Print which releases of vLLM and SGLang have what membroker relies on: `make check-engines`.

Owns the verdict. A release that membroker lists as tested and that differs is a failure. A release that appeared after
this tree was written can only be told: otherwise what others publish would make an unchanged tree fail. `--strict`
makes it a failure too, for those who look after the list. So does what cannot be compared, because there is no index.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

from packaging.version import Version

from membroker.kv.sglang import seams as sglang
from membroker.kv.vllm import seams as vllm

from .releases import Unavailable, chosen, fetch, index_url, python_of, releases
from .sources import Sources

WINDOW_DAYS = 60
"""membroker means to serve each release of this age."""
SERVED, SAME, DIFFERS, BROKEN, UNKNOWN = (
    "tested, and as it was then",
    "not tested; has all that is used",
    "NOT TESTED, AND DIFFERS",
    "TESTED, AND DIFFERS",
    "left out",
)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    engine: str
    version: str
    date: str
    verdict: str
    differences: tuple[str, ...] = ()

    def fails(self, strict: bool) -> bool:
        """Return whether the command fails because of it."""
        return self.verdict == BROKEN or (strict and self.verdict in (DIFFERS, UNKNOWN))


def is_tested(seams: ModuleType, version: Version) -> bool:
    """Return whether the engine's table was tested with this version. Its entries end with a dot, or are whole."""
    tested = (seams.TESTED,) if isinstance(seams.TESTED, str) else seams.TESTED
    return any(str(version).startswith(one) if one.endswith(".") else str(version) == one for one in tested)


def compare(seams: ModuleType, sources: Sources) -> Iterator[str]:
    """Yield what a release lacks of what the tables of `seams` name."""
    return sources.differences(seams.MEMBERS)


def rows(name: str, seams: ModuleType, index: Callable[[], str], keep: Path, now: datetime) -> Iterator[Row]:
    """Yield a line for each release of the package `name` that is compared, the newest last."""

    def listed(version: Version) -> bool:
        return is_tested(seams, version)

    try:
        found = chosen(releases(name, index()), now, timedelta(days=WINDOW_DAYS), listed)
    except Unavailable as error:
        yield Row(name, "?", "", UNKNOWN, (str(error),))
        return
    for release in found:
        about = (name, str(release.version), f"{release.date:%Y-%m-%d}")
        try:
            sources = Sources(python_of(fetch(release, keep), name))
        except Unavailable as error:
            yield Row(*about, UNKNOWN, (str(error),))
            continue
        lacks = tuple(compare(seams, sources))
        if listed(release.version):
            yield Row(*about, BROKEN if lacks else SERVED, lacks)
        else:
            yield Row(*about, DIFFERS if lacks else SAME, lacks)


def show(found: list[Row], colour: bool) -> Iterator[str]:
    """Yield the lines of the table, and below it each difference."""
    yield f"{'engine':8} {'version':12} {'released':10} {'differ':>6}  verdict"
    for row in found:
        count = "-" if row.verdict == UNKNOWN else str(len(row.differences))
        line = f"{row.engine:8} {row.version:12} {row.date:10} {count:>6}  {row.verdict}"
        yield f"\033[31m{line}\033[0m" if colour and row.verdict in (BROKEN, DIFFERS) else line
    for row in found:
        for one in row.differences:
            yield f"{row.engine} {row.version}: {one}"


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, and return 1 if a tested release differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where fetched files stay for the next time")
    parser.add_argument(
        "--strict", action="store_true", help="fail also if an untested release differs, or one is left out"
    )
    options = parser.parse_args(arguments)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, seams in (("vllm", vllm), ("sglang", sglang)):
            found += rows(name, seams, index_url, options.keep or Path(directory), datetime.now(UTC))
    print("\n".join(show(found, sys.stdout.isatty())))
    return int(any(row.fails(options.strict) for row in found))


if __name__ == "__main__":
    sys.exit(main())
