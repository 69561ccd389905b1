"""`Rank`: one process of an engine with tensor parallelism. The process that schedules decides what memory it has.

Owns the threads that do what `Ranks` asks, and passes on what the rank's broker asks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from hmac import compare_digest, digest
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Final

from .. import DEFERRED, Recall, VirtualMemoryPool
from ..errors import ClosedError, InvalidRequest, ThreadLimit
from ..ext import start_thread
from ..types import SleepRequest, SleepStatus
from .lines import Line, answer
from .pages import PoolPages

CONNECTIONS: Final = 3
"""Of a rank: one for questions, which may wait in a broker's queue, one for what is never to wait for those, and one
for the rank's own questions, in the other direction."""
NO_ENGINE: Final = "its engine does not serve yet, or has ended"
_AGAIN_SECONDS: Final = 0.005
"""How often it is asked whether the engine is awake."""


class Rank:
    """Lets the process that schedules decide what memory `pool` has. Pass `address` to the `Ranks` of that process.

    `passed` returns the last step whose fence has passed on this rank's device. `weights` and `also` are those of
    `Sleeper`, for this rank. Threads serve one `Ranks`, until it is closed or this process ends. Nothing else may
    allocate in the pool, or answer the recalls of its model or an operator.
    """

    def __init__(
        self,
        pool: VirtualMemoryPool,
        passed: Callable[[], int],
        *,
        weights: VirtualMemoryPool | None = None,
        also: Callable[[], object] | None = None,
    ) -> None:
        self._pages, self._also = PoolPages(pool), also
        if self._pages.model is None:
            raise InvalidRequest("the pool of a rank is one of a model")
        self._model = self._pages.model
        self._calls: dict[str, Callable[..., object]] = {
            "allocate": self._pages.allocate_ranges,
            "release": self._release,
            "passed": passed,
            "on_recall": lambda is_wanted: self._model.on_recall(self._forward if is_wanted else None),
            "answer": self._answered,
            "name": lambda: self._model.resource_name,
            "on_sleep": lambda is_wanted: self._model.on_sleep(self._pass_on if is_wanted else None),
            "also": self._release_more,
            "weights": lambda: None if weights is None else weights.stats(),
        }
        if weights is not None:
            self._calls |= {"offload": weights.offload, "restore": weights.restore}
        self._recall: tuple[int, Recall | None] = (0, None)
        """The last one, and its number. They change together: another thread reads them."""
        self._scheduler: Line | None = None
        # A directory of our own: `multiprocessing` keeps its own until the process ends, and after a SIGKILL forever.
        directory = TemporaryDirectory(prefix="membroker-kv-")
        self.address: str = f"{directory.name}/rank.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(CONNECTIONS)
        try:
            start_thread(self._accept, "membroker-kv-rank", directory, listener)
        except ThreadLimit:
            listener.close()
            directory.cleanup()
            raise

    def awake(self) -> AbstractContextManager[None]:
        """Wake the engine, wait until it is awake, and keep it awake during the block, as `Sleeper.awake` does.

        Raises `ClosedError`.
        """
        return nullcontext() if self._scheduler is None else awake(partial(self._scheduler, "use"))

    def _accept(self, directory: TemporaryDirectory[str], listener: socket.socket) -> None:
        with directory, listener:
            asking, telling, hearing = _accept_scheduler(listener)
        self._scheduler = Line(hearing)
        start_thread(self._serve, "membroker-kv-rank-ask", asking)
        self._serve(telling)
        self._scheduler.close()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while answer(connection, self._calls):
                pass

    # What the scheduler asks

    def _release(self, ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Release, and return the number of the last recall and what remains of it."""
        self._pages.free_ranges(ranges, is_over=True)  # the process that schedules has asked the fence
        number, recall = self._recall
        return number, 0 if recall is None else recall.remaining

    def _answered(self, number: int) -> None:
        last, recall = self._recall
        if number == last and recall is not None:
            recall.done()

    def _release_more(self) -> None:
        if self._also is not None:
            self._also()

    # What the broker asks

    def _forward(self, recall: Recall) -> object:
        if recall.location != "device" or self._scheduler is None:
            return None
        number = self._recall[0] + 1
        self._recall = number, recall
        with suppress(ClosedError):
            if self._scheduler("recall", number, recall.remaining, recall.deadline, recall.is_guaranteed):
                return DEFERRED
        return None

    def _pass_on(self, request: SleepRequest) -> SleepStatus:
        with suppress(ClosedError):
            if self._scheduler is not None:
                status: SleepStatus = self._scheduler("sleep", request)
                return status
        return SleepStatus("unsupported", detail=NO_ENGINE)


@contextmanager
def awake(keep_awake: Callable[[int], bool]) -> Iterator[None]:
    """Keep an engine awake during a block, by the `keep_awake` of its `Sleeper`, and begin it when it is awake."""
    is_awake = keep_awake(1)
    try:
        while not is_awake:
            time.sleep(_AGAIN_SECONDS)
            is_awake = keep_awake(0)
        yield
    finally:
        with suppress(ClosedError):  # the engine has ended meanwhile: what the block has done, it has done
            keep_awake(-1)


def connect(address: str, number: int) -> Connection:
    """Return the connection of this number to the rank at `address`. Raises `OSError`."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        line.sendall(bytes([number]) + _proof(address))
        return Connection(line.detach())


def _accept_scheduler(listener: socket.socket) -> list[Connection]:
    """Return the connections of the process that has the engine's key, in their order. Others are hung up on.

    Each says its number and the proof in one piece. One that says nothing, or half of it, holds up no other.
    """
    proof = _proof(listener.getsockname())
    silent: list[socket.socket] = []
    found: dict[int, Connection] = {}
    while len(found) < CONNECTIONS:
        for ready in wait([listener, *silent]):
            with suppress(ConnectionError):
                if ready is listener:
                    silent.append(listener.accept()[0])
                    continue
                assert isinstance(ready, socket.socket)
                silent.remove(ready)
                with ready:
                    said = ready.recv(1 + len(proof))
                    if compare_digest(said[1:], proof) and said[0] < CONNECTIONS and said[0] not in found:
                        found[said[0]] = Connection(ready.detach())
    for stranger in silent:
        stranger.close()
    return [found[number] for number in range(CONNECTIONS)]


def _proof(address: str) -> bytes:
    """Return what only a process of the engine can say to the rank at `address`."""
    return digest(bytes(current_process().authkey), address.encode(), "sha256")
