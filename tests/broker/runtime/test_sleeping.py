"""How long a question for sessions is waited for: until all have answered, or for a second."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from membroker.v1.handoff_pb2 import Frame, Sleep, SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus
from membrokerd.runtime import sleeping

ASLEEP = SleepStatus(state=SleepStatus.ASLEEP)


class Peer:
    """A connection that answers what it is asked, or not."""

    def __init__(self, answer: Callable[[SleepAnswer], None]) -> None:
        self._answer = answer

    def notify(self, frame: Frame) -> None:
        answer = SleepAnswer(sleep_id=frame.notice.sleep.sleep_id, status=ASLEEP)
        asyncio.get_running_loop().call_soon(self._answer, answer)


@pytest.mark.parametrize("silent", [False, True])
def test_what_has_been_answered_within_its_time_is_told(monkeypatch: pytest.MonkeyPatch, *, silent: bool) -> None:
    """Nobody is waited for when all have answered, and one that has no connection never."""
    monkeypatch.setattr(sleeping, "ANSWER_SECONDS", 0.05 if silent else 3600.0)
    connections: dict[int, Any] = {}
    questions = sleeping.Sleeping(connections)
    connections[1] = Peer(functools.partial(questions.answered, 1))
    connections[2] = Peer((lambda _: None) if silent else functools.partial(questions.answered, 2))
    assert asyncio.run(questions.ask([1, 2, 99], Sleep())) == ({1: ASLEEP} if silent else {1: ASLEEP, 2: ASLEEP})
