"""Sparse arrays in use: by many threads, to their end, without a broker, and with NumPy."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.sparse_table import COUNT, ROW, ROWS, row
from tests.support.threads import held_up, together

from membroker.errors import InvalidRequest, NotMapped
from membroker.memory.sparse import SparseArray


class TestThreads:
    def test_many_write_the_same_new_tile(self, table: SparseArray, lender: Lender) -> None:
        """Sixteen threads meet the first ids of a tile at once: it comes once, and has what all of them wrote."""

        def write(number: int) -> None:
            table.write(ROWS + number, row(number))

        together([partial(write, number) for number in range(16)])
        assert lender.lent_bytes == PAGE
        assert table.read(ROWS, 16) == b"".join(map(row, range(16)))

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
        seed = random.randrange(2**32)
        print("seed", seed)

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

    @pytest.fixture(autouse=True)
    def _numpy(self) -> None:
        pytest.importorskip("numpy", reason="NumPy is not installed here: pip install numpy")

    def test_rows_in_and_out(self, table: SparseArray, lender: Lender) -> None:
        """What a program of NumPy does with a table: an update of some rows, and a look at them."""
        import numpy as np

        table[5] = np.arange(256)
        table[6:8] = [[1.5], [2.5]]
        assert table[5].tolist() == list(range(256))
        assert (table[5:8].shape, table[5:8].dtype) == ((3, 256), np.float32)
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

    def test_what_is_read_is_a_copy_that_says_so(self, table: SparseArray) -> None:
        table[5] = 1
        one = table[5]
        table[5] = 2
        assert one[0] == 1
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 3

    def test_what_numpy_refuses_changes_nothing(self, table: SparseArray, lender: Lender) -> None:
        """Shapes that do not fit, text, and values that are not indices: no tile comes."""
        wrong: tuple[tuple[Any, Any, type[Exception]], ...] = (
            (0, [1, 2], ValueError),
            (slice(0, 2), [[1.0] * 256] * 3, ValueError),
            (0, "text", ValueError),
            (COUNT, 1, IndexError),
            (-COUNT - 1, 1, IndexError),
            (2**63, 1, IndexError),
            (slice(0, 10, 2), 1, InvalidRequest),
            (slice(10, 0, -1), 1, InvalidRequest),
            (1.0, 1, TypeError),
            ((0, 0), 1, TypeError),
            ([0, 1], 1, TypeError),
        )
        for index, values, error in wrong:
            with pytest.raises(error):
                table[index] = values
        for index, _, error in wrong[3:]:
            with pytest.raises(error):
                table[index]
        assert (table.tiles(), lender.lent_bytes) == ([], 0)

    def test_absent_rows(self, table: SparseArray, zeros: SparseArray) -> None:
        with pytest.raises(NotMapped):
            table[0]
        assert not zeros[ROWS - 1 : ROWS + 1].any()
        assert zeros.tiles() == []

    def test_going_through_all_rows(self, lender: Lender) -> None:
        """A loop over the array ends at its end."""
        with SparseArray(lender, (3, 256), "F32", absent="zero") as array:
            array[1] = 1
            assert [one[0] for one in array] == [0, 1, 0]

    @pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
    def test_dtypes_beyond_numpys(self, lender: Lender, dtype: str) -> None:
        """Values are cast to what the array has, by ml_dtypes."""
        pytest.importorskip("ml_dtypes")
        with SparseArray(lender, (4096, 8, 1024), dtype) as cache:
            cache[9] = 1.25
            assert cache[9].astype("float32").sum() == 1.25 * 8 * 1024
            assert cache[9].dtype.name == {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}[dtype]
