"""Where a pool's pages are, and what they allow: allocation without an offset, shrink, protect, and what is where."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE, Lender, put, state, text
from tests.support.sizes import MIB

from membroker.errors import (
    AlreadyMapped,
    ClosedError,
    DeviceFailure,
    InvalidOffset,
    InvalidRequest,
    NotMapped,
    Offloaded,
    OutOfVirtualMemory,
)
from membroker.pool.page_table import FREE, OFFLOADED, SPARE, USED, PageTable
from membroker.pool.pool import VirtualMemoryPool
from membroker.types import PoolMapping
from membroker.vmm import AccessFlags, DriverError


class TestAnywhere:
    def test_first_fit(self, pool: VirtualMemoryPool) -> None:
        """The lowest hole that holds it is taken; a hole that is too small is left for who fits."""
        base = pool.base_address
        assert [pool.allocate_anywhere(size) for size in (1, 2 * PAGE, "2MiB")] == [base, base + PAGE, base + 3 * PAGE]
        pool.deallocate(PAGE, PAGE)
        assert pool.allocate_anywhere(PAGE + 1) == base + 4 * PAGE
        assert pool.allocate_anywhere(PAGE) == base + PAGE

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

    def test_no_addresses_left(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Free addresses enough, and none side by side: the error says how much there would be; compact makes room."""
        for page in range(0, 64, 2):
            pool.allocate(page * PAGE, PAGE)
        before = state(pool, lender)
        for size, alignment in ((2 * PAGE, 0), (64 * PAGE, 0), (65 * PAGE, 0), (2**62, 0), (PAGE, 2**62)):
            with pytest.raises(OutOfVirtualMemory) as error:
                pool.allocate_anywhere(size, alignment)
            assert (error.value.requested_bytes, error.value.available_bytes) == (max(PAGE, size), PAGE)
        assert isinstance(error.value, MemoryError)
        assert state(pool, lender) == before
        pool.compact()
        assert pool.allocate_anywhere(32 * PAGE) == pool.base_address + 32 * PAGE

    def test_spare_pages_are_taken_first(self, lender: Lender) -> None:
        """What is mapped already costs no call, wherever it is the first fit, also in part."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=8) as pool:
            pool.allocate(0, 4 * PAGE)
            pool.deallocate(PAGE, 2 * PAGE)
            calls: list[int] = []
            lender.before_borrow = lambda: calls.append(1)
            assert pool.allocate_anywhere(2 * PAGE) == pool.base_address + PAGE
            assert calls == []
            pool.deallocate(2 * PAGE, 2 * PAGE)
            assert pool.allocate_anywhere(4 * PAGE) == pool.base_address + 2 * PAGE
            assert (pool.stats().spare_pages, lender.lent_bytes) == (0, 6 * PAGE)


class TestShrink:
    def test_it_undoes_a_growth(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A cache that grew for a long request shrinks by the same size, which was no whole number of pages."""
        pool.grow(2 * PAGE)
        before = state(pool, lender)
        pool.grow(PAGE + 1)
        pool.shrink(PAGE + 1)
        assert pool.stats() == before[0]
        pool.shrink(2 * PAGE)
        assert lender.used_bytes == 0

    def test_more_than_there_is(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.grow(2 * PAGE)
        before = state(pool, lender)
        for size in (2 * PAGE + 1, 64 * PAGE, 2**63 - 1):
            with pytest.raises(InvalidOffset):
                pool.shrink(size)
        assert state(pool, lender) == before

    def test_a_hole_at_the_end(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """What lies before the hole was not meant: nothing is given back."""
        pool.grow(4 * PAGE)
        pool.deallocate(2 * PAGE, PAGE)
        before = state(pool, lender)
        with pytest.raises(NotMapped):
            pool.shrink(2 * PAGE)
        with pool.pin(3 * PAGE, 1), pytest.raises(BufferError):
            pool.shrink(PAGE)
        assert state(pool, lender) == before
        pool.shrink(PAGE)
        assert pool.grow(PAGE) == pool.base_address + 2 * PAGE

    def test_pages_are_kept_as_spare_ones(self, lender: Lender) -> None:
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=2) as pool:
            pool.grow(4 * PAGE)
            pool.shrink(2 * PAGE)
            assert (pool.stats().spare_pages, lender.lent_bytes) == (2, 4 * PAGE)
            pool.shrink(PAGE)
            assert (pool.stats().spare_pages, lender.lent_bytes) == (2, 3 * PAGE)


class TestProtect:
    def test_weights_are_only_read(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A model's weights are loaded and protected; a stray write is refused, and the cache beside is written on."""
        pool.allocate(0, 4 * PAGE)
        put(pool, 1, b"weights")
        pool.protect(PAGE + 5, PAGE, "read")  # which touches two pages
        assert pool.view(PAGE, 7).readonly
        assert bytes(pool.view(PAGE, 7)) == b"weights"
        assert not pool.span(PAGE, 7).writable
        assert pool.span(3 * PAGE, 7).writable
        with pytest.raises(DriverError):
            lender.driver.write(pool.base_address + 2 * PAGE, b"x")
        for page in (0, 3):
            put(pool, page, b"cache")
        assert pool.view(0, 2 * PAGE).readonly, "a view over the border may only be read"
        pool.protect(0, 4 * PAGE, AccessFlags.READ_WRITE)
        put(pool, 1, b"other")

    def test_no_access_at_all(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A guard page behind a buffer, for a bug hunt."""
        pool.allocate(0, 2 * PAGE)
        pool.protect(PAGE, 1, "none")
        with pytest.raises(InvalidRequest, match="no access"):
            pool.view(0, 2 * PAGE)
        with pytest.raises(DriverError):
            lender.driver.read(pool.base_address + PAGE, 1)
        assert [row.access for row in pool.mappings()] == ["read_write", "none"]

    @pytest.mark.parametrize("spare_pages", [0, 4])
    def test_the_next_one_may_write(self, lender: Lender, spare_pages: int) -> None:
        """A protected page is deallocated, and somebody gets it, from the spare ones or not: it is as any other."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=spare_pages) as pool:
            pool.allocate(0, 3 * PAGE)
            pool.protect(PAGE, PAGE, "read")
            pool.deallocate(0, 3 * PAGE)
            pool.allocate(0, 3 * PAGE)
            assert [row.access for row in pool.mappings()] == ["read_write"]
            pool.view(0, 3 * PAGE)[:] = bytes(3 * PAGE)

    def test_refusals_change_nothing(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        pool.allocate(0, 2 * PAGE)
        before = state(pool, lender)
        with pytest.raises(NotMapped):
            pool.protect(PAGE, 2 * PAGE, "read")
        for access in ("write", "READ", 1, None, ""):
            with pytest.raises(InvalidRequest, match="an access is"):
                pool.protect(0, PAGE, access)
        lender.driver.lost = True
        with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_ILLEGAL_ADDRESS")):
            pool.protect(0, PAGE, "read")
        lender.driver.lost = False
        assert state(pool, lender) == before
        pool.view(0, 2 * PAGE)[:] = bytes(2 * PAGE)

    def test_not_under_a_living_view(self, pool: VirtualMemoryPool) -> None:
        """Somebody writes through a view: taking the right away would kill the process. Giving it back harms nobody."""
        pool.allocate(0, 2 * PAGE)
        view = pool.view(PAGE, 4)
        with pytest.raises(BufferError, match="alive"):
            pool.protect(0, 2 * PAGE, "read")
        view[:] = b"fine"
        del view
        pool.protect(0, 2 * PAGE, "read")
        reader = pool.view(PAGE, 4)
        pool.protect(0, 2 * PAGE, "read_write")
        assert bytes(reader) == b"fine"

    def test_it_waits_for_the_device(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A kernel still writes there: taking the right away under it would end the process's context."""
        waits: list[int] = []
        pool.allocate(0, PAGE)
        lender.driver.before_synchronize = lambda: waits.append(1)
        pool.protect(0, PAGE, "read")
        assert waits == [1]
        pool.protect(0, PAGE, "read_write")
        assert waits == [1]


class TestMappings:
    def test_what_is_where(self, lender: Lender) -> None:
        """One row for each run of which the same holds; by page, one for each."""
        with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=4) as pool:
            assert pool.mappings() == []
            pool.allocate(PAGE, 6 * PAGE)
            pool.allocate(20 * PAGE, 2 * PAGE)
            pool.deallocate(2 * PAGE, PAGE)
            pool.protect(5 * PAGE, 2 * PAGE, "read")
            ids = sorted(lender.lent)
            with pool.pin(3 * PAGE + 5, PAGE):
                rows = [
                    PoolMapping(PAGE, PAGE, "used", "read_write", (ids[0],)),
                    PoolMapping(2 * PAGE, PAGE, "spare", "read_write", (ids[1],)),
                    PoolMapping(3 * PAGE, 2 * PAGE, "pinned", "read_write", (ids[2], ids[3])),
                    PoolMapping(5 * PAGE, 2 * PAGE, "used", "read", (ids[4], ids[5])),
                    PoolMapping(20 * PAGE, 2 * PAGE, "used", "read_write", (ids[6], ids[7])),
                ]
                assert pool.mappings() == rows
                by_page = pool.mappings(by_page=True)
            assert [row.size for row in by_page] == [PAGE] * 8
            assert [row.extents[0] for row in by_page] == ids
            assert sum(row.size for row in pool.mappings()) == pool.stats().physical_usage_bytes

    def test_what_another_call_is_at(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """What is being borrowed is not there yet; what is being given back is still there."""
        pool.allocate(0, 2 * PAGE)
        seen: list[list[str]] = []
        lender.driver.before_synchronize = lambda: seen.append([row.state for row in pool.mappings()])
        pool.deallocate(0, PAGE)
        lender.before_borrow = lambda: seen.append([row.state for row in pool.mappings()])
        pool.allocate(2 * PAGE, PAGE)
        lender.driver.before_synchronize = lambda: None
        assert seen == [["changing", "used"], ["used"]]


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

    def test_it_ends_with_an_error_too(self, pool: VirtualMemoryPool) -> None:
        pool.allocate(0, PAGE)
        with pytest.raises(ZeroDivisionError), pool.pin(0, 1):
            raise ZeroDivisionError
        gc.collect()
        pool.deallocate(0, PAGE)


def test_what_a_large_range_allows() -> None:
    """A view over 60,000 pages is made under the pool's lock: while nothing is restricted, no page is looked at."""
    table = PageTable(60_000, PAGE)
    table.claim(range(60_000), [])
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
    table = PageTable(9, PAGE)
    for kind, pages in ((USED, range(2)), (OFFLOADED, range(2, 3)), (USED, range(6, 7))):
        table.claim(pages, [])
        table.set(pages, kind)
        table.release([pages])
    table.claim(range(3, 5), [])
    for check, first, error, what in (
        (table.check_unused, 1, AlreadyMapped, f"offset {PAGE} is mapped already"),
        (table.check_unused, 2, Offloaded, f"offset {2 * PAGE} is offloaded"),
        (table.check_unused, 3, AlreadyMapped, f"offset {3 * PAGE} is being changed"),
        (table.check_unused, 5, AlreadyMapped, f"offset {6 * PAGE} is mapped already"),
        (table.check_used, 0, Offloaded, f"offset {2 * PAGE} is offloaded"),
        (table.check_allocated, 0, NotMapped, f"offset {3 * PAGE} is being changed"),
        (table.check_used, 4, NotMapped, f"offset {4 * PAGE} is being changed"),
        (table.check_used, 5, NotMapped, f"offset {5 * PAGE} is not mapped"),
        (table.check_used, 6, NotMapped, f"offset {7 * PAGE} is not mapped"),
    ):
        with pytest.raises(error, match=what):
            check(range(first, 9))
    assert table.runs_of(OFFLOADED, range(9)) == [range(2, 3)]
    table.claim(range(2, 3), [])
    with pytest.raises(NotMapped, match=f"offset {2 * PAGE} is being changed"):
        table.runs_of(OFFLOADED, range(9))


@pytest.mark.parametrize("seed", [1, 2, None])
def test_the_table_against_a_plain_one(seed: int | None) -> None:
    """Three thousand random changes of a table of forty pages; every question is answered as by a dict of states."""
    seed = seed or random.randrange(1 << 32)
    print(f"seed {seed}")
    choose, table = random.Random(seed), PageTable(40, PAGE)
    states, claimed = dict.fromkeys(range(40), FREE), set()

    def refused(check: Callable[[range], None], pages: range, error: type[Exception]) -> bool:
        try:
            check(pages)
        except error:
            return True
        return False

    for _ in range(3000):
        first = choose.randrange(40)
        pages = range(first, min(40, first + choose.randint(1, 5)))
        kinds, busy = {states[page] for page in pages}, not claimed.isdisjoint(pages)
        assert refused(table.check_unused, pages, AlreadyMapped) == (busy or USED in kinds)
        assert refused(table.check_used, pages, NotMapped) == (busy or kinds != {USED})
        if not busy and kinds <= {FREE, SPARE} and choose.random() < 0.5:
            if kinds == {SPARE} and choose.random() < 0.5:
                assert table.take_spare(pages)
                states.update(dict.fromkeys(pages, USED))
            else:
                table.claim(pages, [])
                claimed.update(pages)
                assert [page for run in table.unbacked([pages]) for page in run] == [
                    page for page in pages if states[page] == FREE
                ]
                if choose.random() < 0.8:
                    state = choose.choice((USED, SPARE))
                    table.set(pages, state)
                    states.update(dict.fromkeys(pages, state))
                if choose.random() < 0.9:
                    table.release([pages])
                    claimed.difference_update(pages)
        elif not busy and kinds == {USED}:
            assert not table.take_spare(pages)
            state = choose.choice((SPARE, FREE))
            table.set(pages, state)
            states.update(dict.fromkeys(pages, state))
        elif busy and claimed.issuperset(pages):
            table.release([pages])
            claimed.difference_update(pages)
        taken = [page for page in range(40) if states[page] == USED or page in claimed]
        assert table.top() == max(taken, default=-1) + 1
        assert table.spare == sum(state == SPARE for state in states.values())
        edges = [-1, *taken, 40]
        free = [after - before - 1 for before, after in pairwise(edges)]
        assert table.largest_free_run() == (max(free), sum(free))
        assert {page for page in range(40) if table.is_used(range(page, page + 1))} == {
            page for page in range(40) if states[page] == USED and page not in claimed
        }
        count, step = choose.randint(1, 6), choose.choice((1, 1, 2, 4))
        offset = choose.randrange(step)
        fits = [at for at in range(offset, 41 - count, step) if set(range(at, at + count)).isdisjoint(taken)]
        try:
            assert table.first_fit(count, step, offset).start == fits[0]
        except OutOfVirtualMemory:
            assert fits == []


def test_a_pool_of_terabytes(lender: Lender) -> None:
    """Addresses cost nothing: 16 TiB of them, and the table is as long as what was used."""
    with VirtualMemoryPool(lender, "16TiB", PAGE) as pool:
        pool.allocate_anywhere(PAGE)
        assert pool.stats().largest_free_run_bytes == pool.capacity - PAGE
        pool.allocate(pool.capacity - PAGE, PAGE)
        put(pool, pool.capacity // PAGE - 1, b"high")
        assert pool.compact() != []
        assert text(pool, 1) == b"high"
