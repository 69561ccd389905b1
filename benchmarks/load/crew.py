"""Processes that do jobs at the same time, told when to begin and when to stop.

All are forked from one server that has imported what they need and has no thread, so that 64 of them are there in a
second or two. Owns processes; knows nothing of what they do, nor of the broker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .figures import WHOLE, Samples, merged
from .jobs import Job

MakeJob = Callable[[], Job]

CONTEXT = multiprocessing.get_context("forkserver")
# All that a process needs, by way of the module that `python -m` runs: each of them would import it again.
CONTEXT.set_forkserver_preload(["benchmarks.load.__main__", "google.rpc.status_pb2"])
END_SECONDS = 10.0


class WorkerFailed(Exception):
    """A process of the benchmark failed; the message is what it said."""


class Crew:
    """Workers, one for each of `jobs`; from the beginning they are warm, and wait."""

    def __init__(self, jobs: Sequence[MakeJob]) -> None:
        self._stop = CONTEXT.RawValue(ctypes.c_bool, False)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        try:
            self._workers = [_start(_work, job, self._stop) for job in jobs]
            self._hear_all()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [process.pid for process, _ in self._workers if process.pid is not None]

    def begin(self) -> None:
        """Let all of them work until `end`."""
        self._stop.value = False
        self._tell_all("go")

    def end(self) -> Samples:
        """Let them finish what they are doing, and return what all of them took."""
        self._stop.value = True
        return merged(self._hear_all())

    def run(self, seconds: float) -> Samples:
        """Let them work for some seconds."""
        self.begin()
        time.sleep(seconds)
        return self.end()

    def once(self) -> Samples:
        """Let each do its job once, and wait for all."""
        self._stop.value = True
        self._tell_all("go")
        return merged(self._hear_all())

    def close(self) -> None:
        """Let them end by themselves, and wait for it."""
        self._tell_all("close")
        self._hear_all()
        for process, _ in self._workers:
            process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End them whatever they do."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _tell_all(self, what: str) -> None:
        for _, connection in self._workers:
            connection.send(what)

    def _hear_all(self) -> list[Any]:
        return [_hear(connection) for _, connection in self._workers]


@contextmanager
def crew(jobs: Sequence[MakeJob]) -> Iterator[Crew]:
    """Yield a crew, which ends by itself when all went well."""
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
        _hear(connection)
        yield
    finally:
        connection.close()
        process.kill()
        process.join()


def _start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    with theirs:
        process = CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
    return process, ours


def _hear(connection: Connection) -> Any:
    try:
        kind, what = connection.recv()
    except EOFError:
        raise WorkerFailed("a process of the benchmark ended without a word") from None
    if kind == "failed":
        raise WorkerFailed(what)
    return what


# --- in the other processes ---


def _obey_the_first_process() -> None:
    """Leave Ctrl-C to it, and end when it does, even by SIGKILL: nobody would say stop any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_first_process, name="end", daemon=True).start()


def _end_with_the_first_process() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _serve(connection: Connection, serve: Callable[..., None], arguments: Sequence[object]) -> None:
    _obey_the_first_process()
    serve(*arguments, lambda: connection.send(("ready", None)))


def _work(connection: Connection, make_job: MakeJob, stop: Any) -> None:
    _obey_the_first_process()
    try:
        job = make_job()
        for _ in range(job.warm_up):
            job.once()
        connection.send(("ready", None))
        while connection.recv() == "go":
            connection.send(("samples", _measure(job, stop)))
        job.close()
        connection.send(("closed", None))
    except (EOFError, BrokenPipeError):
        return  # nobody listens any more
    except Exception:  # noqa: BLE001 - the first process is told of each, and says it
        connection.send(("failed", traceback.format_exc()))


def _measure(job: Job, stop: Any) -> Samples:
    """Do the job until told to stop, and at least once."""
    whole = array("Q")
    parts = [array("Q") for _ in job.parts]
    begun = time.monotonic_ns()
    while True:
        marks = job.once()
        whole.append(marks[-1] - marks[0])
        for number, part in enumerate(parts):
            part.append(marks[number + 1] - marks[number])
        if stop.value:
            break
    elapsed = time.monotonic_ns() - begun
    return Samples({WHOLE: whole, **dict(zip(job.parts, parts, strict=True))}, elapsed)
