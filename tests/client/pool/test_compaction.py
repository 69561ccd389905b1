"""Compaction: runs of pages go lower, with their bytes, their extents and their access, and not a byte is copied."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE, Lender, put, text
from tests.support.processes import descriptors
from tests.support.seeds import chosen_seed
from tests.support.threads import held_up

from membroker.errors import AlreadyMapped, CompactionFailed, NotMapped, OutOfVirtualMemory
from membroker.pool.compaction import next_move
from membroker.pool.page_table import FIXED, FREE, USED
from membroker.pool.pool import VirtualMemoryPool
from membroker.types import Move
from membroker.vmm import libc as _libc


def holes(pool: VirtualMemoryPool) -> VirtualMemoryPool:
    """Make the layout .AA.B...C, each page written with its own number, and return the pool."""
    for page in (1, 2, 4, 8):
        pool.allocate(page * PAGE, PAGE)
        put(pool, page, b"%04d" % page)
    return pool


def pages(pool: VirtualMemoryPool) -> dict[int, bytes]:
    """What stands in each allocated page."""
    return {page: text(pool, page) for page in range(64) if pool.is_mapped(page * PAGE)}


class TestRule:
    """Where runs go, as a picture: `.` is free, a letter is used, `#` is fixed."""

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("", ""),
            ("AAA", "AAA"),
            ("..AAAA", "AAAA.."),
            ("A..BB.C", "ABBC..."),
            ("..#.A", "A.#.."),
            (".#..AA.B", "B#AA...."),
            ("..#A.B", "B.#A.."),
            ("..A#.B", "B.A#.."),
            (".A.#", "A..#"),
        ],
    )
    def test_where_runs_go(self, before: str, after: str) -> None:
        """Down over itself, or into the lowest hole that holds it; beside what is fixed it stays."""
        codes = {".": FREE, "#": FIXED}
        layout, picture = bytearray(codes.get(letter, USED) for letter in before), list(before)
        cursor = 0
        while step := next_move(layout, cursor):
            run, to = step
            letters = [picture[page] for page in run]
            for page, letter in zip((*run, *to), (*"." * len(run), *letters), strict=True):
                picture[page] = letter
                layout[page] = codes.get(letter, USED)
            cursor = run.stop
        assert "".join(picture) == after

    def test_a_run_that_reaches_over_the_cursor_is_not_torn(self) -> None:
        """Somebody allocated right where the last move came from: what was looked at already stays whole."""
        layout = bytearray((FREE, USED, USED, USED, FREE, USED))
        assert next_move(layout, 2) == (range(5, 6), range(1))
        assert next_move(layout, 1) == (range(1, 4), range(3))


class TestFailures:
    """A device that fails half-way: what was moved is where the moves say, and the rest where it was."""

    @pytest.mark.parametrize("steps", range(4))
    def test_the_kernel_fails_at_mapping_k(
        self, pool: VirtualMemoryPool, lender: Lender, monkeypatch: pytest.MonkeyPatch, steps: int
    ) -> None:
        """The run of two pages moves whole or not at all; what moved before it is told by the error."""
        for page in (1, 5, 6, 9):
            pool.allocate(page * PAGE, PAGE)
            put(pool, page, b"%04d" % page)
        real, left = _libc.mmap_again, [steps]

        def failing(address: int, size: int, new_address: int) -> None:
            if not left[0]:
                left[0] = 99  # once: what is undone works
                raise OSError(12, "ENOMEM")
            left[0] -= 1
            real(address, size, new_address)

        before = lender.lent_bytes, lender.used_bytes
        with monkeypatch.context() as patch:
            patch.setattr(_libc, "mmap_again", failing)
            with pytest.raises(CompactionFailed, check=named("ENOMEM")) as failed:
                pool.compact()
        done = {0: 0, 1: 1, 2: 1, 3: 2}[steps]
        moves = [Move(PAGE, 0, PAGE), Move(5 * PAGE, PAGE, 2 * PAGE), Move(9 * PAGE, 3 * PAGE, PAGE)]
        assert list(failed.value.moves) == moves[:done]
        expected = [{1, 5, 6, 9}, {0, 5, 6, 9}, {0, 1, 2, 9}][done]
        assert set(pages(pool)) == expected
        assert sorted(pages(pool).values()) == [b"0001", b"0005", b"0006", b"0009"]
        assert (lender.lent_bytes, lender.used_bytes) == before
        assert all(row.state == "used" for row in pool.mappings())
        assert pool.compact() == moves[done:]
        assert pages(pool) == {0: b"0001", 1: b"0005", 2: b"0006", 3: b"0009"}

    def test_the_callers_function_fails(self, pool: VirtualMemoryPool) -> None:
        """Patching a pointer raises: the move it was told of is made, and the pool goes on."""
        told: list[Move] = []

        def patch(move: Move) -> None:
            told.append(move)
            if len(told) == 2:
                raise LookupError("no such pointer")

        with pytest.raises(LookupError):
            holes(pool).compact(on_move=patch)
        assert set(pages(pool)) == {0, 1, 2, 8}
        assert pool.compact() == [Move(8 * PAGE, 3 * PAGE, PAGE)]

    def test_ctrl_c_waits_for_the_end(self, pool: VirtualMemoryPool) -> None:
        """Somebody presses Ctrl-C in the middle: no move is made that nobody was told of."""
        told: list[Move] = []

        def patch(move: Move) -> None:
            signal.raise_signal(signal.SIGINT)
            told.append(move)

        with pytest.raises(KeyboardInterrupt):
            holes(pool).compact(on_move=patch)
        assert len(told) == 3
        assert pages(pool) == {0: b"0001", 1: b"0002", 2: b"0004", 3: b"0008"}


class TestThreads:
    def test_addresses_that_fell_free_are_nobodys_until_told(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """Pointers are patched before anybody else can get an old address, or find another's bytes there."""
        told: list[Move] = []

        def patch(move: Move) -> None:
            told.append(move)
            for offset in range(move.old_offset, move.old_offset + move.size, PAGE):
                with pytest.raises(AlreadyMapped):
                    pool.allocate(offset, PAGE)
                with pytest.raises(NotMapped):
                    pool.pin(offset, PAGE).__enter__()
            with pytest.raises(NotMapped):
                pool.free(move.new_offset, move.size)
            assert lender.driver.read(pool.base_address + move.new_offset, 4).isdigit()

        assert holes(pool).compact(on_move=patch) == told
        assert len(told) == 3
        for page in (4, 8):
            pool.allocate(page * PAGE, PAGE)
        pool.free(0, 5 * PAGE)

    def test_no_lock_is_held_while_moving(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """One thread compacts, and waits for the device: others work elsewhere, and are told at the pages it has."""
        holes(pool)
        moves: list[Move] = []
        with held_up(lender, lambda: moves.extend(pool.compact()), at_the_device=True):
            calls: tuple[Callable[[int, int], object], ...] = (pool.free, pool.view, pool.span)
            for call in calls:
                with pytest.raises(NotMapped):
                    call(PAGE, 2 * PAGE)
            with pytest.raises(AlreadyMapped):
                pool.allocate(0, PAGE)
            assert [row.state for row in pool.mappings()] == ["changing", "used", "used"]
            pool.allocate(20 * PAGE, PAGE)
            pool.free(4 * PAGE, PAGE)
        assert moves == [Move(PAGE, 0, 2 * PAGE), Move(8 * PAGE, 2 * PAGE, PAGE), Move(20 * PAGE, 3 * PAGE, PAGE)]

    def test_what_other_calls_are_at_stays(self, pool: VirtualMemoryPool, lender: Lender) -> None:
        """A growth waits for memory right behind a run: the run must be where it was when the growth comes back."""
        holes(pool)
        with held_up(lender, lambda: pool.grow(PAGE)):
            plan = pool.compact(dry_run=True)
            assert pool.compact() == plan == [Move(PAGE, 0, 2 * PAGE), Move(4 * PAGE, 2 * PAGE, PAGE)]
        assert set(pages(pool)) == {0, 1, 2, 8, 9}
        assert pool.compact() == [Move(8 * PAGE, 3 * PAGE, 2 * PAGE)]

    def test_a_race_with_a_referee(self, lender: Lender) -> None:
        """Threads take, write, pin, check and give back while others compact: everybody finds his bytes by the moves.

        The referee is a table of who owns which offset. It is changed by `on_move`, before anybody else can get the
        addresses, and read with the range pinned, so an owner that reads foreign bytes has met a fault of the pool.
        """
        seed = chosen_seed()
        table: dict[int, tuple[int, int]] = {}  # by the owner's mark: offset and size
        lock, done, moved = threading.Lock(), threading.Event(), [0]
        pool = VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=3)

        def told(move: Move) -> None:
            moved[0] += 1
            with lock:
                for mark, (offset, size) in table.items():
                    if move.old_offset <= offset < move.old_offset + move.size:
                        table[mark] = offset - move.old_offset + move.new_offset, size

        def own(number: int) -> None:
            choose = random.Random(seed + number)
            marks = iter(range(number * 1_000_000, (number + 1) * 1_000_000))
            mine: list[int] = []
            steps = 0
            while steps < 150 or not (moved[0] or done.is_set()):  # those that compact may begin late
                steps += 1
                if len(mine) < 3 and choose.random() < 0.6:
                    mark, size = next(marks), choose.randint(1, 3) * PAGE
                    with suppress(AlreadyMapped), lock:  # who is told of a move waits, and finds it in the table
                        offset = pool.allocate(choose.randrange(61) * PAGE, size) - pool.base_address
                        table[mark] = offset, size
                        mine.append(mark)
                    while mark in mine and not write(mark):
                        assert not done.is_set()
                elif mine:
                    check(choose.choice(mine), mine, give_back=choose.random() < 0.5)
            for mark in list(mine):
                while mark in mine and not done.is_set():
                    check(mark, mine, give_back=True)

        def write(mark: int) -> bool:
            """Mark both ends; a moment after it is allocated it may be on its way somewhere."""
            with suppress(NotMapped), lock:
                offset, size = table[mark]
                with pool.pin(offset, size) as address:
                    lender.driver.write(address, b"%08d" % mark)
                    lender.driver.write(address + size - 8, b"%08d" % mark)
                return True
            return False

        def check(mark: int, mine: list[int], *, give_back: bool) -> None:
            with suppress(NotMapped), lock:  # not mapped: it is on its way somewhere
                offset, size = table[mark]
                with pool.pin(offset, size) as address:
                    assert lender.driver.read(address, 8) == b"%08d" % mark
                    assert lender.driver.read(address + size - 8, 8) == b"%08d" % mark
                if give_back:
                    pool.free(offset, size)
                    del table[mark]
                    mine.remove(mark)

        def compact() -> None:
            try:
                while not done.is_set():
                    pool.compact(on_move=told)
            finally:
                done.set()  # nobody waits for pages that a failed compaction has left

        with ThreadPoolExecutor(6) as threads:
            compacting = [threads.submit(compact) for _ in range(2)]
            owning = [threads.submit(own, number) for number in range(4)]
            try:
                for owner in owning:
                    owner.result(DEADLINE_SECONDS)
            finally:
                done.set()
        for one in compacting:
            one.result()
        assert moved[0] > 0, "nothing was ever moved"
        pool.compact()
        assert (pool.stats().mapped_pages, lender.lent_bytes) == (0, 0)
        pool.close()


@pytest.mark.parametrize("seed", [1, None])
def test_every_page_follows_its_extent(lender: Lender, seed: int | None) -> None:
    """A model of the pool, a thousand random steps: what is where, what is in it, what it allows, and the sums.

    The model is a dict of pages; it knows the calls' promises and nothing of how they are kept.
    """
    seed = seed or chosen_seed()
    choose = random.Random(seed)
    model: dict[int, tuple[bytes, str]] = {}
    spare = 4 if seed % 2 else 0
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE, spare_pages=spare) as pool:
        for step in range(1000):
            first, count = choose.randrange(60), choose.randint(1, 4)
            wanted = range(first, first + count)
            kind = choose.choice(("allocate", "anywhere", "free", "free", "protect", "compact", "shrink"))
            if kind == "allocate":
                with suppress(AlreadyMapped):
                    pool.allocate(first * PAGE, count * PAGE)
                    assert model.keys().isdisjoint(wanted)
                    fill(pool, model, wanted, step)
            elif kind == "anywhere":
                alignment = choose.choice((1, 1, 2, 4)) * PAGE
                fits = [
                    page
                    for page in range(65 - count)
                    if model.keys().isdisjoint(range(page, page + count))
                    and (pool.base_address + page * PAGE) % alignment == 0
                ]
                try:
                    page = (pool.allocate_anywhere(count * PAGE, alignment) - pool.base_address) // PAGE
                except OutOfVirtualMemory:
                    assert not fits
                else:
                    assert page == fits[0]
                    fill(pool, model, range(page, page + count), step)
            elif kind == "free":
                with suppress(NotMapped):
                    pool.free(first * PAGE, count * PAGE)
                    for page in wanted:
                        del model[page]
            elif kind == "shrink" and model:
                top = max(model) + 1
                with suppress(NotMapped):
                    pool.shrink(PAGE)
                    del model[top - 1]
            elif kind == "protect":
                access = choose.choice(("read", "read_write"))
                with suppress(NotMapped):
                    pool.protect(first * PAGE, count * PAGE, access)
                    model.update({page: (model[page][0], access) for page in wanted})
            elif kind == "compact" and choose.random() < 0.3:
                for move in pool.compact():
                    moved = {page: model.pop(page) for page in range(move.old_offset // PAGE, end(move))}
                    shift = (move.new_offset - move.old_offset) // PAGE
                    assert model.keys().isdisjoint(page + shift for page in moved)
                    model.update({page + shift: content for page, content in moved.items()})
                assert sorted(model) == list(range(len(model)))
                assert pool.stats().fragmentation_ratio == 0.0
            agree(pool, lender, model)


def end(move: Move) -> int:
    return (move.old_offset + move.size) // PAGE


def fill(pool: VirtualMemoryPool, model: dict[int, tuple[bytes, str]], pages: range, step: int) -> None:
    """Write into pages that were just allocated: they have to be writable."""
    for page in pages:
        mark = b"%06d.%03d" % (step, page)
        put(pool, page, mark)
        model[page] = mark, "read_write"


def agree(pool: VirtualMemoryPool, lender: Lender, model: dict[int, tuple[bytes, str]]) -> None:
    rows = {row.offset // PAGE: row for row in pool.mappings(by_page=True) if row.state == "used"}
    assert {page: (text(pool, page, 10), row.access) for page, row in rows.items()} == model
    stats = pool.stats()
    assert stats.mapped_pages == len(model) + stats.spare_pages
    assert stats.physical_usage_bytes == lender.lent_bytes
    taken = [-1, *sorted(model), 64]
    free = [after - before - 1 for before, after in pairwise(taken)]
    assert stats.largest_free_run_bytes == max(free) * PAGE
    assert stats.fragmentation_ratio == pytest.approx(1 - max(free) / sum(free) if sum(free) else 0.0)


def test_it_copies_nothing(pool: VirtualMemoryPool) -> None:
    """The very same memory is mapped lower: the kernel shows the same inodes, and no page was touched."""

    def inodes() -> list[str]:
        with open("/proc/self/maps", encoding="ascii") as maps:
            rows = [line.split() for line in maps if "membroker-extent" in line]
        start = pool.base_address
        within = [row for row in rows if start <= int(row[0].partition("-")[0], 16) < start + pool.capacity]
        return [row[4] for row in sorted(within)]

    pool.allocate(3 * PAGE, 2 * PAGE)
    pool.allocate(9 * PAGE, PAGE)
    before = inodes()
    assert len(set(before)) == 3
    opened = descriptors()
    pool.compact()
    assert inodes() == before
    assert descriptors() == opened
