"""The stage: how much is measured, and how each scene measures, in turns, a moment after each other.

Owns the drivers, daemons and sessions of a scene while it plays. It knows no scene.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from membroker import Client
from membroker.vmm.sizes import GIB, MIB

from ..report import Tell
from .bare import Bare, open_bare
from .daemon import Daemon, difference, running
from .figures import Counts, Row, Section, Times, brokered, hits, row, share
from .pair import Lender
from .works import Work, connect, timed

TRANSPORTS = ("handoff", "grpc")
GAP_MS = 2.0
WARM_UP = 10
WARM_UP_AGAIN = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it: seconds of a turn, how many turns, how many processes work at once, how much is offloaded."""

    seconds: float
    rounds: int
    workers: Sequence[int]
    worker_seconds: float
    worker_rounds: int
    look_seconds: float
    offloaded: int


FULL = Scale(0.45, 3, (1, 2, 4, 8, 16, 32), worker_seconds=1, worker_rounds=2, look_seconds=1, offloaded=2 * GIB)
QUICK = Scale(0.01, 1, (1, 2), worker_seconds=0.1, worker_rounds=1, look_seconds=0.05, offloaded=64 * MIB)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do a work: whose row it is, and for the broker's, which daemon it asks and how."""

    by: str
    work: Work
    daemon: Daemon | None = None
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """A session with a daemon."""

    daemon: Daemon
    transport: str
    client: Client

    @property
    def by(self) -> str:
        """Whose row it is."""
        return brokered(self.transport, self.daemon.stock)

    def way(self, work: Work) -> Way:
        """Return the way that goes here."""
        return Way(self.by, work, self.daemon, self.transport)


@dataclass(frozen=True, slots=True)
class Stage:
    """What every scene gets: the kind of driver, how much to do, and where to report progress."""

    driver: str
    scale: Scale
    tell: Tell

    def measure(
        self, section: Section, work: str, ways: Sequence[Way], extents: int = 0, warm_up: int = WARM_UP
    ) -> None:
        """Measure the ways of one work in turns, first in a tight loop, then with a gap; add their rows.

        The first way is the one that the others are compared with. `extents` is how many one work asks for; at 0
        nothing is asked of the broker. `warm_up` works of each way are not measured.
        """
        for gap_ms in (0.0, GAP_MS):
            taken = {way.by: Times() for way in ways}
            counted: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {way.by: {} for way in ways}
            for number in range(self.scale.rounds):
                pace = f"a gap of {gap_ms:g} ms" if gap_ms else "no gap"
                self.tell(f"{section.key}: {work}, {pace}, turn {number + 1} of {self.scale.rounds}")
                for way in ways:
                    times, counts = self._turn(way, gap_ms / 1e3, min(WARM_UP_AGAIN, warm_up) if number else warm_up)
                    taken[way.by].add(times)
                    for key, value in counts.items():
                        counted[way.by][key] = counted[way.by].get(key, 0.0) + value
            base: Row | None = None
            for way in ways:
                section.rows.append(_row(way, work, gap_ms, taken[way.by], counted[way.by], base, extents))
                base = base or section.rows[-1]

    def _turn(self, way: Way, gap_seconds: float, warm_up: int) -> tuple[Times, Counts]:
        timed(way.work, 0, at_least=min(warm_up, 2) if self.scale.rounds == 1 else warm_up)
        before = way.daemon.counts() if way.daemon else {}
        times = timed(way.work, self.scale.seconds, gap_seconds, at_least=2)
        after = way.daemon.counts() if way.daemon else {}
        return times, difference(before, after)


def _row(way: Way, work: str, gap_ms: float, times: Times, counts: Counts, base: Row | None, extents: int) -> Row:
    if way.daemon is None or not extents:
        return row(work, gap_ms, way.by, times, base)
    asked, stock = extents * len(times.take), way.daemon.stock
    where = share(counts, times, way.transport, extents=asked, stock=stock)
    return row(work, gap_ms, way.by, times, base, hits(counts, asked) if stock else None, where)


@contextmanager
def bare_driver(driver: str) -> Iterator[Bare]:
    """Open the driver in process."""
    bare = open_bare(driver)
    try:
        yield bare
    finally:
        bare.close()


@contextmanager
def lender(driver: str, *, ahead: bool = False) -> Iterator[Lender]:
    """Run a process that lends and does nothing else."""
    found = Lender(driver, ahead=ahead)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def routes(stage: Stage, stocks: Sequence[bool] = (False, True)) -> Iterator[list[Route]]:
    """Run a daemon without stock, and one with it, and open a session of each transport with each."""
    with ExitStack() as stack:
        daemons = [stack.enter_context(running(stage.driver, stock=stock)) for stock in stocks]
        yield [
            Route(daemon, transport, stack.enter_context(connect(daemon.endpoint(), transport)))
            for transport in TRANSPORTS
            for daemon in daemons
        ]
