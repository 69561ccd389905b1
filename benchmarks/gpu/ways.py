"""The ways to do a work, by daemons of this benchmark's own or without one, measured in turns. It knows no scene."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, repeat

from membroker import Client

from ..harness.daemon import Daemon, configuration, connect, difference, running
from ..harness.jobs import Job, timed
from ..harness.samples import Samples
from ..harness.stage import Stage, Turn
from .figures import GpuSection, brokered, hits, row, share

TRANSPORTS = ("handoff", "grpc")
GAP_MS = 2.0
WARM_UP = 10
WARM_UP_AGAIN = 2
SECONDS, ROUNDS = (1.35, 0.01), (3, 1)
"""For one row, in so many turns: in full, and quick."""
TWIN_STOCK = "1GiB"
"""The host driver keeps no stock by default. This is the default of a GPU."""
HOST_CAPACITY = "32GiB"
"""For offloaded pools: a limit that is never reached."""


def broker(driver: str, *, stock: bool) -> AbstractContextManager[Daemon]:
    """Run a daemon on a driver, with the default stock or without any."""
    keys = {} if stock and driver != "host" else {"stock": TWIN_STOCK if stock else 0}
    return running(configuration(driver, host_capacity=HOST_CAPACITY, **keys), fresh=True)


@dataclass(frozen=True, slots=True)
class Route:
    """A session with a daemon, which has a stock or none."""

    daemon: Daemon
    stock: bool
    transport: str
    client: Client

    def way(self, job: Job) -> Way:
        """Return the way that goes here."""
        return Way(brokered(self.transport, self.stock), job, self)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do a work: whose row it is, and for the broker's, which daemon it asks and how."""

    by: str
    job: Job
    route: Route | None = None

    def turn(self, gap_seconds: float, warm_ups: Iterator[int]) -> Turn:
        """Return what does it for some seconds, after some times that are not measured, with the daemon's counts."""
        daemon = self.route.daemon if self.route else None

        def measured(seconds: float) -> Samples:
            timed(self.job, at_least=next(warm_ups))
            before = daemon.counts() if daemon else {}
            samples = timed(self.job, seconds, gap_seconds=gap_seconds, at_least=2)
            samples.counts = difference(before, daemon.counts()) if daemon else {}
            return samples

        return measured


@contextmanager
def routes(driver: str, stocks: Sequence[bool] = (False, True)) -> Iterator[list[Route]]:
    """Run a daemon without stock, and one with it, and open a session of each transport with each."""
    with ExitStack() as stack:
        daemons = [(stack.enter_context(broker(driver, stock=stock)), stock) for stock in stocks]
        yield [
            Route(daemon, stock, transport, stack.enter_context(connect(daemon.endpoint(), transport)))
            for transport in TRANSPORTS
            for daemon, stock in daemons
        ]


def measure(
    stage: Stage, section: GpuSection, work: str, ways: Sequence[Way], extents: int = 0, warm_up: int = WARM_UP
) -> None:
    """Measure the ways of one work in turns, first in a tight loop, then with a gap; add their rows.

    The first way is the one that the others are compared with. `extents` is how many one work asks for; at 0 nothing is
    asked of the broker. `warm_up` works of each way are not measured.
    """
    again = min(WARM_UP_AGAIN, warm_up)
    first = stage.size(warm_up, again)
    for gap_ms in (0.0, GAP_MS):
        pace = f"a gap of {gap_ms:g} ms" if gap_ms else "no gap"
        turns = {way.by: way.turn(gap_ms / 1e3, chain([first], repeat(again))) for way in ways}
        what = f"{section.key}: {work}, {pace}"
        taken = stage.in_turns(what, turns, stage.size(*SECONDS), stage.size(*ROUNDS))
        base = None
        for way in ways:
            samples, route = taken[way.by], way.route
            found = row(work, gap_ms, way.by, samples, base)
            if route is not None and extents:
                asked = extents * samples.count
                found.share = share(samples, route.transport, extents=asked, stock=route.stock)
                found.hit_percent = hits(samples.counts, asked) if route.stock else None
            section.rows.append(found)
            base = base or found
