"""What guests say of themselves: shown for as long as their connection lasts, and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from membroker.v1.handoff_pb2 import Frame, SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus
from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName
from membrokerd.runtime.guests import MOST_OF_MODEL, Guests
from membrokerd.runtime.sleeping import bounded

MIB = 1 << 20
NAME = ModelName("t", "comfy")
SECOND = 1_000_000_000


class World:
    def __init__(self, sessions: int) -> None:
        self.broker = Broker(policy.Rules(2 * MIB, {"device": 64 * MIB}, max_sessions=100), 1)
        self.connections: dict[int, Any] = {}
        self.guests = Guests(self.broker, self.connections)
        for number in range(sessions):
            call = 2 * number + 1
            opened: Any = self.broker.step(
                ev.OpenSession(call, "t", 1, 1, f"p{number}", observer=False, client=""), 0
            ).effects[0]
            session = opened.result.session
            self.broker.step(ev.RegisterModel(call + 1, session, 2, NAME, None, {}, exclusive=False, answers=True), 0)
            self.connections[session] = object()

    def say(self, session: int, state: Any, model: str = str(NAME), **fields: Any) -> None:
        status = SleepStatus(state=state, **fields)
        self.guests.said(session, SleepAnswer(model=model, status=status), 7 * SECOND)


def test_what_a_guest_says_is_shown_as_of_now_and_forgotten_with_the_connection() -> None:
    world = World(1)
    (session,) = world.connections
    world.say(session, SleepStatus.ASLEEP, asleep_ms=5_000, cause=SleepStatus.RECALL, needed_bytes=9, detail="why")
    (found,) = world.guests.of_model(NAME, 10 * SECOND)
    assert (found.asleep_ms, found.cause, found.needed_bytes) == (8_000, SleepStatus.RECALL, 9)
    assert found.detail == "", "a page has room for what is short"
    assert world.guests.counted() == (1, 1)
    world.say(session, SleepStatus.AWAKE)
    assert world.guests.counted() == (1, 0)
    assert world.guests.of_model(ModelName("t", "other"), 0) == []
    world.connections[session] = cast("Any", object())
    assert world.guests.of_model(NAME, 0) == []
    assert world.guests.counted() == (0, 0)


def test_nonsense_is_ignored_or_bounded() -> None:
    world = World(1)
    (session,) = world.connections
    world.say(session, SleepStatus.ASLEEP, model="tenants/t/models/other")
    world.say(session, SleepStatus.UNSUPPORTED)
    world.say(session, 77)
    world.say(99, SleepStatus.ASLEEP)
    assert world.guests.counted() == (0, 0)
    least, most = -(1 << 63), (1 << 63) - 1
    world.say(session, SleepStatus.ASLEEP, needed_bytes=least, weight_bytes=-1, asleep_ms=most, sleep_took_ms=least)
    (found,) = world.guests.of_model(NAME, 8 * SECOND)
    assert (found.needed_bytes, found.weight_bytes, found.sleep_took_ms) == (0, 0, 0)
    assert 0 < found.asleep_ms < most


def test_a_model_shows_no_more_than_a_bound() -> None:
    world = World(MOST_OF_MODEL + 3)
    for session in world.connections:
        world.say(session, SleepStatus.AWAKE)
    assert len(world.guests.of_model(NAME, 0)) == MOST_OF_MODEL
    assert world.guests.counted() == (MOST_OF_MODEL + 3, 0)


@pytest.mark.parametrize("field", ["detail", "of another version"])
def test_no_byte_is_kept_of_what_is_not_shown(field: str) -> None:
    """500 sessions say 60 KB each, in a sentence or in a field that this broker does not know."""
    frame = Frame(sleep_answer=SleepAnswer(status=SleepStatus(detail="x" * 60_000)))
    if field != "detail":
        tag = SleepStatus.DETAIL_FIELD_NUMBER << 3 | 2
        frame = Frame.FromString(frame.SerializeToString().replace(bytes([tag]), bytes([15 << 3 | 2]), 1))
        assert not frame.sleep_answer.status.detail
    said, packet, before = list[SleepStatus](), frame.SerializeToString(), resident_bytes()
    for _ in range(500):
        said.append(bounded(Frame.FromString(packet).sleep_answer.status))
    assert said[0].ByteSize() < 1_000
    assert resident_bytes() - before < len(said) * len(packet) / 2


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1_024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))
