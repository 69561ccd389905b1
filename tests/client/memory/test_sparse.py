"""A sparse array's promises, over a lender in this process and the host driver: no broker, the same code."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.seeds import chosen_seed
from tests.support.sparse_table import COUNT, ROW, ROWS, row
from tests.support.threads import held_up, together

from membroker.errors import DeviceFailure, InvalidOffset, InvalidPageSize, InvalidRequest, NotMapped
from membroker.memory.sparse import SparseArray


@pytest.fixture
def table(lender: Lender) -> Iterator[SparseArray]:
    with SparseArray(lender, (COUNT, 256), "F32") as table:
        yield table


@pytest.fixture
def zeros(lender: Lender) -> Iterator[SparseArray]:
    """The same, where what is absent reads as zero."""
    with SparseArray(lender, (COUNT, 256), "F32", absent="zero") as zeros:
        yield zeros


def state(table: SparseArray, lender: Lender) -> tuple[object, ...]:
    """All that a refusal must leave as it was."""
    tiles = table.tiles()
    contents = [table.read(tile * ROWS) for tile in tiles]
    return tiles, contents, table.address, table.physical_usage_bytes, dict(lender.lent), lender.used_bytes


class TestTiles:
    @pytest.mark.parametrize(
        ("shape", "dtype", "rows", "size"),
        [
            ((100,), "U8", PAGE, PAGE),
            ((1_000_000, 320), "F32", 8192, 5 * PAGE),
            ((1000, 16, 8, 128, 64), "F8_E4M3", 2, PAGE),
            ((10, PAGE // 8 + 1), "C64", 2**18, 2**18 * (PAGE + 8)),
        ],
    )
    def test_the_smallest_tile(self, lender: Lender, shape: tuple[int, ...], dtype: str, rows: int, size: int) -> None:
        """The rows that fill whole granules, for rows of any size."""
        with SparseArray(lender, shape, dtype) as array:
            assert (array.tile_rows, array.tile_size) == (rows, size)

    def test_the_first_write_gives_memory_and_only_there(self, table: SparseArray, lender: Lender) -> None:
        table.write(3 * ROWS + 7, row(1))
        assert table.tiles() == [3]
        assert table.physical_usage_bytes == lender.lent_bytes == lender.used_bytes == PAGE
        table.write(3 * ROWS, row(2))
        assert lender.lent_bytes == PAGE
        assert table.read(3 * ROWS, 9) == row(2) + row(0, 6) + row(1) + row(0)

    def test_rows_over_several_tiles(self, table: SparseArray, lender: Lender) -> None:
        """Tiles that are there stay as they are, those that are missing come in one request, wherever they lie."""
        table.write(ROWS, row(9))
        asked: list[int] = []
        lender.before_borrow = lambda: asked.append(lender.lent_bytes)
        lender.part = 2
        table.write(ROWS // 2, row(5, 4 * ROWS))
        assert asked == [PAGE]
        assert table.tiles() == [0, 1, 2, 3, 4]
        assert table.read(ROWS // 2, 4 * ROWS) == row(5, 4 * ROWS)
        assert table.read(0, ROWS // 2) == row(0, ROWS // 2)
        assert lender.used_bytes == 5 * PAGE

    def test_back_and_drop(self, table: SparseArray, lender: Lender) -> None:
        """Blocks of a cache are taken for a request and given back after it; what comes again is fresh."""
        assert (table.tiles(), table.physical_usage_bytes, lender.used_bytes) == ([], 0, 0)
        table.back(4, 1, 4)
        assert table.tiles() == [1, 4]
        table.write(ROWS, row(1))
        table.back(1, 2)
        assert (table.tiles(), lender.used_bytes) == ([1, 2, 4], 3 * PAGE)
        assert table.read(ROWS) == row(1)
        table.drop(4, 1)
        assert (table.tiles(), lender.lent_bytes, lender.used_bytes) == ([2], PAGE, PAGE)
        table.back(1)
        assert table.read(ROWS) == row(0)
        table.back()
        table.drop()
        assert table.tiles() == [1, 2]


class TestAbsent:
    def test_an_error(self, table: SparseArray) -> None:
        """An id that was never seen is a fault of the program, and it is told which tile."""
        table.write(0, row(1))
        for first, count in ((ROWS, 1), (ROWS - 1, 2), (0, 3 * ROWS)):
            with pytest.raises(NotMapped, match="tile 1 "):
                table.read(first, count)
        assert table.tiles() == [0]

    def test_zero(self, zeros: SparseArray, lender: Lender) -> None:
        """An id that was never seen has the embedding 0; reading it costs no memory."""
        zeros.write(ROWS, row(1, ROWS))
        assert zeros.read(ROWS - 2, ROWS + 4) == row(0, 2) + row(1, ROWS) + row(0, 2)
        assert zeros.read(5 * ROWS, 2 * ROWS) == row(0, 2 * ROWS)
        assert (zeros.tiles(), lender.used_bytes) == ([1], PAGE)
        zeros.drop(1)
        assert zeros.read(ROWS, ROWS) == row(0, ROWS)

    def test_addresses_are_never_zero(self, zeros: SparseArray) -> None:
        """Behind an absent tile there is nothing that a kernel could read: no span of it, by neither choice."""
        zeros.back(0)
        for offset, size in ((PAGE, 1), (PAGE - 1, 2), (0, 3 * PAGE)):
            with pytest.raises(NotMapped):
                zeros.span(offset, size)
        assert zeros.span(PAGE, 0).size == 0


class TestRefused:
    @pytest.mark.parametrize(
        "shape",
        [(), 5, None, "12", (0,), (4, 0), (-1,), (4, -4), (1.0,), (True,), (2**63,), (2**62, 2**62), (1,) * 33, {3: 4}],
    )
    def test_shapes_that_are_none(self, lender: Lender, shape: Any) -> None:
        """No rows, no elements, no whole numbers, more than 2^63-1 bytes, more dimensions than a tensor has."""
        with pytest.raises(InvalidRequest):
            SparseArray(lender, shape, "F32")

    @pytest.mark.parametrize("tile_rows", [0, -1, 1, ROWS + 1, 3 * ROWS // 2, 1.0, "2048", True, 2**62, 2**80])
    def test_tiles_that_fill_no_granules(self, lender: Lender, tile_rows: Any) -> None:
        with pytest.raises(InvalidPageSize):
            SparseArray(lender, (COUNT, 256), "F32", tile_rows)
        with pytest.raises(InvalidPageSize, match=r" 2048 rows \(2\.0 MiB\)"):
            SparseArray(lender, (COUNT, 256), "F32", ROWS - 1)

    def test_what_cannot_be_had(self, lender: Lender) -> None:
        """More addresses than the processor has, sizes whose sum is over 63 bits, and unknown words are refused."""
        with pytest.raises(DeviceFailure):
            SparseArray(lender, (2**60,), "F32")
        with pytest.raises(InvalidRequest):
            SparseArray(lender, (2**63 - 1,), "U8")
        for word in ("location", "absent"):
            with pytest.raises(InvalidRequest, match=word):
                SparseArray(lender, (10,), "F32", **{word: "moon"})
        assert lender.holdings == set()

    def test_rows_that_there_are_not(self, table: SparseArray, lender: Lender) -> None:
        table.write(0, row(1))
        before = state(table, lender)
        for first in (-1, COUNT, 2**63, True, 0.0, "0"):
            for call in (table.read, lambda at: table.write(at, row(2))):
                with pytest.raises(InvalidOffset):
                    call(first)  # type: ignore[operator]
        for first, count in ((0, 0), (0, -1), (0, COUNT + 1), (1, COUNT), (1, 2**63 - 1), (0, True)):
            with pytest.raises(InvalidOffset):
                table.read(first, count)
        assert state(table, lender) == before

    def test_data_that_is_no_whole_rows(self, table: SparseArray, lender: Lender) -> None:
        """A width that does not match is told before anything is borrowed or written, and so is what has no bytes."""
        before = state(table, lender)
        for none in (None, [1, 2], "text", 5, memoryview(bytes(4 * ROW))[::2]):
            with pytest.raises(InvalidRequest):
                table.write(0, none)  # type: ignore[arg-type]
        for data in (b"", b"x", row(1)[:-1], row(1) + b"x"):
            with pytest.raises(InvalidRequest, match=" 1024 "):
                table.write(0, data)
        with pytest.raises(InvalidOffset):
            table.write(COUNT - 1, row(1, 2))
        assert state(table, lender) == before

    @pytest.mark.parametrize("tile", [-1, 10, 2**63, True, 0.0, "0", None])
    def test_tiles_that_there_are_not(self, table: SparseArray, lender: Lender, tile: Any) -> None:
        """One wrong number among right ones: nothing is done for any of them."""
        table.back(3)
        before = state(table, lender)
        for call in (
            table.tensor,
            table.back,
            table.drop,
            lambda one: table.back(0, one),
            lambda one: table.drop(3, one),
        ):
            with pytest.raises(InvalidOffset):
                call(tile)
        assert state(table, lender) == before

    def test_spans_that_do_not_lie_in_it(self, table: SparseArray) -> None:
        table.back(0, 9)
        for offset, size in ((-1, 1), (1, -1), (COUNT * ROW, 1), (0, COUNT * ROW + 1), (2**63 - 1, 2**63 - 1)):
            with pytest.raises(InvalidRequest):
                table.span(offset, size)

    def test_dropping_what_is_absent_or_used(self, table: SparseArray, lender: Lender) -> None:
        """A kernel computes on a tile: it stays, and with it those that were to go in the same call."""
        table.back(1, 2, 3)
        span = table.span(2 * PAGE + 5, PAGE - 4)
        before = state(table, lender)
        with pytest.raises(NotMapped, match="tile 4"):
            table.drop(1, 4)
        for tiles in ((2,), (3,), (1, 2, 3)):
            with pytest.raises(BufferError):
                table.drop(*tiles)
        assert state(table, lender) == before
        del span
        table.drop(1, 2, 3)
        assert lender.used_bytes == 0


class TestAllOrNothing:
    def test_the_second_of_three_is_not_unmapped(
        self, table: SparseArray, lender: Lender, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was unmapped is given back, and what is still mapped is still the array's."""
        table.write(ROWS, row(1, 3 * ROWS))
        unmap, calls = lender.driver.unmap, iter((True, False))

        def unmap_once(address: int, size: int) -> None:
            if not next(calls):
                raise DeviceFailure("lost")
            unmap(address, size)

        monkeypatch.setattr(lender.driver, "unmap", unmap_once)
        with pytest.raises(DeviceFailure):
            table.drop(1, 2, 3)
        monkeypatch.undo()
        assert (table.tiles(), lender.lent_bytes, lender.used_bytes) == ([2, 3], 2 * PAGE, 2 * PAGE)
        assert table.read(2 * ROWS, 2 * ROWS) == row(1, 2 * ROWS)


class TestThreads:
    def test_no_lock_is_held_while_borrowing(self, table: SparseArray, lender: Lender) -> None:
        """One thread waits for the broker with tiles 2 and 3; all others go on, with those, too, when they come."""
        table.write(0, row(1))
        with held_up(lender, lambda: table.write(3 * ROWS - 1, row(2, 2))) as first:
            assert table.read(0) == row(1)
            with pytest.raises(NotMapped):
                table.read(2 * ROWS)
            table.write(ROWS, row(3))
            table.drop(1)
            assert table.tiles() == [0]
            second = threading.Thread(target=table.write, args=(3 * ROWS + 1, row(4)))
            second.start()
            first.go_on()
            second.join()
        assert table.tiles() == [0, 2, 3]
        assert table.read(3 * ROWS, 2) == row(2) + row(4)
        assert lender.lent_bytes == 3 * PAGE

    def test_nobody_finds_what_is_going(self, zeros: SparseArray, lender: Lender) -> None:
        """While a drop waits for the device, its tile is absent for everybody."""
        zeros.write(0, row(1))
        seen: list[object] = []

        def look() -> None:
            seen.extend((zeros.tiles(), zeros.read(0)))
            with pytest.raises(NotMapped):
                zeros.span(0, 1)

        lender.driver.before_synchronize = look
        zeros.drop(0)
        lender.driver.before_synchronize = lambda: None
        assert seen == [[], row(0)]

    def test_churn(self, zeros: SparseArray, lender: Lender) -> None:
        """Threads write, read and drop at random: a row is whole, or zero, and the sums agree."""
        seed = chosen_seed()

        def churn(number: int) -> None:
            choose = random.Random(seed + number)
            for _ in range(150):
                tile, count = choose.randrange(6), choose.randrange(1, 3)
                mine = tile * ROWS + number
                with suppress(BufferError, NotMapped):
                    if choose.random() < 0.4:
                        zeros.drop(*range(tile, tile + count))
                zeros.write(mine, row(number))
                assert zeros.read(mine) in (row(number), row(0))
                assert zeros.read(mine, ROWS)[:ROW] in (row(number), row(0))

        together([partial(churn, number) for number in range(1, 7)])
        assert len(zeros.tiles()) * PAGE == lender.lent_bytes == lender.used_bytes == zeros.physical_usage_bytes


class TestNumpy:
    """`array[rows]`, as NumPy reads and writes."""

    def test_rows_in_and_out(self, table: SparseArray, lender: Lender) -> None:
        """What a program of NumPy does with a table: an update of some rows, and a look at them."""
        table[5] = np.arange(256)
        table[6:8] = [[1.5], [2.5]]
        assert table[5].tolist() == list(range(256))
        assert (table[5:8].shape, table[5:8].dtype) == ((3, 256), np.float32)
        with pytest.raises(ValueError, match="read-only"):
            table[5][0] = 3  # it is a copy
        assert table[np.int64(6)][0] == 1.5
        assert table[6:8].sum() == 256 * 4
        table[-1] = 3
        assert table[COUNT - 1].tolist() == [3] * 256
        assert table.tiles() == [0, 9]
        assert table[COUNT - 2 :].shape == (2, 256)
        assert table[7:7].shape == (0, 256)
        table[7:3] = 1
        assert table.tiles() == [0, 9]
        assert lender.lent_bytes == 2 * PAGE

    def test_what_numpy_refuses_changes_nothing(self, table: SparseArray, lender: Lender) -> None:
        """Shapes that do not fit, text, and values that are not indices: no tile comes."""
        for values in ([1, 2], [[1.0] * 256] * 3, "text"):
            with pytest.raises(ValueError, match=r"broadcast|convert"):
                table[0:2] = values
        wrong: dict[type[Exception], tuple[Any, ...]] = {
            IndexError: (COUNT, -COUNT - 1, 2**63),
            InvalidRequest: (slice(0, 10, 2), slice(10, 0, -1)),
            TypeError: (1.0, (0, 0), [0, 1]),
        }
        for error, indices in wrong.items():
            for index in indices:
                with pytest.raises(error):
                    table[index] = 1
                with pytest.raises(error):
                    table[index]
        assert (table.tiles(), lender.lent_bytes) == ([], 0)

    def test_dtypes_beyond_numpys(self, lender: Lender) -> None:
        """Values are cast to what the array has, by ml_dtypes."""
        with SparseArray(lender, (4096, 8, 1024), "BF16") as cache:
            cache[9] = 1.25
            assert cache[9].astype("float32").sum() == 1.25 * 8 * 1024
            assert cache[9].dtype.name == "bfloat16"
