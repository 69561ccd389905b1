"""Processes that do jobs at the same time, told when to begin and when to stop; and servers.

All are forked from one server that has imported what they need and has no thread, so that 64 of them are there in a
second or two. It never initializes CUDA, which survives no fork. It knows nothing of what they do, nor of the broker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .jobs import Job, timed
from .samples import Samples, merged

ANSWER_SECONDS = 180.0
"""The most that a process may take beyond its work: a context on a GPU takes a second, and 32 wait for each other."""
END_SECONDS = 60.0
MakeJob = Callable[[], Job]
CONTEXT = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Let all processes have these modules from their server: each of them would import them again."""
    CONTEXT.set_forkserver_preload([*modules, "google.rpc.status_pb2"])


class WorkerFailed(Exception):
    """A process of the benchmark failed; the message is its traceback."""


class Crew:
    """Processes, one for each of `jobs`, whose job it makes. At the start they are warm, and wait."""

    def __init__(self, jobs: Sequence[MakeJob]) -> None:
        self._stop = CONTEXT.RawValue(ctypes.c_bool, False)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        try:
            for job in jobs:
                self._workers.append(_start(_work, job, self._stop))
            self._hear(len(jobs))
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process, _ in self._workers if process.pid is not None]

    def begin(self, name: str = "", *, count: int | None = None, after: float = 0.0, once: bool = False) -> None:
        """Let the first `count`, or all, work until `end`, or `once`, all of them from a moment `after` now."""
        self._stop.value = once
        moment = time.monotonic_ns() + int(after * 1e9)
        for _, connection in self._workers[:count]:
            connection.send((name, moment))

    def end(self, count: int | None = None) -> Samples:
        """Let them finish what they are doing, and return what all of them took."""
        self._stop.value = True
        return merged(self._hear(count))

    def run(self, seconds: float, name: str = "", *, count: int | None = None, after: float = 0.0) -> Samples:
        """Let them work for some seconds."""
        self.begin(name, count=count, after=after)
        time.sleep(after + seconds)
        return self.end(count)

    def once(self) -> Samples:
        """Let each do its job once, and wait for all."""
        self.begin(once=True)
        return self.end()

    def close(self) -> None:
        """Let them end by themselves, and wait for it."""
        for _, connection in self._workers:
            connection.send(None)
        self._hear(None, END_SECONDS)
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

    def _hear(self, count: int | None, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Return the answers of the first `count`, or of all, which come within so many seconds."""
        end = time.monotonic() + seconds
        return [_answer(connection, end) for _, connection in self._workers[:count]]


@contextmanager
def working(jobs: Sequence[MakeJob]) -> Iterator[Crew]:
    """Yield a crew. It ends by itself if all went well, and is killed otherwise."""
    workers = Crew(jobs)
    try:
        yield workers
        workers.close()
    finally:
        workers.kill()


@contextmanager
def serving(serve: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a server in a process of its own, and go on once it is ready. It gets `ready` as its last argument."""
    process, connection = _start(_serve, serve, arguments)
    try:
        _answer(connection, time.monotonic() + ANSWER_SECONDS)
        yield
    finally:
        connection.close()
        process.kill()
        process.join()


def _start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `target` with its end of a pipe and the arguments."""
    ours, theirs = CONTEXT.Pipe()
    with theirs:
        process = CONTEXT.Process(target=_obey, args=(target, theirs, *arguments), daemon=True)
        process.start()
    return process, ours


def _answer(connection: Connection, end: float) -> Any:
    """Return what a process answers until `end`; raises `WorkerFailed` when it has failed, ended or is late."""
    try:
        if not connection.poll(max(0.0, end - time.monotonic())):
            raise WorkerFailed("a process of the benchmark did not answer in time")
        failure, found = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerFailed("a process of the benchmark ended without an answer") from None
    if failure:
        raise WorkerFailed(failure)
    return found


# --- in the other processes ---


def _obey(target: Callable[..., None], connection: Connection, *arguments: object) -> None:
    """Leave Ctrl-C to the first process, and end when it does, even by SIGKILL: otherwise this one would never stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first_process, name="end", daemon=True).start()
    try:
        target(connection, *arguments)
    except (EOFError, BrokenPipeError):
        return  # the first process has ended
    except Exception:  # noqa: BLE001 - the first process reports it
        connection.send((traceback.format_exc(), None))


def _end_with_the_first_process() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _serve(connection: Connection, serve: Callable[..., None], arguments: Sequence[object]) -> None:
    serve(*arguments, lambda: connection.send(("", None)))


def _work(connection: Connection, make_job: MakeJob, stop: Any) -> None:
    job = make_job()
    job.warm()
    connection.send(("", None))
    while (word := connection.recv()) is not None:
        name, begin = word
        time.sleep(max(0, begin - time.monotonic_ns()) / 1e9)
        connection.send(("", timed(job.named(name), until=lambda: stop.value)))
    job.close()
    connection.send(("", None))
