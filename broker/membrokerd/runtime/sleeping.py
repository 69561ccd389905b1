"""Asks the sessions of a model to sleep or to wake on an operator's word, and hears how far they are.

Owns the questions that have no answer yet. It decides nothing and keeps nothing: each engine knows whether it sleeps,
so a new daemon has nothing to learn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping

from membroker.v1.handoff_pb2 import Frame, Notice, Sleep, SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus

from .connections import SessionConnection

ANSWER_SECONDS = 1.0
"""How long the answers to one question are waited for. The operator's command asks again."""
MAX_DETAIL = 400
"""The most characters of an answer's sentence. The rest is cut off."""


class Sleeping:
    """The questions of one daemon. `connections` are the sessions' connections."""

    def __init__(self, connections: Mapping[int, SessionConnection]) -> None:
        self._connections = connections
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[int, asyncio.Future[SleepStatus]]] = {}

    async def ask(self, sessions: Iterable[int], question: Sleep) -> dict[int, SleepStatus]:
        """Ask those sessions that are connected. Return the answers that come within ANSWER_SECONDS, by session."""
        asked: dict[int, tuple[int, asyncio.Future[SleepStatus]]] = {}
        for session in sessions:
            if (connection := self._connections.get(session)) is not None:
                question.sleep_id = next(self._ids)
                asked[question.sleep_id] = session, asyncio.get_running_loop().create_future()
                connection.notify(Frame(notice=Notice(sleep=question)))
        self._open |= asked
        try:
            if asked:
                await asyncio.wait([answer for _, answer in asked.values()], timeout=ANSWER_SECONDS)
        finally:
            for sleep_id in asked:
                del self._open[sleep_id]
        return {session: answer.result() for session, answer in asked.values() if answer.done()}

    def answered(self, session: int, answer: SleepAnswer) -> None:
        """Take an answer. One to no open question of this session is ignored."""
        asked, future = self._open.get(answer.sleep_id, (None, None))
        if future is None or asked != session or future.done():
            return
        status = answer.status
        status.cache_bytes, status.weight_bytes = max(0, status.cache_bytes), max(0, status.weight_bytes)
        status.detail = status.detail[:MAX_DETAIL]
        future.set_result(status)
