"""What one worker process does, over and over: the calls that are timed, and what is held open meanwhile.

A job is made inside its process and times its own parts, in nanoseconds of the monotonic clock. It must never start a
process, and never look at the broker but as a client does.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import monotonic_ns

import grpc

import membroker
from membroker.errors import OutOfMemory, TooMany

from .bare import EXTENT, METHOD, pin
from .wire import RawSession

MODEL = "bench"
FAR_TOO_MUCH = 1 << 44
CAPACITY = 1 << 38
"""Of each daemon."""
PAGE = 1 << 30
"""The page of a job that borrows all there is."""
ASKED = CAPACITY // 8
"""Recalls ask for no more than an eighth ahead of need, so each request of it finds no room."""
PAUSE_SECONDS = 0.02


class Job:
    """One piece of work. It may name its `parts`, and is done `warm_up` times before anything is measured."""

    parts: tuple[str, ...] = ()
    warm_up = 0

    def once(self) -> tuple[int, ...]:
        """Do it once, and return the moments at which its parts began, and the last one ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""
        raise NotImplementedError


class PacketEcho(Job):
    """The bare equivalent of the handoff: a packet and its answer, with a descriptor when the server lends."""

    warm_up = 200

    def __init__(self, path: Path, size: int, lends: bool, core: int | None) -> None:
        pin(core)
        self._payload = bytes(size)
        self._lends = lends
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(os.fspath(path))

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        self._socket.send(self._payload)
        if self._lends:
            _, (descriptor,), _, _ = socket.recv_fds(self._socket, 65_536, 1)
            os.close(descriptor)
        else:
            self._socket.recv(65_536)
        return begun, monotonic_ns()

    def close(self) -> None:
        self._socket.close()


class GrpcEcho(Job):
    """The bare equivalent of a gRPC call: a message of plain bytes there and back."""

    warm_up = 200

    def __init__(self, path: Path, size: int) -> None:
        self._payload = bytes(size)
        self._channel = grpc.insecure_channel(f"unix:{path}")
        self._call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(METHOD)

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        self._call(self._payload, wait_for_ready=True)
        return begun, monotonic_ns()

    def close(self) -> None:
        self._channel.close()


class LibraryJob(Job):
    """What a client of the library does with a model."""

    def __init__(self, endpoint: Path, transport: str = "handoff", model: str = MODEL) -> None:
        self._client = membroker.connect(endpoint, transport=transport, client="benchmarks", timeout=60)
        self._model = self._client.register_model(model)

    def close(self) -> None:
        self._client.close()


class LibraryWorker(LibraryJob):
    """What an honest worker does: borrow one extent of 2 MiB, mapped, and give it back."""

    parts = ("allocate", "close")
    warm_up = 200

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        buffer = self._model.allocate(EXTENT)
        held = monotonic_ns()
        buffer.close()
        return begun, held, monotonic_ns()


class Neighbour(LibraryWorker):
    """A worker that borrows and releases a hundred times a second, and works meanwhile."""

    def once(self) -> tuple[int, ...]:
        time.sleep(0.01)
        return super().once()


class RefusedWorker(LibraryWorker):
    """Asks for more than there is, without a wait."""

    parts = ()

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        with suppress(OutOfMemory):
            self._model.allocate(FAR_TOO_MUCH, wait=0).close()
        return begun, monotonic_ns()


class Borrower(LibraryJob):
    """Borrows all it can get, and answers recalls: after a while, or at once and with pages that nobody uses."""

    def __init__(self, endpoint: Path, model: str, answer_seconds: float | None) -> None:
        super().__init__(endpoint, model=model)
        self._pool = self._model.pool(virtual_capacity=CAPACITY, page_size=PAGE)
        self._answer_seconds = answer_seconds
        self._growing = Lock()
        self._model.on_recall(self._answer)

    def _answer(self, recall: membroker.Recall) -> None:
        time.sleep(self._answer_seconds or 0)
        with self._growing:
            if self._answer_seconds is None:  # it came while pages were prepared
                self._pool.trim()
            else:
                self._pool.shrink(recall.remaining)

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        with suppress(OutOfMemory):
            while True:
                with self._growing:
                    if self._answer_seconds is None:
                        self._pool.prepare(self._pool.physical_usage_bytes + PAGE, wait=0)
                    else:
                        self._pool.grow(PAGE, wait=0)
        time.sleep(PAUSE_SECONDS)
        return begun, monotonic_ns()


class Claimant(LibraryJob):
    """Waits until others have borrowed all memory, and then asks for some that it is entitled to, up to its half."""

    parts = ("wait",)

    def __init__(self, endpoint: Path) -> None:
        super().__init__(endpoint)
        self._held: list[membroker.Buffer] = []

    def once(self) -> tuple[int, ...]:
        if len(self._held) * ASKED >= CAPACITY // 2:
            while self._held:
                self._held.pop().close()
            while self._model.stats().books["device"].used_bytes:  # the release is on its way
                time.sleep(PAUSE_SECONDS)
        while self._client.device().locations["device"].free_bytes >= ASKED:
            time.sleep(PAUSE_SECONDS)
        begun = monotonic_ns()
        self._held.append(self._model.allocate(ASKED, wait=10))
        return begun, monotonic_ns()


class RawJob(Job):
    """What a raw session does with a model."""

    def __init__(self, endpoint: Path) -> None:
        self._session = RawSession(endpoint)
        self._model = self._session.register(MODEL)

    def close(self) -> None:
        self._session.close()


class RawWorker(RawJob):
    """The round trips of an honest worker without the library: nothing is mapped, and the release is waited for."""

    parts = ("allocate", "release")
    warm_up = 200

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        ids = self._session.allocate(self._model)
        held = monotonic_ns()
        self._session.release(ids)
        return begun, held, monotonic_ns()


class Filler(RawJob):
    """Fills the books the first time, and gives everything back the second."""

    def __init__(self, endpoint: Path, extents: int) -> None:
        super().__init__(endpoint)
        self._extents = extents
        self._ids: list[int] = []

    def once(self) -> tuple[int, ...]:
        begun = monotonic_ns()
        if self._ids:
            self._session.release(self._ids)
            self._ids = []
        else:
            self._ids = self._session.allocate(self._model, self._extents)
        return begun, monotonic_ns()


class Idle(Job):
    """Sessions that are open and do nothing; as many as the broker has room for."""

    def __init__(self, endpoint: Path, sessions: int) -> None:
        self._sessions: list[RawSession] = []
        with suppress(TooMany):
            for _ in range(sessions):
                self._sessions.append(RawSession(endpoint))

    def once(self) -> tuple[int, ...]:
        return (monotonic_ns(),) * 2

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class Registrar(Idle):
    """One session with many models, which are there as long as it is."""

    def __init__(self, endpoint: Path, models: int) -> None:
        super().__init__(endpoint, 1)
        for number in range(models):
            self._sessions[0].register(f"model-{number:04}")
