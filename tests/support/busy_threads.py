"""What a worker does all the while, in threads of its own: computes in what it holds, and calls the broker.

Both remember their longest step, which is what a user would notice of a daemon that dies.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.daemons import DEADLINE_SECONDS


class Busy:
    """Steps, one after another, until the end or the first that fails."""

    REST_SECONDS = 0.005
    """Between two steps: the cores are for the others too."""

    def __init__(self) -> None:
        self.steps = 0
        self.longest = 0.0
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @abstractmethod
    def step(self) -> None:
        """Do one step."""

    def _run(self) -> None:
        try:
            while not self._end.wait(self.REST_SECONDS):
                began = time.monotonic()
                self.step()
                self.longest = max(self.longest, time.monotonic() - began)
                self.steps += 1
        except BaseException as error:  # noqa: BLE001 - `lives` and `end` raise it where the test sees it
            self._error = error

    def lives(self) -> int:
        """Return how many steps there were, or raise why there are no more."""
        if self._error is not None:
            raise self._error
        return self.steps

    def end(self) -> float:
        """End after the step that is being made, and return how many seconds the longest took."""
        self._end.set()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "a step does not end"
        self.lives()
        return self.longest


class Computing(Busy):
    """Writes to buffers and finds there what it wrote, round after round, and in segments what was sealed."""

    REST_SECONDS = 0.05

    def __init__(self, buffers: Sequence[Any], sealed: Mapping[Any, bytes]) -> None:
        self._buffers = buffers
        self._sealed = sealed
        self._written: list[bytes] = []
        super().__init__()

    def step(self) -> None:
        for buffer, written in zip(self._buffers, self._written, strict=False):
            with buffer.view() as view:
                assert bytes(view) == written, "memory that was lent is not what it was"
        for segment, content in self._sealed.items():
            assert segment.read(0, len(content)) == content, "a segment is not what was sealed"
        self._written = [pattern(f"{self.steps}.{place}", buffer.size) for place, buffer in enumerate(self._buffers)]
        for buffer, written in zip(self._buffers, self._written, strict=True):
            with buffer.view() as view:
                view[:] = written


class Calling(Busy):
    """Borrows a page, uses it and gives it back, again and again."""

    def __init__(self, model: Any, size: int) -> None:
        self._model = model
        self._size = size
        super().__init__()

    def step(self) -> None:
        with self._model.allocate(self._size) as buffer, buffer.view() as view:
            view[:4] = b"mine"
            assert bytes(view[:4]) == b"mine"


def pattern(seed: str, size: int) -> bytes:
    """Return `size` bytes that no other seed gives."""
    word = f"{seed:>16.16}".encode()
    return word * (size // len(word))
