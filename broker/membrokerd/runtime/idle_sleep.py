"""`idle_sleep_seconds`: asks the engines that may sleep by themselves how far they are, and lets idle ones sleep.

Owns what these engines said last. An engine knows its last request, and whether a sleep would pay. The daemon knows
whether others want memory: whether a request of another model waits for some of the device. So each engine is asked
once a second. With `idle_sleep = "always"` every question lets it sleep. Otherwise only one engine at a time is let,
while others want memory: the one that has been idle for longest.

Nothing of this is in the books or in the journal: a new daemon asks again, and nobody depends on the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from membroker.v1.handoff_pb2 import Sleep
from membroker.v1.resources_pb2 import SleepStatus

from ..config.config import Config
from ..core.machine import Broker
from ..core.names import ModelName
from .connections import SessionConnection
from .sleeping import Sleeping

ASK_NS = 1_000_000_000
"""How often an engine is asked. One that has not answered is not asked again before it has another connection."""
MOST_OF_TENANT = 16
"""How many engines of a tenant are asked. Others of it do not sleep by themselves."""
MOST_ENGINES = 512
"""How many engines are asked in all."""


@dataclass(frozen=True, slots=True)
class IdleRules:
    """After how long without a request engines sleep: of a model, else of its tenant, else of all. 0: never."""

    default: float = 0.0
    tenants: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[ModelName, float] = field(default_factory=dict)
    always: bool = False

    @property
    def any(self) -> bool:
        """Whether an engine may sleep by itself."""
        return any((self.default, *self.tenants.values(), *self.models.values()))

    def seconds(self, name: ModelName) -> float:
        """Return when the engines of a model sleep by themselves, in seconds; 0: never."""
        return self.models.get(name, self.tenants.get(name.tenant, self.default))


def rules_of(config: Config) -> IdleRules:
    """Return what a configuration says."""
    return IdleRules(
        default=config.idle_sleep_seconds,
        tenants={name: each for name, own in config.tenants.items() if (each := own.idle_sleep_seconds) is not None},
        models={
            ModelName(name, model): each
            for name, own in config.tenants.items()
            for model, table in own.models.items()
            if (each := table.idle_sleep_seconds) is not None
        },
        always=config.idle_sleep == "always",
    )


class SleepView(NamedTuple):
    """How the engines of a model sleep by themselves.

    They do when idle for `after_ms`. `asleep` sessions say that theirs sleeps, the first of them since `since`, in
    nanoseconds of the loop's clock, and `by_itself` says whether that one did so by itself.
    """

    after_ms: int
    asleep: int = 0
    since: int | None = None
    by_itself: bool = False


@dataclass(slots=True)
class _Engine:
    """A session of a model, and what it said last, at `heard_at`. `question` has no answer yet; 0: none."""

    connection: SessionConnection | None = None
    question: int = 0
    heard_at: int = 0
    idle_ns: int | None = None
    asleep_ns: int | None = None
    by_itself: bool = False
    let: int = 0
    """How often it was let sleep since it last did: one that never does must not keep the others awake."""


class IdleSleep:
    """The engines of one daemon that sleep by themselves."""

    def __init__(self, broker: Broker, sleeping: Sleeping, connections: Mapping[int, SessionConnection]) -> None:
        self.rules = IdleRules()
        """They may change at any time."""
        self._broker = broker
        self._sleeping = sleeping
        self._connections = connections
        self._engines: dict[ModelName, dict[int, _Engine]] = {}
        self._due = 0

    def look(self, now: int) -> None:
        """Ask the engines, if it is time to. It is called with each audit."""
        if now < self._due or not (self._engines or self.rules.any):
            return
        self._due = now + ASK_NS
        self._find()
        chosen = None if self.rules.always else self._longest_idle(now)
        for name, engines in self._engines.items():
            seconds = self.rules.seconds(name)
            for session, engine in engines.items():
                lets = self.rules.always or engine is chosen
                self._ask(name, session, engine, seconds if lets else 0.0, now)

    def of_model(self, name: ModelName) -> SleepView | None:
        """Return how the engines of a model sleep by themselves, or None if they do not."""
        seconds = self.rules.seconds(name)
        if not seconds:
            return None
        found = [engine for engine in self._engines.get(name, {}).values() if engine.asleep_ns is not None]
        if not found:
            return SleepView(round(seconds * 1000))
        first = min(found, key=_since)
        return SleepView(round(seconds * 1000), len(found), _since(first), first.by_itself)

    def asleep(self) -> int:
        """Return how many engines sleep."""
        return sum(engine.asleep_ns is not None for engines in self._engines.values() for engine in engines.values())

    def _find(self) -> None:
        """Know the engines that there are now, and forget those that have gone."""
        before, self._engines = self._engines, {}
        for name, session in self._sessions():
            engine = before.get(name, {}).pop(session, None) or _Engine()
            self._engines.setdefault(name, {})[session] = engine
        for engines in before.values():
            for engine in engines.values():
                self._sleeping.forget(engine.question)

    def _sessions(self) -> Iterator[tuple[ModelName, int]]:
        """Yield the connected sessions of the models whose engines sleep by themselves, as many as are asked."""
        found: Counter[str] = Counter()
        for name, row in self._broker.ledger.models.items():
            if not self.rules.seconds(name):
                continue
            for session in row.sessions:
                if session in self._connections and found[name.tenant] < MOST_OF_TENANT:
                    found[name.tenant] += 1
                    yield name, session
                    if found.total() >= MOST_ENGINES:
                        return

    def _longest_idle(self, now: int) -> _Engine | None:
        """Return the engine to let sleep because others want memory, or None."""
        waits = self._broker.waiting
        wanted = waits.of_location("device")[0]
        found = [
            (engine.let, engine.heard_at - engine.idle_ns, name, session)
            for name, engines in self._engines.items()
            if wanted > waits.of_model(name, "device")[0]
            for session, engine in engines.items()
            if engine.idle_ns is not None and engine.idle_ns + now - engine.heard_at >= self.rules.seconds(name) * 1e9
        ]
        if not found:
            return None
        *_, name, session = min(found)
        return self._engines[name][session]

    def _ask(self, name: ModelName, session: int, engine: _Engine, seconds: float, now: int) -> None:
        """Ask one engine how far it is, and let it sleep if it has been idle for so long; 0: only ask."""
        connection = self._connections[session]
        if engine.connection is connection and engine.question:
            return  # it is slow, or stopped
        self._sleeping.forget(engine.question)
        engine.connection = connection
        engine.let += bool(seconds)
        question = Sleep(model=str(name))
        question.idle.FromNanoseconds(round(seconds * 1e9))

        def heard(status: SleepStatus) -> None:
            engine.question, engine.heard_at = 0, now
            engine.idle_ns = _ns(status.idle_ms) if status.HasField("idle_ms") else None
            is_asleep = status.state == SleepStatus.ASLEEP
            engine.asleep_ns = _ns(status.asleep_ms) if is_asleep else None
            engine.by_itself = status.by_itself
            if status.state in (SleepStatus.FALLING_ASLEEP, SleepStatus.ASLEEP):
                engine.let = 0

        engine.question = self._sleeping.send(session, question, heard)


def _since(engine: _Engine) -> int:
    return engine.heard_at - (engine.asleep_ns or 0)


def _ns(milliseconds: int) -> int:
    return milliseconds * 1_000_000
