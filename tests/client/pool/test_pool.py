"""The pool's promises, over a lender in this process and the host driver: no broker, the same code."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from tests.support.fake_lender import PAGE, Lender, state
from tests.support.sizes import MIB
from tests.support.threads import together

from membroker.errors import (
    AlreadyMapped,
    ClosedError,
    DeviceFailure,
    InvalidOffset,
    InvalidPageSize,
    InvalidRequest,
    NotMapped,
    OutOfMemory,
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

    def test_allocate_and_deallocate(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A cache grows by four pages, is written, and shrinks again: the memory is the device's again at once."""
        address = pool.allocate(0, 4 * PAGE)
        assert address == pool.base_address
        pool.view(0, 4 * PAGE)[:] = b"\x5a" * (4 * PAGE)
        assert pool.physical_usage_bytes == lender.used_bytes == lender.lent_bytes == 4 * PAGE
        pool.deallocate(0, 4 * PAGE)
        assert pool.physical_usage_bytes == lender.used_bytes == lender.lent_bytes == 0

    def test_address_is_base_plus_offset(self, pool: VirtualMemoryPool) -> None:
        assert pool.allocate(3 * PAGE + 5, 10) == pool.base_address + 3 * PAGE + 5

    def test_is_mapped_is_of_a_whole_range(self, pool: VirtualMemoryPool) -> None:
        """A range is mapped when each page that it touches is; one that reaches over the end is no range here."""
        pool.allocate(2 * PAGE, 3 * PAGE)
        for offset, size, mapped in [
            (2 * PAGE, 3 * PAGE, True),
            (3 * PAGE - 1, 2, True),
            (2 * PAGE - 1, 2, False),
            (5 * PAGE - 1, 2, False),
            (PAGE, 5 * PAGE, False),
            (60 * PAGE, 4 * PAGE, False),
        ]:
            assert pool.is_mapped(offset, size) is mapped, (offset, size)
        with pytest.raises(InvalidOffset):
            pool.is_mapped(2 * PAGE, 63 * PAGE)
        with pytest.raises(InvalidRequest):
            pool.is_mapped(2 * PAGE, 0)

    def test_already_mapped_changes_nothing(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Two layers compute overlapping ranges: the second is told, and the first keeps its bytes."""
        pool.allocate(2 * PAGE, PAGE)
        pool.view(2 * PAGE, 4)[:] = b"keep"
        before = state(pool, lender)
        with pytest.raises(AlreadyMapped):
            pool.allocate(0, 4 * PAGE)
        assert state(pool, lender) == before
        assert bytes(pool.view(2 * PAGE, 4)) == b"keep"

    def test_not_mapped_changes_nothing(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A range is freed twice, in part: nothing of it is unmapped the second time."""
        pool.allocate(0, 4 * PAGE)
        pool.deallocate(PAGE, PAGE)
        before = state(pool, lender)
        with pytest.raises(NotMapped):
            pool.deallocate(0, 4 * PAGE)
        with pytest.raises(NotMapped):
            pool.view(0, 4 * PAGE)
        assert state(pool, lender) == before

    def test_stats(self, pool: VirtualMemoryPool) -> None:
        """External fragmentation: what share of the free addresses lies outside the largest free run."""
        assert pool.stats().fragmentation_ratio == 0.0
        pool.allocate(16 * PAGE, 16 * PAGE)
        stats = pool.stats()
        assert (stats.virtual_capacity_bytes, stats.physical_usage_bytes, stats.mapped_pages) == (
            64 * PAGE,
            16 * PAGE,
            16,
        )
        assert stats.fragmentation_ratio == pytest.approx(1 - 32 / 48)
        pool.allocate(0, 16 * PAGE)
        assert pool.stats().fragmentation_ratio == 0.0
        pool.allocate(32 * PAGE, 32 * PAGE)
        assert pool.stats().fragmentation_ratio == 0.0


@pytest.mark.parametrize(
    ("offset", "size", "pages"),
    [(0, 1, 1), (PAGE - 1, 2, 2), (PAGE, PAGE, 1), (PAGE + 1, PAGE, 2), (5, 2 * PAGE, 3), (PAGE // 2, PAGE // 2, 1)],
)
def test_every_touched_page_is_backed(pool: VirtualMemoryPool, offset: int, size: int, pages: int) -> None:
    """A tensor that is not aligned is backed to its last byte, and counted by pages, not by its rounded size."""
    pool.allocate(offset, size)
    assert pool.physical_usage_bytes == pages * PAGE
    assert pool.is_mapped(offset)
    assert pool.is_mapped(offset + size - 1)
    pool.view(offset, size)[:] = b"x" * size
    pool.deallocate(offset, size)
    assert pool.physical_usage_bytes == 0


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
    for call in (pool.allocate, pool.deallocate, pool.view):
        with pytest.raises(InvalidOffset):
            call(offset, size)
    assert state(pool, lender) == before


@pytest.mark.parametrize("size", [0, -1, 2**63, "", "-1MiB", "1.5B", None, 1.5])
def test_sizes_that_are_none(pool: VirtualMemoryPool, lender: Lender, size: int) -> None:
    before = state(pool, lender)
    for call in (pool.allocate, pool.deallocate, pool.view):
        with pytest.raises(InvalidRequest):
            call(0, size)
    with pytest.raises(InvalidRequest):
        pool.grow(size)
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

    def test_refused_at_once(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.allocate(0, PAGE)
        lender.capacity = 4 * PAGE
        before = state(pool, lender)
        with pytest.raises(OutOfMemory):
            pool.allocate(PAGE, 4 * PAGE)
        assert state(pool, lender) == before
        pool.allocate(PAGE, 3 * PAGE)

    @pytest.mark.parametrize("pages", [0, 1, 3, 4, 7])
    @pytest.mark.parametrize("failure", [OutOfMemory("full"), KeyboardInterrupt(), DeviceFailure("broken")])
    def test_the_lender_fails_at_page_k(self, lender: Lender, pages: int, failure: BaseException) -> None:
        """The card is full, or somebody presses Ctrl-C, with some pages mapped already."""
        lender.part = 2
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
            pool.allocate(0, PAGE)
            before = state(pool, lender)
            lender.fails_after, lender.failure = pages, failure
            with pytest.raises(type(failure)):
                pool.allocate(PAGE, 8 * PAGE)
            assert state(pool, lender) == before
            lender.fails_after = None
            pool.allocate(PAGE, 8 * PAGE)

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

    @pytest.mark.parametrize("mappings", range(6))
    def test_the_driver_fails_at_map_k(self, lender: Lender, mappings: int) -> None:
        """The process runs out of mappings half-way (vm.max_map_count)."""
        lender.part = 2
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
            before = state(pool, lender)
            lender.driver.maps_left = mappings
            with pytest.raises(DeviceFailure, match="ENOMEM"):
                pool.allocate(0, 6 * PAGE)
            assert state(pool, lender) == before
            lender.driver.maps_left = None
            pool.allocate(0, 6 * PAGE)

    def test_unmapping_fails(self, lender: Lender) -> None:
        """The device is lost while a range is given back: what is still mapped is not called given back."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
            pool.allocate(0, 2 * PAGE)
            before = state(pool, lender)
            lender.driver.lost = True
            with pytest.raises(DeviceFailure, match="ILLEGAL_ADDRESS"):
                pool.deallocate(0, 2 * PAGE)
            assert state(pool, lender) == before
            lender.driver.lost = False


class TestGrow:
    def test_grows_behind_the_highest_page(self, pool: VirtualMemoryPool) -> None:
        """A cache that only ever appends, with a hole from an earlier request that is left alone."""
        assert pool.grow(PAGE + 1) == pool.base_address
        assert pool.grow(1) == pool.base_address + 2 * PAGE
        pool.deallocate(0, PAGE)
        assert pool.grow("2MiB") == pool.base_address + 3 * PAGE
        assert not pool.is_mapped(0)

    def test_beyond_the_capacity(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.grow(63 * PAGE)
        before = state(pool, lender)
        with pytest.raises(OutOfVirtualMemory):
            pool.grow(PAGE + 1)
        assert state(pool, lender) == before
        pool.grow(PAGE)
        with pytest.raises(OutOfVirtualMemory):
            pool.grow(1)

    def test_many_threads_grow_at_once(self, pool: VirtualMemoryPool) -> None:
        """Sixteen decoding threads append to one pool: each gets its own range, and together they have no hole."""
        addresses: list[int] = []
        together([lambda: addresses.append(pool.grow(3 * PAGE))] * 16)
        assert sorted(addresses) == [pool.base_address + 3 * PAGE * step for step in range(16)]
        assert pool.stats().mapped_pages == 48


class TestThreads:
    def test_no_lock_is_held_while_borrowing(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """One thread waits for memory that only another can free: it must be able to."""
        pool.allocate(0, PAGE)
        waiting, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            waiting.set()
            assert go_on.wait(30)

        lender.before_borrow = wait
        borrower = threading.Thread(target=pool.allocate, args=(PAGE, PAGE))
        borrower.start()
        assert waiting.wait(30)
        lender.before_borrow = lambda: None
        pool.deallocate(0, PAGE)
        assert not pool.is_mapped(PAGE)
        with pytest.raises(AlreadyMapped, match="another call"):
            pool.allocate(PAGE, PAGE)
        with pytest.raises(NotMapped):
            pool.deallocate(PAGE, PAGE)
        go_on.set()
        borrower.join()
        assert pool.is_mapped(PAGE)

    def test_closed_while_borrowing(self, lender: Lender) -> None:
        """The server shuts down while a request still waits for memory: what arrives is given back."""
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
        pool.allocate(0, PAGE)
        waiting, go_on = threading.Event(), threading.Event()
        raised: list[type[BaseException]] = []

        def wait() -> None:
            waiting.set()
            assert go_on.wait(30)

        def borrow() -> None:
            try:
                pool.allocate(PAGE, PAGE)
            except ClosedError as error:
                raised.append(type(error))

        lender.before_borrow = wait
        borrower = threading.Thread(target=borrow)
        borrower.start()
        assert waiting.wait(30)
        pool.close()
        with pytest.raises(ClosedError):
            pool.allocate(4 * PAGE, PAGE)
        go_on.set()
        borrower.join()
        assert raised == [ClosedError]
        assert lender.used_bytes == 0

    def test_deallocated_twice_at_once(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Two threads free the same range while the first waits for the device: nothing is left for the second."""
        pool.allocate(0, 2 * PAGE)
        waiting, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            waiting.set()
            assert go_on.wait(30)

        lender.driver.before_synchronize = wait
        first = threading.Thread(target=pool.deallocate, args=(0, 2 * PAGE))
        first.start()
        assert waiting.wait(30)
        lender.driver.before_synchronize = lambda: None
        with pytest.raises(NotMapped):
            pool.deallocate(PAGE, PAGE)
        with pytest.raises(NotMapped):
            pool.view(PAGE, 1)
        with pytest.raises(AlreadyMapped):
            pool.allocate(0, 1)
        go_on.set()
        first.join()
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


class TestViews:
    def test_a_viewed_range_cannot_be_deallocated(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A slice is still in somebody's hands: unmapping under it would kill the process."""
        pool.allocate(0, 4 * PAGE)
        part = pool.view(PAGE, 16)[2:4]
        before = state(pool, lender)
        with pytest.raises(BufferError):
            pool.deallocate(0, 4 * PAGE)
        assert state(pool, lender) == before
        pool.deallocate(2 * PAGE, 2 * PAGE)
        part[:] = b"ok"
        del part
        pool.deallocate(0, 2 * PAGE)

    def test_a_view_keeps_a_closed_pool(self, lender: Lender) -> None:
        """A program closes its pool and reads its results afterwards; the memory goes when they do."""
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
        pool.allocate(0, PAGE)
        view = pool.view(0, 5)
        view[:] = b"hello"
        pool.close()
        assert pool.closed
        with pytest.raises(ClosedError):
            pool.view(0, 1)
        assert bytes(view) == b"hello"
        assert lender.used_bytes == PAGE
        del view
        lender.settle()
        assert lender.used_bytes == lender.lent_bytes == 0

    def test_a_view_keeps_a_forgotten_pool(self, lender: Lender) -> None:
        """Nobody has the pool any more, but a numpy array over it; it must not lose its memory."""
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
        pool.allocate(0, PAGE)
        view = pool.view(0, 5)
        del pool
        gc.collect()
        lender.settle()
        view[:] = b"hello"
        assert lender.used_bytes == PAGE
        del view
        gc.collect()
        lender.settle()
        assert lender.used_bytes == 0


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
        """Only what is missing is borrowed, each run of it in one call, around what is there."""
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
        assert len(borrowed) == 2
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
        with pytest.raises(DeviceFailure, match="ENOMEM"):
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
        with pytest.raises(DeviceFailure, match="ILLEGAL_ADDRESS"):
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

    def test_close_gives_it_back(self, lender: Lender) -> None:
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=8)
        pool.allocate(0, 4 * PAGE)
        pool.deallocate(0, 2 * PAGE)
        pool.prepare(PAGE)
        pool.close()
        assert lender.used_bytes == lender.lent_bytes == 0
        no_calls: tuple[Callable[[], object], ...] = (
            lambda: pool.allocate(0, PAGE),
            lambda: pool.deallocate(2 * PAGE, PAGE),
            lambda: pool.prepare(PAGE),
            pool.trim,
        )
        for no_call in no_calls:
            with pytest.raises(ClosedError):
                no_call()

    def test_a_forgotten_pool_gives_it_back(self, lender: Lender) -> None:
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=8)
        pool.allocate(0, 4 * PAGE)
        pool.deallocate(0, 2 * PAGE)
        del pool
        gc.collect()
        lender.settle()
        assert lender.used_bytes == lender.lent_bytes == 0

    def test_a_forked_childs_copy_is_the_parents(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """What a fork leaves a child is abandoned: a spare page is not its to take, to trim, or to give back."""
        keeping.allocate(0, 2 * PAGE)
        keeping.deallocate(0, PAGE)
        (holding,) = lender.holdings
        holding.state = "abandoned"  # as the child's copy is
        calls: tuple[Callable[[], object], ...] = (
            lambda: keeping.allocate(0, PAGE),
            lambda: keeping.deallocate(PAGE, PAGE),
            lambda: keeping.grow(PAGE),
            lambda: keeping.prepare(PAGE),
            keeping.trim,
            keeping.stats,
            lambda: keeping.is_mapped(0),
        )
        for call in calls:
            with pytest.raises(ClosedError, match="forked"):
                call()
        keeping.close()
        assert lender.lent_bytes == 2 * PAGE
        holding.state = "open"
        assert keeping.stats().spare_pages == 1
        keeping.allocate(0, PAGE)

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
        with _borrowing(keeping, lender, 0, 5 * PAGE) as go_on:
            with pytest.raises(AlreadyMapped, match="another call"):
                keeping.allocate(0, pages * PAGE)
            with pytest.raises(AlreadyMapped, match="another call"):
                keeping.allocate(3 * PAGE, pages * PAGE)
            assert keeping.trim() == 0
            assert not keeping.is_mapped(0)
            go_on()
        assert all(keeping.is_mapped(page * PAGE) for page in range(5))
        keeping.view(0, 5 * PAGE)[:] = bytes(5 * PAGE)
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (5, 0)

    def test_trim_while_another_call_borrows(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """Elsewhere in the pool somebody waits for memory; what is given back here may be what he waits for."""
        keeping.allocate(0, 4 * PAGE)
        keeping.deallocate(0, 4 * PAGE)
        with _borrowing(keeping, lender, 8 * PAGE, 4 * PAGE) as go_on:
            assert keeping.trim() == 4 * PAGE
            assert lender.lent_bytes == 0
            go_on()
        assert (keeping.stats().mapped_pages, keeping.stats().spare_pages) == (4, 0)

    def test_allocate_while_another_call_trims(self, keeping: VirtualMemoryPool, lender: Lender) -> None:
        """The trim waits for the device with a page in hand: that page is being changed, and then it is nobody's."""
        keeping.allocate(0, 2 * PAGE)
        keeping.deallocate(0, PAGE)
        waiting, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            waiting.set()
            assert go_on.wait(30)

        lender.driver.before_synchronize = wait
        trimming = threading.Thread(target=keeping.trim)
        trimming.start()
        assert waiting.wait(30)
        lender.driver.before_synchronize = lambda: None
        with pytest.raises(AlreadyMapped, match="another call"):
            keeping.allocate(0, PAGE)
        keeping.deallocate(PAGE, PAGE)
        keeping.allocate(PAGE, PAGE)
        go_on.set()
        trimming.join()
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


@contextmanager
def _borrowing(pool: VirtualMemoryPool, lender: Lender, offset: int, size: int) -> Iterator[Callable[[], None]]:
    """Yield while another thread's `allocate` waits for the lender; what is yielded lets it go on, to its end."""
    waiting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        lender.before_borrow = lambda: None
        waiting.set()
        assert go_on.wait(30)

    lender.before_borrow = wait
    borrower = threading.Thread(target=pool.allocate, args=(offset, size))
    borrower.start()
    assert waiting.wait(30)

    def finish() -> None:
        go_on.set()
        borrower.join()

    try:
        yield finish
    finally:
        finish()


class TestEnd:
    def test_close_gives_everything_back(self, lender: Lender) -> None:
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
        pool.allocate(0, 3 * PAGE)
        pool.allocate(10 * PAGE, PAGE)
        pool.close()
        assert lender.used_bytes == lender.lent_bytes == 0
        pool.close()
        for call in (pool.allocate, pool.deallocate, pool.view):
            with pytest.raises(ClosedError):
                call(0, PAGE)
        for no_call in (lambda: pool.base_address, lambda: pool.is_mapped(0), pool.stats, lambda: pool.grow(1)):
            with pytest.raises(ClosedError):
                no_call()

    def test_a_forgotten_pool_gives_everything_back(self, lender: Lender) -> None:
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
        pool.allocate(0, 3 * PAGE)
        del pool
        gc.collect()
        assert lender.used_bytes == 3 * PAGE, "a finalizer itself must not unmap: it may run under any lock"
        lender.settle()
        assert lender.used_bytes == lender.lent_bytes == 0
