"""Spare pages: a pool keeps released pages for its next allocation."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE, Lender, state
from tests.support.threads import held_up, together

from membroker.errors import (
    AlreadyMapped,
    DeviceFailure,
    InvalidRequest,
    NotMapped,
    OutOfMemory,
    OutOfVirtualMemory,
)
from membroker.pool.pool import VirtualMemoryPool


class TestSpare:
    """Pages that stay mapped and charged while nobody uses them."""

    @pytest.fixture
    def keeping(self, lender: Lender) -> Iterator[VirtualMemoryPool]:
        """A pool that keeps up to four spare pages, and everything that it asks of the lender counted."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
            yield pool

    @pytest.fixture
    def borrowed(self, lender: Lender) -> list[int]:
        """How many calls were made for memory: one number more for each."""
        calls: list[int] = []
        lender.before_borrow = lambda: calls.append(len(calls))
        return calls

    @pytest.mark.parametrize("spare_pages", [-1, -64, "4", 1.5, None, True])
    def test_less_than_none(self, lender: Lender, spare_pages: int) -> None:
        with pytest.raises(InvalidRequest, match="spare"):
            VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=spare_pages)

    def test_a_page_that_comes_back_asks_nobody(
        self, keeping: VirtualMemoryPool, lender: Lender, borrowed: list[int]
    ) -> None:
        """A request ends and the next begins: its pages stay mapped, charged, and as they were written."""
        address = keeping.allocate(2 * PAGE, 2 * PAGE)
        keeping.view(2 * PAGE, 4)[:] = b"mine"
        keeping.deallocate(2 * PAGE, 2 * PAGE)
        assert not keeping.is_mapped(2 * PAGE)
        stats = keeping.stats()
        assert (stats.mapped_pages, stats.spare_pages, stats.physical_usage_bytes) == (2, 2, 2 * PAGE)
        assert keeping.physical_usage_bytes == lender.lent_bytes == lender.used_bytes == 2 * PAGE
        assert keeping.allocate(2 * PAGE, 2 * PAGE) == address
        assert keeping.is_mapped(3 * PAGE)
        assert keeping.stats().spare_pages == 0
        assert bytes(keeping.view(2 * PAGE, 4)) == b"mine"
        assert len(borrowed) == 1

    def test_what_is_spare_is_not_allocated(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """It can be neither freed again nor looked at nor held, and every refusal changes nothing."""
        keeping.allocate(0, 2 * PAGE)
        keeping.deallocate(0, PAGE)
        before = state(keeping, lender)
        for call in (keeping.deallocate, keeping.view, keeping.span):
            for size in (PAGE, 2 * PAGE):
                with pytest.raises(NotMapped):
                    call(0, size)
        with pytest.raises(AlreadyMapped):
            keeping.allocate(0, 2 * PAGE)
        assert state(keeping, lender) == before

    def test_no_more_than_there_may_be(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """A range is kept whole or given back whole, and the rest is the broker's."""
        keeping.allocate(0, 10 * PAGE)
        keeping.deallocate(0, 3 * PAGE)
        keeping.deallocate(3 * PAGE, 2 * PAGE)
        assert (keeping.stats().spare_pages, lender.lent_bytes) == (3, 8 * PAGE)
        keeping.deallocate(5 * PAGE, PAGE)
        keeping.deallocate(6 * PAGE, PAGE)
        assert (keeping.stats().spare_pages, lender.lent_bytes) == (4, 7 * PAGE)

    def test_a_range_that_is_spare_in_part(
        self, keeping: VirtualMemoryPool, lender: Lender, borrowed: list[int]
    ) -> None:
        """Only what is missing is borrowed, in one request, around what is there."""
        keeping.allocate(0, 8 * PAGE)
        keeping.view(2 * PAGE, 5)[:] = b"third"
        for page in (2, 5):
            keeping.deallocate(page * PAGE, PAGE)
        keeping.trim()
        for page in (0, 1, 3, 4, 6, 7):
            keeping.deallocate(page * PAGE, PAGE)
        assert (keeping.stats().spare_pages, lender.lent_bytes) == (4, 4 * PAGE)
        borrowed.clear()
        assert keeping.allocate(0, 8 * PAGE) == keeping.base_address
        assert len(borrowed) == 1
        stats = keeping.stats()
        assert (stats.mapped_pages, stats.spare_pages) == (8, 0)
        assert all(keeping.is_mapped(page * PAGE) for page in range(8))
        assert bytes(keeping.view(2 * PAGE, 5)) == bytes(5), "a page that was trimmed came back as it was"

    @pytest.mark.parametrize("pages", [0, 1, 2, 5, None])
    @pytest.mark.parametrize("failure", [OutOfMemory("full"), KeyboardInterrupt(), DeviceFailure("broken")])
    def test_out_of_memory_between_spare_pages(
        self, keeping: VirtualMemoryPool, lender: Lender, pages: int | None, failure: BaseException
    ) -> None:
        """It fails in the first or in the second run of what is missing (2 pages and 6), or is refused the second.

        What was spare is spare, with what is in it.
        """
        lender.part = 2
        keeping.allocate(0, 3 * PAGE)
        keeping.view(2 * PAGE, 4)[:] = b"keep"
        keeping.deallocate(2 * PAGE, PAGE)
        keeping.deallocate(0, 2 * PAGE)
        keeping.allocate(5 * PAGE, PAGE)
        keeping.deallocate(5 * PAGE, PAGE)
        before = state(keeping, lender)
        lender.fails_after, lender.failure = pages, failure
        if pages is None:
            lender.capacity = lender.lent_bytes + 3 * PAGE
        with pytest.raises(OutOfMemory if pages is None else type(failure)):
            keeping.allocate(0, 12 * PAGE)
        assert state(keeping, lender) == before
        lender.fails_after, lender.capacity = None, 1 << 40
        keeping.allocate(0, 12 * PAGE)
        assert keeping.stats().spare_pages == 0
        assert bytes(keeping.view(2 * PAGE, 4)) == b"keep"

    @pytest.mark.parametrize("mappings", range(4))
    def test_the_driver_fails_between_spare_pages(
        self, keeping: VirtualMemoryPool, lender: Lender, mappings: int
    ) -> None:
        keeping.allocate(0, 3 * PAGE)
        keeping.deallocate(0, 3 * PAGE)
        before = state(keeping, lender)
        lender.driver.maps_left = mappings
        with pytest.raises(DeviceFailure, check=named("ENOMEM")):
            keeping.allocate(0, 7 * PAGE)
        assert state(keeping, lender) == before
        lender.driver.maps_left = None

    def test_grow_goes_over_what_is_spare(self, keeping: VirtualMemoryPool, borrowed: list[int]) -> None:
        """A cache shrinks by three pages and grows again: behind what is used, over what is spare, and beyond."""
        keeping.grow(4 * PAGE)
        keeping.deallocate(PAGE, 3 * PAGE)
        borrowed.clear()
        assert keeping.grow(2 * PAGE) == keeping.base_address + PAGE
        assert borrowed == []
        assert keeping.grow(3 * PAGE) == keeping.base_address + 3 * PAGE
        assert len(borrowed) == 1
        stats = keeping.stats()
        assert (stats.mapped_pages, stats.spare_pages) == (6, 0)

    def test_prepare_is_ahead_of_need(self, pool: VirtualMemoryPool, lender: Lender, borrowed: list[int]) -> None:
        """Memory is lent before the request comes, also in a pool that keeps nothing; the growth then asks nobody."""
        pool.grow(PAGE)
        pool.prepare(3 * PAGE)
        assert (pool.stats().mapped_pages, pool.stats().spare_pages, lender.lent_bytes) == (4, 3, 4 * PAGE)
        assert not pool.is_mapped(PAGE)
        pool.prepare(2 * PAGE)
        pool.prepare("6MiB")
        assert len(borrowed) == 2, "what is there was lent again"
        assert pool.grow(2 * PAGE) == pool.base_address + PAGE
        assert pool.allocate(3 * PAGE, PAGE) == pool.base_address + 3 * PAGE
        assert (len(borrowed), pool.stats().spare_pages) == (2, 0)
        pool.deallocate(0, 4 * PAGE)
        assert lender.lent_bytes == 0, "a pool without spare pages kept some"

    def test_prepare_fails_as_allocate_does(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.grow(2 * PAGE)
        pool.prepare(PAGE)
        before = state(pool, lender)
        for size, error in ((0, InvalidRequest), (63 * PAGE, OutOfVirtualMemory), ("a lot", InvalidRequest)):
            with pytest.raises(error):
                pool.prepare(size)
        lender.fails_after = 2
        with pytest.raises(OutOfMemory):
            pool.prepare(8 * PAGE)
        assert state(pool, lender) == before

    def test_trim_gives_all_of_it_back(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """Somebody else needs memory: what nobody uses goes, in whatever pieces it lies; what is used stays."""
        keeping.allocate(0, 8 * PAGE)
        for page in (0, 1, 4, 7):
            keeping.deallocate(page * PAGE, PAGE)
        keeping.view(2 * PAGE, 4)[:] = b"keep"
        assert keeping.trim() == 4 * PAGE
        assert keeping.trim() == 0
        assert (keeping.stats().spare_pages, lender.lent_bytes, lender.used_bytes) == (0, 4 * PAGE, 4 * PAGE)
        assert bytes(keeping.view(2 * PAGE, 4)) == b"keep"
        keeping.allocate(0, PAGE)
        assert bytes(keeping.view(0, 4)) == bytes(4)

    def test_a_trim_that_fails_keeps_what_is_left(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """The device is lost: what is still mapped is still spare, and still charged."""
        keeping.allocate(0, 3 * PAGE)
        keeping.deallocate(0, PAGE)
        keeping.deallocate(2 * PAGE, PAGE)
        before = state(keeping, lender)
        lender.driver.lost = True
        with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_ILLEGAL_ADDRESS")):
            keeping.trim()
        assert state(keeping, lender) == before
        lender.driver.lost = False
        assert keeping.trim() == 2 * PAGE

    def test_a_view_keeps_a_page_from_turning_spare(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """Somebody still reads it: it would be given to the next under his eyes."""
        keeping.allocate(0, 2 * PAGE)
        view, span = keeping.view(0, 4), keeping.span(PAGE, 4)
        before = state(keeping, lender)
        for page in (0, 1):
            with pytest.raises(BufferError):
                keeping.deallocate(page * PAGE, PAGE)
        assert state(keeping, lender) == before
        del view, span
        keeping.deallocate(0, 2 * PAGE)
        assert keeping.stats().spare_pages == 2

    # --- threads ---

    def test_threads_race_for_one_spare_page(self, keeping: VirtualMemoryPool) -> None:
        """Sixteen threads want the same page, again and again: exactly one gets it each time."""
        for _ in range(50):
            keeping.allocate(0, PAGE)
            keeping.deallocate(0, PAGE)
            won: list[int] = []

            def race(won: list[int] = won) -> None:
                with suppress(AlreadyMapped):
                    won.append(keeping.allocate(0, PAGE))

            together([race] * 16)
            assert won == [keeping.base_address]
            keeping.deallocate(0, PAGE)

    @pytest.mark.parametrize("pages", [1, 2])
    def test_what_another_call_is_about_to_use(self, keeping: VirtualMemoryPool, lender: Lender, pages: int) -> None:
        """One thread waits for the page between two spare ones: nobody else gets those, and nobody trims them away."""
        keeping.allocate(0, 5 * PAGE)
        keeping.deallocate(0, 2 * PAGE)
        keeping.deallocate(3 * PAGE, 2 * PAGE)
        keeping._backing.spare_pages = 0
        keeping.deallocate(2 * PAGE, PAGE)
        keeping._backing.spare_pages = 4
        with held_up(lender, lambda: keeping.allocate(0, 5 * PAGE)):
            with pytest.raises(AlreadyMapped):
                keeping.allocate(0, pages * PAGE)
            with pytest.raises(AlreadyMapped):
                keeping.allocate(3 * PAGE, pages * PAGE)
            assert keeping.trim() == 0
            assert not keeping.is_mapped(0)
        assert all(keeping.is_mapped(page * PAGE) for page in range(5))
        keeping.view(0, 5 * PAGE)[:] = bytes(5 * PAGE)
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (5, 0)

    def test_trim_while_another_call_borrows(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """Elsewhere in the pool somebody waits for memory; what is given back here may be what he waits for."""
        keeping.allocate(0, 4 * PAGE)
        keeping.deallocate(0, 4 * PAGE)
        with held_up(lender, lambda: keeping.allocate(8 * PAGE, 4 * PAGE)):
            assert keeping.trim() == 4 * PAGE
            assert lender.lent_bytes == 0
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (4, 0)

    def test_allocate_while_another_call_trims(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """The trim waits for the device with a page in hand: that page is being changed, and then it is nobody's."""
        keeping.allocate(0, 2 * PAGE)
        keeping.deallocate(0, PAGE)
        with held_up(lender, keeping.trim, at_the_device=True):
            with pytest.raises(AlreadyMapped):
                keeping.allocate(0, PAGE)
            keeping.deallocate(PAGE, PAGE)
            keeping.allocate(PAGE, PAGE)
        assert not keeping.is_mapped(0)
        keeping.allocate(0, PAGE)
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (2, 0)

    def test_churn(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """Threads take, write, give back, prepare and trim on few pages: each owns what it has, and the sums agree."""
        owned = [threading.Semaphore(1) for _ in range(64)]

        def churn(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(300):
                first, count = choose.randrange(8), choose.choice((1, 1, 2, 3))
                if choose.random() < 0.1:
                    keeping.trim()
                try:
                    keeping.allocate(first * PAGE, count * PAGE)
                except AlreadyMapped:
                    continue
                for page in range(first, first + count):
                    assert owned[page].acquire(blocking=False), "a page has two owners"
                view = keeping.view(first * PAGE, count * PAGE)
                view[:8] = b"%08d" % seed
                assert bytes(view[:8]) == b"%08d" % seed
                view.release()
                del view
                for page in range(first, first + count):
                    owned[page].release()
                keeping.deallocate(first * PAGE, count * PAGE)

        together([partial(churn, seed) for seed in range(6)])
        stats = keeping.stats()
        assert stats.mapped_pages == stats.spare_pages <= 4
        assert lender.lent_bytes == stats.physical_usage_bytes
        assert keeping.trim() == stats.physical_usage_bytes
        assert lender.used_bytes == 0
