"""Fixtures that every folder may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest

from tests.support.daemons import Daemon, Shared, running
from tests.support.devices import DEVICES, Device
from tests.support.hermetic import Run, surroundings
from tests.support.processes import wait_for_grpc

_STATED: list[str] = []

# From 3.12 on, Python warns of each fork in a process with threads. Programs of the tests do that on purpose.
os.environ.setdefault("PYTHONWARNINGS", "ignore:This process (pid=:DeprecationWarning")

RUN = Run()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The tests of this process leave no process and no file behind: of all fixtures this one ends last."""
    yield
    left = "\n".join(RUN.leftovers())
    assert not left, f"the tests have left these behind:\n{left}"


@pytest.fixture(autouse=True)
def own_surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test has its own home, runtime and state directories. Engines compile for minutes into the user's home."""
    is_long = request.node.get_closest_marker("gpu") is not None or "engines" in request.path.parts
    with surroundings(own_home=not is_long):
        yield
    RUN.remember(request.node.nodeid)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Leave out of each later garbage collection what the files before this one have left, imports above all.

    Without that, a collection takes 35 ms at the end of a run instead of 1 ms. And let gRPC close the descriptors that
    those files have used: a test may count its own.
    """
    gc.collect()
    gc.freeze()
    wait_for_grpc()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """The daemon of a file's tests with the marker `shared_daemon`; the first of them starts it."""
    shared = Shared()
    yield shared
    shared.close()


@pytest.fixture
def daemon(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Daemon]:
    """A daemon on the host driver: 256 MiB, the tenants red and blue.

    Each test has its own. With the marker `shared_daemon` the tests of a file use one, as long as each leaves it
    unused: its log, counters and revision may be older than the test, and a model ends with its last session. In such a
    file, `shared_daemon(False)` marks a test that needs its own.
    """
    marker = request.node.get_closest_marker("shared_daemon")
    share = marker is not None and marker.args != (False,)
    with shared.borrowed() if share else running() as one:
        yield one


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """Each kind of device: for a story that is the same on the host driver and on a GPU."""
    return DEVICES[request.param]


@pytest.fixture(params=["handoff", pytest.param("grpc", marks=pytest.mark.deep)])
def transport(request: pytest.FixtureRequest) -> str:
    """Each of the two ways to ask; `make test` takes the first, because both lead to one dispatcher."""
    return str(request.param)


@pytest.fixture
def state(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Return a function that puts a figure into the report: a property of the test, and a line at the end of the run.

    For times and sizes, which differ from machine to machine: nothing is asserted of them.
    """

    def put(what: str, figure: str) -> None:
        record_property(what, figure)
        _STATED.append(f"{what}: {figure}")

    return put


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put the directories of `tmp_path` into the run's own; `--basetemp` keeps them after the run."""
    if config.option.basetemp is None:
        config.option.basetemp = str(RUN.directory / "run" / "tmp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with deep tests first, those with the longest timeouts before all, then those with many tests.

    So no process is left with a long file.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)

    def length(file: list[pytest.Item]) -> tuple[bool, float, int]:
        timeouts = [mark.args[0] for item in file if (mark := item.get_closest_marker("timeout"))]
        return not any(item.get_closest_marker("deep") for item in file), -max(timeouts, default=0), -len(file)

    by_length = sorted(files.values(), key=length)
    items[:] = [item for one in by_length for item in one]


def pytest_collection_finish() -> None:
    """Leave out of each later garbage collection what exists now: thousands of tests, which no test can forget.

    Hundreds of tests collect garbage to see what a program forgets, and each collection took 26 ms. After a freeze
    Python would start full collections far more often, because it counts few old objects. The threshold prevents that:
    garbage of one test should not close its descriptors in the middle of another test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what was stated."""
    if _STATED:
        terminalreporter.section("stated by the tests")
        for line in _STATED:
            terminalreporter.write_line(line)
