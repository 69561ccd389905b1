"""The pool's promises, over a lender in this process and the host driver: no broker, the same code."""

from __future__ import annotations

import signal
import threading

import pytest
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


class TestSeed:
    """What candle-cuda-vmm's tests ask of its pool."""

    def test_new_pool(self, pool: VirtualMemoryPool) -> None:
        """A worker makes a pool for its whole KV cache; that costs no memory."""
        assert pool.capacity == 64 * PAGE
        assert pool.page_size == PAGE
        assert pool.base_address % PAGE == 0
        assert pool.physical_usage_bytes == 0
        assert not pool.is_mapped(0)

    @pytest.mark.parametrize("page_size", [0, 1, 4096, MIB, 3 * MIB, PAGE + 1, "1MiB", -PAGE, "a page"])
    def test_invalid_page_size(self, lender: Lender, page_size: int | str) -> None:
        """Somebody takes the kernel's page size for the card's; the message says what the card wants."""
        with pytest.raises(InvalidPageSize):
            VirtualMemoryPool(lender, 64 * PAGE, page_size)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (-1, 1),
        (64 * PAGE, 1),
        (64 * PAGE - 1, 2),
        (0, 64 * PAGE + 1),
        (2**64 - 1, 2),
        (2**63 - 1, 2**63 - 1),
        (1, 2**63 - 1),
        (True, 1),
        (0.0, 1),
    ],
)
def test_ranges_outside_the_pool(pool: VirtualMemoryPool, lender: Lender, offset: int, size: int) -> None:
    """offset + size that would overflow 64 bits is refused like any other range beyond the capacity."""
    before = state(pool, lender)
    calls = (pool.allocate, pool.deallocate, pool.view, pool.span, lambda *at: pool.pin(*at).__enter__())
    for call in (*calls, lambda *at: pool.protect(*at, "read")):
        with pytest.raises(InvalidOffset):
            call(offset, size)
    assert state(pool, lender) == before


@pytest.mark.parametrize("size", [0, -1, 2**63, "", "-1MiB", "1.5B", None, 1.5])
def test_sizes_that_are_none(pool: VirtualMemoryPool, lender: Lender, size: int) -> None:
    before = state(pool, lender)
    for call in (pool.allocate, pool.deallocate, pool.view):
        with pytest.raises(InvalidRequest):
            call(0, size)
    for grow in (pool.grow, pool.allocate_anywhere, pool.shrink, pool.prepare):
        with pytest.raises(InvalidRequest):
            grow(size)
    assert state(pool, lender) == before


@pytest.mark.parametrize("capacity", [0, -1, 2**63, 2**63 - 1, "much"])
def test_capacities_that_are_none(lender: Lender, capacity: int | str) -> None:
    with pytest.raises(InvalidRequest):
        VirtualMemoryPool(lender, capacity, PAGE)


def test_addresses_that_cannot_be_had(lender: Lender) -> None:
    """More addresses than the processor has: the device says no, and nothing is held."""
    with pytest.raises(DeviceFailure):
        VirtualMemoryPool(lender, 2**62, PAGE)


def test_capacity_is_rounded_to_pages(lender: Lender) -> None:
    with VirtualMemoryPool(lender, PAGE + 1, "2MiB") as pool:
        assert pool.capacity == 2 * PAGE
        pool.allocate(0, "4MiB")


class TestAllOrNothing:
    """A growth that cannot be completed leaves the pool, the books and the device as they were."""

    @pytest.mark.parametrize("what", ["allocate", "allocate_anywhere", "grow", "prepare"])
    def test_ctrl_c_while_nobody_waits(self, pool: VirtualMemoryPool, lender: Lender, what: str) -> None:
        """It comes while pages are mapped, and is held off: they are unmapped, since nobody gets their address."""
        lender.part = 2
        pool.allocate(0, PAGE)
        before = state(pool, lender)
        lender.before_borrow = lambda: signal.raise_signal(signal.SIGINT)
        where = [PAGE] if what == "allocate" else []
        with pytest.raises(KeyboardInterrupt):
            getattr(pool, what)(*where, 8 * PAGE)
        assert state(pool, lender) == before


class TestGrow:
    def test_beyond_the_capacity(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.allocate(60 * PAGE, PAGE)
        before = state(pool, lender)
        for grow in (pool.grow, pool.prepare):
            with pytest.raises(OutOfVirtualMemory) as caught:
                grow(3 * PAGE + 1)
            assert (caught.value.requested_bytes, caught.value.available_bytes) == (3 * PAGE + 1, 3 * PAGE)
            assert isinstance(caught.value, MemoryError)
        assert state(pool, lender) == before
        pool.grow(3 * PAGE)
        pool.allocate(0, 60 * PAGE)
        with pytest.raises(OutOfVirtualMemory, match=r" 1: .*virtual_capacity"):
            pool.grow(1)
        with pytest.raises(OutOfVirtualMemory, match=r" 0\. .*virtual_capacity"):
            pool.allocate_anywhere(PAGE)

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
            pool.deallocate(0, PAGE)
            assert not pool.is_mapped(PAGE)
            with pytest.raises(AlreadyMapped):
                pool.allocate(PAGE, PAGE)
            with pytest.raises(NotMapped):
                pool.deallocate(PAGE, PAGE)
        assert pool.is_mapped(PAGE)

    def test_deallocated_twice_at_once(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Two threads free the same range while the first waits for the device: nothing is left for the second."""
        pool.allocate(0, 2 * PAGE)
        with held_up(lender, lambda: pool.deallocate(0, 2 * PAGE), at_the_device=True):
            with pytest.raises(NotMapped):
                pool.deallocate(PAGE, PAGE)
            with pytest.raises(NotMapped):
                pool.view(PAGE, 1)
            with pytest.raises(AlreadyMapped):
                pool.allocate(0, 1)
        assert pool.physical_usage_bytes == 0

    def test_racing_for_one_page(self, pool: VirtualMemoryPool) -> None:
        """Many threads want the same page and give it back: exactly one has it at a time."""
        owned = threading.Semaphore(1)

        def churn() -> None:
            for _ in range(100):
                try:
                    pool.allocate(0, PAGE)
                except AlreadyMapped:
                    continue
                assert owned.acquire(blocking=False)
                owned.release()
                pool.deallocate(0, PAGE)

        together([churn] * 8)
        assert pool.physical_usage_bytes == 0
