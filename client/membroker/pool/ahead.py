"""Borrowing ahead: how many spare pages a pool keeps ready, and the thread that borrows them before they are needed.

Owns that number and the thread. It must never wait for the device, nor take what others want: the broker refuses what
is asked for ahead when anybody waits. The thread must not refer to the pool while it waits: a pool that is garbage must
be able to end.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from ..errors import ClosedError, MembrokerError
from ..threads import start_thread
from ..vmm.sizes import GIB

logger: logging.Logger = logging.getLogger("membroker")

MOST_BYTES: Final = GIB
"""The most that "auto" keeps ready."""
SLICE_SECONDS: Final = 0.02
SLICES: Final = 500
"""How many slices are looked at: those of the last 10 seconds. The one in which the most pages were taken decides."""
LOOK_SECONDS: Final = 1.0
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
"""After a refusal the pool borrows nothing ahead for so many seconds, doubled with each refusal in a row. Longer pauses
cost more: each page that is not ready takes a call, and a refusal is cheap."""
MOST_PER_CALL: Final = 64


class Ahead:
    """How many spare pages of `page_size` bytes to keep: `fixed`, or, if that is None, by what was taken lately."""

    def __init__(self, fixed: int | None, page_size: int) -> None:
        self.fixed = fixed
        self._most = max(1, MOST_BYTES // page_size)
        self._slice = 0
        self._taken = 0
        self._history: dict[int, int] = {}
        """Pages that were taken in each slice before this one."""
        self.target: int = 1 if fixed is None else fixed
        """How many spare pages are to be there, as last worked out."""
        self._pause = 0.0
        self._resume_at = 0.0
        self.is_resting: bool = False
        """Whether nothing is borrowed ahead until the next page is taken."""
        self._wake = threading.Event()

    def start(self, keep_ahead: Callable[[], bool]) -> None:
        """Keep pages ready from now on, by calls of a pool's method, as long as the pool lives.

        The method borrows or releases pages once, and returns whether there is more to do. Raises `ThreadLimit`.
        """
        start_thread(_keep, "membroker-ahead", weakref.WeakMethod(keep_ahead), self._wake)

    def took(self, count: int, left: int) -> None:
        """Note that pages were taken, and `left` spare ones are there. Part of every allocation."""
        self.is_resting = False
        now = int(time.monotonic() / SLICE_SECONDS)
        if now != self._slice:
            self._history[self._slice], self._slice, self._taken = self._taken, now, 0
        self._taken += count
        if left <= self.target // 2 and not self._wake.is_set():
            self._wake.set()

    def work_out(self) -> int:
        """Work the target out again, and return it."""
        if self.fixed is None:
            oldest = int(time.monotonic() / SLICE_SECONDS) - SLICES
            self._history = {at: count for at, count in list(self._history.items()) if at > oldest}
            lately = [*self._history.values(), self._taken if self._slice > oldest else 0]
            self.target = min(self._most, max(1, *lately))
        return self.target

    @property
    def is_paused(self) -> bool:
        """Whether nothing is borrowed ahead, because the broker refused it lately."""
        return time.monotonic() < self._resume_at

    def granted(self) -> None:
        """Note that the broker lends ahead."""
        self._pause = 0.0

    def refused(self) -> None:
        """Note that the broker does not lend ahead, or has recalled pages that were ready."""
        self._pause = min(LAST_PAUSE, max(FIRST_PAUSE, 2 * self._pause))
        self._resume_at = time.monotonic() + self._pause


def _keep(reference: weakref.ref[Callable[[], bool]], wake: threading.Event) -> None:
    while True:
        wake.wait(LOOK_SECONDS)
        wake.clear()
        keep_ahead = reference()
        if keep_ahead is None:
            return
        try:
            while keep_ahead():
                pass
        except ClosedError:
            return
        except MembrokerError as error:
            logger.info("cannot borrow pages ahead at the moment: %s", error)
        except Exception:
            logger.exception("borrowing pages ahead has failed")
        del keep_ahead
