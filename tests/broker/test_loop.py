"""The loop carries out all that a step led to, also when one of its listeners has a defect."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from membroker.vmm import open_driver
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.broker import Broker
from membrokerd.executor import Executor
from membrokerd.loop import Loop


def test_a_reply_that_fails_does_not_lose_the_effects_behind_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books have changed by then: a session whose Goodbye cannot be answered must still be forgotten."""
    answers: list[Any] = []
    forgotten: list[int] = []

    def broken(result: object) -> None:
        raise RuntimeError("the connection has a defect")

    async def play() -> int:
        driver = open_driver("host")
        loop = Loop(Broker(policy.Rules(2, {"device": 64}), epoch=1), Executor(driver, 0), audit_seconds=1.0)
        loop.on_forget.append(forgotten.append)
        loop.ask(lambda call: ev.OpenSession(call, "t", 1, 1, "p", False, "test"), answers.append)
        assert isinstance(answers[0], fx.SessionOpened)
        session = answers[0].session
        loop.ask(lambda call: ev.Goodbye(call, session, 1), broken)
        driver.close()
        return session

    monkeypatch.setattr(logging.getLogger("membrokerd"), "propagate", True)
    with caplog.at_level(logging.ERROR, logger="membrokerd"):
        assert forgotten == [asyncio.run(play())]
    assert "a fault of the broker" in caplog.text
