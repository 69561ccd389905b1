"""Processes that borrow, or do without a broker, all at the same moment.

Each has one context on the GPU and can do every work, so that a turn of bare processes and one of borrowers are the
same processes. They are spawned, since CUDA survives no fork. Owns processes; knows nothing of what is compared.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..load.crew import WorkerFailed
from .bare import open_bare
from .figures import IN_PROCESS, Times
from .pair import PairExtent
from .works import BareExtent, BorrowedExtent, Work, connect, timed

CONTEXT = multiprocessing.get_context("spawn")
START_SECONDS = 180.0
"""A context takes a second, and 32 of them wait for each other."""
ANSWER_SECONDS = 60.0
BEGIN_SECONDS = 0.05
"""From the word to all until the moment that they begin: all have heard it by then."""
WARM_UP = 20
MODEL = "crowd"

Routes = Mapping[str, tuple[Path, str]]
"""The endpoint and the transport of each way to borrow, by the name of its row."""
Lenders = Mapping[str, Path]
"""Where processes lend that do nothing else, by the name of the row."""


class Crew:
    """Workers that wait to be told what to do."""

    def __init__(self, count: int, driver: str, size: int, routes: Routes, lenders: Lenders) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        try:
            for _ in range(count):
                self._workers.append(_start(driver, size, routes, lenders))
            self._hear(self._workers, START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def run(self, count: int, by: str, seconds: float) -> list[Times]:
        """Let the first `count` do one work for some seconds, from the same moment on."""
        chosen = self._workers[:count]
        begin = time.monotonic_ns() + int(BEGIN_SECONDS * 1e9)
        for _, connection in chosen:
            connection.send((by, begin, seconds))
        return self._hear(chosen, seconds + ANSWER_SECONDS)

    def close(self) -> None:
        """Let them end by themselves, and wait for it."""
        for _, connection in self._workers:
            connection.send(None)
        self._hear(self._workers, ANSWER_SECONDS)
        for process, _ in self._workers:
            process.join(ANSWER_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End them whatever they do."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _hear(self, workers: Sequence[tuple[BaseProcess, Connection]], seconds: float) -> list[Any]:
        end = time.monotonic() + seconds
        return [_answer(connection, end) for _, connection in workers]


@contextmanager
def crew(count: int, driver: str, size: int, routes: Routes, lenders: Lenders) -> Iterator[Crew]:
    """Yield a crew that is warm; it ends by itself when all went well."""
    workers = Crew(count, driver, size, routes, lenders)
    try:
        yield workers
        workers.close()
    finally:
        workers.kill()


def _start(driver: str, size: int, routes: Routes, lenders: Lenders) -> tuple[BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    with theirs:
        process = CONTEXT.Process(target=_work, args=(theirs, driver, size, routes, lenders), daemon=True)
        process.start()
    return process, ours


def _answer(connection: Connection, end: float) -> Any:
    try:
        if not connection.poll(max(0.0, end - time.monotonic())):
            raise WorkerFailed("a process of the benchmark did not answer in time")
        kind, what = connection.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerFailed("a process of the benchmark ended without a word") from None
    if kind == "failed":
        raise WorkerFailed(what)
    return what


# --- in the other processes ---


def _work(connection: Connection, driver: str, size: int, routes: Routes, lenders: Lenders) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears Ctrl-C, and its end is the pipe's
    try:
        with ExitStack() as stack:
            works = _works(stack, driver, size, routes, lenders)
            for work in works.values():
                timed(work, 0, at_least=WARM_UP)
            connection.send(("ready", None))
            while (word := connection.recv()) is not None:
                by, begin, seconds = word
                time.sleep(max(0, begin - time.monotonic_ns()) / 1e9)
                connection.send(("times", timed(works[by], seconds)))
        connection.send(("closed", None))
    except (EOFError, BrokenPipeError):
        return  # nobody listens any more
    except Exception:  # noqa: BLE001 - the first process is told of each, and says it
        connection.send(("failed", traceback.format_exc()))


def _works(stack: ExitStack, driver: str, size: int, routes: Routes, lenders: Lenders) -> dict[str, Work]:
    bare = open_bare(driver)
    stack.callback(bare.close)
    works: dict[str, Work] = {IN_PROCESS: BareExtent(bare, size)}
    for by, path in lenders.items():
        pair = PairExtent(bare, path, size)
        stack.callback(pair.close)
        works[by] = pair
    for by, (endpoint, transport) in routes.items():
        client = stack.enter_context(connect(endpoint, transport))
        works[by] = BorrowedExtent(client.register_model(MODEL), size)
    return works
