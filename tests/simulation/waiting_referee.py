"""Judges requests that wait for room: each ends in time, none waits for what it could have, and the order is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.shares import divide

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.books import Step

if TYPE_CHECKING:
    from tests.simulation.referee import Referee

Waiters = Mapping[int, Any]
"""The core's waiters by call."""


class WaitingReferee:
    """Looks into the queue of the core before and after each step, and judges what happened by the definition."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self.before: dict[int, Any] = {}
        self.ends: Counter[str] = Counter()
        """How waits ended."""
        self.compared = 0
        """Grants while another request waited that would have fitted in its place."""

    @property
    def _world(self) -> Any:
        return self._referee.world

    def take_down(self) -> None:
        """Note which requests wait before a step."""
        self.before = dict(self._world.broker.waiting._waiters)

    def decided(self) -> list[Any]:
        """Return the requests that waited before the step, and do not wait any more."""
        after = self._world.broker.waiting._waiters
        return [waiter.event for call, waiter in self.before.items() if call not in after]

    def judge(self, event: ev.Event, step: Step) -> None:
        """Hold one step to all that is promised to those that wait."""
        world, after = self._world, self._world.broker.waiting._waiters
        gone = {call: one for call, one in self.before.items() if call not in after and one.deadline is not None}
        ended = [effect for effect in step.effects if isinstance(effect, fx.Waited)]
        answers = {one.call: one.result for one in step.effects if isinstance(one, fx.Answer)}
        at_once = {call for call, one in gone.items() if one.since == world.now and call not in answers}
        told = Counter(one.call for one in ended)
        assert told == Counter(gone.keys() - at_once), "the end of a wait is told wrongly"
        for one in ended:
            assert one.waited_ns == world.now - gone[one.call].since
            assert (one.result == "granted") == (one.call not in answers), f"{one} and {answers.get(one.call)}"
            assert one.guaranteed == gone[one.call].guaranteed
            self.ends[one.result] += 1
        if world.broker.waiting.left_over:
            assert world.broker.deadline == 0, "the next step does not follow at once"
        else:
            for waiter in after.values():
                self._judge_waiter(waiter)
        if isinstance(event, ev.Allocate | ev.CreateSegment) and event.call in after:
            self._judge_deadline(event, after[event.call])
        granted = [one for call, one in gone.items() if call not in answers]
        if granted:
            self._judge_order(granted[-1], [one for one in after.values() if one.deadline is not None])

    def _judge_waiter(self, waiter: Any) -> None:
        world = self._world
        row = world.broker.ledger.sessions[waiter.event.session]
        assert row.state == "open" or waiter.deadline is None, "a session waits that is not connected"
        if waiter.deadline is None:
            return
        assert waiter.deadline > world.now, "a wait has not ended in time"
        in_vain = world.broker.draining or world.broker.stopping or world.broker.cannot_write
        assert not in_vain, "it waits, and nothing is lent"
        assert waiter.name in row.models, "it waits for a model that it left"
        fits = self._referee.guarantees.may_borrow(waiter.name, waiter.event.location, waiter.size)
        assert not fits, f"{waiter} waits, and there is room"

    def _judge_deadline(self, event: ev.Allocate | ev.CreateSegment, waiter: Any) -> None:
        world = self._world
        guaranteed = self._referee.guarantees.is_guaranteed(waiter.name, event.location, waiter.size)
        assert waiter.guaranteed == guaranteed, (
            "it is told to be within a guarantee, and is not, or the other way round"
        )
        wait = event.wait_ns
        if wait is None:
            wait = world.broker.rules.guarantee_wait_ns if guaranteed else 0
        if waiter.deadline is not None:
            assert waiter.deadline == world.now + wait, "it waits for another time than it said"
        else:
            more = waiter.size > world.broker.rules.capacities[event.location]
            limited = self._referee.guarantees.is_limited(waiter.name, event.location, waiter.size)
            assert not wait or more or limited, "it does not wait, and said so"

    def _judge_order(self, last: Any, waiting: Sequence[Any]) -> None:
        """The last one that was granted went before nobody who had a better right to as much."""
        where = last.event.location
        others = [
            one for one in waiting if one.event.location == where and one.size <= last.size and one.name != last.name
        ]
        others = [one for one in others if one.name.tenant != last.name.tenant]
        guarantees = self._referee.guarantees
        undone = last.name, last.size
        others = [one for one in others if guarantees.may_borrow(one.name, where, one.size, undone)]
        if not others:
            return
        self.compared += 1
        mine = self._class(last, last)
        for one in others:
            theirs = self._class(one, last)
            older = one.event.call < last.event.call
            assert theirs is None or mine is None or (mine, older) <= (theirs, False), f"{last} went before {one}"

    def _class(self, waiter: Any, last: Any) -> int | None:
        """Return 0 within a guarantee, 1 within a share, 2 beyond, before `last` was granted; None: it is too close."""
        guarantees, where = self._referee.guarantees, waiter.event.location
        given = last.size if waiter is last else 0
        if guarantees.is_guaranteed(waiter.name, where, waiter.size, less=given):
            return 0
        shares = divide(self._referee, where, last)
        granule = self._world.broker.rules.granularity
        left = shares[waiter.name] - (guarantees.lent(waiter.name, where) - given) - waiter.size
        return None if abs(left) < 4 * granule else 1 if left > 0 else 2

    def report(self) -> str:
        """Return what happened, in a line."""
        ends = ", ".join(f"{count:,} {how}" for how, count in sorted(self.ends.items())) or "none"
        return f"waits: {ends}; {self.compared:,} grants beside others that would have fitted"
