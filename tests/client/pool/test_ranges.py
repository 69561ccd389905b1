"""Several unconnected ranges by one request, release after a fence, and addresses that stay while pages come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender, put, state, text

from membroker.errors import AlreadyMapped, DeviceFailure, InvalidOffset, InvalidRequest, NotMapped, OutOfMemory
from membroker.memory.lender import Placement
from membroker.memory.local_source import LocalSource
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm.driver import DriverError, Location

LAYERS = [(at * PAGE, PAGE) for at in (3, 13, 23, 33)]
"""The same page of four tensors."""


class Fence:
    """An event that counts the waits for it, or fails as the device does."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.waits = 0
        self.failure = failure

    def synchronize(self) -> None:
        self.waits += 1
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def borrowed(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """How many extents each request had, and whether it was ahead of need."""
    found: list[tuple[int, bool]] = []
    borrow = lender.borrow

    def noted(size: int, count: int, where: Location, placement: Placement, until: float | None, **hints: Any) -> None:
        found.append((count, hints["ahead"]))
        borrow(size, count, where, placement, until, **hints)

    monkeypatch.setattr(lender, "borrow", noted)
    return found


@pytest.fixture
def waits(lender: Lender) -> list[None]:
    """One entry for each time that anything waited for the whole device."""
    found: list[None] = []
    lender.driver.before_synchronize = lambda: found.append(None)
    return found


class TestAllocate:
    def test_one_request_for_all(self, pool: VirtualMemoryPool, borrowed: list[tuple[int, bool]]) -> None:
        pool.allocate_ranges(LAYERS)
        assert borrowed == [(4, False)]
        assert [row.offset // PAGE for row in pool.mappings(by_page=True)] == [3, 13, 23, 33]
        put(pool, 23, b"layer 2")
        pool.allocate_ranges([(14 * PAGE, 2 * PAGE), (40 * PAGE, PAGE)], ahead=True)
        assert borrowed[1:] == [(3, True)]
        assert text(pool, 23, 7) == b"layer 2"
        pool.free(pool.base_address + 14 * PAGE)
        assert not pool.is_mapped(15 * PAGE), "each range is an allocation of its own"

    def test_connected_ranges_keep_their_order(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Ranges may come in any order and may touch, and more than a packet of them arrives in parts."""
        lender.part = 3
        pool.allocate_ranges([(page * PAGE, PAGE) for page in (9, 2, 3, 1, 30, 8, 31)])
        assert [row.offset // PAGE for row in pool.mappings(by_page=True)] == [1, 2, 3, 8, 9, 30, 31]
        for page in (1, 2, 3, 8, 9, 30, 31):
            put(pool, page, bytes([page]))
        assert [text(pool, page, 1)[0] for page in (1, 2, 3, 8, 9, 30, 31)] == [1, 2, 3, 8, 9, 30, 31]

    def test_far_more_than_there_is(self) -> None:
        """8 TiB in two ranges: refused at once, before anything is made for each page."""
        with LocalSource("host", limit="64MiB") as source, VirtualMemoryPool(source, "16TiB", PAGE) as pool:
            with pytest.raises(OutOfMemory):
                pool.allocate_ranges([(0, "4TiB"), (1 << 43, "4TiB")])
            assert pool.physical_usage_bytes == 0

    def test_none(self, pool: VirtualMemoryPool, borrowed: list[tuple[int, bool]]) -> None:
        pool.allocate_ranges([])
        pool.deallocate_ranges([])
        assert borrowed == []

    @pytest.mark.parametrize(
        ("ranges", "error"),
        [
            ([(0, PAGE), (64 * PAGE, PAGE)], InvalidOffset),
            ([(0, PAGE), (PAGE - 1, 1)], InvalidRequest),
            ([(0, PAGE), (0, PAGE)], InvalidRequest),
            ([(0, PAGE), (5 * PAGE, 0)], InvalidRequest),
            ([(0, PAGE), 5], InvalidRequest),
            ([(0, PAGE), (60 * PAGE, PAGE)], AlreadyMapped),
        ],
    )
    def test_one_wrong_range(
        self, pool: VirtualMemoryPool, lender: Lender, ranges: list[tuple[int, int]], error: type[Exception]
    ) -> None:
        pool.allocate(60 * PAGE, PAGE)
        before = state(pool, lender)
        with pytest.raises(error):
            pool.allocate_ranges(ranges)
        assert state(pool, lender) == before

    @pytest.mark.parametrize("failure", [OutOfMemory("full"), KeyboardInterrupt()])
    def test_a_failure_half_way(self, pool: VirtualMemoryPool, lender: Lender, failure: BaseException) -> None:
        """The third extent does not come: the two that came are unmapped and released."""
        lender.fails_after, lender.failure, lender.part = 2, failure, 1
        before = state(pool, lender)
        with pytest.raises(type(failure)):
            pool.allocate_ranges(LAYERS)
        assert state(pool, lender) == before
        lender.fails_after = None
        pool.allocate_ranges(LAYERS)


class TestDeallocate:
    def test_after_a_fence(self, pool: VirtualMemoryPool, lender: Lender, waits: list[None]) -> None:
        """Nothing waits for the whole device: other work on it goes on."""
        pool.allocate_ranges(LAYERS)
        pool.allocate(50 * PAGE, PAGE)
        fence = Fence()
        pool.deallocate_ranges(LAYERS, after=fence)
        pool.deallocate(50 * PAGE, PAGE, after=fence)
        assert (fence.waits, waits, lender.lent_bytes) == (2, [], 0)

    def test_without_a_fence_it_waits_once(self, pool: VirtualMemoryPool, waits: list[None]) -> None:
        pool.allocate_ranges(LAYERS)
        pool.deallocate_ranges(LAYERS)
        assert len(waits) == 1

    def test_a_fence_that_fails(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.allocate_ranges(LAYERS)
        before = state(pool, lender)
        for call in self.calls(pool, Fence(ValueError("the device is lost"))):
            with pytest.raises(ValueError, match="the device is lost"):
                call()
            assert state(pool, lender) == before

    def test_what_is_no_fence(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.allocate_ranges(LAYERS)
        before = state(pool, lender)
        for call in self.calls(pool, 7):
            with pytest.raises(InvalidRequest, match="synchronize"):
                call()
            assert state(pool, lender) == before

    @staticmethod
    def calls(pool: VirtualMemoryPool, fence: object) -> list[Callable[[], None]]:
        return [
            lambda: pool.deallocate(3 * PAGE, PAGE, after=fence),
            lambda: pool.deallocate_ranges(LAYERS, after=fence),
        ]

    @pytest.mark.parametrize("wrong", [(40 * PAGE, PAGE), (3 * PAGE, 1)])
    def test_one_wrong_range(self, pool: VirtualMemoryPool, lender: Lender, wrong: tuple[int, int]) -> None:
        pool.allocate_ranges(LAYERS)
        before = state(pool, lender)
        with pytest.raises((NotMapped, InvalidRequest)):
            pool.deallocate_ranges([*LAYERS, wrong])
        assert state(pool, lender) == before

    def test_the_driver_fails_half_way(
        self, pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two of four ranges are unmapped before the driver fails: those are free, and the others can be retried."""
        pool.allocate_ranges(LAYERS)
        unmap, left = lender.driver.unmap, [2]

        def flaky(address: int, size: int) -> None:
            if not left[0]:
                raise DriverError("cuMemUnmap", "CUDA_ERROR_UNKNOWN", 999)
            left[0] -= 1
            unmap(address, size)

        monkeypatch.setattr(lender.driver, "unmap", flaky)
        with pytest.raises(DeviceFailure):
            pool.deallocate_ranges(LAYERS)
        assert [pool.is_mapped(offset) for offset, _ in LAYERS] == [False, False, True, True]
        assert lender.lent_bytes == 2 * PAGE
        monkeypatch.undo()
        pool.deallocate_ranges(LAYERS[2:])
        assert lender.lent_bytes == 0

    def test_spare_pages(self, lender: Lender) -> None:
        """A pool with spare pages keeps the ranges, and backs the same ones from there without a request."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
            pool.allocate_ranges(LAYERS)
            put(pool, 13, b"kept")
            pool.deallocate_ranges(LAYERS)
            assert pool.stats().spare_pages == 4
            lender.capacity = 0
            pool.allocate_ranges(LAYERS)
            assert text(pool, 13) == b"kept"


class TestAddresses:
    def test_pages_come_and_go_beneath(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        span = pool.addresses(0, 32 * PAGE)
        assert (span.address, span.size) == (pool.base_address, 32 * PAGE)
        pool.allocate(3 * PAGE, PAGE)
        assert pool.mappings()[0].state == "used"
        pool.deallocate(3 * PAGE, PAGE)
        assert lender.lent_bytes == 0

    def test_a_pin_still_holds_its_pages(self, pool: VirtualMemoryPool) -> None:
        span = pool.addresses(0, 32 * PAGE)
        pool.allocate(3 * PAGE, PAGE)
        with pool.pin(3 * PAGE, PAGE), pytest.raises(BufferError):
            pool.deallocate(3 * PAGE, PAGE)
        assert span.size

    def test_compaction_stays_out(self, pool: VirtualMemoryPool) -> None:
        """A tensor finds its bytes by their addresses: nothing moves away from there, or into a hole there."""
        span = pool.addresses(0, 8 * PAGE)
        pool.allocate(3 * PAGE, PAGE)
        pool.allocate(20 * PAGE, PAGE)
        (move,) = pool.compact()
        assert (move.old_offset, move.new_offset) == (20 * PAGE, 8 * PAGE)
        del span
        assert len(pool.compact()) == 2

    def test_the_addresses_outlive_the_pool(self, lender: Lender) -> None:
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
            span = pool.addresses(0, PAGE)
            with pytest.raises(InvalidOffset):
                pool.addresses(64 * PAGE, 1)
        assert lender.holdings, "the addresses are reserved still"
        del span
        lender.settle()
        assert not lender.holdings
