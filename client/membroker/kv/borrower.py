"""`GroupBorrower`: the thread of an elastic cache that asks the broker for what the engine needs, and maps it.

Owns the question that is under way: there is one at a time, and it may wait in the broker's queue. What is wanted, and
what was granted, is in `CacheState`. It must not release anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from ..errors import ClosedError, MembrokerError, OutOfMemory, SessionLost
from .layout import Layout
from .ranks import Pages
from .state import LOOK_SECONDS, CacheState

logger: logging.Logger = logging.getLogger("membroker")

ASK_SECONDS: Final = 1.0
"""How long one question waits in the broker's queue. Then the cache looks again what it needs, and asks again."""
FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""How many seconds nothing is asked after a refusal that did not wait, doubled with each such refusal in a row."""


class GroupBorrower:
    """Borrows groups of `layout` in `pages`, as `state` wants them. `granted` is called after each grant."""

    def __init__(self, pages: Pages, layout: Layout, state: CacheState, granted: Callable[[], object]) -> None:
        self._pages = pages
        self._layout = layout
        self._state = state
        self._granted = granted
        self._logged: type[Exception] | None = None
        """The kind of failure that was said last: one that comes again each second is said once."""
        self._wanted, self._room = threading.Event(), threading.Event()

    def want(self, blocks: int) -> None:
        """Note how many blocks are wanted, and ask for what is missing."""
        if self._state.want(blocks):
            self._wanted.set()

    def retry(self) -> None:
        """Ask at once for what is missing: what was refused may be granted now."""
        self._room.set()
        self._wanted.set()

    def run(self) -> None:
        """Ask until the cache is closed, or the pool is, or the broker does not know its session any more."""
        try:
            self._ask()
        finally:
            self._state.end_growing()

    def _ask(self) -> None:
        pause = 0.0
        while not (self._state.is_closed or self._pages.closed):
            question = self._state.question()
            if question is None:
                self._wanted.wait(LOOK_SECONDS)
                self._wanted.clear()
                continue
            groups, may_wait = question
            error = self._borrow(groups, self._state.wanted_bytes() if may_wait else 0, may_wait=may_wait)
            if isinstance(error, ClosedError | SessionLost):
                if not (self._state.is_closed or self._pages.closed):
                    logger.error("the cache can borrow no more memory: restart its engine. %s", error)
                return
            if error is None:
                pause = 0.0
            elif may_wait and not (isinstance(error, OutOfMemory) and error.waited_seconds):
                pause = min(LAST_PAUSE, max(FIRST_PAUSE, 2 * pause))
                self._room.clear()
                self._room.wait(pause)

    def _borrow(self, groups: Sequence[int], wanted_bytes: int, *, may_wait: bool) -> BaseException | None:
        """Borrow and map groups, the first of `wanted_bytes`; return the error if they were refused."""
        ranges = [span for group in groups for span in self._layout.ranges(group)]
        refusal: BaseException | None = None
        try:
            timeout = ASK_SECONDS if may_wait else None
            self._pages.allocate_ranges(ranges, timeout=timeout, ahead=not may_wait, wanted_bytes=wanted_bytes)
            if self._state.is_closed:  # `ElasticCache.close` may have ended before this answer
                self._pages.free_ranges(ranges)
                raise ClosedError("this cache is closed")
            self._logged = None
        except (OutOfMemory, ClosedError, SessionLost) as error:
            refusal = error.with_traceback(None)
        except Exception as error:
            if type(error) is not self._logged:
                is_bug = not isinstance(error, MembrokerError)
                logger.warning("the cache cannot borrow memory at the moment: %s", error, exc_info=is_bug)
            self._logged = type(error)
            refusal = error.with_traceback(None)
        self._state.answered(groups, is_granted=refusal is None)
        if refusal is None:
            self._granted()
        return refusal
