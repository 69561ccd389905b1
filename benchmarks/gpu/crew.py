"""Processes that borrow, or do without a broker, all at the same moment.

Each has one context on the GPU and can do every work, so that a turn of bare processes and one of borrowers are the
same processes. They are spawned, since CUDA survives no fork.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from .. import crew
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


class Crew(crew.Crew):
    """Workers that borrow in each way, or do without a broker."""

    def __init__(self, count: int, driver: str, size: int, routes: Routes, lenders: Lenders) -> None:
        super().__init__(CONTEXT, _work, [(driver, size, routes, lenders)] * count, START_SECONDS)

    def run(self, count: int, by: str, seconds: float) -> list[Times]:
        """Let the first `count` do one work for some seconds, from the same moment on."""
        self._tell((by, time.monotonic_ns() + int(BEGIN_SECONDS * 1e9), seconds), count)
        return self._hear(seconds + ANSWER_SECONDS, count)


def working(count: int, driver: str, size: int, routes: Routes, lenders: Lenders) -> AbstractContextManager[Crew]:
    """Yield a crew, which ends by itself if all went well."""
    return crew.closing(Crew(count, driver, size, routes, lenders))


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
        return  # the first process has ended
    except Exception:  # noqa: BLE001 - the first process reports it
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
