"""Several unconnected ranges by one request, release after a fence, and addresses that stay while pages come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.fake_lender import PAGE, Lender, state

from membroker.errors import AlreadyMapped, DeviceFailure, InvalidOffset, InvalidRequest, NotMapped, OutOfMemory
from membroker.memory.local_source import LocalSource
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm.driver import DriverError

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


class TestAllocate:
    def test_far_more_than_there_is(self) -> None:
        """8 TiB in two ranges: refused at once, before anything is made for each page."""
        with LocalSource("host", limit="64MiB") as source, VirtualMemoryPool(source, "16TiB", PAGE) as pool:
            with pytest.raises(OutOfMemory):
                pool.allocate_ranges([(0, "4TiB"), (1 << 43, "4TiB")])
            assert pool.physical_usage_bytes == 0

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


class TestDeallocate:
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


class TestAddresses:
    def test_the_addresses_outlive_the_pool(self, lender: Lender) -> None:
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
            span = pool.addresses(0, PAGE)
            with pytest.raises(InvalidOffset):
                pool.addresses(64 * PAGE, 1)
        assert lender.holdings, "the addresses are reserved still"
        del span
        lender.settle()
        assert not lender.holdings
