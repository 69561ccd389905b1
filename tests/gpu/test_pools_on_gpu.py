"""Pools on a real GPU: compaction moves pages without a copy, after the work that uses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.gpu import enter, on_gpu
from tests.support.sizes import GIB, MIB
from tests.support.workers import PAGE, worker

from membroker import LocalSource, VirtualMemoryPool
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]


@pytest.fixture
def source() -> Iterator[LocalSource]:
    """The first GPU in this process, without a broker."""
    with LocalSource(limit="8GiB") as source:
        yield source


def test_compaction_waits_for_what_runs(source: LocalSource) -> None:
    """Work that was queued before still writes to the old addresses: all of it is there afterwards, and nothing
    faults.
    """
    import cuda.bindings.driver as cuda

    size = GIB
    with VirtualMemoryPool(source, "16GiB", "64MiB") as pool:
        source.driver.synchronize()  # which makes its context this thread's
        address = pool.allocate(size, size)
        for value in (*range(1, 100), 0x5A):
            (result,) = cuda.cuMemsetD8Async(address, value, size, 0)
            assert int(result) == 0
        (move,) = pool.compact()
        assert (move.old_offset, move.new_offset, move.size) == (size, 0, size)
        for offset in (0, size // 2, size - MIB):
            assert source.driver.read(pool.base_address + offset, MIB) == b"\x5a" * MIB


def test_compaction_of_what_a_broker_lent(gpu: CudaDriver) -> None:
    """Imported extents have neither handle nor descriptor here: they can be moved all the same, and the books do not
    change.
    """
    with on_gpu(gpu) as daemon, worker() as one:
        enter(one, daemon, page="2MiB")
        one.do("for page in (3, 4, 9, 20): fill(driver, pool.allocate(page * PAGE, PAGE), PAGE, page)")
        one.do("moves = pool.compact()")
        assert one.ask("[[move.old_offset // PAGE, move.new_offset // PAGE] for move in moves]") == [
            [3, 0],
            [9, 2],
            [20, 3],
        ]
        for place, value in enumerate((3, 4, 9, 20)):
            assert one.ask(f"holds(driver, pool.base_address + {place} * PAGE, PAGE, {value})")
        assert daemon.books().lent_bytes == 4 * PAGE
        one.do("pool.free(0, 4 * PAGE)")
        assert daemon.books().lent_bytes == 0
