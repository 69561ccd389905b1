"""Spare pages: a pool keeps released pages for its next allocation."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.threads import held_up, together

from membroker.errors import AlreadyMapped, DeviceFailure, InvalidRequest
from membroker.pool.pool import VirtualMemoryPool


class TestSpare:
    """Pages that stay mapped and charged while nobody uses them."""

    @pytest.fixture
    def keeping(self, lender: Lender) -> Iterator[VirtualMemoryPool]:
        """A pool that keeps up to four spare pages, and everything that it asks of the lender counted."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
            yield pool

    @pytest.mark.parametrize("spare_pages", [-1, -64, "4", 1.5, None, True])
    def test_less_than_none(self, lender: Lender, spare_pages: int) -> None:
        with pytest.raises(InvalidRequest, match="spare"):
            VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=spare_pages)

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


def test_a_driver_that_fails_keeps_spare_pages(lender: Lender) -> None:
    """They are asked for on a device that computes. A closed pool has none to give."""
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
        pool._backing._is_never_busy = False
        pool.prepare(2 * PAGE)
        unmap = lender.driver.unmap

        def stuck(address: int, size: int) -> None:
            lender.driver.lost = True
            lender.driver._check_alive("cuMemUnmap")

        lender.driver.unmap = stuck  # type: ignore[method-assign]
        with pytest.raises(DeviceFailure):
            pool._holding.give_spare(64 * PAGE, lambda _: True)
        lender.driver.unmap, lender.driver.lost = unmap, False  # type: ignore[method-assign]
        assert pool.stats().spare_pages == 2
        pool._holding.give_spare(64 * PAGE, lambda _: True)
        assert pool.stats().spare_pages == 0
    pool._holding.give_spare(PAGE, lambda _: True)
