"""What programs have in their hands: sizes and offsets of NumPy; dtypes of NumPy, ml_dtypes and torch, by any name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.fake_lender import PAGE
from tests.support.sizes import MIB

import membroker
from membroker import dlpack
from membroker.dtypes import word_of
from membroker.errors import InvalidOffset, InvalidRequest
from membroker.pool.pool import VirtualMemoryPool
from membroker.safetensors import write_index

INTS = [np.int64, np.uint64]
NO_INTS = [1.0, np.float64(1), True, np.True_, None, b"1", [1]]


@pytest.fixture
def host() -> Iterator[membroker.LocalSource]:
    with membroker.LocalSource("host") as source:
        yield source


class TestSizes:
    """Sums over shapes and offsets out of index tensors are NumPy's ints."""

    @pytest.mark.parametrize("number", INTS)
    def test_ints_of_numpy_are_ints(self, pool: VirtualMemoryPool, number: type) -> None:
        """Everywhere, and what comes back is an int: an address in int64 would overflow in the next sum."""
        address = pool.allocate(number(PAGE), number(2 * PAGE))
        assert (type(address + 0), address) == (int, pool.base_address + PAGE)
        assert type(pool.grow(number(1)) + 0) is int
        with pool.pin(number(PAGE), number(8)) as pinned:
            assert (type(pinned), pinned) == (int, address)
        span = pool.span(number(PAGE), number(8))
        assert (type(span.address), type(span.size)) == (int, int)
        del span
        pool.free(number(PAGE), number(2 * PAGE))
        pool.shrink(number(PAGE))

    @pytest.mark.parametrize("number", NO_INTS, ids=repr)
    def test_what_is_no_int_is_refused(self, pool: VirtualMemoryPool, host: membroker.LocalSource, number: Any) -> None:
        """A float is a rounding that somebody forgot, a bool is an argument in the wrong place."""
        for wrong in (
            lambda: pool.allocate(0, number),
            lambda: pool.free(number),
            lambda: membroker.Buffer(host, number),
            lambda: membroker.VirtualMemoryPool(host, "8MiB", "2MiB", spare_pages=number),
        ):
            with pytest.raises(InvalidRequest):
                wrong()
        with pytest.raises(InvalidOffset):
            pool.allocate(number, 1)


WORDS = {
    "BF16": ["BF16", "bfloat16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
    "F16": ["F16", "float16", np.float16, np.dtype("f2"), np.dtype("<f2")],
    "F32": ["F32", "float32", "torch.float32", np.float32, np.dtype("f4")],
    "I64": ["I64", "int64", np.int64, np.dtype(np.int64)],
    "BOOL": ["BOOL", "bool", np.bool_, np.dtype(bool)],
    "F8_E4M3": ["F8_E4M3", "float8_e4m3fn", "torch.float8_e4m3fn", ml_dtypes.float8_e4m3fn],
}


class TestDtypes:
    """A program has its dtypes from its framework, or from a model's config.json ("torch_dtype": "bfloat16")."""

    @pytest.mark.parametrize(
        ("word", "dtype"), [(word, dtype) for word, dtypes in WORDS.items() for dtype in dtypes], ids=str
    )
    def test_a_dtype_by_each_of_its_names(self, host: membroker.LocalSource, word: str, dtype: Any) -> None:
        assert word_of(dtype) == word
        _, index = write_index({"x": (dtype, (np.int64(4), 2))})
        assert (index["x"].dtype, index["x"].shape) == (word, (4, 2))
        assert all(type(dimension) is int for dimension in index["x"].shape)
        with membroker.SparseArray(host, (np.int64(1 << 20), 64), dtype) as array:
            assert array.dtype == word
            assert all(type(dimension) is int for dimension in array.shape)
        with membroker.Buffer(host, MIB) as buffer:
            tensor = dlpack.export(buffer, [np.int64(8), 2], dtype, np.int64(64))
            assert (tensor.dtype, tensor.shape) == (word, (8, 2))
            del tensor

    @pytest.mark.parametrize(
        "dtype", [None, float, 3, "f4", "<f4", "", "torch.", ..., np.zeros(1), np.generic, np.dtype(">f4")], ids=repr
    )
    def test_what_is_no_dtype_is_refused(self, host: membroker.LocalSource, dtype: Any) -> None:
        """`"F4"` is four bits here and `"f4"` four bytes to NumPy: a code is no name."""
        with pytest.raises(InvalidRequest):
            word_of(dtype)
        with pytest.raises(InvalidRequest, match="tensor 'x'"):
            write_index({"x": (dtype, (2,))})
        with pytest.raises(InvalidRequest):
            membroker.SparseArray(host, (1 << 20, 64), dtype)
