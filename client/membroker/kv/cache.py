"""`ElasticCache`: the memory of an engine's KV cache, borrowed and released while the engine serves.

Owns the pages of a pool, and two threads. One borrows (`GroupBorrower`). The other releases what has passed its fence,
answers recalls, and shrinks the cache of an engine that rests (`Releaser`).

The engine's scheduler thread calls `grow` and `turn`. These must never wait for the broker or the driver: what they
share with the threads is in `CacheState`. A borrow that is refused takes up to 20 ms, and a question may wait in the
broker's queue longer than a recall has time: so the scheduler asks nothing itself, and the two threads are two. Pages
are unmapped after a fence that the engine records. A wait for the device would stall the engine for a step, and end a
CUDA graph capture in any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from .. import DEFERRED, Model, Recall, VirtualMemoryPool
from ..errors import ClosedError, InvalidRequest, MembrokerError
from ..ext import Closing, arguments, start_thread
from .balloon import Balloon
from .borrower import GroupBorrower
from .engine import Engine
from .groups import DOOMED, DRAINING, MAPPED, RETIRING
from .layout import Layout
from .pages import PoolPages
from .ranks import Pages, Ranks
from .releaser import Releaser
from .state import CacheState, CacheStats

logger: logging.Logger = logging.getLogger("membroker")

CLOSE_SECONDS: Final = 5.0
"""How long `close` waits for each thread. One that still asks a broker which is away ends later."""


class ElasticCache(Closing):
    """The memory of an engine's KV cache: as many pages of `layout` in `pool` as the engine needs. A context manager.

    With `Ranks` in place of a pool, the cache has the same pages in every rank of an engine. All sizes are then those
    of one rank.

    Sizes are in bytes, or text such as `"8GiB"`. `floor` is never released, and the cache's thread borrows it. `ahead`
    is kept mapped beyond what the engine needs, while no other model waits for memory. `keep` is the most that cached
    prefixes may occupy in pages that no request uses. Block 0, the null block or that for padding, has memory from the
    start, and the engine has it from the start. `timeout` is how long the constructor may wait for that, as in
    `VirtualMemoryPool.allocate`.

    While it is open, the cache answers the recalls of the pool's model, and replaces any callback that was set before.
    A program that has more to release can set its own callback later, and pass recalls on to `answer`. Give each cache
    a model of its own, because the cache releases everything that a recall asks for.

    Raises `InvalidRequest` if the base address or the page size of `layout` is not the pool's, or if the pool keeps
    spare pages or borrows ahead; and what `VirtualMemoryPool.allocate` and `Model.on_recall` raise.
    """

    def __init__(
        self,
        pool: VirtualMemoryPool | Pages,
        layout: Layout,
        *,
        floor: int | str = 0,
        ahead: int | str = 0,
        keep: int | str = "2GiB",
        timeout: float | None = None,
    ) -> None:
        self._pages = pages = PoolPages(pool) if isinstance(pool, VirtualMemoryPool) else pool
        if (layout.base, layout.page_size) != (pages.base_address, pages.page_size):
            raise InvalidRequest(
                f"{layout!r} is not one of this pool: make it with the pool's base_address and page_size"
            )
        self.layout = layout
        """The blocks, and the pages that they lie in."""
        self._balloon = Balloon(
            layout,
            floor=arguments.bytes_of("the floor", floor),
            ahead=arguments.bytes_of("what is kept ahead", ahead),
            keep=arguments.bytes_of("what prefixes may keep", keep),
        )
        self._groups = self._balloon.groups
        self._state = CacheState(self._balloon, has_ranks=isinstance(pool, Ranks))
        self._left: list[tuple[int, int]] = []
        """What a close has still to release. The pool may be used for something else after that."""
        self._first_gone = False
        """Whether block 0 has no memory, because the engine sleeps."""
        pages.allocate_ranges(self._first_ranges(), timeout=timeout)
        for group in self._groups.first:
            self._groups.move(group, "asked")
            self._groups.move(group, "mapped")
        self._borrower = GroupBorrower(pages, layout, self._state, self._borrowed)
        self._releaser = Releaser(pages, layout, self._state, self._borrower)
        self._threads: list[threading.Thread] = []
        try:
            if (model := pages.model) is not None:  # from here on recalls may come
                model.on_recall(self.answer)
            for name, loop in (("ask", self._borrower.run), ("release", self._releaser.run)):
                self._threads.append(start_thread(loop, f"membroker-kv-{name}"))
        except BaseException:
            self.close()
            raise

    # What the engine calls. None of these waits for the broker or the device.

    def attach(self, engine: Engine) -> None:
        """Begin to serve `engine`: hold all blocks but block 0, and release those that have memory.

        Call it once, in the scheduler thread, after the engine has warmed up and captured its graphs. Nothing is
        released before this call, because a release needs the engine's fences. Raises `ClosedError`, `InvalidRequest`
        for a second engine, and what `engine.hold` raises.
        """
        self._check_open()
        if self._releaser.engine is not None:
            raise InvalidRequest("this cache has an engine already")
        engine.hold([block for block in range(self.layout.blocks) if not self._groups.is_out(block)])
        self._releaser.engine = engine
        self.turn()

    def grow(self) -> int:
        """Ask for what the engine needs, give it the blocks that became usable, and return their number.

        It may be called at any point where the engine can take blocks, such as before it admits a request.
        """
        return self._grow(self._serving())

    def _grow(self, engine: Engine) -> int:
        self.want(engine.need())
        if blocks := self.take():
            engine.release(blocks)
        return len(blocks)

    def turn(self, *, is_idle: bool = False) -> None:
        """Do what `grow` does, then hold blocks to release and record a fence. Call it at the end of each step.

        Do not call it while the engine is about to use a block that `Engine.unused` still returns, such as a block of a
        prefix that was found and is not referenced yet.

        With `is_idle` the engine rests, and may sleep: it has no request, and computes nothing before a turn without
        it. It is for an engine whose loop goes on without requests, so that no other thread may make its turns.
        """
        engine = self._check_attached() if is_idle else self._serving()
        self._grow(engine)
        if self._state.hold(engine):
            self._state.retire(engine.fence())
            self._releaser.look()
        if is_idle and not self.is_resting:
            self._releaser.rest(engine.fence(), makes_turns=False)

    @property
    def is_asked_back(self) -> bool:
        """Whether others want memory back. A `turn` before the next step is scheduled then saves the time of a step."""
        return self._state.is_asked_back

    @property
    def is_short(self) -> bool:
        """Whether the engine has to do with the memory that it has. Then it had better admit no request that would
        leave none to those that run."""
        return self._state.is_short

    def rest(self) -> None:
        """Tell the cache that the engine is idle and calls nothing before `wake`. The cache then shrinks by itself."""
        engine = self._serving()
        self.turn()
        self._releaser.rest(engine.fence(), makes_turns=True)

    @property
    def is_resting(self) -> bool:
        """Whether the engine is idle: from `rest`, or a `turn` that says so, to `wake`, `grow` or another `turn`."""
        return self._releaser.is_resting

    def wake(self) -> None:
        """End a rest, before the engine uses its free list. `grow` and `turn` do so too."""
        self._releaser.wake()

    def want(self, blocks: int) -> None:
        """Set how many blocks the engine wants in all. A thread of the cache borrows the missing ones.

        `grow` calls this. Call it yourself only in a program that has no `Engine`.
        """
        blocks = min(arguments.whole_number("a number of blocks", blocks), self.layout.blocks)
        self._check_open()
        self._borrower.want(blocks)

    def take(self) -> list[int]:
        """Return the blocks that have become usable since the last call. They belong to the engine from now on.

        Raises `ClosedError`.
        """
        self._check_open()
        return self._state.take()

    # Sleep. `Sleeper` calls these.

    def suspend(self) -> None:
        """Begin to release all but the floor, and give the engine no block before `resume`. The engine rests.

        It returns at once. Requests that arrive in the meantime find no free block, and wait. Raises `ClosedError`, and
        `InvalidRequest` before `attach`.
        """
        self._check_attached()
        self._state.suspend()
        self._releaser.look()

    @property
    def is_empty(self) -> bool:
        """Whether a suspended cache has released all that it can, and the engine has no free block."""
        return self._state.is_empty

    def release_first(self) -> None:
        """Release the memory of block 0, too, unless there is a floor. Call it when `is_empty` is True.

        It waits until the engine's last step is over on every device. The engine must compute nothing before `resume`.
        Raises what `VirtualMemoryPool.free` raises.
        """
        self._releaser.wait_for_rest()
        if not self._balloon.floor:
            self._first_gone = True  # also if the driver fails half way
            self._pages.free_ranges(self._first_ranges())

    def resume(self, timeout: float | None = None) -> None:
        """Borrow again what `release_first` released, and let the engine have blocks again.

        `timeout` is that of `VirtualMemoryPool.allocate`. Raises what `VirtualMemoryPool.allocate` raises; the cache
        then stays suspended.
        """
        self._check_open()
        if self._first_gone:
            self._pages.allocate_ranges(self._first_ranges(), timeout=timeout)
            self._first_gone = False
        self._state.resume()
        self._borrower.retry()
        self._releaser.look()

    def end_growing(self) -> None:
        """End the waits of an engine that cannot wake: no more blocks come."""
        self._state.end_growing()

    @property
    def model(self) -> Model | Ranks | None:
        """What answers the broker and its operator: the pool's model, or None without a broker."""
        return self._pages.model

    def _first_ranges(self) -> list[tuple[int, int]]:
        return [span for group in self._groups.first for span in self.layout.ranges(group)]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep the thread that releases memory away from the device during a block that captures a CUDA graph.

        A query of a CUDA event from any thread can end a capture. The block begins when the thread has finished its
        current work, and no page is released before the end of the block. Use it together with `Client.defer_recalls`,
        which holds up the other threads of the library.
        """
        with self._releaser.driver:
            yield

    # These wait.

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until more blocks have become usable. Return whether `grow` would return any.

        It is for an engine that has requests and can run none of them without more memory. Raises `ClosedError` if the
        cache is closed, also during the wait, and if no more blocks can come because the broker has forgotten the
        session.
        """
        self._check_open()
        return self._state.wait_for_ready(arguments.seconds_of("seconds", seconds))

    def prepare(self, blocks: int, timeout: float = 60.0) -> bool:
        """Want `blocks` blocks in all, wait up to `timeout` seconds for their memory, and return whether they have it.

        It is for the warm-up of an engine, before it serves. Raises `ClosedError` if the cache is closed, also during
        the wait.
        """
        seconds = arguments.seconds_of("timeout", timeout)
        self.want(blocks)
        has_come = self._state.wait_for(blocks, seconds)
        self._check_open()
        return has_come

    def close(self) -> None:
        """Wait for the device, release all memory, and end. Idempotent. The engine must compute nothing afterwards.

        The pool stays open and keeps its addresses. Raises `BufferError` while a view of the memory is alive, and
        `DeviceFailure`. After such an error the memory stays until `close` succeeds or the pool is closed.
        """
        if not self._state.is_closed:
            self._end()
        if self._left and not self._pages.closed:
            self._pages.free_ranges(self._left)
        self._left = []

    def _end(self) -> None:
        self._state.is_closed = True
        self._state.end_growing()  # the thread that asks may still wait for an answer
        self._borrower.retry()
        self._releaser.look()
        model = self._pages.model
        if model is not None and model.recall_callback == self.answer:  # and no callback that was set later
            try:
                model.on_recall(None)
            except MembrokerError as error:
                logger.info("could not tell the broker that this cache answers no more recalls: %s", error)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        groups = [group for state in (MAPPED, DRAINING, RETIRING, DOOMED) for group in self._groups.groups_in(state)]
        self._left = [span for group in groups for span in self.layout.ranges(group)]

    def stats(self) -> CacheStats:
        """Return the present figures. Raises `ClosedError`."""
        self._check_open()
        found = self._state.stats()
        if self._first_gone:
            gone = sum(map(self.layout.bytes_of, self._groups.first))
            found = replace(found, charged_bytes=found.charged_bytes - gone)
        return found

    def __repr__(self) -> str:
        return f"<membroker.kv.ElasticCache of {self.layout!r}{', closed' * self._state.is_closed}>"

    def answer(self, recall: Recall) -> object:
        """Answer a recall of the pool's memory: the callback for `Model.on_recall`, which other callbacks may call."""
        if recall.location != "device" or self._state.is_closed or not self._state.recalled(recall):
            return None
        self._releaser.look()
        return DEFERRED

    def _check_open(self) -> None:
        if self._state.is_closed or self._pages.closed:
            raise ClosedError("this cache, or its pool, is closed")

    def _check_attached(self) -> Engine:
        self._check_open()
        if self._releaser.engine is None:
            raise InvalidRequest("this cache has no engine: attach one")
        return self._releaser.engine

    def _serving(self) -> Engine:
        engine = self._check_attached()
        self.wake()
        return engine

    def _borrowed(self) -> None:
        if self._state.is_suspended:
            self._releaser.look()  # it is to go at once
