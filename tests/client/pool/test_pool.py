"""The pool's promises, over a lender in this process and the host driver: no broker, the same code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.driver_errors import failing_from
from tests.support.fake_lender import PAGE, Lender, state
from tests.support.sizes import MIB
from tests.support.threads import held_up, together

from membroker.errors import (
    AlreadyMapped,
    DeviceFailure,
    InvalidOffset,
    InvalidPageSize,
    InvalidRequest,
    NotMapped,
    OutOfVirtualMemory,
)
from membroker.pool.pool import VirtualMemoryPool


@pytest.mark.parametrize("page_size", [0, 4096, 3 * MIB, PAGE + 1, "1MiB", -PAGE, "a page"])
def test_page_sizes_that_are_none(lender: Lender, page_size: int | str) -> None:
    """Somebody takes the kernel's page size for the card's."""
    with pytest.raises(InvalidPageSize):
        VirtualMemoryPool(lender, 64 * PAGE, page_size)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        *((-1, 1), (64 * PAGE, 1), (64 * PAGE - 1, 2), (0, 64 * PAGE + 1), (True, 1), (0.0, 1)),
        *((2**64 - 1, 2), (2**63 - 1, 2**63 - 1), (1, 2**63 - 1)),
    ],
)
def test_ranges_outside_the_pool(pool: VirtualMemoryPool, lender: Lender, offset: int, size: int) -> None:
    """offset + size that would overflow 64 bits is refused like any other range beyond the capacity."""
    before = state(pool, lender)
    calls = (pool.allocate, pool.free, pool.view, pool.span, lambda *at: pool.pin(*at).__enter__())
    for call in (*calls, lambda *at: pool.protect(*at, "read")):
        with pytest.raises(InvalidOffset):
            call(offset, size)
    assert state(pool, lender) == before


@pytest.mark.parametrize("size", [0, -1, 2**63, "", "-1MiB", "1.5B", None, 1.5])
def test_sizes_that_are_none(pool: VirtualMemoryPool, lender: Lender, size: int) -> None:
    before = state(pool, lender)
    for call in (pool.allocate, pool.free, pool.view):
        with pytest.raises(InvalidRequest):
            call(0, size)
    for grow in (pool.grow, pool.allocate_anywhere, pool.shrink, pool.prepare):
        with pytest.raises(InvalidRequest):
            grow(size)
    assert state(pool, lender) == before


def test_addresses_that_cannot_be_had(lender: Lender) -> None:
    """No number of bytes, or more than the processor has addresses for: the device says no, and nothing is held."""
    for capacity in (0, -1, 2**63, 2**63 - 1, "much"):
        with pytest.raises(InvalidRequest):
            VirtualMemoryPool(lender, capacity, PAGE)
    with pytest.raises(DeviceFailure):
        VirtualMemoryPool(lender, 2**62, PAGE)


def test_capacity_is_rounded_to_pages(lender: Lender) -> None:
    with VirtualMemoryPool(lender, PAGE + 1, "2MiB") as pool:
        assert pool.capacity == 2 * PAGE
        pool.allocate(0, "4MiB")


class TestGrow:
    def test_beyond_the_capacity(self, pool: VirtualMemoryPool) -> None:
        """The error says how much more there could be, and what to raise."""
        pool.allocate(0, 61 * PAGE)
        for grow in (pool.grow, pool.allocate_anywhere, pool.prepare):
            with pytest.raises(OutOfVirtualMemory, match=r"virtual_capacity") as caught:
                grow(4 * PAGE)
            assert (caught.value.requested_bytes, caught.value.available_bytes) == (4 * PAGE, 3 * PAGE)

    @pytest.mark.parametrize("call", ["grow", "allocate_anywhere"])
    def test_many_threads_grow_at_once(self, pool: VirtualMemoryPool, call: str) -> None:
        """Sixteen decoding threads append to one pool: each gets its own range, and together they have no hole."""
        addresses: list[int] = []
        together([lambda: addresses.append(getattr(pool, call)(3 * PAGE))] * 16)
        assert sorted(addresses) == [pool.base_address + 3 * PAGE * step for step in range(16)]
        assert pool.stats().mapped_pages == 48


class TestThreads:
    def test_no_lock_is_held_while_borrowing(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """One thread waits for memory that only another can free: it must be able to."""
        pool.allocate(0, PAGE)
        with held_up(lender, lambda: pool.allocate(PAGE, PAGE)):
            pool.free(0, PAGE)
            assert not pool.is_mapped(PAGE)
            with pytest.raises(AlreadyMapped):
                pool.allocate(PAGE, PAGE)
            with pytest.raises(NotMapped):
                pool.free(PAGE, PAGE)
        assert pool.is_mapped(PAGE)

    def test_freed_twice_at_once(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Two threads free the same range while the first waits for the device: nothing is left for the second."""
        pool.allocate(0, 2 * PAGE)
        with held_up(lender, lambda: pool.free(0, 2 * PAGE), at_the_device=True):
            with pytest.raises(NotMapped):
                pool.free(PAGE, PAGE)
            with pytest.raises(NotMapped):
                pool.view(PAGE, 1)
            with pytest.raises(AlreadyMapped):
                pool.allocate(0, 1)
        assert pool.physical_usage_bytes == 0


# Several unconnected ranges by one request, and release after a fence

LAYERS = [(at * PAGE, PAGE) for at in (3, 13, 23, 33)]
"""The same page of four tensors."""


class LostFence:
    """An event that fails as the device does."""

    def synchronize(self) -> None:
        raise ZeroDivisionError


class TestAllocateRanges:
    @pytest.mark.parametrize("wrong", [(PAGE - 1, 1), (5 * PAGE, 0), 5])
    def test_one_wrong_range(self, pool: VirtualMemoryPool, lender: Lender, wrong: Any) -> None:
        """Two bytes of one page, none, and no range."""
        before = state(pool, lender)
        with pytest.raises(InvalidRequest):
            pool.allocate_ranges([(0, PAGE), wrong])
        assert state(pool, lender) == before


class TestFences:
    @pytest.mark.parametrize(("fence", "error"), [(LostFence(), ZeroDivisionError), (7, InvalidRequest)])
    def test_a_fence_that_fails(
        self, pool: VirtualMemoryPool, lender: Lender, fence: object, error: type[Exception]
    ) -> None:
        pool.allocate_ranges(LAYERS)
        before = state(pool, lender)
        for call in (
            lambda: pool.free(3 * PAGE, PAGE, after=fence),
            lambda: pool.free(pool.base_address + 3 * PAGE, after=fence),
            lambda: pool.free_ranges(LAYERS, after=fence),
        ):
            with pytest.raises(error):
                call()
            assert state(pool, lender) == before

    def test_the_driver_fails_half_way(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Two of four ranges are unmapped before the driver fails: those are free, and the others can be retried."""
        pool.allocate_ranges(LAYERS)
        with failing_from(lender.driver, "unmap", 3), pytest.raises(DeviceFailure):
            pool.free_ranges(LAYERS)
        assert [pool.is_mapped(offset) for offset, _ in LAYERS] == [False, False, True, True]
        assert lender.lent_bytes == 2 * PAGE
        pool.free_ranges(LAYERS[2:])
        assert lender.lent_bytes == 0


# Spare pages: a pool keeps released pages for its next allocation


class TestSpare:
    """Pages that stay mapped and charged while nobody uses them."""

    @pytest.fixture
    def keeping(self, lender: Lender) -> Iterator[VirtualMemoryPool]:
        """A pool that keeps up to four spare pages, and everything that it asks of the lender counted."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
            yield pool

    def test_less_than_none(self, lender: Lender) -> None:
        for spare_pages in (-1, "4", 1.5, None, True):
            with pytest.raises(InvalidRequest, match="spare"):
                VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=spare_pages)  # type: ignore[arg-type]

    @pytest.mark.parametrize("pages", [1, 2])
    def test_what_another_call_is_about_to_use(self, keeping: VirtualMemoryPool, lender: Lender, pages: int) -> None:
        """One thread waits for the page between two spare ones: nobody else gets those, and nobody trims them away."""
        keeping.allocate(0, 5 * PAGE)
        keeping.free(0, 2 * PAGE)
        keeping.free(3 * PAGE, 2 * PAGE)
        keeping._backing.spare_pages = 0
        keeping.free(2 * PAGE, PAGE)
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
        keeping.free(0, 4 * PAGE)
        with held_up(lender, lambda: keeping.allocate(8 * PAGE, 4 * PAGE)):
            assert keeping.trim() == 4 * PAGE
            assert lender.lent_bytes == 0
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (4, 0)

    def test_allocate_while_another_call_trims(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """The trim waits for the device with a page in hand: that page is being changed, and then it is nobody's."""
        keeping.allocate(0, 2 * PAGE)
        keeping.free(0, PAGE)
        with held_up(lender, keeping.trim, at_the_device=True):
            with pytest.raises(AlreadyMapped):
                keeping.allocate(0, PAGE)
            keeping.free(PAGE, PAGE)
            keeping.allocate(PAGE, PAGE)
        assert not keeping.is_mapped(0)
        keeping.allocate(0, PAGE)
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (2, 0)
