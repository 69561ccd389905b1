"""Offload a pool to host memory and restore it: every byte, every address, and every page in between."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
from tests.client.pool.offload.pages import PAGES, digest, fill, pinned_bytes, sizes
from tests.support.fake_lender import PAGE, Lender
from tests.support.sizes import MIB

from membroker.errors import (
    AlreadyMapped,
    ClosedError,
    NotMapped,
    Offloaded,
    OutOfMemory,
)
from membroker.pool import offload
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import libc as _libc
from membroker.vmm.driver import DriverError


class TestThereAndBack:
    def test_a_whole_pool(self, pool: VirtualMemoryPool, lender: Lender, random_bytes: Callable[[int], bytes]) -> None:
        """A model sleeps: its memory is everybody's, its bytes are the host's; it wakes as it was, where it was."""
        pool.allocate(0, 7 * PAGE)
        pool.allocate(20 * PAGE, 4 * PAGE)
        offsets = [*range(0, 7 * PAGE, PAGE), *range(20 * PAGE, 24 * PAGE, PAGE)]
        for offset in offsets:
            fill(pool, offset, random_bytes(PAGE))
        before = digest(pool, *offsets)
        assert pool.offload() == 11 * PAGE
        assert sizes(pool) == (0, 11)
        assert lender.used_bytes == lender.lent_bytes == pool.physical_usage_bytes == 0
        assert lender.declared_bytes == pinned_bytes(lender) == 11 * PAGE
        base = pool.base_address
        with VirtualMemoryPool(lender, PAGES * PAGE, PAGE) as other:  # whose pages are the same memory's
            other.allocate(0, 11 * PAGE)
            fill(other, 0, random_bytes(11 * PAGE))
        assert pool.restore() == 11 * PAGE
        assert (sizes(pool), pool.base_address) == ((11, 0), base)
        assert digest(pool, *offsets) == before
        assert lender.declared_bytes == pinned_bytes(lender) == 0
        assert pool.offload(0, 7 * PAGE) == pool.restore() == 7 * PAGE
        assert digest(pool, *offsets) == before

    def test_a_part_of_a_pool(self, pool: VirtualMemoryPool, random_bytes: Callable[[int], bytes]) -> None:
        """Every page that the range touches goes, and no other; back comes what is asked for."""
        pool.allocate(0, 8 * PAGE)
        fill(pool, 0, random_bytes(8 * PAGE))
        every = range(0, 8 * PAGE, PAGE)
        before = digest(pool, *every)
        assert pool.offload(2 * PAGE + 1, 2 * PAGE) == 3 * PAGE
        assert [pool.is_mapped(offset) for offset in every] == [True, True, False, False, False, True, True, True]
        assert pool.offload(0, 4 * PAGE) == 2 * PAGE, "pages that are offloaded already are passed over"
        assert pool.restore(3 * PAGE, 1) == PAGE
        assert pool.restore(3 * PAGE, 1) == 0
        assert pool.restore() == 4 * PAGE
        assert digest(pool, *every) == before

    def test_nothing_to_do(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Of a pool without pages nothing is copied, charged or told."""
        lender.host_capacity = 0
        told: list[object] = []
        assert pool.offload(progress=lambda *numbers: told.append(numbers)) == pool.restore() == 0
        assert told == []

    def test_spare_pages_are_given_back_as_they_are(self, lender: Lender) -> None:
        """What nobody uses is not copied; spare pages outside of the range stay."""
        with VirtualMemoryPool(lender, PAGES * PAGE, PAGE, spare_pages=4) as pool:
            pool.allocate(0, 6 * PAGE)
            pool.deallocate(PAGE, 2 * PAGE)
            pool.deallocate(5 * PAGE, PAGE)
            assert pool.offload(0, 4 * PAGE) == 2 * PAGE
            assert sizes(pool) == (2, 2)
            assert pool.stats().spare_pages == 1
            assert lender.declared_bytes == 2 * PAGE

    def test_pinned_memory_is_kept_for_the_next_time(
        self, pool: VirtualMemoryPool, lender: Lender, random_bytes: Callable[[int], bytes]
    ) -> None:
        """A model that sleeps and wakes again and again pins its memory once; a larger one pins what is missing."""
        pool.allocate(0, 12 * PAGE)
        fill(pool, 0, random_bytes(12 * PAGE))
        every = range(0, 12 * PAGE, PAGE)
        before = digest(pool, *every)
        for size, pinned in ((5, 5), (5, 5), (3, 5), (8, 8), (12, 12), (1, 12)):
            assert pool.offload(0, size * PAGE) == size * PAGE
            assert lender.declared_bytes == pinned_bytes(lender) == pinned * PAGE
            pool.restore(keep_pinned=True)
            assert digest(pool, *every) == before
            assert lender.declared_bytes == pinned_bytes(lender) == pinned * PAGE
        lender.host_capacity = 0
        assert pool.offload() == pool.restore(keep_pinned=True) == 12 * PAGE
        pool.trim()
        assert lender.declared_bytes == pinned_bytes(lender) == 0
        lender.host_capacity = 1 << 40
        pool.offload(0, 3 * PAGE)
        pool.restore(keep_pinned=True)
        lender.host_capacity = 4 * PAGE
        with pytest.raises(OutOfMemory):
            pool.offload()
        assert lender.declared_bytes == pinned_bytes(lender) == 3 * PAGE
        assert digest(pool, *every) == before

    def test_a_pool_of_pages_larger_than_a_chunk(self, lender: Lender, random_bytes: Callable[[int], bytes]) -> None:
        with VirtualMemoryPool(lender, "64MiB", "16MiB") as pool:
            pool.allocate(0, "48MiB")
            fill(pool, 0, random_bytes(48 * MIB))
            before = digest(pool, 0, 16 * MIB, 32 * MIB)
            assert pool.offload() == pool.restore() == 48 * MIB
            assert digest(pool, 0, 16 * MIB, 32 * MIB) == before

    def test_blocks_that_are_neighbours(
        self,
        pool: VirtualMemoryPool,
        lender: Lender,
        monkeypatch: pytest.MonkeyPatch,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        """Pinned memory often lies side by side: a chunk whose pages are in two blocks is two copies all the same."""
        step = offload.BLOCK_BYTES
        first = lender.driver.reserve(8 * step)
        lender.driver.unreserve(first, 8 * step)  # addresses that nobody else is given meanwhile
        pinned: list[int] = []

        def side_by_side(size: int) -> int:
            pinned.append(first + len(pinned) * step)
            _libc.mmap_nothing(size, pinned[-1])
            _libc.mprotect(pinned[-1], size, _libc.PROT_READ_WRITE)
            return pinned[-1]

        pool.allocate(0, 8 * PAGE)
        fill(pool, 0, random_bytes(8 * PAGE))
        every = range(0, 8 * PAGE, PAGE)
        before = digest(pool, *every)
        with monkeypatch.context() as patch:
            patch.setattr(_libc, "mmap_memory", side_by_side)
            pool.offload()
        assert len(pinned) == 3
        pool.restore()
        assert digest(pool, *every) == before

    def test_every_way_at_random(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Hundreds of calls in any order: each page has its own bytes or none, and the books are the pages."""
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        dice = random.Random(seed)
        there: dict[int, bytes] = {}
        away: set[int] = set()
        for _ in range(300):
            first, count = dice.randrange(24), dice.randrange(1, 6)
            pages = range(first, first + count)
            what = dice.choice(("allocate", "deallocate", "offload", "restore"))
            if what == "allocate" and not there.keys() & set(pages):
                pool.allocate(first * PAGE, count * PAGE)
                for page in pages:
                    there[page] = dice.randbytes(16)
                    pool.view(page * PAGE, 16)[:] = there[page]
                    pool.view(page * PAGE + PAGE - 16, 16)[:] = there[page]
            elif what == "deallocate" and there.keys() >= set(pages):
                pool.deallocate(first * PAGE, count * PAGE)
                for page in pages:
                    del there[page]
                away.difference_update(pages)
            elif what == "offload":
                gone = (set(pages) & there.keys()) - away
                assert pool.offload(first * PAGE, count * PAGE) == len(gone) * PAGE
                away |= gone
            elif what == "restore":
                assert pool.restore(first * PAGE, count * PAGE) == len(away & set(pages)) * PAGE
                away -= set(pages)
            assert sizes(pool) == (len(there) - len(away), len(away))
            assert lender.lent_bytes == lender.used_bytes == (len(there) - len(away)) * PAGE
            assert len(away) * PAGE <= lender.declared_bytes == pinned_bytes(lender)
            for page in there.keys() - away:
                assert bytes(pool.view(page * PAGE, 16)) == there[page]
                assert bytes(pool.view(page * PAGE + PAGE - 16, 16)) == there[page]


class TestAnOffloadedPage:
    def test_is_neither_mapped_nor_free(self, pool: VirtualMemoryPool) -> None:
        """Nothing can be put in its place, nobody gets its bytes, and what grows does so above it."""
        pool.allocate(0, 4 * PAGE)
        pool.offload(2 * PAGE, 2 * PAGE)
        for refused in (
            lambda: pool.allocate(2 * PAGE, 1),
            lambda: pool.allocate(3 * PAGE, 2 * PAGE),
            lambda: pool.view(PAGE, 2 * PAGE),
            lambda: pool.span(3 * PAGE, 1),
        ):
            with pytest.raises(Offloaded, match=r"restore\(\)"):
                refused()
        assert issubclass(Offloaded, AlreadyMapped)
        assert issubclass(Offloaded, NotMapped)
        assert sizes(pool) == (2, 2)
        assert pool.grow(1) == pool.base_address + 4 * PAGE
        assert pool.stats().largest_free_run_bytes == (PAGES - 5) * PAGE

    def test_is_listed_and_stays_where_it_is(self, pool: VirtualMemoryPool) -> None:
        """A compaction moves what has memory, and nothing over a page that is to come back."""
        for page in (1, 3, 5):
            pool.allocate(page * PAGE, PAGE)
        pool.offload(3 * PAGE, PAGE)
        rows = [(row.offset // PAGE, row.size // PAGE, row.state, len(row.extents)) for row in pool.mappings()]
        assert rows == [(1, 1, "used", 1), (3, 1, "offloaded", 0), (5, 1, "used", 1)]
        pool.compact()
        rows = [(row.offset // PAGE, row.size // PAGE, row.state, len(row.extents)) for row in pool.mappings()]
        assert rows == [(0, 2, "used", 2), (3, 1, "offloaded", 0)]
        pool.restore()
        assert pool.is_mapped(3 * PAGE)

    @pytest.mark.parametrize("access", ["read", "none"])
    def test_comes_back_with_what_it_allowed(self, pool: VirtualMemoryPool, access: str) -> None:
        """Weights that were protected against accidents are so again, with their bytes, also after a stop half way."""
        pool.allocate(0, 8 * PAGE)
        for page in range(8):
            fill(pool, page * PAGE, bytes([page]))
        pool.protect(0, 7 * PAGE, access)
        with pytest.raises(ZeroDivisionError):
            pool.offload(progress=lambda *_: 1 / 0)
        pool.offload()
        assert [row.access for row in pool.mappings()] == [access, "read_write"]
        pool.restore()
        assert [(row.access, row.size // PAGE) for row in pool.mappings()] == [(access, 7), ("read_write", 1)]
        driver = pool._holding.source.driver
        for page in range(7):
            with pytest.raises(DriverError):
                driver.write(pool.base_address + page * PAGE, b"x")
        pool.protect(0, 8 * PAGE, "read_write")
        assert [pool.view(page * PAGE, 1)[0] for page in range(8)] == [*range(8)]

    def test_is_deallocated_without_coming_back(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Its bytes are forgotten, and a block of host memory is freed when its last page is gone."""
        pool.allocate(0, 6 * PAGE)
        pool.offload(0, 5 * PAGE)
        pool.deallocate(0, 2 * PAGE)
        assert lender.declared_bytes == pinned_bytes(lender) == 5 * PAGE
        pool.deallocate(2 * PAGE, PAGE)
        assert lender.declared_bytes == pinned_bytes(lender) == 2 * PAGE
        pool.deallocate(3 * PAGE, 3 * PAGE)
        assert sizes(pool) == (0, 0)
        assert lender.lent_bytes == lender.declared_bytes == pinned_bytes(lender) == 0
        pool.allocate(0, 6 * PAGE)

    def test_does_not_become_a_spare_one(self, lender: Lender) -> None:
        with VirtualMemoryPool(lender, PAGES * PAGE, PAGE, spare_pages=8) as pool:
            pool.allocate(0, 4 * PAGE)
            pool.offload(PAGE, PAGE)
            pool.deallocate(0, 4 * PAGE)
            assert sizes(pool) == (0, 0)
            assert lender.declared_bytes == 0

    def test_ends_with_its_pool(self, lender: Lender) -> None:
        """Closed, or forgotten: what lies on the host is freed, and no longer declared."""
        for forget in (False, True):
            pool = VirtualMemoryPool(lender, PAGES * PAGE, PAGE)
            pool.allocate(0, 4 * PAGE)
            pool.offload(0, 3 * PAGE)
            if not forget:
                pool.close()
                with pytest.raises(ClosedError):
                    pool.restore()
            del pool
            gc.collect()
            lender.settle()
            assert lender.declared_bytes == pinned_bytes(lender) == lender.lent_bytes == 0
