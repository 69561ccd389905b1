"""Asks the sessions of a model to sleep or to wake, and hears how far they are: for an operator, or for `idle_sleep`.

Owns the questions that have no answer yet. It decides nothing and keeps nothing: each engine knows whether it sleeps,
so a new daemon has nothing to learn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping

from membroker.v1.handoff_pb2 import Frame, Notice, Sleep, SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus

from .connections import SessionConnection

ANSWER_SECONDS = 1.0
"""How long the answers to one question are waited for. The operator's command asks again."""
MOST_MS = 10 * 365 * 86_400_000
"""The longest time that a session is believed."""
MAX_DETAIL = 400
"""The most characters of an answer's sentence. The rest is cut off."""


class Sleeping:
    """The questions of one daemon. `connections` are the sessions' connections."""

    def __init__(self, connections: Mapping[int, SessionConnection]) -> None:
        self._connections = connections
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[int, Callable[[SleepStatus], None]]] = {}

    def send(self, session: int, question: Sleep, heard: Callable[[SleepStatus], None]) -> int:
        """Ask a session, which is connected, and return the question's number. `heard` gets its first answer."""
        question.sleep_id = next(self._ids)
        self._open[question.sleep_id] = session, heard
        self._connections[session].notify(Frame(notice=Notice(sleep=question)))
        return question.sleep_id

    def forget(self, sleep_id: int) -> None:
        """Wait for the answer to a question no longer."""
        self._open.pop(sleep_id, None)

    async def ask(self, sessions: Iterable[int], question: Sleep) -> dict[int, SleepStatus]:
        """Ask those sessions that are connected. Return the answers that come within ANSWER_SECONDS, by session."""
        asked: dict[int, asyncio.Future[SleepStatus]] = {}
        numbers = []
        for session in sessions:
            if session in self._connections:
                answer = asked[session] = asyncio.get_running_loop().create_future()
                numbers.append(self.send(session, question, answer.set_result))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=ANSWER_SECONDS)
        finally:
            for number in numbers:
                self.forget(number)
        return {session: answer.result() for session, answer in asked.items() if answer.done()}

    def answered(self, session: int, answer: SleepAnswer) -> None:
        """Take an answer. One to no open question of this session is ignored."""
        asked, heard = self._open.get(answer.sleep_id, (None, None))
        if heard is None or asked != session:
            return
        self.forget(answer.sleep_id)
        heard(bounded(answer.status))


def bounded(status: SleepStatus) -> SleepStatus:
    """Return what a session says, without what cannot be or what this broker does not know: a copy.

    It is kept and shown, and what is unknown or too long in it, or in the frame around it, could be 64 KiB.
    """
    status.DiscardUnknownFields()
    for name in ("cache_bytes", "weight_bytes", "needed_bytes"):
        setattr(status, name, max(0, getattr(status, name)))
    for field, value in status.ListFields():
        if field.name.endswith("_ms"):
            setattr(status, field.name, min(max(0, value), MOST_MS))
    status.detail = status.detail[:MAX_DETAIL]
    return SleepStatus.FromString(status.SerializeToString())
