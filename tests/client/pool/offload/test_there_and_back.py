"""Offload a pool to host memory and restore it: every byte, every address, and every page in between."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.client.pool.offload.pages import PAGES, digest, fill, pinned_bytes, sizes
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.seeds import chosen_seed

from membroker.dlpack import export
from membroker.errors import ClosedError, DeviceFailure, InvalidRequest, NotMapped, Offloaded
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
        seed = chosen_seed()
        dice = random.Random(seed)
        there: dict[int, bytes] = {}
        away: set[int] = set()
        for _ in range(300):
            first, count = dice.randrange(24), dice.randrange(1, 6)
            pages = range(first, first + count)
            what = dice.choice(("allocate", "free", "offload", "restore"))
            if what == "allocate" and not there.keys() & set(pages):
                pool.allocate(first * PAGE, count * PAGE)
                for page in pages:
                    there[page] = dice.randbytes(16)
                    pool.view(page * PAGE, 16)[:] = there[page]
                    pool.view(page * PAGE + PAGE - 16, 16)[:] = there[page]
            elif what == "free" and there.keys() >= set(pages):
                pool.free(first * PAGE, count * PAGE)
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


# Under living views: a captured graph, or a tensor in a module, is there again after `restore`


def test_a_view_is_the_same_after_it(
    pool: VirtualMemoryPool, lender: Lender, random_bytes: Callable[[int], bytes]
) -> None:
    """The page's promise is that tensors stay valid; `tensor` of any page blocked `offload` until it was gone."""
    pool.allocate(0, PAGES * PAGE)
    data = random_bytes(PAGES * PAGE)
    pool.view(0, len(data))[:] = data
    view, exported = pool.view(0, 3 * PAGE), export(pool, (PAGE,), "U8", 5 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    with pytest.raises(BufferError, match="2 views"):
        pool.offload()
    assert pool.offload(despite_views=True) == len(data)
    assert lender.lent == {}
    with pytest.raises(Offloaded):
        pool.view(0, 1)
    pool.restore()
    assert ctypes.addressof(ctypes.c_char.from_buffer(view)) == address
    assert bytes(view) == data[: 3 * PAGE]
    assert bytes(pool.view(5 * PAGE, PAGE)) == data[5 * PAGE : 6 * PAGE]
    with pytest.raises(BufferError, match="1 view"):
        pool.free(5 * PAGE, PAGE)
    del view, exported


def test_a_pool_that_is_closed_meanwhile(pool: VirtualMemoryPool, lender: Lender) -> None:
    """Its addresses stay until the view is gone, so nothing else comes to lie there; its bytes are dropped then."""
    pool.allocate(0, 2 * PAGE)
    view = pool.view(0, PAGE)
    pool.offload(despite_views=True)
    pool.close()
    assert lender.holdings
    del view
    lender.settle()
    assert not lender.holdings


def test_an_access_meanwhile_ends_the_process() -> None:
    """As the docstring says: it never reads what another program has there."""
    script = f"""
from tests.support.fake_lender import PAGE, Lender
from membroker.pool.pool import VirtualMemoryPool
pool = VirtualMemoryPool(Lender(), {PAGES} * PAGE, PAGE)
pool.allocate(0, PAGE)
view = pool.view(0, PAGE)
pool.offload(despite_views=True)
print(view[0])
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."})
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"")


# What cannot be offloaded is refused before anything has changed


def test_the_host_has_no_memory_to_pin(
    pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block is refused by the driver: the first is freed, and nothing is declared."""
    pin = lender.driver.pin

    def scarce(size: int) -> int:
        if pinned_bytes(lender):
            raise DriverError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", 2)
        return pin(size)

    monkeypatch.setattr(lender.driver, "pin", scarce)
    pool.allocate(0, 6 * PAGE)
    with pytest.raises(DeviceFailure, match="cuMemHostRegister"):
        pool.offload()
    assert sizes(pool) == (6, 0)
    assert lender.declared_bytes == pinned_bytes(lender) == 0


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (PAGES * PAGE, None), (0, PAGES * PAGE + 1), (0, 0)])
def test_ranges_outside(pool: VirtualMemoryPool, offset: int, size: int | None) -> None:
    for call in (pool.offload, pool.restore):
        with pytest.raises(InvalidRequest):
            call(offset, size)


def test_another_call_is_at_a_page(pool: VirtualMemoryPool, lender: Lender) -> None:
    """While one thread offloads, no other takes its pages away, brings them back, or offloads them again."""
    pool.allocate(0, 8 * PAGE)
    refused: list[str] = []

    def disturb(done: int, total: int) -> None:
        for call in (pool.offload, pool.restore, lambda: pool.free(0, 8 * PAGE), lambda: pool.view(0, 1)):
            try:
                call()
            except NotMapped as error:
                refused.append(str(error))

    pool.offload(progress=disturb)
    assert len(refused) == 4 * 4 - 1  # when the last chunk has gone there is nothing left to offload
    assert all("another call" in told or "is offloaded" in told for told in refused)
    assert sizes(pool) == (0, 8)
