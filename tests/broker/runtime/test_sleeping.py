"""How long a question for sessions is waited for: until all have answered, or for a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from membroker.v1.handoff_pb2 import Frame, Sleep, SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus
from membrokerd.runtime import sleeping

ASLEEP = SleepStatus(state=SleepStatus.ASLEEP)


class AskedSession:
    """A connection that answers what it is asked, or not."""

    def __init__(self, answer: Callable[[int], None]) -> None:
        self._answer = answer

    def notify(self, frame: Frame) -> None:
        asyncio.get_running_loop().call_soon(self._answer, frame.notice.sleep.sleep_id)


def ask(answering: dict[int, bool]) -> dict[int, SleepStatus]:
    """Ask these sessions, of which some answer, and one that has no connection."""
    connections: dict[int, Any] = {}
    questions = sleeping.Sleeping(connections)
    for session, answers in answering.items():

        def answer(number: int, session: int = session, answers: bool = answers) -> None:
            if answers:
                questions.answered(session, SleepAnswer(sleep_id=number, status=ASLEEP))

        connections[session] = AskedSession(answer)
    return asyncio.run(questions.ask([*answering, 99], Sleep()))


def test_nobody_is_waited_for_when_all_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "ANSWER_SECONDS", 3600.0)
    assert ask({1: True, 2: True}) == {1: ASLEEP, 2: ASLEEP}
    assert ask({}) == {}


def test_one_that_is_silent_costs_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others have answered by then is told."""
    monkeypatch.setattr(sleeping, "ANSWER_SECONDS", 0.05)
    assert ask({1: False, 2: True}) == {2: ASLEEP}
