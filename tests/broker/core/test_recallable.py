"""What a step costs beside many sessions that answer recalls, counted in calls: times say little on a busy machine."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName

GRANULE = 2 << 20
MODELS = 16


class Crowd:
    """A tenant with many sessions that answer recalls of all its models, and have a page of each: the memory is full.

    Beside it stands a session of another tenant that has nothing.
    """

    def __init__(self, sessions: int) -> None:
        self.pages = sessions * MODELS
        capacities = {"device": self.pages * GRANULE}
        rules = policy.Rules(granularity=GRANULE, capacities=capacities, max_sessions=sessions + 1)
        self.broker, self.now, self.calls, self._last = Broker(rules, epoch=1), 0, Counter[str](), 0
        names = [ModelName("many", f"m{number}") for number in range(MODELS)]
        self.pairs = [(session, name) for session in self._opened("many", sessions) for name in names]
        (self.other,), self.name = self._opened("other", 1), ModelName("other", "m")
        for session, name in [*self.pairs, (self.other, self.name)]:
            call = self.call()
            self.step(ev.RegisterModel(call, session, call, name, None, {}, False, name != self.name))
        self.extents: dict[tuple[int, ModelName], int] = {}
        for session, name in self.pairs:
            call = self.call()
            debited = self.broker.step(ev.Allocate(call, session, call, name, "device", GRANULE, 1), 0).facts[0]
            self.extents[session, name] = debited.first  # type: ignore[union-attr]
            self.step(ev.Made(session, call, 0))
            self.step(ev.Acknowledge(session, call, 0))

    def _opened(self, tenant: str, count: int) -> list[int]:
        opened = [ev.OpenSession(self.call(), tenant, 0, 0, f"{tenant} {number}", False, "") for number in range(count)]
        return [self.step(one)[0].result.session for one in opened]

    def call(self) -> int:
        """Return a number for the next call."""
        self._last += 1
        return self._last

    def step(self, event: ev.Event) -> list[Any]:
        """Return the effects of a step, of which no call is counted."""
        return self.broker.step(event, self.now).effects

    def counted(self, event: ev.Event) -> list[Any]:
        """Return the effects of a step, whose Python calls are counted."""

        def count(frame: FrameType, what: str, _: Any) -> None:
            if what == "call":
                self.calls[frame.f_code.co_qualname] += 1

        sys.setprofile(count)
        try:
            return self.step(event)
        finally:
            sys.setprofile(None)


def _refusal(sessions: int) -> Counter[str]:
    crowd = Crowd(sessions)
    (session, name), call = crowd.pairs[0], crowd.call()
    crowd.counted(ev.Allocate(call, session, call, name, "device", GRANULE, crowd.pages))
    (answer,) = crowd.counted(ev.InputsDrained(call))
    assert isinstance(answer.result, Denied)
    assert answer.result.reason is Reason.CAPACITY
    return crowd.calls


def test_a_refusal_costs_the_same_however_many_sessions_answer() -> None:
    """A tenant opens session after session, each for all its models, and asks for more than there is."""
    few, many = _refusal(2), _refusal(64)
    assert many.total() <= few.total() + 50, (many - few).most_common(10)
