"""Where a pool's pages are, and what they allow: allocation without an offset, shrink, protect, and what is where."""

from __future__ import annotations

from typing import cast

import pytest
from tests.support.fake_lender import PAGE, Lender, put, state, text
from tests.support.sizes import MIB

from membroker.errors import (
    AlreadyMapped,
    ClosedError,
    InvalidRequest,
    NotMapped,
    Offloaded,
)
from membroker.memory.lifetime import MappedMemory
from membroker.pool.page_table import OFFLOADED, USED, PageTable
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import AccessFlags


class TestAnywhere:
    @pytest.mark.parametrize("alignment", [1, 4096, PAGE, 2 * PAGE, 8 * PAGE, "16MiB"])
    def test_the_address_is_aligned(self, pool: VirtualMemoryPool, alignment: int | str) -> None:
        """A kernel wants its table at a multiple of 16 MiB, of the address and not of the offset."""
        size = 16 * MIB if isinstance(alignment, str) else alignment
        pool.allocate(0, 3 * PAGE)
        for _ in range(3):
            address = pool.allocate_anywhere(PAGE, alignment)
            assert address % size == 0
            assert address >= pool.base_address + 3 * PAGE

    @pytest.mark.parametrize("page", [PAGE, 8 * PAGE])
    def test_the_base_is_a_multiple_of_the_page_size(self, lender: Lender, page: int) -> None:
        with VirtualMemoryPool(lender, 8 * page, page) as pool:
            assert pool.base_address % page == 0
            assert pool.allocate_anywhere(1, page) == pool.base_address

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


def table_of(count: int) -> PageTable:
    """Return a table of pages that have no memory."""
    return PageTable(count, PAGE, cast(MappedMemory, None))


def test_what_a_large_range_allows() -> None:
    """A view over 60,000 pages is made under the pool's lock: while nothing is restricted, no page is looked at."""
    table = table_of(60_000)
    table.claim([], [range(60_000)])
    table.set(range(60_000), USED)
    table.release([range(60_000)])
    assert table.least_access(cast(range, object())) is AccessFlags.READ_WRITE
    for page, access in ((7, AccessFlags.READ), (40_000, AccessFlags.NONE)):
        table.restrict(range(page, page + 1), access)
    assert table.least_access(range(7)) is AccessFlags.READ_WRITE
    assert table.least_access(range(5, 30_000)) is AccessFlags.READ
    assert table.least_access(range(60_000)) is AccessFlags.NONE


def test_a_refusal_names_the_page_and_what_is_with_it() -> None:
    """Two pages are used, one is offloaded, a call is at two, one is free, and the next one used."""
    table = table_of(9)
    for kind, pages in ((USED, range(2)), (OFFLOADED, range(2, 3)), (USED, range(6, 7))):
        table.claim([], [pages])
        table.set(pages, kind)
        table.release([pages])
    table.claim([], [range(3, 5)])
    for check, first, error, what in (
        (table.unbacked, 2, Offloaded, f"offset {2 * PAGE} is offloaded"),
        (table.unbacked, 5, AlreadyMapped, f"offset {6 * PAGE} is mapped already"),
        (table.check_used, 0, Offloaded, f"offset {2 * PAGE} is offloaded"),
        (table.check_allocated, 0, NotMapped, f"offset {3 * PAGE} is being changed"),
        (table.check_used, 6, NotMapped, f"offset {7 * PAGE} is not mapped"),
    ):
        with pytest.raises(error, match=what):
            check(range(first, 9))
    assert table.runs_of(OFFLOADED, range(9)) == [range(2, 3)]
    table.claim([], [range(2, 3)])
    with pytest.raises(NotMapped, match=f"offset {2 * PAGE} is being changed"):
        table.runs_of(OFFLOADED, range(9))


def test_a_pool_of_terabytes(lender: Lender) -> None:
    """Addresses cost nothing: 16 TiB of them, and the table is as long as what was used."""
    with VirtualMemoryPool(lender, "16TiB", PAGE) as pool:
        pool.allocate_anywhere(PAGE)
        assert pool.stats().largest_free_run_bytes == pool.capacity - PAGE
        pool.allocate(pool.capacity - PAGE, PAGE)
        put(pool, pool.capacity // PAGE - 1, b"high")
        assert pool.compact() != []
        assert text(pool, 1) == b"high"
