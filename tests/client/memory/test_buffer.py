"""A buffer over a lender in this process: who gives it back, and when."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fake_lender import Lender
from tests.support.interrupts import interrupted_everywhere

from membroker.memory.buffer import Buffer


class InterruptedLock:
    """A lock behind which Ctrl-C strikes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        raise KeyboardInterrupt


def test_a_buffer_that_is_forgotten_is_given_back_and_one_that_was_closed_wakes_nobody() -> None:
    """A worker that allocates and closes without a pause would wake its background thread each time, for nothing."""
    lender = Lender()
    buffer = Buffer(lender, "2MiB")
    buffer.close()
    del buffer
    gc.collect()
    assert not lender.work
    buffer = Buffer(lender, "2MiB")
    del buffer
    gc.collect()
    assert lender.lent_bytes == 2 << 20
    (give_back,) = lender.work
    give_back()
    assert lender.lent_bytes == 0


def test_an_interrupt_at_the_beginning_of_a_use_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as a view begins: the buffer must not wait for ever for the end of a view that nobody has."""
    lender = Lender()
    buffer = Buffer(lender, "2MiB")
    monkeypatch.setattr(buffer._holding, "_lock", InterruptedLock())
    with pytest.raises(KeyboardInterrupt):
        buffer.view()
    monkeypatch.undo()
    buffer.close()
    assert lender.lent_bytes == 0


def test_an_interrupt_anywhere_in_a_use_leaves_none_behind() -> None:
    """Ctrl-C as a view is made, before it and behind it: when the buffer is closed, all of it goes back."""
    lender, buffers = Lender(), []

    def prepare() -> Callable[[], object]:
        buffers.append(Buffer(lender, "2MiB"))
        return buffers[-1].view

    points = 0
    for points in interrupted_everywhere(prepare):
        buffers.pop().close()
        assert lender.lent_bytes == 0, f"point {points}"
    buffers.pop().close()
    assert points > 10


def test_a_buffer_that_is_garbage_together_with_its_lender_is_given_back() -> None:
    """A worker object that knows both, and itself, is dropped: the memory may not wait for the end of the process."""
    lender = Lender()
    work, lent = lender.work, lender.lent
    worker: dict[str, Any] = {"lender": lender, "buffer": Buffer(lender, "2MiB")}
    worker["self"] = worker
    del lender, worker
    gc.collect()
    work.popleft()()
    assert not lent
    assert not work
