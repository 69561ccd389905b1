"""More scenes: what a request waits for memory that others must release, and what all of it costs.

Owns their rows, as `scenes` those of the others.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ..harness.crew import working
from ..harness.daemon import TWIN_BYTES, sources
from ..harness.samples import WHOLE, Samples
from ..harness.stage import Stage
from . import core, walk
from .figures import LoadSection, timing
from .jobs import Borrower, Claimant
from .scenes import BUSY_SECONDS, SECONDS, TENANTS, daemon_on_host

BORROWERS = 4
ANSWER_SECONDS = 0.03
HALF = TWIN_BYTES // 2
"""What the claimant is guaranteed, or its share beside one other tenant."""


def recalls(stage: Stage) -> Iterator[LoadSection]:
    """Ask for memory that one is entitled to while others have borrowed all of it, and answer recalls."""
    section = LoadSection(
        "An entitled request, when others have borrowed all memory",
        f"{BORROWERS} programs of another tenant borrow all there is, and answer recalls after "
        f"{1000 * ANSWER_SECONDS:.0f} ms, or at once with pages that they do not use. A worker asks for an eighth of "
        "the capacity at a time, up to a half, releases it all, and begins again once the others have borrowed that.",
    )
    yield section
    found = [
        ("recalled.spare", "spare pages, within the guarantee", HALF, None),
        ("recalled.guaranteed", "used pages, within the guarantee", HALF, ANSWER_SECONDS),
        ("recalled.share", "used pages, within the share", 0, ANSWER_SECONDS),
    ]
    for key, name, guarantee, answer_seconds in found:
        stage.tell(f"recalls: {name}")
        with daemon_on_host(TENANTS[:2]) as daemon:
            daemon.guarantee(TENANTS[0], guarantee)
            jobs = [
                partial(Borrower, daemon.endpoint(TENANTS[1]), f"m{number}", answer_seconds)
                for number in range(BORROWERS)
            ]
            with working(jobs) as borrowers, working([partial(Claimant, daemon.endpoint(TENANTS[0]))]) as claimant:
                borrowers.begin()
                samples = claimant.run(2 * stage.size(*BUSY_SECONDS))  # a few waits a second
                borrowers.end()
        section.timings.append(timing(key, name, samples, "wait"))


def the_core(stage: Stage, before: Path | None = None) -> Iterator[LoadSection]:
    """Measure steps of the core, in turns with that of the tree `before`. One extent: in a process for each turn."""
    section = LoadSection(
        "The core alone",
        "No daemon and no I/O. Times are CPU times, so others at work on the machine matter less than in the other "
        f"scenes. One look at {core.TENANTS * core.MODELS} requests that wait, each of another model, is a release "
        "that is enough for one of them; half of the models have borrowed all memory, and are asked for it.",
    )
    yield section
    count = int(5_000 * stage.size(*SECONDS))
    works: dict[str, Callable[[], Sequence[int]]] = {
        "plain": partial(_extent_times_of, core.ROOT, count),
        "guaranteed": partial(_extent_times_of, core.ROOT, count, "guaranteed"),
        "schedule": partial(core.schedule_times, max(3, int(10 * stage.size(*SECONDS)))),
    }
    if before is not None:
        works["before"] = partial(_extent_times_of, before, count)
    rows = stage.in_turns("the core alone", {name: partial(_worked, work) for name, work in works.items()}, 0)
    older = None
    if before is not None:
        older = timing("core.before", f"one extent, {before.name}", rows["before"])
        section.timings.append(older)
    plain = timing("core.extent", "one extent, allocated and released", rows["plain"], WHOLE, older)
    section.timings += [
        plain,
        timing("core.guaranteed", "the same with a guarantee in force", rows["guaranteed"], WHOLE, plain),
        timing("core.schedule", "one look at all that wait", rows["schedule"]),
    ]
    section.figure("core.divisions", "shares computed for 1,000 extents, nobody waits", core.divisions(1_000), "")


def beside(stage: Stage, before: Path) -> Iterator[LoadSection]:
    """Compare what one extent costs the daemon with the daemon of another tree."""
    section = LoadSection(
        f"One extent, beside {before.name}",
        "The CPU time of the daemon, the kernel's included, for a page of 2 MiB that a client borrows and releases, "
        "in turns with the daemon of the other tree.",
    )
    yield section
    stage.tell(f"one extent, here and with {before.name}")
    callers = walk.walked({"old": before, "new": None}, 2 + int(10 * stage.size(*SECONDS)))
    old, new = (statistics.median(callers[name].cpu[1:]) * 1e6 for name in ("old", "new"))
    section.figure("beside.old", f"the daemon's CPU, {before.name}", old, "us")
    section.figure("beside.new", "the daemon's CPU, this tree", new, "us")
    section.figure("beside.ratio", f"the daemon's CPU for one extent, to {before.name}", new / old, "x")


def _worked(work: Callable[[], Sequence[int]], _: float) -> Samples:
    begun = time.monotonic_ns()
    return Samples({"step": array("Q", work())}, time.monotonic_ns() - begun)


def _extent_times_of(tree: Path, count: int, *options: str) -> list[int]:
    command = [sys.executable, "-m", "benchmarks.load.core", str(count), *options]
    times: list[int] = json.loads(subprocess.run(command, env=sources(tree), stdout=subprocess.PIPE, check=True).stdout)
    return times
