"""What a first program meets: the numbers of a refusal."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from tests.support.sizes import MIB

import membroker
from membroker.errors import OutOfMemory
from membroker.pool.pool import VirtualMemoryPool


@pytest.mark.parametrize(
    "attempt",
    [
        VirtualMemoryPool.grow,
        VirtualMemoryPool.allocate_anywhere,
        lambda pool, size: pool.allocate(64 * MIB, size),
        lambda pool, size: membroker.GrowableBuffer(pool._backing._source, size, "1GiB", "64MiB"),
    ],
)
def test_the_bytes_that_were_asked_for_and_the_rounding(attempt: Callable[[VirtualMemoryPool, str], object]) -> None:
    """20 MiB were asked for; a message that speaks of 64 MiB alone makes people look for a fault of their own."""
    with membroker.LocalSource("host", limit="96MiB") as source, VirtualMemoryPool(source, "1GiB", "64MiB") as pool:
        pool.allocate_anywhere("64MiB")
        with pytest.raises(OutOfMemory, match=r"^20\.0 MiB \(64\.0 MiB .* 64\.0 MiB\) .*, 32\.0 MiB ") as caught:
            attempt(pool, "20MiB")
        numbers = (caught.value.asked_bytes, caught.value.requested_bytes, caught.value.available_bytes)
        assert numbers == (20 * MIB, 64 * MIB, 32 * MIB)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.asked_bytes) == (str(caught.value), 20 * MIB)
