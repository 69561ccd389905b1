"""Threads that meet: a call that waits until the test lets it go on, and many that begin at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.support.daemons import DEADLINE_SECONDS
from tests.support.fake_lender import FlakyDriver, Lender


class HeldUp:
    """A call in another thread, which waits where `owner` calls its function `hook`."""

    def __init__(self, owner: Lender | FlakyDriver, call: Callable[[], object], hook: str) -> None:
        self._waiting, self._go_on = threading.Event(), threading.Event()

        def wait() -> None:
            setattr(owner, hook, lambda: None)
            self._waiting.set()
            assert self._go_on.wait(DEADLINE_SECONDS)

        setattr(owner, hook, wait)
        self._thread = threading.Thread(target=call)
        self._thread.start()
        assert self._waiting.wait(DEADLINE_SECONDS)

    def go_on(self) -> None:
        """Let it go on, to its end."""
        self._go_on.set()
        self._thread.join()


@contextmanager
def held_up(lender: Lender, call: Callable[[], object], *, at_the_device: bool = False) -> Iterator[HeldUp]:
    """Yield while `call`, in another thread, waits for the lender, or for the device; at the end it goes on."""
    held = HeldUp(lender.driver, call, "before_synchronize") if at_the_device else HeldUp(lender, call, "before_borrow")
    try:
        yield held
    finally:
        held.go_on()


def together(work: Sequence[Callable[[], object]]) -> None:
    """Do each piece in a thread of its own, all at once, to the end of the last; raise what one of them raised."""
    start = threading.Barrier(len(work))

    def begin(piece: Callable[[], object]) -> None:
        start.wait(DEADLINE_SECONDS)
        piece()

    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(begin, piece) for piece in work]:
            done.result()
