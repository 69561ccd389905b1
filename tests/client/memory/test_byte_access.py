"""A buffer as other code takes one: NumPy, DLPack, slices, `len`, what pickle says; and when its memory is released."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect

from membroker.errors import ClosedError, InvalidRequest
from membroker.memory.buffer import Buffer
from membroker.memory.growable import GrowableBuffer
from membroker.memory.sparse import SparseArray
from membroker.pool.pool import VirtualMemoryPool

KINDS: list[Callable[[Lender], Any]] = [
    lambda lender: Buffer(lender, 100),
    lambda lender: GrowableBuffer(lender, 100, PAGE),
]


@pytest.fixture(params=KINDS, ids=["Buffer", "GrowableBuffer"])
def buffer(request: pytest.FixtureRequest, lender: Lender) -> Any:
    with request.param(lender) as made:
        yield made


def test_it_has_a_length_and_slices(buffer: Any) -> None:
    assert (len(buffer), buffer.nbytes, buffer.size) == (100, 100, 100)
    buffer[:5] = b"hello"
    buffer[99] = 7
    assert (bytes(buffer[:5]), buffer[-1], buffer[1]) == (b"hello", 7, ord("e"))
    with pytest.raises(ValueError, match="different structures"):
        buffer[:5] = b"hi"
    with pytest.raises(IndexError):
        buffer[100]


def test_numpy_takes_it(buffer: Any) -> None:
    """Without a copy; the array keeps the memory after the buffer was closed."""
    array = np.asarray(buffer)
    assert (array.dtype, array.shape) == (np.uint8, (100,))
    array[3] = 9
    assert buffer[3] == 9
    assert np.from_dlpack(buffer)[3] == 9
    assert np.asarray(buffer, dtype="f4")[3] == 9.0
    copied = np.array(buffer)
    copied[3] = 1
    assert buffer[3] == 9
    with pytest.raises(ValueError, match="would be a copy"):
        np.asarray(buffer, dtype="f4", copy=False)
    buffer.close()
    assert array[3] == 9
    with pytest.raises(ClosedError):
        np.asarray(buffer)


def test_on_a_gpu_it_is_refused_in_words(buffer: Any) -> None:
    buffer._on_host = False
    for call in (lambda: np.asarray(buffer), lambda: buffer[0], lambda: buffer.__buffer__(0)):
        with pytest.raises(InvalidRequest, match="only the host driver's memory can be viewed"):
            call()
    assert len(buffer) == 100


OTHERS: list[Callable[[Lender], Any]] = [
    *KINDS,
    lambda lender: VirtualMemoryPool(lender, PAGE, PAGE),
    lambda lender: SparseArray(lender, (10, 256), "F32"),
]


@pytest.mark.parametrize("make", OTHERS)
def test_pickle_says_what_to_do(lender: Lender, make: Callable[[Lender], Any]) -> None:
    """It was "cannot pickle '_thread.lock' object"."""
    with make(lender) as made:
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"belongs to this process .* attach\(\) a segment"):
                call(made)


# In which thread its memory is released, and when


def test_a_buffer_that_is_forgotten_is_given_back_and_one_that_was_closed_wakes_nobody() -> None:
    """A worker that allocates and closes without a pause would wake its background thread each time, for nothing."""
    lender = Lender()
    buffer = Buffer(lender, "2MiB")
    buffer.close()
    del buffer
    collect()
    assert not lender.work
    buffer = Buffer(lender, "2MiB")
    del buffer
    collect()
    assert lender.lent_bytes == 2 << 20
    (give_back,) = lender.work
    give_back()
    assert lender.lent_bytes == 0


def test_a_buffer_that_is_garbage_together_with_its_lender_is_given_back() -> None:
    """A worker object that knows both, and itself, is dropped: the memory may not wait for the end of the process."""
    lender = Lender()
    work, lent = lender.work, lender.lent
    worker: dict[str, Any] = {"lender": lender, "buffer": Buffer(lender, "2MiB")}
    worker["self"] = worker
    del lender, worker
    collect()
    work.popleft()()
    assert not lent
    assert not work
