"""A table of ten tiles as a sparse array."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.fake_lender import Lender
from tests.support.sparse_table import COUNT

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
