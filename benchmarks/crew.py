"""Processes of a benchmark, each with a pipe: they wait, do what they are told, and end.

Owns processes; knows nothing of what they do, nor of the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

END_SECONDS = 60.0


class WorkerFailed(Exception):
    """A process of the benchmark failed; the message is its traceback."""


class Crew:
    """Processes that run `target`, one for each tuple of arguments. At the start they are warm, and wait."""

    def __init__(
        self,
        context: Any,
        target: Callable[..., None],
        arguments: Sequence[tuple[object, ...]],
        start_seconds: float | None = None,
    ) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        try:
            for each in arguments:
                self._workers.append(start(context, target, *each))
            self._hear(start_seconds)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process, _ in self._workers if process.pid is not None]

    def close(self) -> None:
        """Let them end by themselves, and wait for it."""
        self._tell(None)
        self._hear(END_SECONDS)
        for process, _ in self._workers:
            process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all that still run."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _tell(self, word: object, count: int | None = None) -> None:
        """Send `word` to the first `count`, or to all."""
        for _, connection in self._workers[:count]:
            connection.send(word)

    def _hear(self, seconds: float | None, count: int | None = None) -> list[Any]:
        """Return the answers of the first `count`, or of all; with `seconds`, all must come within them."""
        end = None if seconds is None else time.monotonic() + seconds
        return [answer(connection, end) for _, connection in self._workers[:count]]


_C = TypeVar("_C", bound=Crew)


@contextmanager
def closing(workers: _C) -> Iterator[_C]:
    """Yield a crew. It ends by itself if all went well, and is killed otherwise."""
    try:
        yield workers
        workers.close()
    finally:
        workers.kill()


def start(context: Any, target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `target` with its end of a pipe and the arguments."""
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
    return process, ours


def answer(connection: Connection, end: float | None = None) -> Any:
    """Return what a process answers until `end`; raises `WorkerFailed` when it has failed, ended or is late."""
    try:
        if not connection.poll(None if end is None else max(0.0, end - time.monotonic())):
            raise WorkerFailed("a process of the benchmark did not answer in time")
        kind, what = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerFailed("a process of the benchmark ended without an answer") from None
    if kind == "failed":
        raise WorkerFailed(what)
    return what
