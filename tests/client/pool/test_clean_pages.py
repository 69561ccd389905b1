"""Which spare pages a pool releases by itself: those that no work on the device can use, without a wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.fake_lender import PAGE, Lender

from membroker.errors import DeviceFailure
from membroker.pool.pool import VirtualMemoryPool


@pytest.fixture
def waits(lender: Lender) -> list[int]:
    """How often anything waited for the device: one number more for each time."""
    found: list[int] = []
    lender.driver.before_synchronize = lambda: found.append(len(found))
    return found


@pytest.fixture
def busy(lender: Lender, waits: list[int]) -> Iterator[VirtualMemoryPool]:
    """A pool of up to four spare pages on a device that computes."""
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
        pool._backing._is_never_busy = False
        yield pool


def given(pool: VirtualMemoryPool, pages: int = 64, *, asked: bool = True) -> int:
    """Ask for this many pages, and return how many went back."""
    before = pool.stats().mapped_pages
    pool._holding.give_spare(pages * PAGE, lambda _: asked)
    return before - pool.stats().mapped_pages


def test_prepared_pages_are_clean(busy: VirtualMemoryPool, waits: list[int], lender: Lender) -> None:
    """Nothing was ever written there, so they go without a wait: only as many as were asked for."""
    busy.prepare(5 * PAGE)
    assert given(busy, 2) == 2
    assert [row.offset for row in busy.mappings(by_page=True)] == [0, PAGE, 2 * PAGE]
    assert given(busy, asked=False) == 0
    assert given(busy) == 3
    assert waits == []
    assert lender.lent_bytes == 0


def test_a_deallocated_page_is_clean_after_the_next_wait(busy: VirtualMemoryPool, waits: list[int]) -> None:
    """A kernel may still write to it. The next deallocation that waits for the device makes it clean."""
    busy.allocate(0, 8 * PAGE)
    busy.deallocate(0, 2 * PAGE)
    assert (given(busy), waits) == (0, [])
    busy.deallocate(2 * PAGE, 3 * PAGE)  # more than may be spare
    assert waits == [0]
    busy.deallocate(5 * PAGE, PAGE)
    assert given(busy) == 0, "the last one came after the wait, and the pool knows no more than that"
    busy.deallocate(6 * PAGE, 2 * PAGE)
    assert (given(busy), waits) == (3, [0, 1])


def test_a_prepared_page_that_was_used_is_clean_no_more(busy: VirtualMemoryPool, waits: list[int]) -> None:
    """One of three prepared pages was allocated and deallocated: the other two go."""
    busy.prepare(3 * PAGE)
    busy.deallocate(busy.allocate(PAGE, PAGE) - busy.base_address, PAGE)
    assert busy.stats().spare_pages == 3
    assert given(busy) == 2
    assert [row.offset for row in busy.mappings()] == [PAGE]
    busy.allocate(0, 2 * PAGE)
    busy.deallocate(0, 2 * PAGE)
    assert (given(busy), waits) == (0, [])


def test_a_page_that_was_clean_and_is_used_stays(busy: VirtualMemoryPool) -> None:
    """It was clean before it was allocated again: what is allocated never goes."""
    busy.prepare(2 * PAGE)
    busy.allocate(0, PAGE)
    assert given(busy) == 1
    assert busy.is_mapped(0)


def test_a_page_that_moved_over_a_prepared_one(busy: VirtualMemoryPool, waits: list[int]) -> None:
    """A prepared page was used and released; a run moved to its place, and was released there: it is not clean."""
    busy.prepare(2 * PAGE)
    busy.allocate(0, 3 * PAGE)
    busy._backing.spare_pages = 0
    busy.deallocate(0, PAGE)
    busy.compact()
    busy._backing.spare_pages = 4
    count = len(waits)
    busy.deallocate(0, 2 * PAGE)
    assert (given(busy), len(waits)) == (0, count)


def test_on_the_host_all_spare_pages_are_clean(lender: Lender, waits: list[int]) -> None:
    """No work is ever in flight there."""
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
        pool.allocate(0, 4 * PAGE)
        pool.deallocate(0, PAGE)
        pool.deallocate(2 * PAGE, PAGE)
        assert (given(pool), waits) == (2, [])


def test_a_driver_that_fails_keeps_them(busy: VirtualMemoryPool, lender: Lender) -> None:
    busy.prepare(2 * PAGE)
    unmap = lender.driver.unmap

    def stuck(address: int, size: int) -> None:
        lender.driver.lost = True
        lender.driver._check_alive("cuMemUnmap")

    lender.driver.unmap = stuck  # type: ignore[method-assign]
    with pytest.raises(DeviceFailure):
        given(busy)
    lender.driver.unmap, lender.driver.lost = unmap, False  # type: ignore[method-assign]
    assert busy.stats().spare_pages == 2
    assert given(busy) == 2


def test_a_pool_that_is_closed_or_empty_gives_nothing(lender: Lender) -> None:
    pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
    assert given(pool) == 0
    pool.close()
    pool._holding.give_spare(PAGE, lambda _: True)
