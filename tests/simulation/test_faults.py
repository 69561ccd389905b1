"""Each planted fault changes what the core has. The tests that look for the faults are deep, and would say so late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType

import pytest
from tests.simulation import test_daemon_deaths, test_hosting, test_joined, test_recalls, test_simulation
from tests.simulation.faults import Fault


def faults_of(module: ModuleType) -> Iterator[Fault]:
    found: list[Iterable[Fault]] = [each for name, each in vars(module).items() if name.startswith("FAULTS")]
    for faults in found:
        yield from faults


@pytest.mark.parametrize("module", [test_daemon_deaths, test_hosting, test_joined, test_recalls, test_simulation])
def test_each_can_be_planted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = list(faults_of(module))
    assert faults
    for fault in faults:
        with monkeypatch.context() as planted:
            fault(planted)
