"""What the figures should be, beside what they are. Never a test: a machine with others at work misses all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from membroker.vmm.sizes import GIB, MIB, format_size

from .figures import ATTACH, EXTENTS, IN_PROCESS, PAGES, POOL, WORKERS, Row, Section, brokered
from .scenes import PAGE_BY_PAGE, PAIR, PAIR_AHEAD, SPARE_GROWTH, SPARE_PAGE, pages_of, workers_of
from .stage import GAP_MS, TRANSPORTS

ALLOCATE = {2 * MIB: {False: 3.0, True: 2.2}, GIB: {False: 2.5, True: 1.6}}
"""An extent's allocate and map at p50, without and with stock, to the driver in process."""
FREE = 1.5
GROW = {2 * MIB: 2.1, 64 * MIB: 3.0}
"""Growth by 1 GiB, by the size of its pages."""
POOL_US = 5.0
ATTACHED, ATTACHED_SIZE = 1.3, 64 * GIB
CROWD, CROWD_RATE = 32, 0.8


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure at p50 and what it should be, at most or at least. `unit` is `x` or `us`.

    `pair` is what two processes without a broker reached in the same run, where that was measured.
    """

    what: str
    gap_ms: float
    value: float
    target: float
    unit: str = "x"
    at_least: bool = False
    pair: float | None = None

    @property
    def reached(self) -> bool:
        """Whether it is what it should be."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def goals(sections: Sequence[Section]) -> list[Goal]:
    """Return what was measured of all that has a target; the targets are for the handoff."""
    by_key = {section.key: section for section in sections}
    found: list[Goal] = []
    for key, look in (
        (EXTENTS, _extents),
        (PAGES, _pages),
        (POOL, _pool),
        (ATTACH, _attach),
        (WORKERS, _workers),
    ):
        if key in by_key:
            found += look(by_key[key])
    return found


def _extents(section: Section) -> Iterator[Goal]:
    for size in (2 * MIB, 64 * MIB, GIB):
        for stock in (False, True):
            by = brokered(TRANSPORTS[0], stock)
            for found in _paces(section, format_size(size), by):
                pair = section.find(found.work, found.gap_ms, PAIR_AHEAD if stock else PAIR)
                if size in ALLOCATE and found.take_ratio is not None:
                    target = ALLOCATE[size][stock]
                    yield Goal(f"allocate {found.work}, {by}", found.gap_ms, found.take_ratio, target, pair=_take(pair))
                if found.give_ratio is not None:
                    goal = Goal(f"free {found.work}, {by}", found.gap_ms, found.give_ratio, FREE, pair=_give(pair))
                    yield goal


def _pages(section: Section) -> Iterator[Goal]:
    for page, target in GROW.items():
        for stock in (False, True):
            by = brokered(TRANSPORTS[0], stock)
            for found in _paces(section, pages_of(page), by):
                pair = section.find(found.work, found.gap_ms, PAIR)
                if found.take_ratio is not None and found.give_ratio is not None:
                    yield Goal(f"grow {found.work}, {by}", found.gap_ms, found.take_ratio, target, pair=_take(pair))
                    each = section.find(found.work, found.gap_ms, PAGE_BY_PAGE)
                    if each is not None:
                        ratio = found.take.p50_ns / each.take.p50_ns
                        yield Goal(f"grow {found.work}, {by}, to access page by page", found.gap_ms, ratio, target)
                    yield Goal(f"shrink {found.work}, {by}", found.gap_ms, found.give_ratio, FREE, pair=_give(pair))


def _pool(section: Section) -> Iterator[Goal]:
    for work in (SPARE_PAGE, SPARE_GROWTH):
        for found in _paces(section, work, "pool"):
            yield Goal(f"from the pool, {work}", found.gap_ms, found.take.p50_ns / 1e3, POOL_US, "us")


def _attach(section: Section) -> Iterator[Goal]:
    by = brokered(TRANSPORTS[0], stock=False)
    for found in _paces(section, format_size(ATTACHED_SIZE), by):
        if found.take_ratio is not None:
            yield Goal(f"attach {found.work}, handoff", found.gap_ms, found.take_ratio, ATTACHED)


def _workers(section: Section) -> Iterator[Goal]:
    for stock in (False, True):
        by = brokered(TRANSPORTS[0], stock)
        found = section.find(workers_of(CROWD), 0.0, by)
        if found is not None and found.rate_ratio is not None:
            pair = section.find(found.work, 0.0, PAIR)
            rate = pair.rate_ratio if pair else None
            yield Goal(f"rate of {found.work}, {by}", 0.0, found.rate_ratio, CROWD_RATE, at_least=True, pair=rate)


def _take(found: Row | None) -> float | None:
    return found.take_ratio if found else None


def _give(found: Row | None) -> float | None:
    return found.give_ratio if found else None


def _paces(section: Section, work: str, by: str) -> Iterator[Row]:
    assert by != IN_PROCESS
    for gap_ms in (0.0, GAP_MS):
        found = section.find(work, gap_ms, by)
        if found is not None:
            yield found
