"""`Ranks`: the pools of several processes as one, for an engine whose cache lies in all of them (tensor parallelism).

Owns the connections between the process that schedules and its ranks, on one machine. The scheduler's `ElasticCache`
borrows from a `Ranks` as from a pool of its own: what it allocates has memory in every rank, or in none. Its `Sleeper`
puts all ranks to sleep, whichever rank's broker an operator has asked. Each rank may have another GPU and another
broker. The processes of one engine trust each other: they know each other by the key that `multiprocessing` passes to
child processes, and by a directory of the user's own.

The ranks are asked one after the other: two engines that want the last pages of the same brokers would otherwise get
one page each, and both give up. They are asked over connections of their own, not in the engine's metadata of a step:
so memory comes between steps, and an idle engine answers recalls without stepping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, Final

from .. import DEFERRED
from ..errors import ClosedError, MembrokerError
from ..ext import Closing, arguments, start_thread
from ..types import MemoryStats, SleepRequest, SleepStatus
from .lines import Line, answer, hang_up
from .pages import PoolPages, Range
from .rank import CONNECTIONS, NO_ENGINE, connect

_AGAIN_SECONDS: Final = 0.005
"""How often the ranks are asked which steps are over."""
_UNDO_SECONDS: Final = 1.0
"""How long a rank waits for memory that it has just released, because another rank could not."""


class Ranks(Closing):
    """The pools of the `Rank`s at `addresses`, with pages of `page_size` bytes: the `Pages` of an `ElasticCache`.

    They are also the model that its brokers and operators ask. Offsets count from the beginning of each pool, and the
    base address is 0. Every call raises `ClosedError` when a rank has ended.
    """

    base_address: Final = 0

    def __init__(self, addresses: Sequence[str], page_size: int) -> None:
        self.page_size = page_size
        self.recall_callback: Callable[[Any], object] | None = None
        """What is called with each recall."""
        self.sleep_callback: Callable[[SleepRequest], SleepStatus] | None = None
        """What is called with each question of an operator."""
        self.closed: bool = False
        self._keep_awake: Callable[[int], bool] | None = None
        self._users = 0
        """How many blocks of `Rank.awake` run in all ranks."""
        self._using = threading.Lock()
        self._asked_at = 0.0
        self._passed = -1
        with ExitStack() as undo:
            self._ranks = [undo.enter_context(_RankLink(address)) for address in addresses]
            self.resource_name: str = self._ranks[0].tell("name")
            self.weights: RankWeights | None = RankWeights(self._ranks) if self._ranks[0].tell("weights") else None
            """The weights of all ranks, if these are in pools of theirs."""
            self._hearing = start_thread(self._hear, "membroker-kv-recalls")
            self._undo = undo.pop_all()

    def allocate_ranges(
        self, ranges: Sequence[Range], *, timeout: float | None = None, ahead: bool = False, wanted_bytes: int = 0
    ) -> None:
        """Back the ranges in every rank, or in none, as `VirtualMemoryPool.allocate_ranges` does in one.

        The ranks are asked in their order. Raises the error of the first rank that is refused.
        """
        until = None if timeout is None else time.monotonic() + arguments.seconds_of("timeout", timeout)
        with ExitStack() as undo:
            for rank in self._ranks:
                left = None if until is None else max(0.0, until - time.monotonic())
                rank.ask("allocate", ranges, timeout=left, ahead=ahead, wanted_bytes=wanted_bytes)
                undo.callback(rank.release, ranges)
            undo.pop_all()

    def free_ranges(self, ranges: Sequence[Range], *, is_over: bool = False) -> None:
        """Release the ranges in every rank. No rank waits for its device: its work is over, or the engine ends.

        Raises the error of the first rank that has ended. The others have released them.
        """
        _in_all(self._ranks, lambda rank: rank.release(ranges))

    @property
    def model(self) -> Ranks:
        """The models of all ranks as one."""
        return self

    def passed(self) -> int:
        """Return the last step whose fence has passed in every rank, as of a few milliseconds ago."""
        now = time.monotonic()
        if now >= self._asked_at + _AGAIN_SECONDS:
            self._asked_at = now
            self._passed = min(rank.tell("passed") for rank in self._ranks)
        return self._passed

    def on_recall(self, callback: Callable[[Any], object] | None) -> None:
        """Call `callback` with each recall of device memory by any rank's broker, as `Model.on_recall` does."""
        self.recall_callback = callback
        _in_all(self._ranks, lambda rank: rank.tell("on_recall", callback is not None))

    def on_sleep(self, callback: Callable[[SleepRequest], SleepStatus] | None) -> None:
        """Call `callback` with each question to any rank about its sleep, as `Model.on_sleep` does."""
        self.sleep_callback = callback
        _in_all(self._ranks, lambda rank: rank.tell("on_sleep", callback is not None))

    def on_use(self, callback: Callable[[int], bool]) -> None:
        """Call `callback`, `Sleeper.keep_awake`, for each block of `Rank.awake`, and now for all that run."""
        with self._using:
            self._keep_awake = callback
            callback(self._users)

    def also(self) -> None:
        """Call in every rank what it was given as `also`."""
        _ask_all(self._ranks, "also")

    def close(self) -> None:
        """End the connections, also while a thread waits for a rank. The ranks keep what is allocated."""
        self.closed = True
        for rank in self._ranks:
            for connection in rank.connections:
                hang_up(connection)
        self._hearing.join()
        self._undo.close()

    # What the ranks ask

    def _hear(self) -> None:
        asked: dict[Connection, dict[str, Callable[..., object]]] = {
            rank.heard: {"recall": partial(self._recalled, rank), "sleep": self._slept, "use": self._used}
            for rank in self._ranks
        }
        while asked:
            for ready in wait(list(asked)):
                assert isinstance(ready, Connection)
                if self.closed or not answer(ready, asked[ready]):
                    del asked[ready]

    def _recalled(self, rank: _RankLink, number: int, remaining: int, deadline: float, is_guaranteed: bool) -> bool:
        rank.recall = RankRecall(rank, number, remaining, deadline, is_guaranteed)
        return self.recall_callback is not None and self.recall_callback(rank.recall) is DEFERRED

    def _slept(self, request: SleepRequest) -> SleepStatus:
        callback = self.sleep_callback
        return SleepStatus("unsupported", detail=NO_ENGINE) if callback is None else callback(request)

    def _used(self, more: int) -> bool:
        with self._using:
            is_awake = self._keep_awake is None or self._keep_awake(more)
            self._users += more
            return is_awake


Pages = PoolPages | Ranks
"""Where an `ElasticCache` has its memory: in one pool, or in the pools of all ranks."""


class RankWeights:
    """The weights of all ranks, with the methods of a pool that a `Sleeper` calls."""

    def __init__(self, ranks: Sequence[_RankLink]) -> None:
        self._ranks = ranks

    def offload(self, *, progress: Callable[[int, int], object]) -> None:
        """Copy the weights of every rank to its host, or of none, as `VirtualMemoryPool.offload` does.

        `progress` can stop it before it has begun.
        """
        progress(0, 0)
        try:
            _ask_all(self._ranks, "offload")
        except MembrokerError:
            with suppress(MembrokerError):  # others have it already: then it comes back when the engine wakes
                self.restore(timeout=_UNDO_SECONDS, keep_pinned=False)
            raise

    def restore(self, *, timeout: float | None, keep_pinned: bool) -> None:
        """Copy back what is on the host, in all ranks at the same time, as `VirtualMemoryPool.restore` does.

        Raises what the first rank raises that is refused. The others keep what they have, and the next call goes on.
        """
        _ask_all(self._ranks, "restore", timeout=timeout, keep_pinned=keep_pinned)

    def stats(self) -> MemoryStats:
        """Return the figures of the rank that has the most on the host."""
        found: list[MemoryStats] = [rank.tell("weights") for rank in self._ranks]
        return max(found, key=lambda state: state.offloaded_bytes)


@dataclass(eq=False)
class RankRecall:
    """A recall by the broker of one rank, as `membroker.Recall` in that rank."""

    model: _RankLink
    number: int
    remaining: int
    deadline: float
    """By `time.monotonic`, which is one clock for all processes of a machine."""
    is_guaranteed: bool
    location: ClassVar[str] = "device"

    def done(self) -> None:
        """Answer it."""
        with suppress(ClosedError):  # the rank has ended, and its memory with it
            self.model.tell("answer", self.number)


class _RankLink(Closing):
    """The scheduler's side of the connections to one rank."""

    tell: Line
    ask: Line
    heard: Connection

    def __init__(self, address: str) -> None:
        with ExitStack() as undo:
            try:
                self.connections = [undo.enter_context(connect(address, number)) for number in range(CONNECTIONS)]
            except OSError as error:
                raise ClosedError(f"a rank of this engine has ended, or another `Ranks` has it: {error!r}") from error
            undo.pop_all()
        asking, telling, self.heard = self.connections
        self.ask, self.tell = Line(asking), Line(telling)
        self.recall: RankRecall | None = None

    def release(self, ranges: Sequence[Range]) -> None:
        number, remaining = self.tell("release", ranges)
        recall = self.recall
        if recall is not None and recall.number == number:  # else another one has come since
            recall.remaining = remaining

    def close(self) -> None:
        self.ask.close()
        self.tell.close()
        self.heard.close()


def _ask_all(ranks: Sequence[_RankLink], name: str, **options: object) -> None:
    """Ask all ranks at the same time, and wait until all have answered. Raises the first error."""
    for rank in ranks:
        rank.ask.begin(name, **options)
    _in_all(ranks, lambda rank: rank.ask.end())


def _in_all(ranks: Sequence[_RankLink], call: Callable[[_RankLink], object]) -> None:
    """Call it for each rank, also after one that has ended or refuses. Raises the first error."""
    errors: list[MembrokerError] = []
    for rank in ranks:
        try:
            call(rank)
        except MembrokerError as error:
            errors.append(error)
    if errors:
        raise errors[0]
