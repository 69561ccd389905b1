"""Pools on a real GPU: compaction without a copy, a source without a broker, and several models of one program."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest
from tests.support.gpu import SLACK, at_rest, enter, on_gpu, used
from tests.support.sizes import GIB, MIB
from tests.support.workers import PAGE, worker

from membroker import LocalSource, VirtualMemoryPool
from membroker.errors import OutOfMemory
from membroker.vmm import DriverError, Location
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("gpu")]


@pytest.fixture
def source() -> Iterator[LocalSource]:
    """The first GPU in this process, without a broker."""
    with LocalSource(limit="8GiB") as source:
        yield source


def content(seed: int) -> bytes:
    """The bytes of a page: the same for the same seed, and different at every place."""
    return random.Random(seed).randbytes(PAGE)


def test_compaction_keeps_every_byte(source: LocalSource, gpu: CudaDriver) -> None:
    """Scattered pages become contiguous; each keeps its bytes and its access, and the GPU uses no more memory."""
    driver = source.driver
    with VirtualMemoryPool(source, "64GiB", PAGE) as pool:
        for page in (1, 2, 7, 30, 31, 32, 1000):
            driver.write(pool.allocate(page * PAGE, PAGE), content(page))
        pool.protect(31 * PAGE, PAGE, "read")
        rest = at_rest(lambda: used(gpu))
        where = {page: pool.base_address + page * PAGE for page in (1, 2, 7, 30, 31, 32, 1000)}
        with pool.pin(7 * PAGE, 1):
            moves = pool.compact()
        assert len(moves) == 3
        for move in moves:
            for page, address in where.items():
                offset = address - pool.base_address
                if 0 <= offset - move.old_offset < move.size:
                    where[page] = address + move.new_offset - move.old_offset
        assert where[7] == pool.base_address + 7 * PAGE
        for page, address in where.items():
            assert zlib.crc32(driver.read(address, PAGE)) == zlib.crc32(content(page))
        with pytest.raises(DriverError):
            driver.write(where[31], b"x")
        driver.write(where[32], b"written")
        assert abs(used(gpu) - rest) <= SLACK
        assert source.physical_usage_bytes == 7 * PAGE
        pool.compact()
        assert pool.stats().fragmentation_ratio == 0.0
        assert zlib.crc32(driver.read(pool.base_address, PAGE)) == zlib.crc32(content(1))


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


def test_a_gpu_that_is_full(source: LocalSource, gpu: CudaDriver) -> None:
    """More than the GPU has, without a limit in the way: refused with the GPU's own figure, and nothing stays
    allocated.
    """
    rest = at_rest(lambda: used(gpu))
    memory = gpu.memory(Location.DEVICE)
    with LocalSource() as unlimited, VirtualMemoryPool(unlimited, 2 * memory.total, GIB) as pool:
        with pytest.raises(OutOfMemory) as refused:
            pool.allocate(0, memory.total)
        assert refused.value.level == "device"
        assert 0 < refused.value.available_bytes < refused.value.requested_bytes
        assert unlimited.physical_usage_bytes == pool.physical_usage_bytes == 0
    assert at_rest(lambda: used(gpu)) <= rest + SLACK
    with VirtualMemoryPool(source, "16GiB", GIB) as pool, pytest.raises(OutOfMemory) as refused:
        pool.allocate(0, "9GiB")
    assert (refused.value.level, refused.value.available_bytes) == ("capacity", 8 * GIB)


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
