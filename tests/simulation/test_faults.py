"""Each planted fault changes what the core has. The tests that look for the faults are deep, and would say so late."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
from tests.simulation import test_daemon_deaths, test_hosting, test_joined, test_recalls, test_simulation
from tests.simulation.faults import Faults


@pytest.mark.parametrize("module", [test_daemon_deaths, test_hosting, test_joined, test_recalls, test_simulation])
def test_each_can_be_planted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [each for each in vars(module).values() if isinstance(each, Faults)]
    assert found
    for fault in itertools.chain(*found):
        with monkeypatch.context() as planted:
            fault(planted)
