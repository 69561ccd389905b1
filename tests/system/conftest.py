"""What system tests state in the report of a run, beside passed and failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_STATED: list[str] = []


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
        terminalreporter.section("stated by the tests")
        for line in _STATED:
            terminalreporter.write_line(line)
