"""A buffer over a lender in this process: in which thread its memory is released, and when."""

from __future__ import annotations

from typing import Any

from tests.support.fake_lender import Lender
from tests.support.garbage import collect

from membroker.memory.buffer import Buffer


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
