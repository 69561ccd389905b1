"""Offloading: what goes to the host comes back byte by byte, and nothing stays charged, held or pinned behind it."""

from __future__ import annotations

import gc
import hashlib
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.fake_lender import PAGE, Lender
from tests.support.processes import ends, heard, worker
from tests.support.sizes import MIB

import membroker
from membroker import interrupts
from membroker.errors import (
    AlreadyMapped,
    ClosedError,
    CompactionFailed,
    DescriptorLimit,
    DeviceFailure,
    InvalidRequest,
    MembrokerError,
    NotMapped,
    Offloaded,
    OutOfMemory,
    OutOfVirtualMemory,
    SessionLost,
)
from membroker.pool import offload
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import libc as _libc
from membroker.vmm.driver import DriverError

PAGES = 64


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two pages and blocks of three, so that a few MiB are many chunks on their way."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 3 * PAGE)


@pytest.fixture
def lender() -> Iterator[Lender]:
    """A lender that has everything back at the end: by its books, by the device, and on the host."""
    lender = Lender()
    yield lender
    gc.collect()
    lender.settle()
    assert (lender.lent, lender.used_bytes, lender.declared_bytes) == ({}, 0, 0)
    assert pinned_bytes(lender) == 0
    assert lender.holdings == set()
    lender.driver.close()
    lender.device.close()


@pytest.fixture
def pool(lender: Lender) -> Iterator[VirtualMemoryPool]:
    with VirtualMemoryPool(lender, PAGES * PAGE, PAGE) as pool:
        yield pool


@pytest.fixture
def random_bytes() -> Callable[[int], bytes]:
    """Bytes of a seed that is printed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed).randbytes


def pinned_bytes(lender: Lender) -> int:
    """What the driver of the library has pinned."""
    return sum(lender.driver._pinned._sizes.values())


def digest(pool: VirtualMemoryPool, *offsets: int) -> str:
    """The checksum of whole pages at these offsets."""
    found = hashlib.sha256()
    for offset in offsets:
        found.update(pool.view(offset, pool.page_size))
    return found.hexdigest()


def fill(pool: VirtualMemoryPool, offset: int, data: bytes) -> None:
    pool.view(offset, len(data))[:] = data


def run(offset: int) -> str:
    """The name of a run of pages in a segment's header."""
    return f"offset-{offset:020}"


def sizes(pool: VirtualMemoryPool) -> tuple[int, int]:
    """How many pages have memory, and how many are offloaded."""
    stats = pool.stats()
    return stats.mapped_pages, stats.offloaded_bytes // pool.page_size


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


class TestRefusals:
    def test_a_living_view(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Somebody still has the addresses of one page: none goes, and no host memory was taken."""
        pool.allocate(0, 6 * PAGE)
        for take in (pool.view, pool.span):
            held = take(4 * PAGE, 8)
            with pytest.raises(BufferError, match="still alive"):
                pool.offload()
            assert sizes(pool) == (6, 0)
            assert lender.declared_bytes == 0
            assert pool.offload(0, 4 * PAGE) == 4 * PAGE
            pool.restore()
            del held

    def test_the_hosts_limit(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """The model may not have so much of the host: nothing has changed."""
        lender.host_capacity = 4 * PAGE - 1
        pool.allocate(0, 4 * PAGE)
        before = digest(pool, 0, 3 * PAGE)
        with pytest.raises(OutOfMemory):
            pool.offload()
        assert sizes(pool) == (4, 0)
        assert digest(pool, 0, 3 * PAGE) == before
        assert pool.offload(0, 3 * PAGE) == 3 * PAGE

    def test_the_host_has_no_memory_to_pin(
        self, pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
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

    def test_a_pool_of_the_hosts_memory(self, lender: Lender) -> None:
        with VirtualMemoryPool(lender, PAGES * PAGE, PAGE, location="host") as pool:
            pool.allocate(0, PAGE)
            with pytest.raises(InvalidRequest, match="host's already"):
                pool.offload()

    @pytest.mark.parametrize(("offset", "size"), [(-1, 1), (PAGES * PAGE, None), (0, PAGES * PAGE + 1), (0, 0)])
    def test_ranges_outside(self, pool: VirtualMemoryPool, offset: int, size: int | None) -> None:
        for call in (pool.offload, pool.restore):
            with pytest.raises(InvalidRequest):
                call(offset, size)

    @pytest.mark.parametrize(
        ("words", "message"),
        [({"progress": True}, "progress is a function"), ({"to": "llama/kv"}, "a segment .* not 'llama/kv'")],
    )
    def test_words_that_are_none(self, pool: VirtualMemoryPool, words: dict[str, Any], message: str) -> None:
        """As other libraries take them: a bar that is to be shown, a segment by its name. Nothing is copied."""
        pool.allocate(0, 4 * PAGE)
        with pytest.raises(InvalidRequest, match=message):
            pool.offload(**words)
        assert sizes(pool) == (4, 0)
        segment = words.get("to", "llama/kv")
        with pytest.raises(InvalidRequest, match=message):
            pool.restore_from(segment, progress=words.get("progress"))

    def test_another_call_is_at_a_page(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """While one thread offloads, no other takes its pages away, brings them back, or offloads them again."""
        pool.allocate(0, 8 * PAGE)
        refused: list[str] = []

        def disturb(done: int, total: int) -> None:
            for call in (pool.offload, pool.restore, lambda: pool.deallocate(0, 8 * PAGE), lambda: pool.view(0, 1)):
                try:
                    call()
                except NotMapped as error:
                    refused.append(str(error))

        pool.offload(progress=disturb)
        assert len(refused) == 4 * 4 - 1  # when the last chunk has gone there is nothing left to offload
        assert all("another call" in told or "is offloaded" in told for told in refused)
        assert sizes(pool) == (0, 8)


class TestHalfWay:
    def test_too_little_memory_to_restore(
        self, pool: VirtualMemoryPool, lender: Lender, random_bytes: Callable[[int], bytes]
    ) -> None:
        """Others took it meanwhile: what has room is back and used, the rest is safe, and the error has the numbers."""
        pool.allocate(0, 8 * PAGE)
        fill(pool, 0, random_bytes(8 * PAGE))
        others = range(PAGE, 8 * PAGE, PAGE)
        before = digest(pool, *others)
        pool.offload()
        lender.capacity = 5 * PAGE
        told: list[tuple[int, int]] = []
        with pytest.raises(OutOfMemory, match=r"8\.0 MiB of 16\.0 MiB are restored.*others stay offloaded") as refused:
            pool.restore(progress=lambda *numbers: told.append(numbers))
        assert refused.value.metadata["restored_bytes"] == str(4 * PAGE)
        assert refused.value.metadata["offloaded_bytes"] == str(4 * PAGE)
        assert sizes(pool) == (4, 4)
        assert all(done <= 4 * PAGE and total == 8 * PAGE for done, total in told)
        fill(pool, 0, b"written between the two")
        lender.capacity = 8 * PAGE
        assert pool.restore() == 4 * PAGE
        assert digest(pool, *others) == before
        assert bytes(pool.view(0, 7)) == b"written"
        assert lender.declared_bytes == 0

    @pytest.mark.parametrize("away", [True, False])
    def test_progress_raises(self, pool: VirtualMemoryPool, lender: Lender, away: bool) -> None:
        """A caller stops it by an exception of its own: what was on its way has arrived, and nothing is lost."""
        pool.allocate(0, 12 * PAGE)
        for page in range(12):
            fill(pool, page * PAGE, page.to_bytes(2, "little"))
        if not away:
            pool.offload()

        class EnoughError(Exception):
            pass

        def stop(done: int, total: int) -> None:
            if done >= 2 * PAGE:
                raise EnoughError

        with pytest.raises(EnoughError):
            pool.offload(progress=stop) if away else pool.restore(progress=stop)
        mapped, offloaded = sizes(pool)
        assert mapped
        assert offloaded
        assert mapped + offloaded == 12
        assert lender.lent_bytes == lender.used_bytes == mapped * PAGE
        assert pool.restore() == offloaded * PAGE
        assert [int.from_bytes(pool.view(page * PAGE, 2), "little") for page in range(12)] == [*range(12)]

    @pytest.mark.parametrize(
        "error",
        [
            OutOfVirtualMemory(2, 1),
            CompactionFailed("after 0 moves", []),
            DescriptorLimit("none is left"),
            SessionLost("forgotten", "TOKEN_REJECTED"),
        ],
    )
    def test_progress_raises_what_the_library_raises(self, pool: VirtualMemoryPool, error: MembrokerError) -> None:
        """It used another pool meanwhile, and that failed: its error comes out as it is, with the numbers of this."""
        pool.allocate(0, 12 * PAGE)

        def fail(done: int, total: int) -> None:
            raise error

        for call, done in ((pool.offload, "offloaded"), (pool.restore, "restored")):
            error.args, error.metadata = ("it failed",), {}
            with pytest.raises(type(error), match=rf"^it failed; .* are {done}") as failed:
                call(progress=fail)
            assert failed.value is error
            assert int(error.metadata[f"{done}_bytes"]) > 0
            pool.offload()

    def test_progress_is_told_all_of_it(self, pool: VirtualMemoryPool) -> None:
        pool.allocate(0, 5 * PAGE)
        for call in (pool.offload, pool.restore):
            told: list[tuple[int, int]] = []
            call(progress=lambda *numbers, told=told: told.append(numbers))
            assert told == [(2 * PAGE, 5 * PAGE), (4 * PAGE, 5 * PAGE), (5 * PAGE, 5 * PAGE)]

    def test_interrupted(self, pool: VirtualMemoryPool) -> None:
        """Ctrl-C in a copy of minutes: it ends at the next chunk, and each page is at one place."""

        def interrupt(*_: int) -> None:
            signal.raise_signal(signal.SIGINT)
            until(lambda: interrupts._here.task is not None and interrupts._here.task.interrupted)

        pool.allocate(0, 12 * PAGE)
        with pytest.raises(KeyboardInterrupt):
            pool.offload(progress=interrupt)
        mapped, offloaded = sizes(pool)
        assert mapped
        assert offloaded
        with pytest.raises(KeyboardInterrupt):
            pool.restore(progress=interrupt)
        pool.restore()
        assert sizes(pool) == (12, 0)

    def test_interrupted_while_pinned_memory_is_freed(
        self, pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C in a trim that frees gigabytes: all of it is freed, and nothing stays declared."""
        pool.allocate(0, 9 * PAGE)
        pool.offload()
        pool.restore(keep_pinned=True)
        unpin = lender.driver.unpin

        def interrupted(address: int) -> None:
            signal.raise_signal(signal.SIGINT)
            unpin(address)

        monkeypatch.setattr(lender.driver, "unpin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.trim()
        assert lender.declared_bytes == pinned_bytes(lender) == 0

    @pytest.mark.parametrize("end", ["restore", "trim", "close"])
    def test_pinned_memory_that_cannot_be_freed(
        self, lender: Lender, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        """A card frees nothing while a graph is captured: what stays pinned stays charged, until the next end."""
        unpin, failing = lender.driver.unpin, True

        def refusing(address: int) -> None:
            if failing and len(lender.driver._pinned._sizes) == 2:
                raise DriverError("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)
            unpin(address)

        monkeypatch.setattr(lender.driver, "unpin", refusing)
        pool = VirtualMemoryPool(lender, PAGES * PAGE, PAGE)
        pool.allocate(0, 9 * PAGE)
        pool.offload()
        if end == "trim":
            pool.restore(keep_pinned=True)
        with pytest.raises(DeviceFailure, match="CAPTURE"):
            getattr(pool, end)()
        assert lender.declared_bytes == pinned_bytes(lender) == 6 * PAGE
        failing = False
        if end == "restore":
            assert sizes(pool) == (9, 0)
        if end != "close":
            pool.trim()
            assert lender.declared_bytes == pinned_bytes(lender) == 0
        pool.close()

    def test_memory_comes_free_as_it_goes(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Another model waits for room: it gets some before the last page is copied."""
        pool.allocate(0, 12 * PAGE)
        lent: list[int] = []
        pool.offload(progress=lambda *_: lent.append(lender.used_bytes // PAGE))
        assert lent == [10, 8, 6, 4, 2, 0]

    @pytest.mark.parametrize("away", [True, False])
    def test_a_copy_fails(
        self, pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch, away: bool
    ) -> None:
        """The device fails at the third chunk: what has arrived counts, and what has not is where it was."""
        pool.allocate(0, 12 * PAGE)
        for page in range(12):
            fill(pool, page * PAGE, page.to_bytes(2, "little"))
        if not away:
            pool.offload()
        copier = lender.driver.copier

        def failing() -> object:
            one = copier()
            wait = one.wait

            def fail(mark: int) -> None:
                wait(mark)
                if mark == 3:
                    raise DriverError("cuEventSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", 214)

            one.wait = fail  # type: ignore[method-assign]
            return one

        with monkeypatch.context() as patch:
            patch.setattr(lender.driver, "copier", failing)
            with pytest.raises(DeviceFailure, match="ECC") as failed:
                pool.offload() if away else pool.restore()
        mapped, offloaded = sizes(pool)
        assert failed.value.metadata["offloaded_bytes"] == str(offloaded * PAGE)
        assert mapped + offloaded == 12
        assert min(mapped, offloaded) >= 2
        assert lender.lent_bytes == lender.used_bytes == mapped * PAGE
        pool.restore()
        assert [int.from_bytes(pool.view(page * PAGE, 2), "little") for page in range(12)] == [*range(12)]

    def test_interrupted_while_it_gives_back_what_was_in_vain(
        self, pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The device fails, several chunks are on their way, and Ctrl-C strikes at the first one given back."""
        pool.allocate(0, 12 * PAGE)
        for page in range(12):
            fill(pool, page * PAGE, page.to_bytes(2, "little"))
        pool.offload()
        copier, give_back = lender.driver.copier, lender.give_back

        def failing() -> object:
            one = copier()
            wait = one.wait

            def fail(mark: int) -> None:
                wait(mark)
                if mark > 1:
                    raise DriverError("cuEventSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", 214)

            one.wait = fail  # type: ignore[method-assign]
            return one

        def interrupted(extent_ids: Sequence[int]) -> None:
            monkeypatch.setattr(lender, "give_back", give_back)
            give_back(extent_ids)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(lender.driver, "copier", failing)
            monkeypatch.setattr(lender, "give_back", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.restore()
        assert sizes(pool) == (2, 10)
        assert lender.lent_bytes == lender.used_bytes == 2 * PAGE
        assert pool.restore() == 10 * PAGE
        assert [int.from_bytes(pool.view(page * PAGE, 2), "little") for page in range(12)] == [*range(12)]

    def test_a_lost_device_keeps_no_host_memory(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Not even what the pages allowed can be set again: what was pinned for them is freed all the same."""
        pool.allocate(0, 12 * PAGE)
        pool.protect(0, 12 * PAGE, "none")

        def lose(done: int, total: int) -> None:
            lender.driver.lost = True

        with pytest.raises(DeviceFailure, match=r"ILLEGAL_ADDRESS.* are offloaded"):
            pool.offload(progress=lose)
        lender.driver.lost = False
        mapped, offloaded = sizes(pool)
        assert mapped + offloaded == 12
        pool.deallocate(0, 12 * PAGE)
        assert lender.declared_bytes == pinned_bytes(lender) == 0

    def test_closed_by_another_thread(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """It ends soon, and what was on its way to either side is given back."""
        pool.allocate(0, 16 * PAGE)

        def close(done: int, total: int) -> None:
            closing = threading.Thread(target=pool.close)
            closing.start()
            closing.join()

        with pytest.raises(ClosedError, match="are offloaded"):
            pool.offload(progress=close)
        assert lender.lent == {}
        assert lender.declared_bytes == pinned_bytes(lender) == 0


class TestOverABroker:
    @pytest.fixture
    def daemon(self) -> Iterator[Daemon]:
        with running({"host_capacity": "64MiB", "settle_seconds": 1.0}) as one:
            yield one

    def books(self, daemon: Daemon) -> tuple[int, int]:
        """Bytes charged at the device and at the host."""
        device, host = daemon.device().locations
        return device.lent_bytes + device.releasing_bytes, host.lent_bytes + host.releasing_bytes

    def test_the_books(self, daemon: Daemon, transport: str, random_bytes: Callable[[int], bytes]) -> None:
        """Both charges move in opposite directions, and what the user declares himself is counted beside."""
        with membroker.connect(daemon.endpoint(), transport=transport) as client:
            model = client.register_model("m", virtual_capacity="1GiB", host_limit="40MiB")
            model.declare("3MiB", "host")
            with model.pool(page_size=PAGE) as pool:
                pool.allocate(0, 16 * PAGE)
                fill(pool, 0, random_bytes(16 * PAGE))
                before = digest(pool, *range(0, 16 * PAGE, PAGE))
                assert pool.offload() == 16 * PAGE
                assert self.books(daemon) == (0, 35 * MIB)
                model.declare("8MiB", "host")
                assert model.stats().books["host"].declared_bytes == 40 * MIB
                with pytest.raises(membroker.OutOfMemory):
                    model.declare("9MiB", "host")
                with pytest.raises(InvalidRequest, match="33554432 that are declared already"):
                    model.declare((1 << 63) - 1, "host")
                assert pool.restore() == 16 * PAGE
                assert self.books(daemon) == (32 * MIB, 8 * MIB)
                assert digest(pool, *range(0, 16 * PAGE, PAGE)) == before
                pool.allocate(16 * PAGE, PAGE)
                with pytest.raises(membroker.OutOfMemory) as refused:
                    pool.offload()
                assert (refused.value.level, refused.value.available_bytes) == ("model", 32 * MIB)
                assert sizes(pool) == (17, 0)
                model.declare(0, "host")
                pool.offload()
            assert self.books(daemon) == (0, 0)

    def test_no_room_to_come_back(self, daemon: Daemon, transport: str) -> None:
        """Another tenant took the room: the broker's numbers come beside the pool's."""
        with (
            membroker.connect(daemon.endpoint(), transport=transport) as client,
            membroker.connect(daemon.endpoint("blue")) as other,
        ):
            pool = client.register_model("m").pool(page_size=PAGE)
            pool.allocate(0, 16 * PAGE)
            pool.offload()
            with other.register_model("m").allocate("234MiB"):
                with pytest.raises(membroker.OutOfMemory) as refused:
                    pool.restore()
                assert refused.value.level == "capacity"
                assert refused.value.metadata["restored_bytes"] == str(10 * PAGE)
                assert sizes(pool) == (10, 6)
            assert pool.restore() == 6 * PAGE

    def test_a_broker_that_lends_nothing_of_the_host(self, transport: str) -> None:
        with running() as daemon, membroker.connect(daemon.endpoint(), transport=transport) as client:
            pool = client.register_model("m").pool(page_size=PAGE)
            pool.allocate(0, PAGE)
            with pytest.raises(membroker.InvalidRequest, match="host_capacity"):
                pool.offload()
            assert sizes(pool) == (1, 0)

    @pytest.mark.parametrize("what", ["pool.offload(progress=told)", "pool.offload(); pool.restore(progress=told)"])
    def test_killed_in_the_middle(self, daemon: Daemon, transport: str, what: str) -> None:
        """SIGKILL while chunks are on their way: nothing stays charged at either location."""
        script = f"""
from membroker.pool import offload
offload.CHUNK_BYTES = PAGE
client = connect()
pool = client.register_model('m').pool(page_size=PAGE)
pool.allocate(0, 16 * PAGE)
def told(done, total):
    if done == 4 * PAGE:
        say('half')
        wait()
{what}
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "half"
            device, host = self.books(daemon)
            assert 0 < device <= 16 * PAGE
            assert host == 32 * MIB
            process.kill()
            process.wait()
            until(lambda: self.books(daemon) == (0, 0))

    @pytest.mark.parametrize("away", [True, False])
    def test_the_broker_dies_meanwhile(
        self, daemon: Daemon, transport: str, away: bool, random_bytes: Callable[[int], bytes]
    ) -> None:
        """The call goes on with the next daemon, whose books are right at both locations."""
        with membroker.connect(daemon.endpoint(), transport=transport, timeout=30) as client:
            pool = client.register_model("m").pool(page_size=PAGE)
            pool.allocate(0, 12 * PAGE)
            fill(pool, 0, random_bytes(12 * PAGE))
            every = range(0, 12 * PAGE, PAGE)
            before = digest(pool, *every)
            if not away:
                pool.offload()

            def die(done: int, total: int) -> None:
                if done == 4 * PAGE:
                    daemon.kill()
                    daemon.start_again()

            assert (pool.offload(progress=die) if away else pool.restore(progress=die)) == 12 * PAGE
            until(lambda: self.books(daemon) == ((0, 24 * MIB) if away else (24 * MIB, 0)))
            pool.restore()
            assert digest(pool, *every) == before
            pool.close()
            until(lambda: self.books(daemon) == (0, 0))

    def test_host_bytes_are_freed_while_no_broker_runs(self, daemon: Daemon, transport: str) -> None:
        """Nobody waits for it; the next daemon is told what is declared still."""
        with membroker.connect(daemon.endpoint(), transport=transport, timeout=30) as client:
            model = client.register_model("m")
            model.declare("5MiB", "host")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 6 * PAGE)
            pool.offload()
            assert self.books(daemon) == (0, 17 * MIB)
            daemon.kill()
            pool.deallocate(0, 3 * PAGE)
            daemon.start_again()
            until(lambda: self.books(daemon) == (0, 11 * MIB))
            pool.restore()
            until(lambda: self.books(daemon) == (6 * MIB, 5 * MIB))


class TestSegments:
    @pytest.fixture
    def daemon(self) -> Iterator[Daemon]:
        with running({"host_capacity": "64MiB", "settle_seconds": 1.0}) as one:
            yield one

    def test_another_worker_goes_on_where_one_was_killed(self, daemon: Daemon, transport: str) -> None:
        """What is in a segment outlives its writer: the bytes are at the same offsets of another process's pool."""
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        script = f"""
import hashlib, random
client = connect()
model = client.register_model('m', virtual_capacity='1GiB')
pool = model.pool(page_size=PAGE)
pool.allocate(PAGE, 3 * PAGE)
pool.allocate(10 * PAGE, 2 * PAGE)
data = random.Random({seed}).randbytes(5 * PAGE)
pool.view(PAGE, 3 * PAGE)[:] = data[:3 * PAGE]
pool.view(10 * PAGE, 2 * PAGE)[:] = data[3 * PAGE:]
segment = model.create_segment('sleeping', pool.offload_size(), 'host')
assert pool.offload(to=segment) == 5 * PAGE
assert not segment.writable
say(hashlib.sha256(data).hexdigest())
wait()
"""
        with worker(script, daemon, transport) as process:
            written = heard(process)
            process.kill()
            process.wait()
        until(lambda: not daemon.sessions())
        with membroker.connect(daemon.endpoint(), transport=transport) as client:
            pool = client.register_model("m", virtual_capacity="1GiB").pool(page_size=PAGE)
            told: list[tuple[int, int]] = []
            with client.attach("m/sleeping") as segment:
                copied = pool.restore_from(segment, progress=lambda *numbers: told.append(numbers))
                segment.delete()
            assert copied == 5 * PAGE
            assert told[-1] == (5 * PAGE, 5 * PAGE)
            found = bytes(pool.view(PAGE, 3 * PAGE)) + bytes(pool.view(10 * PAGE, 2 * PAGE))
            assert hashlib.sha256(found).hexdigest() == written
            assert sizes(pool) == (5, 0)
            until(lambda: not any(books.lent_bytes for books in daemon.device().locations[1:]))

    def test_the_same_worker_comes_back(self, daemon: Daemon, random_bytes: Callable[[int], bytes]) -> None:
        """A pool restores from the segment that it has offloaded to, though its owner has closed and deleted it."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 6 * PAGE)
            fill(pool, 0, random_bytes(6 * PAGE))
            every = range(0, 6 * PAGE, PAGE)
            before = digest(pool, *every)
            segment = model.create_segment("s", pool.offload_size(), "host")
            pool.offload(to=segment)
            assert model.stats().books["host"].declared_bytes == 0
            segment.delete()
            segment.close()
            assert pool.restore() == 6 * PAGE
            assert digest(pool, *every) == before
            until(lambda: not client.segments())

    def test_segments_that_will_not_do(self, daemon: Daemon) -> None:
        """Too small, of the device, sealed, or another client's: refused, and nothing has changed."""
        with membroker.connect(daemon.endpoint()) as client, membroker.connect(daemon.endpoint()) as other:
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 2 * PAGE)
            small = model.create_segment("small", 2 * PAGE, "host")
            with pytest.raises(InvalidRequest, match="need"):
                pool.offload(to=small)
            sealed = model.create_segment("sealed", pool.offload_size(), "host")
            with pytest.raises(InvalidRequest, match="of the device"):
                pool.offload(to=model.create_segment("wrong", pool.offload_size()))
            sealed.seal()
            with pytest.raises(membroker.SegmentNotWritable):
                pool.offload(to=sealed)
            sealed.delete()
            theirs = other.register_model("m").create_segment("theirs", pool.offload_size(), "host")
            with pytest.raises(InvalidRequest, match="another client's"):
                pool.offload(to=theirs)
            assert sizes(pool) == (2, 0)
            closed = model.create_segment("closed", pool.offload_size(), "host")
            closed.close()
            with pytest.raises(ClosedError):
                pool.offload(to=closed)

    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            ({"weights": ("F32", (8,))}, "no offloaded pages"),
            ({run(0): ("I8", (PAGE,))}, "no offloaded pages"),
            ({"offset-0": ("U8", (PAGE,))}, "no offloaded pages"),
            ({"offset-" + "\u0661" * 20: ("U8", (PAGE,))}, "no offloaded pages"),
            ({run(1): ("U8", (PAGE,))}, "whole pages"),
            ({run(0): ("U8", (PAGE + 1,))}, "whole pages"),
            ({run(10**20 - 1): ("U8", (PAGE,))}, "whole pages"),
            ({run(2 * PAGE): ("U8", (3 * PAGE,))}, "whole pages"),
            ({run(0): ("U8", (0,))}, "whole pages"),
            ({run(0): ("U8", (2 * PAGE,)), run(PAGE): ("U8", (PAGE,))}, "twice"),
        ],
    )
    def test_what_another_wrote_is_not_believed(
        self, daemon: Daemon, tensors: dict[str, tuple[str, tuple[int]]], words: str
    ) -> None:
        """A segment of weights, or of lies, is restored by nobody."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            segment = model.create_segment("s", "16MiB", "host")
            segment.lay_out(tensors)
            pool = model.pool(page_size=PAGE, virtual_capacity=4 * PAGE)
            with pytest.raises(InvalidRequest, match="not sealed"):
                pool.restore_from(segment)
            segment.seal()
            with pytest.raises(InvalidRequest, match=words):
                pool.restore_from(segment)
            assert sizes(pool) == (0, 0)
            segment.delete()

    def test_a_segment_of_nothing(self, daemon: Daemon) -> None:
        """Sealed with no page in it: nothing comes, and it is not held on to."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            with model.create_segment("s", PAGE, "host") as segment:
                segment.lay_out({})
                segment.seal()
                assert model.pool(page_size=PAGE).restore_from(segment) == 0
                segment.delete()
            until(lambda: not client.segments())

    def test_a_pool_of_nothing(self, daemon: Daemon) -> None:
        """Who waits for the segment of a pool without pages is told that there are none, and waits for no seal."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE)
            with model.create_segment("s", pool.offload_size(), "host") as segment:
                assert pool.offload(to=segment) == 0
                assert not segment.writable
                with client.attach("m/s", timeout=10) as attached:
                    assert pool.restore_from(attached) == 0
                with pytest.raises(membroker.SegmentNotWritable):
                    pool.offload(to=segment)
                segment.delete()
            until(lambda: not client.segments())

    def test_the_place_is_taken(self, daemon: Daemon) -> None:
        """A page of the range is in use, or offloaded: nothing has changed. Then it is freed, and all comes."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool, other = model.pool(page_size=PAGE, spare_pages=2), model.pool(page_size=PAGE)
            other.allocate(0, 4 * PAGE)
            fill(other, 3 * PAGE, b"last")
            segment = model.create_segment("s", other.offload_size(), "host")
            other.offload(to=segment)
            pool.allocate(3 * PAGE, PAGE)
            with pytest.raises(AlreadyMapped):
                pool.restore_from(segment)
            pool.offload()
            with pytest.raises(Offloaded):
                pool.restore_from(segment)
            assert sizes(pool) == (0, 1)
            pool.restore()
            pool.deallocate(3 * PAGE, PAGE)
            assert pool.stats().spare_pages == 1
            assert pool.restore_from(segment) == 4 * PAGE
            assert bytes(pool.view(3 * PAGE, 4)) == b"last"
            segment.delete()

    def test_no_room_to_come_back(self, daemon: Daemon) -> None:
        """What has not come back is the new pool's, offloaded, and lies in the segment until there is room."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m", limit="8MiB")
            first = model.pool(page_size=PAGE)
            first.allocate(0, 4 * PAGE)
            fill(first, 3 * PAGE, b"last")
            segment = model.create_segment("s", first.offload_size(), "host")
            first.offload(to=segment)
            segment.delete()
            pool = model.pool(page_size=PAGE)
            with model.allocate(PAGE):
                with pytest.raises(membroker.OutOfMemory) as refused:
                    pool.restore_from(segment)
                assert refused.value.metadata["restored_bytes"] == str(2 * PAGE)
            assert sizes(pool) == (2, 2)
            segment.close()
            first.close()
            assert pool.restore() == 2 * PAGE
            assert bytes(pool.view(3 * PAGE, 4)) == b"last"

    def test_a_pool_that_is_not_offloaded_to_the_end_leaves_its_segment_unsealed(self, daemon: Daemon) -> None:
        """Nobody else can take half of a pool for all of it; the worker itself has every byte."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 8 * PAGE)
            fill(pool, 7 * PAGE, b"last")
            segment = model.create_segment("s", pool.offload_size(), "host")
            with pytest.raises(ZeroDivisionError):
                pool.offload(to=segment, progress=lambda *_: 1 / 0)
            assert segment.writable
            mapped, offloaded = sizes(pool)
            assert mapped + offloaded == 8
            assert offloaded
            segment.close()
            assert pool.restore() == offloaded * PAGE
            assert bytes(pool.view(7 * PAGE, 4)) == b"last"
            until(lambda: not client.segments())

    def test_a_living_view_of_the_segment(self, daemon: Daemon) -> None:
        """It would refuse the seal, when all has been copied: so it is told before. Without it the same call goes."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 4 * PAGE)
            fill(pool, 0, b"first")
            segment = model.create_segment("s", pool.offload_size(), "host")
            view = segment.view()
            with pytest.raises(BufferError, match="view of the segment"):
                pool.offload(to=segment)
            assert sizes(pool) == (4, 0)
            assert bytes(view[:8]) == bytes(8), "a header was written"
            view.release()
            del view
            assert pool.offload(to=segment) == 4 * PAGE
            assert not segment.writable

    def test_a_view_that_is_taken_meanwhile(self, daemon: Daemon) -> None:
        """The seal is refused, and everything is in the segment: who lets the view go seals it himself."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 4 * PAGE)
            fill(pool, 0, b"first")
            segment = model.create_segment("s", pool.offload_size(), "host")
            views: list[memoryview] = []
            with pytest.raises(BufferError, match="view of the segment"):
                pool.offload(to=segment, progress=lambda *_: views.append(segment.view()))
            assert sizes(pool) == (0, 4)
            views.clear()
            segment.seal()
            assert pool.restore() == 4 * PAGE
            assert bytes(pool.view(0, 5)) == b"first"

    def test_what_lies_in_a_segment_is_not_written_over(
        self, daemon: Daemon, random_bytes: Callable[[int], bytes]
    ) -> None:
        """It stopped half way, and whoever tries again takes the same segment: its first pages are nowhere else."""
        with membroker.connect(daemon.endpoint()) as client:
            model = client.register_model("m")
            pool, other = model.pool(page_size=PAGE), model.pool(page_size=PAGE)
            other.allocate(0, PAGE)
            pool.allocate(0, 12 * PAGE)
            fill(pool, 0, random_bytes(12 * PAGE))
            every = range(0, 12 * PAGE, PAGE)
            before = digest(pool, *every)
            segment = model.create_segment("s", pool.offload_size(), "host")
            with pytest.raises(ZeroDivisionError):
                pool.offload(to=segment, progress=lambda *_: 1 / 0)
            mapped, offloaded = sizes(pool)
            assert mapped
            for again in (pool, other):
                with pytest.raises(InvalidRequest, match=r"restore\(\) them first, or take another segment"):
                    again.offload(to=segment)
            assert (sizes(pool), sizes(other)) == ((mapped, offloaded), (1, 0))
            pool.restore()
            assert digest(pool, *every) == before
            assert pool.offload(to=segment) == 12 * PAGE
            with pytest.raises(membroker.SegmentNotWritable):
                other.offload(to=segment)
            pool.restore()
            assert digest(pool, *every) == before


def test_a_forked_child_has_none_of_it(daemon: Daemon, transport: str) -> None:
    """It can neither restore nor hold its parent's host bytes; the parent goes on."""
    del daemon
    script = """
client = connect()
pool = client.register_model('m').pool(page_size=PAGE)
pool.allocate(0, 4 * PAGE)
pool.view(0, 5)[:] = b'first'
pool.offload()
child = os.fork()
if not child:
    try:
        pool.restore()
    except membroker.ClosedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
pool.restore()
assert bytes(pool.view(0, 5)) == b'first'
client.close()
"""
    with running({"host_capacity": "64MiB"}) as one, worker(script, one, transport) as process:
        ends(process)
