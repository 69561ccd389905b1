"""The copies of an offload or a restore: some chunks are copied while others are unmapped or borrowed.

Owns the order of the chunks under way. It must never know which direction they go, or what becomes of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from ..arguments import Progress
from ..interrupts import let_through
from ..vmm.driver import Driver

CHUNKS_UNDER_WAY = 4


class Copying:
    """Copies chunks, a few at a time. Calls `arrive` for each completed chunk, in order; it returns the chunk's bytes.

    If the block fails, the copies that have begun are still completed.
    """

    def __init__(self, driver: Driver, arrive: Callable[[range], int], progress: Progress | None, total: int) -> None:
        self._arrive = arrive
        self._progress = progress
        self._total = total
        self._done = 0
        self._under_way: deque[tuple[int, range]] = deque()
        self._copier = driver.copier()

    def begin(self, chunk: range, copies: Iterable[tuple[int, int, int]]) -> None:
        """Begin to copy a chunk, once fewer than `CHUNKS_UNDER_WAY` are being copied."""
        while len(self._under_way) >= CHUNKS_UNDER_WAY:
            self._tell(self._finish_one())
        let_through()
        for target, source, size in copies:
            self._copier.copy(target, source, size)
        self._under_way.append((self._copier.mark(), chunk))

    def finish(self) -> None:
        """Wait for all copies that have begun."""
        while self._under_way:
            self._tell(self._finish_one())

    def _finish_one(self) -> int:
        mark, chunk = self._under_way.popleft()
        self._copier.wait(mark)
        return self._arrive(chunk)

    def _tell(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            while self._under_way:
                self._finish_one()
        finally:
            self._copier.close()
