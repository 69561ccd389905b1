"""What pools, growable buffers and sparse arrays promise alike: all or nothing, one wait for the device, a clean end.

Over a lender in this process and the host driver: no broker, the same code.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tests.support import fake_lender
from tests.support.daemons import until
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.sparse_table import COUNT, ROWS, row
from tests.support.threads import held_up

from membroker.errors import ClosedError, DeviceFailure, OutOfMemory
from membroker.memory.growable import GrowableBuffer
from membroker.memory.sparse import SparseArray
from membroker.pool.pool import VirtualMemoryPool

Call = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """A kind of memory that grows by pages. It is made with one page, of which `hold` keeps some bytes."""

    make: Callable[[Lender], Any]
    more: Callable[[Any, int], object]
    fewer: Callable[[Any, int], object]
    state: Callable[[Any, Lender], object]
    hold: Callable[[Any], Any]
    calls: Callable[[Any], tuple[Call, ...]]
    takes_turns: bool
    """Whether a call waits for the one before it to end."""


def pool_of(lender: Lender, spare_pages: int = 0) -> VirtualMemoryPool:
    pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=spare_pages)
    pool.grow((1 + spare_pages) * PAGE)
    if spare_pages:
        pool.free(PAGE, spare_pages * PAGE)
        assert pool.stats().spare_pages == spare_pages
    return pool


def calls_of_a_pool(pool: VirtualMemoryPool) -> tuple[Call, ...]:
    within: list[Call] = [partial(call, 0, PAGE) for call in (pool.allocate, pool.free, pool.view, pool.is_mapped)]
    sized = [partial(call, PAGE) for call in (pool.grow, pool.shrink, pool.prepare, pool.allocate_anywhere)]
    others = (pool.trim, pool.stats, pool.mappings, pool.compact, partial(pool.compact, dry_run=True))
    return (
        *within,
        *sized,
        *others,
        pool.offload,
        pool.restore,
        lambda: pool.base_address,
        lambda: pool.pin(0, 1).__enter__(),
    )


def table_of(lender: Lender) -> SparseArray:
    table = SparseArray(lender, (COUNT, 256), "F32")
    table.write(2 * ROWS, row(1))
    return table


def write_more(table: SparseArray, pages: int) -> None:
    """Write to the lowest tiles until so many of them were absent."""
    absent = [tile for tile in range(10) if tile not in table.tiles()]
    table.write(0, row(2, min(COUNT, (absent[pages - 1] + 1) * ROWS)))


POOL = Kind(
    make=pool_of,
    more=lambda pool, pages: pool.grow(pages * PAGE),
    fewer=lambda pool, pages: pool.shrink(pages * PAGE),
    state=fake_lender.state,
    hold=lambda pool: pool.view(0, 5),
    calls=calls_of_a_pool,
    takes_turns=False,
)
KINDS = {
    "pool": POOL,
    "buffer": Kind(
        make=lambda lender: GrowableBuffer(lender, PAGE, 64 * PAGE, PAGE),
        more=lambda buffer, pages: buffer.grow(pages * PAGE),
        fewer=lambda buffer, pages: buffer.shrink(pages * PAGE),
        state=lambda buffer, lender: (buffer.size, buffer.physical_usage_bytes, bytes(buffer.view())),
        hold=lambda buffer: buffer.view(),
        calls=lambda buffer: (
            *(partial(call, 1) for call in (buffer.resize, buffer.grow, buffer.shrink)),
            *(buffer.view, lambda: buffer.span(0, 0), lambda: buffer.address),
        ),
        takes_turns=True,
    ),
    "array": Kind(
        make=table_of,
        more=write_more,
        fewer=lambda table, pages: table.drop(*table.tiles()[-pages:]),
        state=lambda table, lender: (table.tiles(), [table.read(tile * ROWS) for tile in table.tiles()]),
        hold=lambda table: table.span(2 * PAGE, 5),
        calls=lambda table: (
            *(partial(call, 2) for call in (table.back, table.drop, table.tensor, table.read)),
            *(table.tiles, lambda: table.write(0, row(1)), lambda: table.span(0, 0), lambda: table.address),
        ),
        takes_turns=True,
    ),
}
SPARE = {"pool with spare pages": Kind(**vars(POOL) | {"make": partial(pool_of, spare_pages=4)})}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=KINDS | SPARE)
def any_kind(request: pytest.FixtureRequest) -> Kind:
    return (KINDS | SPARE)[request.param]


@pytest.fixture
def memory(kind: Kind, lender: Lender) -> Iterator[Any]:
    lender.part = 2
    with kind.make(lender) as memory:
        yield memory


@pytest.fixture
def state(kind: Kind, memory: Any, lender: Lender) -> Callable[[], object]:
    """All that a refusal must leave as it was."""
    return lambda: (kind.state(memory, lender), memory.physical_usage_bytes, dict(lender.lent), lender.used_bytes)


class TestAllOrNothing:
    """A change that cannot be completed leaves the memory, the books and the device as they were."""

    def test_refused_at_once(self, kind: Kind, memory: Any, lender: Lender, state: Callable[[], object]) -> None:
        """The limit is near: growing by too much is refused whole, and by less goes on."""
        lender.capacity = 4 * PAGE
        before = state()
        with pytest.raises(OutOfMemory):
            kind.more(memory, 4)
        assert state() == before
        kind.more(memory, 3)
        assert lender.lent_bytes == lender.used_bytes == 4 * PAGE

    @pytest.mark.parametrize("pages", [0, 1, 3, 4, 7])
    @pytest.mark.parametrize("failure", [OutOfMemory("full"), KeyboardInterrupt(), DeviceFailure("broken")])
    def test_the_lender_fails_at_page_k(
        self, kind: Kind, memory: Any, lender: Lender, state: Callable[[], object], pages: int, failure: BaseException
    ) -> None:
        """The GPU is full, or somebody presses Ctrl-C, with some pages mapped already."""
        before = state()
        lender.fails_after, lender.failure = pages, failure
        with pytest.raises(type(failure)):
            kind.more(memory, 8)
        assert state() == before
        lender.fails_after = None
        kind.more(memory, 8)

    def test_ctrl_c_while_nobody_waits(
        self, kind: Kind, memory: Any, lender: Lender, state: Callable[[], object]
    ) -> None:
        """It comes while pages are mapped, and is held off: they are unmapped, since nobody learns of them."""
        before = state()
        lender.before_borrow = lambda: signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            kind.more(memory, 8)
        assert state() == before

    @pytest.mark.parametrize("mappings", range(6))
    def test_the_driver_fails_at_map_k(
        self, kind: Kind, memory: Any, lender: Lender, state: Callable[[], object], mappings: int
    ) -> None:
        """The process runs out of mappings half-way (vm.max_map_count)."""
        before = state()
        lender.driver.maps_left = mappings
        with pytest.raises(DeviceFailure, check=named("ENOMEM")):
            kind.more(memory, 6)
        assert state() == before
        lender.driver.maps_left = None
        kind.more(memory, 6)

    def test_the_device_is_lost_while_pages_go(
        self, kind: Kind, memory: Any, lender: Lender, state: Callable[[], object]
    ) -> None:
        """What is still mapped is not called released."""
        kind.more(memory, 2)
        before = state()
        lender.driver.lost = True
        with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_ILLEGAL_ADDRESS")):
            kind.fewer(memory, 2)
        assert state() == before
        lender.driver.lost = False
        kind.fewer(memory, 2)
        assert lender.used_bytes == PAGE

    def test_it_waits_for_the_device_once(self, kind: Kind, memory: Any, lender: Lender) -> None:
        """Work may still use what goes."""
        kind.more(memory, 2)
        waits: list[int] = []
        lender.driver.before_synchronize = lambda: waits.append(lender.used_bytes)
        kind.fewer(memory, 2)
        assert waits == [3 * PAGE]


class TestEnd:
    def test_close_gives_everything_back(self, any_kind: Kind, lender: Lender) -> None:
        memory = any_kind.make(lender)
        memory.close()
        memory.close()
        assert memory.closed
        assert lender.used_bytes == lender.lent_bytes == 0
        for call in any_kind.calls(memory):
            with pytest.raises(ClosedError):
                call()

    def test_what_is_forgotten_gives_everything_back(self, any_kind: Kind, lender: Lender) -> None:
        memory = any_kind.make(lender)
        lent = lender.lent_bytes
        del memory
        collect()
        assert lender.used_bytes == lent, "a finalizer itself must not unmap: it may run under any lock"
        lender.settle()
        assert lender.used_bytes == lender.lent_bytes == 0

    @pytest.mark.parametrize("closes", [True, False])
    def test_what_is_held_stays(self, kind: Kind, lender: Lender, closes: bool) -> None:
        """A program closes it, or forgets it, and reads its results afterwards; the memory goes when they do."""
        memory = kind.make(lender)
        held = kind.hold(memory)
        if closes:
            memory.close()
            with pytest.raises(ClosedError):
                kind.hold(memory)
        del memory
        collect()
        lender.settle()
        assert lender.used_bytes == PAGE
        if isinstance(held, memoryview):
            held[:5] = b"hello"
        else:
            assert lender.driver.read(held.address, 5) == row(1)[:5]
        del held
        collect()
        lender.settle()
        assert lender.used_bytes == lender.lent_bytes == 0

    def test_a_forked_childs_copy_is_the_parents(self, any_kind: Kind, lender: Lender) -> None:
        """What a fork leaves a child is abandoned, and its locks may be held forever: nothing is touched."""
        memory = any_kind.make(lender)
        lent = lender.lent_bytes
        (holding,) = lender.holdings
        holding.state = "abandoned"  # as the child's copy is
        with getattr(memory, "_lock", nullcontext()):
            for call in any_kind.calls(memory):
                with pytest.raises(ClosedError, match="forked"):
                    call()
        memory.close()
        assert lender.lent_bytes == lent
        holding.state = "open"
        memory.close()

    def test_closed_while_borrowing(self, kind: Kind, lender: Lender) -> None:
        """The server shuts down while one call waits for memory, and another for its turn: all is released."""
        memory = kind.make(lender)
        raised: list[BaseException] = []
        asked: list[int] = []

        def more() -> None:
            try:
                kind.more(memory, 1)
            except ClosedError as error:
                raised.append(error)

        with held_up(lender, more) as first:
            second = threading.Thread(target=more)
            if kind.takes_turns:
                second.start()
                until(lambda: len(memory._holding._calls) == 2)
            lender.before_borrow = lambda: asked.append(lender.lent_bytes)
            memory.close()
            with pytest.raises(ClosedError):
                kind.more(memory, 1)
            first.go_on()
            if kind.takes_turns:
                second.join()
        assert (len(raised), asked) == (1 + kind.takes_turns, [])
        assert lender.used_bytes == lender.lent_bytes == 0
