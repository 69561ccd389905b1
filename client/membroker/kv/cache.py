"""`ElasticCache`: the memory of an engine's KV cache, borrowed and released while the engine serves.

Owns a balloon, its lock, and two threads. One asks the broker and maps, one question at a time. The other releases what
has passed its fence, answers recalls, and shrinks the cache of an engine that rests. They are two because a question
may wait in the broker's queue for a second, and a recall is to be answered in one.

The engine's scheduler thread calls `grow` and `turn`. It must never wait for the broker or the driver, so the lock is
held for operations on lists alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

logger = logging.getLogger("membroker")

ASK_SECONDS: Final = 1.0
"""How long one question waits in the broker's queue. Then the cache looks again what it needs, and asks again."""
FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""How many seconds nothing is asked after a refusal that did not wait, doubled with each such refusal in a row."""
LINGER_SECONDS: Final = 0.25
"""What the engine needed in this time or the time before is kept: need goes up and down with each batch."""
FENCE_SECONDS: Final = 0.001
"""How often a fence is looked at. A step of an engine takes 10 to 30 ms."""
LOOK_SECONDS: Final = 1.0
"""How often the threads look whether the pool was closed."""
CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for each thread. One that still asks a broker which is away ends later."""
ANSWER_SECONDS: Final = 0.1
"""A recall is answered so long before its deadline, whatever has been released by then."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Figures of one moment.

    `blocks` have memory and are with the engine, or will be with its next `grow`; `wanted_blocks` is what it needs.
    `charged_bytes` are borrowed, and `going_bytes` of them are to be released. `grants` and `refusals` count answers
    of the broker since the beginning.
    """

    blocks: int
    wanted_blocks: int
    charged_bytes: int
    going_bytes: int
    grants: int
    refusals: int


class ElasticCache(Closing):
    """The pages of `layout` in `pool`, as many as an engine needs. A context manager.

    Sizes are in bytes, or text. `floor` is what is never released; `ahead` is kept mapped beyond what the engine needs,
    while the broker has memory that nobody waits for; `keep` is the most that cached prefixes may occupy in pages that
    no request uses; `ceiling` is the most that is borrowed (None: the model's limit alone). The blocks in `always` have
    memory from here on, and the engine has them from the beginning: a null block, or blocks for padding.

    While this is open, it answers the recalls of the pool's model, in place of any callback that was set before. A
    callback that is set later can pass them on, to `answer`.

    Raises `InvalidRequest` for a layout of other pages, or bounds that contradict each other; and what
    `VirtualMemoryPool.allocate` and `Model.on_recall` raise.
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
        self._engine: Engine | None = None
        self._want = len(always)
        self._peaks = [0, 0]
        """The most that was wanted since the last look, and between that and the one before."""
        self._look_at = 0.0
        self._fences: dict[int, Fence] = {}
        self._recall: Recall | None = None
        self._tried: object = None
        """The recall for which groups were chosen last."""
        self._owed = 0
        """Bytes that `shrink` asked for and that are not released yet."""
        self._resting: Fence | None = None
        self._looks_left = 0
        self._ahead_at = 0.0
        """When something may be asked ahead of need, after a refusal."""
        self._closed = False
        self._grants = self._refusals = 0
        # Guards the balloon and all of the above. Held for operations on lists alone.
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
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
        self._ask.set()

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
        if retired := self._hold(engine):
            self._retire(retired, engine.fence())

    def rest(self) -> None:
        """Say that the engine has no request, and calls nothing before `wake`. Then the cache shrinks by itself."""
        engine = self._serving()
        self.turn()
        fence = engine.fence()
        with self._turns:
            self._resting, self._looks_left = fence, 3
        self._keep.set()

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
        with self._lock:
            self._want = blocks
            self._peaks[0] = max(self._peaks[0], blocks)
            if not self._asked_back():
                for group in self._balloon.revive(blocks):
                    self._fences.pop(group, None)
            question = self._balloon.next_to_map(blocks)
        if question is not None and (question[1] or time.monotonic() >= self._ahead_at):
            self._ask.set()

    def take(self) -> list[int]:
        """Return the blocks that have become usable since the last time. The engine has them from now on."""
        with self._lock:
            return self._balloon.take()

    def shrink(self, size: int | str) -> None:
        """Release so many bytes soon, as for a recall: free pages first, and busy ones by preemption.

        Nothing is borrowed until that is done, or until nothing more can be released. It is for an engine that is told
        to sleep; what the engine does not need goes without it.
        """
        length = bytes_of("what is to be released", size)
        self._check_open()
        if self._engine is None:
            raise InvalidRequest("this cache has no engine: attach one")
        with self._lock:
            self._owed = length
        self._keep.set()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep the cache's own thread away from the device during a block that captures a CUDA graph.

        Looking at an event from any thread can end a capture. The block begins when the thread has finished what it is
        doing, and recalls wait for its end. Use it beside `Client.defer_recalls`, which does the same for the library.
        """
        with self._driver:
            yield

    # Beginning and end. These wait.

    def prepare(self, blocks: int, wait: float = 60.0) -> bool:
        """Want so many blocks, and wait up to `wait` seconds until they have memory; return whether they do.

        It is for the warm-up of an engine, before it serves.
        """
        seconds = seconds_of("wait", wait)
        self.want(blocks)
        with self._grown:
            self._grown.wait_for(lambda: self._closed or self._balloon.available >= blocks, seconds)
            self._check_open()
            return self._balloon.available >= blocks

    def close(self) -> None:
        """Wait for the device, release all memory, and end. Idempotent. The engine computes no more.

        The pool stays open, with its addresses. Raises `DeviceFailure`; the memory then goes with the pool.
        """
        with self._lock:
            before, self._closed = self._closed, True
            self._grown.notify_all()
        if before:
            return
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
        with self._lock:
            balloon = self._balloon
            return CacheStats(
                balloon.available,
                self._want,
                balloon.charged_bytes,
                balloon.going_bytes,
                self._grants,
                self._refusals,
            )

    def __repr__(self) -> str:
        return f"<membroker.kv.ElasticCache of {self._layout!r}{', closed' * self._closed}>"

    def answer(self, recall: Recall) -> object:
        """Answer a recall of the pool's memory: the callback for `Model.on_recall`, and for one that passes it on."""
        if recall.location != "device":
            return None
        with self._lock:
            if self._closed:
                return None
            self._recall, self._tried = recall, None
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

    # Shrinking: in the scheduler thread, or in ours while the engine rests

    def _asked_back(self) -> int:
        """Return the bytes that must go, what is going already included. The caller holds the lock."""
        recall = self._recall
        return max(self._owed, recall.remaining if recall is not None else 0)

    def _hold(self, engine: Engine) -> list[int]:
        """Choose what goes, and hold its unused blocks; return the groups that now need a fence."""
        now = time.monotonic()
        with self._lock:
            balloon, size = self._balloon, self._asked_back()
            if balloon.is_draining:
                self._hold_unused(engine)
            is_due = now >= self._look_at
            if is_due or size > balloon.going_bytes:
                balloon.choose(max(self._peaks), size, engine.unused, engine.warmth)
                self._hold_unused(engine)
            if size:
                if balloon.is_draining and engine.preempt(balloon.draining_blocks()):
                    self._hold_unused(engine)
                self._tried = self._recall
                if not balloon.going_bytes:
                    self._owed = 0  # there is no more
            if is_due:
                self._look_at = now + LINGER_SECONDS
                self._peaks = [self._want, self._peaks[0]]
            return balloon.retire()

    def _hold_unused(self, engine: Engine) -> None:
        blocks = engine.unused(self._balloon.draining_blocks())
        if blocks:
            engine.hold(list(blocks))
            self._balloon.held(blocks)

    def _retire(self, groups: Collection[int], fence: Fence) -> None:
        """Let our thread release groups once the fence has passed."""
        with self._lock:
            self._fences.update(dict.fromkeys(groups, fence))
        self._keep.set()

    # The thread that asks

    def _ask_loop(self) -> None:
        pause = 0.0
        while not (self._closed or self._pool.closed):
            question = self._next_question()
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
                self._ahead_at = time.monotonic() + LAST_PAUSE
            elif not (isinstance(error, OutOfMemory) and error.waited_seconds):
                pause = min(LAST_PAUSE, max(FIRST_PAUSE, 2 * pause))
                self._room.clear()
                self._room.wait(pause)

    def _next_question(self) -> tuple[int, bool] | None:
        """Return the group to borrow now, and whether it is needed, or None."""
        with self._lock:
            found = None if self._asked_back() else self._balloon.next_to_map(self._want)
            if found is None or not (found[1] or time.monotonic() >= self._ahead_at):
                return None
            self._balloon.asked(found[0])
            return found

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
        with self._lock:
            if refusal is None:
                self._balloon.mapped(group)
                self._grants += 1
            else:
                self._balloon.refused(group)
                self._refusals += 1
            self._grown.notify_all()
        return refusal

    # The thread that releases

    def _release_loop(self) -> None:
        again = 0.0
        while not (self._closed or self._pool.closed):
            self._keep.wait(max(self._patience(), again - time.monotonic()))
            self._keep.clear()
            try:
                self._turn_at_rest()
                if time.monotonic() >= again:
                    self._release_passed()
            except ClosedError:
                return
            except Exception:
                logger.exception("the cache could not release memory: it tries again in a second")
                again = time.monotonic() + LOOK_SECONDS
            self._settle()

    def _patience(self) -> float:
        """Return how many seconds this thread may sleep, unless it is told of something."""
        with self._lock:
            if self._fences:
                return FENCE_SECONDS
            if self._resting is not None and (self._looks_left or self._balloon.is_draining):
                return LINGER_SECONDS
            if self._recall is not None:
                return max(0.0, min(LOOK_SECONDS, self._recall.deadline - ANSWER_SECONDS - time.monotonic()))
            return LOOK_SECONDS

    def _turn_at_rest(self) -> None:
        """Do what `turn` does for an engine that rests."""
        with self._turns:
            engine, fence = self._engine, self._resting
            if engine is None or fence is None:
                return
            self.want(engine.need())
            look_at = self._look_at
            if retired := self._hold(engine):
                self._looks_left = 3
                self._retire(retired, fence)
            elif self._look_at != look_at and self._looks_left:
                self._looks_left -= 1

    def _release_passed(self) -> None:
        """Unmap and release the groups whose fence has passed."""
        with self._lock:
            waiting = list(self._fences.items())
        for group, fence in waiting:
            with self._driver:
                if not fence.query():
                    continue
                with self._lock:
                    if self._fences.get(group) is not fence or self._balloon.state(group) != RETIRING:
                        continue  # the engine has wanted it again
                    self._balloon.leaving(group)
                self._unmap(group, fence)
            self._room.set()
            self._ask.set()

    def _unmap(self, group: int, fence: Fence) -> None:
        try:
            with device_failures():
                self._pool.deallocate_ranges(self._layout.ranges(group), after=fence)
        except BaseException:
            with self._lock:
                self._balloon.failed(group)
            raise
        with self._lock:
            self._balloon.unmapped(group)
            self._fences.pop(group, None)
            self._owed = max(0, self._owed - self._layout.bytes_of(group))

    def _settle(self) -> None:
        """Answer the open recall, if all of it is released, nothing more can be, or its time is nearly over."""
        with self._lock:
            recall = self._recall
            if recall is None:
                return
            is_over = recall.deadline - ANSWER_SECONDS <= time.monotonic()
            has_no_more = self._tried is recall and not self._balloon.going_bytes
            if not (is_over or has_no_more or not recall.remaining or self._engine is None):
                return
            self._recall = None
        recall.done()
        self._room.set()
        self._ask.set()
