"""Where a pool's pages are: allocation at an alignment, pins, and the map that `print(pool)` and a notebook draw."""

from __future__ import annotations

import pytest
from tests.support.fake_lender import PAGE, Lender, state
from tests.support.sizes import MIB

from membroker.errors import ClosedError, InvalidOffset, InvalidRequest
from membroker.pool.pool import VirtualMemoryPool


class TestAnywhere:
    @pytest.mark.parametrize("alignment", [4096, 2 * PAGE, "16MiB"])
    def test_the_address_is_aligned(self, pool: VirtualMemoryPool, alignment: int | str) -> None:
        """A kernel wants its table at a multiple of 16 MiB, of the address and not of the offset."""
        size = 16 * MIB if isinstance(alignment, str) else alignment
        pool.allocate(0, 3 * PAGE)
        for _ in range(3):
            address = pool.allocate_anywhere(PAGE, alignment)
            assert address % size == 0
            assert address >= pool.base_address + 3 * PAGE

    @pytest.mark.parametrize("alignment", [3, -2, "3MiB", 1.5, 2**64])
    def test_alignments_that_are_none(self, pool: VirtualMemoryPool, lender: Lender, alignment: int) -> None:
        before = state(pool, lender)
        with pytest.raises(InvalidRequest):
            pool.allocate_anywhere(PAGE, alignment)
        assert state(pool, lender) == before


class TestPin:
    def test_a_pin_keeps_a_closed_pool(self, lender: Lender) -> None:
        """A transfer runs at the address while the server shuts down."""
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE)
        pool.allocate(0, PAGE)
        with pool.pin(0, PAGE) as address:
            pool.close()
            lender.driver.write(address, b"still")
            assert lender.used_bytes == PAGE
        lender.settle()
        assert lender.used_bytes == 0
        with pytest.raises(ClosedError):
            pool.pin(0, PAGE).__enter__()


def test_the_addresses_outlive_the_pool(lender: Lender) -> None:
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
        span = pool.addresses(0, PAGE)
        with pytest.raises(InvalidOffset):
            pool.addresses(64 * PAGE, 1)
    assert lender.holdings, "the addresses are reserved still"
    del span
    lender.settle()
    assert not lender.holdings


def test_a_cell_for_each_page(lender: Lender) -> None:
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=1) as pool:
        assert str(pool) == f"{pool!r}\nnothing is allocated"
        pool.allocate(PAGE, 5 * PAGE)
        pool.offload(2 * PAGE, PAGE)
        pool.free(5 * PAGE, PAGE)
        span = pool.span(3 * PAGE, 1)
        assert str(pool).splitlines() == [
            repr(pool),
            "|.#oP#s| # used, P pinned, s spare, o offloaded; a cell is 2.0 MiB",
        ]
        assert pool._repr_html_().count("<rect") == 5
        del span
    assert str(pool) == repr(pool)
