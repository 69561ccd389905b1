"""Offload a pool to host memory and restore it: every byte, every address, and every page in between."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.client.pool.offload.pages import PAGES, digest, fill, pinned_bytes, sizes
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.sizes import MIB

from membroker.errors import ClosedError
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

    def test_nothing_to_do(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Of a pool without pages nothing is copied, charged or told."""
        lender.host_capacity = 0
        told: list[object] = []
        assert pool.offload(progress=lambda *numbers: told.append(numbers)) == pool.restore() == 0
        assert told == []

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
            collect()
            lender.settle()
            assert lender.declared_bytes == pinned_bytes(lender) == lender.lent_bytes == 0
