"""`Releaser`: the thread of an elastic cache that releases memory, and answers the broker's recalls.

Owns the fences that are looked at, and the turns of an engine that rests. What is to go is in `CacheState`. It must not
borrow anything: a question may wait in the broker's queue for a second, and a recall is to be answered in one.
"""

from __future__ import annotations

import logging
import threading
import time

from .. import Recall
from ..errors import ClosedError
from .borrower import GroupBorrower
from .engine import Engine, Fence
from .layout import Layout
from .ranks import Pages
from .state import FENCE_SECONDS, LOOK_SECONDS, CacheState

logger: logging.Logger = logging.getLogger("membroker")


class Releaser:
    """Releases groups of `layout` in `pages`, as `state` lets them go. `borrower` is told: it may borrow them again."""

    def __init__(self, pages: Pages, layout: Layout, state: CacheState, borrower: GroupBorrower) -> None:
        self._pages = pages
        self._layout = layout
        self._state = state
        self._borrower = borrower
        self.engine: Engine | None = None
        """What is served."""
        self._rested: Fence | None = None
        """The fence of the last rest."""
        self.is_resting: bool = False
        """Whether the engine is idle."""
        self._makes_turns = False
        """Whether this thread makes its turns then."""
        self._turns = threading.Lock()
        """Held while this thread calls the engine for one that rests: `wake` waits for it."""
        self.driver: threading.Lock = threading.Lock()
        """Held while a fence is looked at and pages are unmapped."""
        self._wanted = threading.Event()

    def look(self) -> None:
        """Look at what is to go."""
        self._wanted.set()

    def rest(self, fence: Fence, *, makes_turns: bool) -> None:
        """Make the turns of an idle engine from now on, or let it make them. Its steps end with `fence`."""
        with self._turns:
            self._rested, self.is_resting, self._makes_turns = fence, True, makes_turns
        self._state.rest()
        self._wanted.set()

    def wake(self) -> None:
        """Make no turn any more."""
        if self.is_resting:
            with self._turns:
                self.is_resting = self._makes_turns = False

    def wait_for_rest(self) -> None:
        """Wait until the steps before the last rest are over. Raises `ClosedError` if the cache ends before."""
        while self._rested is not None:
            if self._state.is_closed:
                raise ClosedError("this cache is closed")
            with self.driver:
                if self._rested.query():
                    return
            time.sleep(FENCE_SECONDS)

    def run(self) -> None:
        """Release until the cache is closed, or the pool is. Then answer the open recalls: nothing else will."""
        try:
            self._release()
        finally:
            for recall in self._state.end():
                self._answer(recall)

    def _release(self) -> None:
        again = 0.0
        while not (self._state.is_closed or self._pages.closed):
            self._wanted.wait(self._state.patience(again, at_rest=self._makes_turns))
            self._wanted.clear()
            try:
                if time.monotonic() >= again:
                    try:
                        self._turn_at_rest()
                    finally:  # an engine that fails keeps no page of a step that is over
                        self._release_passed()
            except ClosedError:
                return
            except Exception:
                logger.exception("the cache could not release memory, and tries again in a second")
                again = time.monotonic() + LOOK_SECONDS
            self._settle()

    def _turn_at_rest(self) -> None:
        """Do what `ElasticCache.turn` does, for an engine that rests."""
        with self._turns:
            engine, fence = self.engine, self._rested
            if engine is None or fence is None or not self._makes_turns:
                return
            self._borrower.want(min(engine.need(), self._layout.blocks))
            if self._state.hold(engine):
                self._state.retire(fence)

    def _release_passed(self) -> None:
        """Unmap and release the groups whose fence has passed. Raises the first failure, when it has tried them all."""
        failure: Exception | None = None
        for group, fence in self._state.retiring():
            if not self.driver.acquire(blocking=False):
                break  # a graph is being captured
            try:
                if fence.query() and self._state.leave(group, fence):
                    self._unmap(group)
            except ClosedError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
            finally:
                self.driver.release()
        if failure is not None:
            raise failure

    def _unmap(self, group: int) -> None:
        try:
            self._pages.free_ranges(self._layout.ranges(group), is_over=True)
        except BaseException:
            self._state.stayed(group)
            raise
        self._state.left(group)
        self._borrower.retry()

    def _settle(self) -> None:
        """Answer the open recalls for which it is time."""
        while (recall := self._state.settled(has_engine=self.engine is not None)) is not None:
            self._answer(recall)
            self._borrower.retry()

    def _answer(self, recall: Recall) -> None:
        try:
            recall.done()
        except Exception:
            logger.exception("the cache could not answer a recall")
