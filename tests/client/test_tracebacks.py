"""What a user sees of a refusal or of Ctrl-C: the message, and the line of the program that made the call.

Eight frames of the library stood between the two, and the same again for what the error came from.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import PAGE

import membroker
from membroker import tracebacks

LIBRARY = str(Path(membroker.__file__).parent)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running({"host_capacity": "64MiB"}) as one:
        yield one


@pytest.fixture
def client(daemon: Daemon) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint()) as one:
        yield one


def frames_of(call: Callable[[], object]) -> int:
    """Return how many frames of the library the printed traceback of a refused call has, with its causes."""
    with pytest.raises(membroker.MembrokerError) as caught:
        call()
    shown = traceback.format_exception(caught.value)
    return sum(line.count(f'File "{LIBRARY}') for line in shown)


REFUSED: dict[str, Callable[[Any], object]] = {
    "connect": lambda at: membroker.connect("/nowhere", timeout=0.01),
    "attach": lambda at: at.client.attach("m/none"),
    "allocate": lambda at: at.model.allocate("32MiB"),
    "create_segment": lambda at: at.model.create_segment("w", "32MiB"),
    "grow": lambda at: at.growable.grow("32MiB"),
    "sparse": lambda at: at.sparse[0],
    "pool.allocate": lambda at: at.pool.allocate(0, "32MiB"),
    "pool.free": lambda at: at.pool.free(0, PAGE),
    "closed": lambda at: at.closed.view(),
}


class Objects:
    """One of each, of a model that may have 16 MiB."""

    def __init__(self, client: membroker.Client) -> None:
        self.client = client
        self.model = client.model("m", limit="16MiB")
        self.pool = self.model.pool(page_size=PAGE, virtual_capacity="64MiB")
        self.growable = self.model.growable_buffer(PAGE, "64MiB", page_size=PAGE)
        self.sparse = self.model.sparse_array((1 << 20, 8), "float32", tile_rows=1 << 16)
        self.closed = self.model.allocate(PAGE)
        self.closed.close()


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_ends_at_the_callers_line(client: membroker.Client, what: str) -> None:
    at = Objects(client)
    assert frames_of(lambda: REFUSED[what](at)) == 0


def test_a_variable_shows_all_frames(client: membroker.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Objects(client)
    monkeypatch.setenv(tracebacks.VARIABLE, "full")
    assert frames_of(lambda: at.model.allocate("32MiB")) > 4


def test_frames_of_the_users_code_stay(client: membroker.Client) -> None:
    """Also those that the library has called, in an error of the library as in one of its own."""
    at = Objects(client)

    def progress(done: int, total: int) -> None:
        at.model.allocate("32MiB")

    def defect(done: int, total: int) -> None:
        raise ZeroDivisionError

    for number, (callback, name) in enumerate(((progress, "progress"), (defect, "defect"))):
        at.pool.allocate(number * PAGE, PAGE)
        with pytest.raises((membroker.OutOfMemory, ZeroDivisionError)) as caught:
            at.pool.offload(progress=callback)
        assert name in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


PROGRAM = """
import membroker, sys
with membroker.connect(sys.argv[1]) as client:
    model = client.model("c")
    pool = model.pool(page_size="2MiB")
    print("now", flush=True)
    pool.allocate(0, "200MiB", timeout=600)
"""


def test_an_interrupt_ends_at_the_callers_line(daemon: Daemon, client: membroker.Client) -> None:
    """Ctrl-C in a wait shows the line that waits, and nothing of the library."""
    held = client.model("h").allocate("128MiB")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(daemon.endpoint())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        until(
            lambda: [one for one in client.models() if one.name.endswith("/c") and one.books["device"].waiting_requests]
        )
        process.send_signal(signal.SIGINT)
        said = process.communicate()[1]
    held.close()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("File") == 1, said
