"""What guests say of themselves: how far their sleep is, why they sleep, and what they need to wake.

Owns what each session said last, for as long as its connection lasts. Nobody trusts it: it is shown, and decides
nothing. It is neither in the books nor in the journal: a guest says it again, and so a new daemon learns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from membroker.v1.handoff_pb2 import SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus

from ..core.machine import Broker
from ..core.names import ModelName
from .connections import SessionConnection
from .sleeping import bounded

MOST_OF_MODEL = 16
"""How many guests of a model are shown."""
_STATES = (SleepStatus.AWAKE, SleepStatus.BUSY, SleepStatus.FALLING_ASLEEP, SleepStatus.ASLEEP, SleepStatus.WAKING)


class SaidByGuest(NamedTuple):
    """What a session said last, at `at` nanoseconds of the loop's clock, over this connection."""

    connection: SessionConnection
    model: ModelName
    status: SleepStatus
    at: int


class Guests:
    """The guests of one daemon. A session has one at most."""

    def __init__(self, broker: Broker, connections: Mapping[int, SessionConnection]) -> None:
        self._broker = broker
        self._connections = connections
        self._said: dict[int, SaidByGuest] = {}

    def said(self, session: int, answer: SleepAnswer, now: int) -> None:
        """Take what a session says of a model of its own; all else is ignored."""
        row, connection = self._broker.ledger.sessions.get(session), self._connections.get(session)
        name = next((name for name in (row.models if row else ()) if str(name) == answer.model), None)
        if name is None or connection is None or answer.status.state not in _STATES:
            return
        self._said[session] = SaidByGuest(connection, name, bounded(answer.status), now)
        if len(self._said) > len(self._connections):
            self.counted()

    def of_model(self, name: ModelName, now: int) -> list[SleepStatus]:
        """Return what the guests of a model said last, but their sentences. How long they have slept is as of now."""
        found: list[SleepStatus] = []
        row = self._broker.ledger.models.get(name)
        for session in row.sessions if row is not None and self._said else ():
            said = self._said.get(session)
            if (
                said is None
                or said.model != name
                or not self._is_connected(session, said)
                or len(found) == MOST_OF_MODEL
            ):
                continue
            status = SleepStatus()
            status.CopyFrom(said.status)
            status.detail = ""
            if status.HasField("asleep_ms"):
                status.asleep_ms += (now - said.at) // 1_000_000
            found.append(status)
        return found

    def counted(self) -> tuple[int, int]:
        """Return how many guests there are, and how many of them are not awake. Forget those that have gone."""
        self._said = {session: said for session, said in self._said.items() if self._is_connected(session, said)}
        states = [said.status.state for said in self._said.values()]
        return len(states), sum(state not in (SleepStatus.AWAKE, SleepStatus.BUSY) for state in states)

    def _is_connected(self, session: int, said: SaidByGuest) -> bool:
        return self._connections.get(session) is said.connection
