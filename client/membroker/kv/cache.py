"""`ElasticCache`: the memory of an engine's KV cache, borrowed and released while the engine serves.

Owns the pages of a pool, and two threads. One asks the broker and maps, one question at a time. The other releases what
has passed its fence, answers recalls, and shrinks the cache of an engine that rests. They are two because a question
may wait in the broker's queue for a second, and a recall is to be answered in one.

The engine's scheduler thread calls `grow` and `turn`. These must never wait for the broker or the driver: what they
share with the threads is in `CacheState`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ..arguments import bytes_of, seconds_of, whole_number
from ..closing import Closing
from ..errors import ClosedError, InvalidRequest, MembrokerError, OutOfMemory
from ..interrupts import device_failures
from ..model import Recall
from ..pool.pool import VirtualMemoryPool
from ..session.recalls import DEFERRED
from .balloon import DRAINING, MAPPED, RETIRING, Balloon
from .engine import Engine, Fence
from .layout import Layout
from .state import LOOK_SECONDS, CacheState, CacheStats

logger = logging.getLogger("membroker")

ASK_SECONDS: Final = 1.0
"""How long one question waits in the broker's queue. Then the cache looks again what it needs, and asks again."""
FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""How many seconds nothing is asked after a refusal that did not wait, doubled with each such refusal in a row."""
CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for each thread. One that still asks a broker which is away ends later."""


class ElasticCache(Closing):
    """The pages of `layout` in `pool`, as many as an engine needs. A context manager.

    Sizes are in bytes, or text. `floor` is what is never released; `ahead` is kept mapped beyond what the engine needs,
    while the broker has memory that nobody waits for; `keep` is the most that cached prefixes may occupy in pages that
    no request uses; `ceiling` is the most that is borrowed (None: the model's limit alone). The blocks in `always` have
    memory from here on, and the engine has them from the beginning: a null block, or blocks for padding.

    While this is open, it answers the recalls of the pool's model, in place of any callback that was set before. A
    callback that is set later can pass them on, to `answer`: one that has more to release, or two caches of one model.

    Raises `InvalidRequest` for a layout of other pages, a pool with spare pages, or bounds that contradict each other;
    and what `VirtualMemoryPool.allocate` and `Model.on_recall` raise.
    """

    def __init__(
        self,
        pool: VirtualMemoryPool,
        layout: Layout,
        *,
        floor: int | str = 0,
        ahead: int | str = 0,
        keep: int | str = "2GiB",
        ceiling: int | str | None = None,
        always: Collection[int] = (0,),
    ) -> None:
        if (layout.base, layout.page_size) != (pool.base_address, pool.page_size):
            raise InvalidRequest(
                f"{layout!r} is not one of this pool: make it with the pool's base_address and page_size"
            )
        if pool._backing.spare_pages or pool._ahead is not None:
            raise InvalidRequest("the pool of an elastic cache has no spare pages and borrows nothing ahead by itself")
        self._pool = pool
        self._layout = layout
        self._balloon = Balloon(
            layout,
            floor=bytes_of("the floor", floor),
            ahead=bytes_of("what is kept ahead", ahead),
            keep=bytes_of("what prefixes may keep", keep),
            ceiling=None if ceiling is None else bytes_of("the ceiling", ceiling),
            always=always,
        )
        self._state = CacheState(self._balloon, len(always))
        self._engine: Engine | None = None
        self._resting: Fence | None = None
        self._closed = False
        # Held while the other thread calls the engine for one that rests: `wake` waits for it.
        self._turns = threading.Lock()
        # Held while a fence is looked at and pages are unmapped: `capturing` takes it.
        self._driver = threading.Lock()
        self._ask, self._keep, self._room = threading.Event(), threading.Event(), threading.Event()
        first = [one for group in self._balloon.first for one in layout.ranges(group)]
        pool.allocate_ranges(first)
        for group in self._balloon.first:
            self._balloon.asked(group)
            self._balloon.mapped(group)
        self._model: Any = pool._lender if hasattr(pool._lender, "on_recall") else None
        self._callback = self.answer
        if self._model is not None:
            try:
                self._model.on_recall(self._callback)
            except BaseException:
                pool.deallocate_ranges(first)
                raise
        self._threads = [
            threading.Thread(target=loop, name=f"membroker-kv-{name}", daemon=True)
            for name, loop in (("ask", self._ask_loop), ("release", self._release_loop))
        ]
        for thread in self._threads:
            thread.start()

    # What the engine calls. None of these waits for the broker or the device.

    def attach(self, engine: Engine) -> None:
        """Begin to serve `engine`: hold all of its blocks but `always`, and release those that have memory.

        Call it once, in the scheduler thread, when the engine has warmed up and captured its graphs: nothing is
        released before, because that needs the engine's fences.
        """
        self._check_open()
        if self._engine is not None:
            raise InvalidRequest("this cache has an engine already")
        engine.hold([block for block in range(self._layout.blocks) if not self._balloon.is_out(block)])
        self._engine = engine
        self.turn()

    def grow(self) -> int:
        """Tell what the engine needs, and give it the blocks that became usable; return their number.

        It may be called at any point where the engine can take blocks, such as before it admits a request.
        """
        engine = self._serving()
        self.want(engine.need())
        blocks = self.take()
        if blocks:
            engine.release(blocks)
        return len(blocks)

    def turn(self) -> None:
        """`grow`, and then shrink: hold blocks that are to go, and record a fence. Call it at the end of each step.

        At that point no block may be about to be used that `Engine.unused` returns, such as a prefix that was found
        and is not referenced yet.
        """
        self.grow()
        engine = self._serving()
        if retired := self._state.hold(engine):
            self._state.retire(retired, engine.fence())
            self._keep.set()

    def rest(self) -> None:
        """Say that the engine has no request, and calls nothing before `wake`. Then the cache shrinks by itself."""
        engine = self._serving()
        self.turn()
        fence = engine.fence()
        with self._turns:
            self._resting = fence
        self._state.rest()
        self._keep.set()

    @property
    def is_resting(self) -> bool:
        """Whether the cache makes the engine's turns by itself: from `rest` to `wake`, `grow` or `turn`."""
        return self._resting is not None

    def wake(self) -> None:
        """End a rest, before the engine uses its free list. `grow` and `turn` do so too."""
        if self._resting is not None:
            with self._turns:
                self._resting = None

    def want(self, blocks: int) -> None:
        """Tell how many blocks the engine wants in all. What is missing is borrowed by another thread.

        `grow` does this. It is for a program that has no `Engine`, and for `prepare`.
        """
        blocks = min(whole_number("a number of blocks", blocks), self._layout.blocks)
        self._check_open()
        if self._state.want(blocks):
            self._ask.set()

    def take(self) -> list[int]:
        """Return the blocks that have become usable since the last time. The engine has them from now on."""
        return self._state.take()

    @property
    def is_growing(self) -> bool:
        """Whether blocks are on their way: `grow` would return some, or the broker is asked for what the engine wants.

        It is so too while the broker refuses: `stats().refusals` counts that.
        """
        return self._state.is_growing

    def shrink(self, size: int | str) -> None:
        """Release so many bytes soon, as for a recall: free pages first, and busy ones by preemption.

        Nothing is borrowed until that is done, or until nothing more can be released. It is for an engine that is told
        to sleep; what the engine does not need goes without it.
        """
        length = bytes_of("what is to be released", size)
        self._check_open()
        if self._engine is None:
            raise InvalidRequest("this cache has no engine: attach one")
        self._state.owe(length)
        self._keep.set()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep the cache's own thread away from the device during a block that captures a CUDA graph.

        Looking at an event from any thread can end a capture. The block begins when the thread has finished what it is
        doing, and no page is released before its end. Use it beside `Client.defer_recalls`, which does the same for
        the other threads of the library.
        """
        with self._driver:
            yield

    # These wait.

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until more blocks have become usable, and return whether any have: `grow` returns them.

        It is for an engine that has requests, and can run none of them without more memory.
        """
        return self._state.wait_for_ready(seconds_of("seconds", seconds))

    def prepare(self, blocks: int, wait: float = 60.0) -> bool:
        """Want so many blocks, and wait up to `wait` seconds until they have memory; return whether they do.

        It is for the warm-up of an engine, before it serves.
        """
        seconds = seconds_of("wait", wait)
        self.want(blocks)
        has_come = self._state.wait_for(blocks, seconds)
        self._check_open()
        return has_come

    def close(self) -> None:
        """Wait for the device, release all memory, and end. Idempotent. The engine computes no more.

        The pool stays open, with its addresses. Raises `DeviceFailure`; the memory then goes with the pool.
        """
        if self._closed:
            return
        self._closed = True
        for event in (self._ask, self._keep, self._room):
            event.set()
        model = self._model
        if model is not None and model._recalls.callback_of(model.resource_name) == self._callback:
            try:
                model.on_recall(None)
            except MembrokerError as error:
                logger.info("the broker was not told that recalls are not answered any more: %s", error)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        groups = [group for state in (MAPPED, DRAINING, RETIRING) for group in self._balloon.groups_in(state)]
        if not self._pool.closed:
            self._pool.deallocate_ranges([one for group in groups for one in self._layout.ranges(group)])

    def stats(self) -> CacheStats:
        """Return the present figures. Raises `ClosedError`."""
        self._check_open()
        return self._state.stats()

    def __repr__(self) -> str:
        return f"<membroker.kv.ElasticCache of {self._layout!r}{', closed' * self._closed}>"

    def answer(self, recall: Recall) -> object:
        """Answer a recall of the pool's memory: the callback for `Model.on_recall`, and for one that passes it on."""
        if recall.location != "device" or self._closed:
            return None
        self._state.recalled(recall)
        self._keep.set()
        return DEFERRED

    def _check_open(self) -> None:
        if self._closed or self._pool.closed:
            raise ClosedError("this cache, or its pool, is closed")

    def _serving(self) -> Engine:
        self._check_open()
        if self._engine is None:
            raise InvalidRequest("this cache has no engine: attach one")
        self.wake()
        return self._engine

    # The thread that asks

    def _ask_loop(self) -> None:
        pause = 0.0
        while not (self._closed or self._pool.closed):
            question = self._state.question()
            if question is None:
                self._ask.wait(LOOK_SECONDS)
                self._ask.clear()
                continue
            group, is_needed = question
            error = self._borrow(group, is_needed=is_needed)
            if isinstance(error, ClosedError):
                return
            if error is None:
                pause = 0.0
            elif not is_needed:
                self._state.pause_ahead(LAST_PAUSE)
            elif not (isinstance(error, OutOfMemory) and error.waited_seconds):
                pause = min(LAST_PAUSE, max(FIRST_PAUSE, 2 * pause))
                self._room.clear()
                self._room.wait(pause)

    def _borrow(self, group: int, *, is_needed: bool) -> BaseException | None:
        """Borrow and map a group; return the error if it was refused."""
        ranges = self._layout.ranges(group)
        refusal: BaseException | None = None
        try:
            if is_needed:
                self._pool.allocate_ranges(ranges, wait=ASK_SECONDS)
            else:
                self._pool.allocate_ranges(ranges, ahead=True)
        except OutOfMemory as error:
            refusal = error.with_traceback(None)
        except MembrokerError as error:
            logger.info("no memory can be borrowed for the cache at the moment: %s", error)
            refusal = error.with_traceback(None)
        except Exception as error:
            logger.exception("borrowing for the cache has failed")
            refusal = error
        self._state.answered(group, is_granted=refusal is None)
        return refusal

    # The thread that releases

    def _release_loop(self) -> None:
        again = 0.0
        while not (self._closed or self._pool.closed):
            self._keep.wait(self._state.patience(again, at_rest=self._resting is not None))
            self._keep.clear()
            try:
                if time.monotonic() >= again:
                    self._turn_at_rest()
                    self._release_passed()
            except ClosedError:
                return
            except Exception:
                logger.exception("the cache could not release memory: it tries again in a second")
                again = time.monotonic() + LOOK_SECONDS
            self._settle()

    def _turn_at_rest(self) -> None:
        """Do what `turn` does for an engine that rests."""
        with self._turns:
            engine, fence = self._engine, self._resting
            if engine is None or fence is None:
                return
            self.want(engine.need())
            if retired := self._state.hold(engine):
                self._state.retire(retired, fence)

    def _release_passed(self) -> None:
        """Unmap and release the groups whose fence has passed."""
        for group, fence in self._state.retiring():
            if not self._driver.acquire(blocking=False):
                return  # a graph is being captured
            try:
                if fence.query() and self._state.leave(group, fence):
                    self._unmap(group, fence)
            finally:
                self._driver.release()

    def _unmap(self, group: int, fence: Fence) -> None:
        try:
            with device_failures():
                self._pool.deallocate_ranges(self._layout.ranges(group), after=fence)
        except BaseException:
            self._state.stayed(group)
            raise
        self._state.left(group)
        self._room.set()
        self._ask.set()

    def _settle(self) -> None:
        """Answer the open recall, if it is time."""
        recall = self._state.settled(has_engine=self._engine is not None)
        if recall is None:
            return
        try:
            recall.done()
        except Exception:
            logger.exception("a recall could not be answered")
        self._room.set()
        self._ask.set()
