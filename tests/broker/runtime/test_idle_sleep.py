"""Which engines the daemon asks and lets sleep, and what a program that lies or is silent can change."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from membroker.v1.handoff_pb2 import Frame, Sleep, SleepAnswer
from membroker.v1.resources_pb2 import SleepStatus
from membrokerd.config.config import Config, ModelConfig, TenantConfig
from membrokerd.core.names import ModelName
from membrokerd.runtime import sleeping
from membrokerd.runtime.idle_sleep import ASK_NS, MOST_ENGINES, MOST_OF_TENANT, IdleRules, IdleSleep, rules_of
from membrokerd.runtime.sleeping import MOST_MS, Sleeping

CHAT, SEARCH = ModelName("red", "chat"), ModelName("red", "search")


class Peer:
    """A session's connection, which keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def notify(self, frame: Frame) -> None:
        self.asked.append(frame.notice.sleep)


class Engines:
    """Models with a session each, the requests that wait by model, and the time."""

    def __init__(self, rules: IdleRules, *names: ModelName) -> None:
        self.peers: dict[int, Any] = {number: Peer() for number in range(len(names))}
        self.names = {name: SimpleNamespace(sessions={number}) for number, name in enumerate(names)}
        self.waits: dict[ModelName, int] = {}
        self.now = 0
        broker: Any = SimpleNamespace(
            ledger=SimpleNamespace(models=self.names),
            waiting=SimpleNamespace(
                of_location=lambda location: (sum(self.waits.values()), len(self.waits)),
                of_model=lambda name, location: (self.waits.get(name, 0), 1),
            ),
        )
        self.sleeping = Sleeping(self.peers)
        self.idle_sleep = IdleSleep(broker, self.sleeping, self.peers)
        self.idle_sleep.rules = rules

    def look(self) -> list[float]:
        """Let the daemon ask, and return how long each session is to have been idle, if it was asked."""
        before = [len(peer.asked) for peer in self.peers.values()]
        self.now += ASK_NS
        self.idle_sleep.look(self.now)
        new = [peer.asked[count:] for peer, count in zip(self.peers.values(), before, strict=True)]
        return [asked[0].idle.ToNanoseconds() / 1e9 for asked in new if asked]

    def say(self, session: int, state: Any = SleepStatus.AWAKE, **times: Any) -> None:
        answer = SleepAnswer(sleep_id=self.peers[session].asked[-1].sleep_id)
        answer.status.CopyFrom(SleepStatus(state=state, **times))
        self.sleeping.answered(session, answer)


def test_a_model_goes_before_its_tenant_and_that_before_the_daemon() -> None:
    """0 is never. Nothing is set by default."""
    models = {"chat": ModelConfig(idle_sleep_seconds=3.0), "search": ModelConfig(idle_sleep_seconds=0.0)}
    tenants = {"red": TenantConfig(models=models, idle_sleep_seconds=2.0), "blue": TenantConfig()}
    rules = rules_of(Config(idle_sleep_seconds=1.0, idle_sleep="always", tenants=tenants))
    names = (CHAT, SEARCH, ModelName("red", "other"), ModelName("blue", "any"))
    assert [rules.seconds(name) for name in names] == [3.0, 0.0, 2.0, 1.0]
    assert rules.always
    assert rules.any
    nothing = rules_of(Config())
    assert (nothing.any, nothing.always, nothing.seconds(CHAT)) == (False, False, 0.0)
    assert Engines(nothing, CHAT).look() == [], "nobody is asked"
    assert Engines(IdleRules(5.0, always=True), CHAT, SEARCH).look() == [5.0, 5.0], "everybody is let at once"


def test_once_a_second_and_no_second_question_before_an_answer() -> None:
    """A stopped program collects no questions; on a new connection it is asked again, and the old answer is ignored."""
    world = Engines(IdleRules(5.0), CHAT)
    assert world.look() == [0.0]
    world.idle_sleep.look(world.now + ASK_NS - 1)
    assert len(world.peers[0].asked) == 1
    assert world.look() == []
    old, world.peers[0] = world.peers[0], Peer()
    world.names[CHAT].sessions = {0}
    assert world.look() == [0.0]
    late = SleepAnswer(sleep_id=old.asked[0].sleep_id, status=SleepStatus(state=SleepStatus.ASLEEP, asleep_ms=1))
    world.sleeping.answered(0, late)
    assert world.idle_sleep.asleep() == 0
    assert len(world.sleeping._open) == 1


def test_an_engine_sleeps_for_others_and_not_for_its_own_model() -> None:
    """Its own requests are no reason. With others', the one that is idle for longest, and one at a time.

    One that is not idle for long enough is let alone; `idle_ms` is absent if it has requests, or a sleep would not pay.
    """
    world = Engines(IdleRules(5.0), CHAT, SEARCH)
    world.look()
    for session, idle in ((0, 6_000), (1, 9_000)):
        world.say(session, idle_ms=idle)
    world.waits = {SEARCH: 10}
    assert world.look() == [5.0, 0.0], "only the other one"
    world.waits = {SEARCH: 10, ModelName("blue", "x"): 1}
    world.say(0, SleepStatus.FALLING_ASLEEP)
    world.say(1, idle_ms=10_000)
    assert world.look() == [0.0, 5.0]
    for times in ({}, {"idle_ms": 3_000}, {"idle_ms": -(1 << 63)}):
        for session in (0, 1):
            world.say(session, **times)
        assert world.look() == [0.0, 0.0]


def test_a_liar_keeps_no_other_engine_awake() -> None:
    """It says that it is idle forever and never sleeps: each time the one that was let less often is next."""
    world = Engines(IdleRules(5.0), CHAT, SEARCH)
    world.waits = {ModelName("blue", "x"): 1}
    world.look()
    let = []
    for _ in range(4):
        world.say(0, idle_ms=(1 << 63) - 1)
        world.say(1, idle_ms=6_000)
        let.append(world.look())
    assert let == [[5.0, 0.0], [0.0, 5.0]] * 2


def test_what_it_says_of_its_sleep_is_bounded() -> None:
    """The first that sleeps is shown, no time is negative or above ten years, and one that has gone is forgotten."""
    world = Engines(IdleRules(5.0), CHAT)
    world.names[CHAT].sessions = {0, 1, 2}
    world.peers |= {1: Peer(), 2: Peer()}
    world.look()
    for session, asleep in enumerate((-1, (1 << 63) - 1, 4)):
        world.say(session, SleepStatus.ASLEEP, asleep_ms=asleep, by_itself=session == 1)
    view = world.idle_sleep.of_model(CHAT)
    assert view == (5_000, 3, world.now - MOST_MS * 1_000_000, True)
    world.names[CHAT].sessions = {2}
    world.look()
    assert world.idle_sleep.of_model(CHAT) == (5_000, 1, world.now - ASK_NS - 4_000_000, False)
    del world.names[CHAT]
    world.look()
    assert world.idle_sleep.asleep() == len(world.sleeping._open) == 0


def test_how_many_are_asked_is_bounded() -> None:
    """Of one tenant, and in all."""
    one = Engines(IdleRules(5.0), *(ModelName("red", f"m{number}") for number in range(MOST_OF_TENANT + 3)))
    assert len(one.look()) == MOST_OF_TENANT
    many = Engines(IdleRules(5.0), *(ModelName(f"t{number}", "m") for number in range(MOST_ENGINES + 3)))
    assert len(many.look()) == MOST_ENGINES


# --- a question for some sessions ---


class AnsweringPeer:
    """A connection that answers what it is asked, or not."""

    def __init__(self, answer: Callable[[SleepAnswer], None]) -> None:
        self._answer = answer

    def notify(self, frame: Frame) -> None:
        answer = SleepAnswer(sleep_id=frame.notice.sleep.sleep_id, status=SleepStatus(state=SleepStatus.ASLEEP))
        asyncio.get_running_loop().call_soon(self._answer, answer)


@pytest.mark.parametrize("silent", [False, True])
def test_what_has_been_answered_within_its_time_is_told(monkeypatch: pytest.MonkeyPatch, *, silent: bool) -> None:
    """The wait ends when all have answered. A session without a connection is not waited for."""
    monkeypatch.setattr(sleeping, "ANSWER_SECONDS", 0.05 if silent else 3600.0)
    connections: dict[int, Any] = {}
    questions = Sleeping(connections)
    connections[1] = AnsweringPeer(functools.partial(questions.answered, 1))
    connections[2] = AnsweringPeer((lambda _: None) if silent else functools.partial(questions.answered, 2))
    told = asyncio.run(questions.ask([1, 2, 99], Sleep()))
    assert {session: status.state for session, status in told.items()} == dict.fromkeys(
        [1] if silent else [1, 2], SleepStatus.ASLEEP
    )
