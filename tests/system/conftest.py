"""Clients of two tenants; and a daemon that gets bad input, with an honest worker beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, running
from tests.support.keepers import end_keeper
from tests.support.scene import CONFIG, TAKES_DESCRIPTORS, Scene

import membroker
from membroker.admin import Admin


@pytest.fixture
def red(daemon: Daemon) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint("red")) as client:
        yield client


@pytest.fixture
def blue(daemon: Daemon) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint("blue")) as client:
        yield client


@pytest.fixture
def admin(daemon: Daemon) -> Iterator[Admin]:
    one = Admin(daemon.admin / "grpc.sock")
    yield one
    one.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets. Keepers in it end with it."""
    with tempfile.TemporaryDirectory(prefix="mb-", ignore_cleanup_errors=True) as name:
        yield Path(name)
        for path in Path(name).rglob("fdstore.sock"):
            end_keeper(path)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """One daemon for all requests that are refused: none of them may leave anything behind."""
    with running(CONFIG, module=TAKES_DESCRIPTORS) as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        scene = Scene(daemon, worker, worker.model("honest"))
        yield scene
        scene.unharmed()


@pytest.fixture
def unmoved(scene: Scene) -> Iterator[Callable[[], None]]:
    """Yield a function that starts the watch; afterwards the books' revision must be what it was."""
    at: list[int] = []
    yield lambda: at.append(scene.revision)
    assert at
    assert scene.revision == at[0], "a refused request changed the books"
    scene.unharmed()
