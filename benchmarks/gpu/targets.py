"""What the figures should be, beside what they are. Never a test: a machine with others at work misses all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from membroker.vmm.sizes import GIB, MIB, format_size

from ..harness.goals import Goal
from .figures import ATTACH, EXTENTS, IN_PROCESS, PAGES, POOL, WORKERS, GpuSection, Row, brokered
from .scenes import PAGE_BY_PAGE, PAIR, PAIR_AHEAD, SPARE_GROWTH, SPARE_PAGE, pages_of, workers_of
from .ways import GAP_MS, TRANSPORTS

ALLOCATE = {2 * MIB: {False: 3.0, True: 2.2}, GIB: {False: 2.5, True: 1.6}}
"""An extent's allocate and map at p50, without and with stock, to the driver in process."""
FREE = 1.5
GROW = {2 * MIB: 2.1, 64 * MIB: 3.0}
"""Growth by 1 GiB, by the size of its pages."""
POOL_US = 5.0
ATTACHED, ATTACHED_SIZE = 1.3, 64 * GIB
CROWD, CROWD_RATE = 32, 0.8


def goals(sections: Sequence[GpuSection]) -> list[Goal]:
    """Return what was measured of all that has a target; the targets are for the handoff."""
    looks = {EXTENTS: _extents, PAGES: _pages, POOL: _pool, ATTACH: _attach, WORKERS: _workers}
    by_key = {section.key: section for section in sections}
    return [goal for key, look in looks.items() if key in by_key for goal in look(by_key[key])]


def _goal(
    what: str, found: Row, value: float | None, target: float, pair: float | None = None, unit: str = "x"
) -> Iterator[Goal]:
    """Yield a goal of a row, unless nothing was measured beside it."""
    if value is not None:
        yield Goal(what, value, target, unit, gap_ms=found.gap_ms, pair=pair)


def _extents(section: GpuSection) -> Iterator[Goal]:
    for size in (2 * MIB, 64 * MIB, GIB):
        for stock in (False, True):
            by = brokered(TRANSPORTS[0], stock)
            for found in _paces(section, format_size(size), by):
                pair = section.find(found.work, found.gap_ms, PAIR_AHEAD if stock else PAIR)
                if size in ALLOCATE:
                    target = ALLOCATE[size][stock]
                    yield from _goal(f"allocate {found.work}, {by}", found, found.take_ratio, target, _take(pair))
                yield from _goal(f"free {found.work}, {by}", found, found.give_ratio, FREE, _give(pair))


def _pages(section: GpuSection) -> Iterator[Goal]:
    for page, target in GROW.items():
        for stock in (False, True):
            by = brokered(TRANSPORTS[0], stock)
            for found in _paces(section, pages_of(page), by):
                pair = section.find(found.work, found.gap_ms, PAIR)
                grow = f"grow {found.work}, {by}"
                yield from _goal(grow, found, found.take_ratio, target, _take(pair))
                each = section.find(found.work, found.gap_ms, PAGE_BY_PAGE)
                ratio = found.take.p50_ns / each.take.p50_ns if each else None
                yield from _goal(f"{grow}, to access page by page", found, ratio, target)
                yield from _goal(f"shrink {found.work}, {by}", found, found.give_ratio, FREE, _give(pair))


def _pool(section: GpuSection) -> Iterator[Goal]:
    for work in (SPARE_PAGE, SPARE_GROWTH):
        for found in _paces(section, work, "pool"):
            yield from _goal(f"from the pool, {work}", found, found.take.p50_ns / 1e3, POOL_US, unit="us")


def _attach(section: GpuSection) -> Iterator[Goal]:
    for found in _paces(section, format_size(ATTACHED_SIZE), brokered(TRANSPORTS[0], stock=False)):
        yield from _goal(f"attach {found.work}, handoff", found, found.take_ratio, ATTACHED)


def _workers(section: GpuSection) -> Iterator[Goal]:
    pair = section.find(workers_of(CROWD), 0.0, PAIR)
    for stock in (False, True):
        by = brokered(TRANSPORTS[0], stock)
        found = section.find(workers_of(CROWD), 0.0, by)
        if found is not None and found.rate_ratio is not None:
            what, rate = f"rate of {found.work}, {by}", pair.rate_ratio if pair else None
            yield Goal(what, found.rate_ratio, CROWD_RATE, "x", at_least=True, gap_ms=0.0, pair=rate)


def _take(found: Row | None) -> float | None:
    return found.take_ratio if found else None


def _give(found: Row | None) -> float | None:
    return found.give_ratio if found else None


def _paces(section: GpuSection, work: str, by: str) -> Iterator[Row]:
    assert by != IN_PROCESS
    return (found for gap_ms in (0.0, GAP_MS) if (found := section.find(work, gap_ms, by)) is not None)
