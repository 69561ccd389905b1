"""What one worker process does, over and over: the calls that are timed, and what is held open meanwhile.

A job is made inside its process. It must never start a process, and never look at the broker but as a client does.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

import membroker
from membroker.errors import OutOfMemory, TooMany
from membroker.v1.broker_pb2 import ReleaseExtentsRequest
from membroker.v1.handoff_pb2 import Frame
from membroker.wire import frames as handoff
from membroker.wire.names import MAX_IDS_PER_FRAME

from ..harness.daemon import TWIN_BYTES, connect
from ..harness.jobs import Job
from .bare import EXTENT
from .wire import RawSession

MODEL = "bench"
FAR_TOO_MUCH = 1 << 44
PAGE = 1 << 30
"""The page of a job that borrows all there is."""
ASKED = TWIN_BYTES // 8
"""Recalls ask for no more than an eighth ahead of need, so each request of it finds no room."""
PAUSE_SECONDS = 0.02
UNKNOWN_ID, POLL_MS = 1 << 60, 100


class LibraryJob(Job):
    """What a client of the library does with a model."""

    def __init__(
        self, endpoint: Path, transport: str = "handoff", model: str = MODEL, **calls: Callable[[], object]
    ) -> None:
        super().__init__(**calls)
        self._client = connect(endpoint, transport)
        self._model = self._client.model(model)

    def close(self) -> None:
        self._client.close()


class LibraryWorker(LibraryJob):
    """What an honest worker does: borrow one extent of 2 MiB, mapped, and give it back."""

    warm_up = 200

    def __init__(self, endpoint: Path, transport: str = "handoff") -> None:
        super().__init__(endpoint, transport, allocate=self._allocate, close=self._close)

    def _allocate(self) -> None:
        self._buffer = self._model.allocate(EXTENT)

    def _close(self) -> None:
        self._buffer.close()


class Neighbour(LibraryWorker):
    """A worker that borrows and releases a hundred times a second, and works meanwhile."""

    def prepare(self) -> None:
        time.sleep(0.01)


class RefusedWorker(LibraryJob):
    """Asks for more than there is, without a wait."""

    warm_up = 200

    def __init__(self, endpoint: Path) -> None:
        super().__init__(endpoint, ask=self._ask)

    def _ask(self) -> None:
        with suppress(OutOfMemory):
            self._model.allocate(FAR_TOO_MUCH, timeout=0).close()


class Borrower(LibraryJob):
    """Borrows all it can get, and answers recalls: after a while, or at once and with pages that nobody uses."""

    def __init__(self, endpoint: Path, model: str, answer_seconds: float | None) -> None:
        super().__init__(endpoint, model=model, borrow=self._borrow)
        self._pool = self._model.pool(virtual_capacity=TWIN_BYTES, page_size=PAGE)
        self._answer_seconds = answer_seconds
        self._growing = Lock()
        self._model.on_recall(self._answer)

    def prepare(self) -> None:
        time.sleep(PAUSE_SECONDS)

    def _answer(self, recall: membroker.Recall) -> None:
        time.sleep(self._answer_seconds or 0)
        with self._growing:
            if self._answer_seconds is None:  # it came while pages were prepared
                self._pool.trim()
            else:
                self._pool.shrink(recall.remaining)

    def _borrow(self) -> None:
        with suppress(OutOfMemory):
            while True:
                with self._growing:
                    if self._answer_seconds is None:
                        self._pool.prepare(self._pool.physical_usage_bytes + PAGE, timeout=0)
                    else:
                        self._pool.grow(PAGE, timeout=0)


class Claimant(LibraryJob):
    """Waits until others have borrowed all memory, and then asks for some that it is entitled to, up to its half."""

    def __init__(self, endpoint: Path) -> None:
        super().__init__(endpoint, wait=self._wait)
        self._held: list[membroker.Buffer] = []

    def prepare(self) -> None:
        if len(self._held) * ASKED >= TWIN_BYTES // 2:
            while self._held:
                self._held.pop().close()
            while self._model.stats().books["device"].used_bytes:  # the release is on its way
                time.sleep(PAUSE_SECONDS)
        while self._client.device().locations["device"].free_bytes >= ASKED:
            time.sleep(PAUSE_SECONDS)

    def _wait(self) -> None:
        self._held.append(self._model.allocate(ASKED, timeout=10))


class RawJob(Job):
    """What a raw session does with a model."""

    def __init__(self, endpoint: Path, **calls: Callable[[], object]) -> None:
        super().__init__(**calls)
        self._session = RawSession(endpoint)
        self._model = self._session.register(MODEL)
        self._ids: list[int] = []

    def close(self) -> None:
        self._session.close()


class RawWorker(RawJob):
    """The round trips of an honest worker without the library: nothing is mapped, and the release is waited for."""

    warm_up = 200

    def __init__(self, endpoint: Path) -> None:
        super().__init__(endpoint, allocate=self._allocate, release=self._release)

    def _allocate(self) -> None:
        self._ids = self._session.allocate(self._model)

    def _release(self) -> None:
        self._session.release(self._ids)


class Filler(RawJob):
    """Fills the books the first time, and gives everything back the second."""

    def __init__(self, endpoint: Path, extents: int) -> None:
        super().__init__(endpoint, turn=self._turn)
        self._extents = extents

    def _turn(self) -> None:
        if self._ids:
            self._session.release(self._ids)
            self._ids = []
        else:
            self._ids = self._session.allocate(self._model, self._extents)


class Idle(Job):
    """Sessions that are open and do nothing, as many as the broker has room for; the first one has models."""

    def __init__(self, endpoint: Path, sessions: int, models: int = 0, **calls: Callable[[], object]) -> None:
        super().__init__(**calls)
        self._sessions: list[RawSession] = []
        with suppress(TooMany):
            for _ in range(sessions):
                self._sessions.append(RawSession(endpoint))
        for number in range(models):
            self._sessions[0].register(f"model-{number:04}")

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class Flooder(Idle):
    """Sessions that send what the broker may be sent, and takes longest for a frame: releases of 4,096 unknown ids."""

    def __init__(self, endpoint: Path, sessions: int) -> None:
        super().__init__(endpoint, sessions, flood=self._flood)
        unknown = ReleaseExtentsRequest(extent_ids=range(UNKNOWN_ID, UNKNOWN_ID + MAX_IDS_PER_FRAME))
        self._frame = handoff.encode(Frame(request_id=1, release=unknown))
        self._poll = select.poll()
        self._by_descriptor = {session.fileno(): session for session in self._sessions}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN | select.POLLOUT)

    def _flood(self) -> None:
        for descriptor, _ in self._poll.poll(POLL_MS):
            self._by_descriptor[descriptor].flood(self._frame)
