"""Processes that do jobs at the same time, told when to begin and when to stop.

All are forked from one server that has imported what they need and has no thread, so that 64 of them are there in a
second or two.
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
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from .. import crew
from .figures import WHOLE, Samples, merged
from .jobs import Job

MakeJob = Callable[[], Job]

CONTEXT = multiprocessing.get_context("forkserver")
# All that a process needs, by way of the module that `python -m` runs: each of them would import it again.
CONTEXT.set_forkserver_preload(["benchmarks.load.__main__", "google.rpc.status_pb2"])


class Crew(crew.Crew):
    """Workers, one for each of `jobs`."""

    def __init__(self, jobs: Sequence[MakeJob]) -> None:
        self._stop = CONTEXT.RawValue(ctypes.c_bool, False)
        super().__init__(CONTEXT, _work, [(job, self._stop) for job in jobs])

    def begin(self) -> None:
        """Let all of them work until `end`."""
        self._stop.value = False
        self._tell("go")

    def end(self) -> Samples:
        """Let them finish what they are doing, and return what all of them took."""
        self._stop.value = True
        return merged(self._hear(None))

    def run(self, seconds: float) -> Samples:
        """Let them work for some seconds."""
        self.begin()
        time.sleep(seconds)
        return self.end()

    def once(self) -> Samples:
        """Let each do its job once, and wait for all."""
        self._stop.value = True
        self._tell("go")
        return merged(self._hear(None))


def working(jobs: Sequence[MakeJob]) -> AbstractContextManager[Crew]:
    """Yield a crew, which ends by itself if all went well."""
    return crew.closing(Crew(jobs))


@contextmanager
def serving(serve: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a server in a process of its own, and go on once it is ready. It gets `ready` as its last argument."""
    process, connection = crew.start(CONTEXT, _serve, serve, arguments)
    try:
        crew.answer(connection)
        yield
    finally:
        connection.close()
        process.kill()
        process.join()


# --- in the other processes ---


def _obey_the_first_process() -> None:
    """Leave Ctrl-C to it, and end when it does, even by SIGKILL: otherwise it would never stop."""
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
        return  # the first process has ended
    except Exception:  # noqa: BLE001 - the first process reports it
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
