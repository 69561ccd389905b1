"""What the tests on a card share: the card itself, and what they state in the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver

_STATED: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of pytest-timeout where that is not installed: there it means nothing, and harms nothing."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, which is not installed here")


@pytest.fixture(scope="session")
def card() -> Iterator[CudaDriver]:
    """The first card as a broker sees it, without a context: its figures are NVML's."""
    try:
        driver = CudaDriver()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA card to test on: {error}")
    yield driver
    driver.close()


@pytest.fixture
def state(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Return a function that puts a figure into the report: a property of the test, and a line at the end of the run.

    For times and sizes, which differ from machine to machine: nothing is asserted of them.
    """

    def put(what: str, figure: str) -> None:
        record_property(what, figure)
        _STATED.append(f"{what}: {figure}")

    return put


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what was stated."""
    if _STATED:
        terminalreporter.section("stated by the tests on the card")
        for line in _STATED:
            terminalreporter.write_line(line)
