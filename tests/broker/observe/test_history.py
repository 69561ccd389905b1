"""The samples behind the status page's chart, of a real core."""

from __future__ import annotations

import time

import pytest
from tests.support.sizes import GIB, MIB

from membrokerd.core.machine import Broker
from membrokerd.core.policy import Rules
from membrokerd.observe.history import SAMPLE_SECONDS, SAMPLES, History


def test_samples_are_in_order_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """NTP sets the clock back by an hour: the chart goes on."""
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600 * now[0])
    history = History(lambda: now[0])
    broker = Broker(Rules(granularity=2 * MIB, capacities={"device": GIB, "host": 0}), 1)
    for _ in range(2 * SAMPLES):
        history.look(broker)
        history.look(broker)  # too early for another one
        now[0] += SAMPLE_SECONDS
    ages = [history.samples[-1].at - sample.at for sample in history.samples]
    assert ages == [SAMPLE_SECONDS * number for number in range(SAMPLES)][::-1]
