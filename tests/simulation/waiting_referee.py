"""Judges requests that wait for room: each ends in time, none waits for what it could have, and the order is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.guarantees_referee import borrower
from tests.simulation.parts import Counting
from tests.simulation.shares import SLACK, divide

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.referee import Referee


class WaitingReferee(Counting):
    """Looks into the queue of the core before and after each step, and judges what happened by the definition."""

    COUNTED = ("ends",)

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self.before: dict[int, Any] = {}
        self.came: Any = None
        """The request that the step is about, as if it waited."""
        self.granted: dict[int, Any] = {}
        """Requests that waited and were granted, and are not answered yet."""
        self.ends: Counter[str] = Counter()
        """How waits ended."""

    @property
    def _world(self) -> Any:
        return self._referee.world

    def take_down(self, event: ev.Event) -> None:
        """Note which requests wait before a step, and which one comes."""
        self.before = dict(self._world.broker.waiting._waiters)
        self.came = None
        if isinstance(event, ev.Allocate):
            self.came = SimpleNamespace(event=event, name=event.name, size=event.extent_bytes * event.count)
        elif isinstance(event, ev.CreateSegment):
            name = ModelName(event.name.tenant, event.name.model)
            self.came = SimpleNamespace(event=event, name=name, size=event.size)
        elif isinstance(event, ev.Declare) and (event.recallable or event.wait_ns is not None):
            more = event.declared_bytes - self._referee.recalls.declared[event.session, event.name, event.location]
            if more > 0:
                self.came = SimpleNamespace(event=event, name=event.name, size=more)

    @property
    def all_of_step(self) -> list[Any]:
        """Return all requests that waited before the step or came with it."""
        return [*self.before.values(), *([self.came] if self.came else [])]

    def decided(self) -> list[Any]:
        """Return the requests that waited before the step, and do not wait any more."""
        after = self._world.broker.waiting._waiters
        return [waiter.event for call, waiter in self.before.items() if call not in after]

    def is_asked(self, event: ev.Event) -> bool:
        """Say whether the session of a request is asked for bytes of the same model."""
        one = self.came
        return one is not None and self._referee.recalls.is_asked(event.session, one.name, one.event.location)  # type: ignore[union-attr]

    def judge(self, event: ev.Event, step: Step) -> None:
        """Hold one step to all that is promised to those that wait."""
        world, after = self._world, self._world.broker.waiting._waiters
        gone = {call: one for call, one in self.before.items() if call not in after}
        timed = {call: one for call, one in gone.items() if one.deadline is not None}
        answers = {one.call: one.result for one in step.effects if isinstance(one, fx.Answer)}
        ended = [one for one in step.effects if isinstance(one, fx.Waited)]
        self._judge_told(timed, ended, answers)
        assert not isinstance(event, ev.InputsDrained) or event.call not in after, "a request is decided more than once"
        if world.broker.waiting.left_over:
            assert world.broker.deadline == 0, "the next step does not follow at once"
        else:
            for waiter in after.values():
                self._judge_waiter(waiter)
            for where in world.broker.books.rules.capacities:
                waiting = [one for one in after.values() if one.event.location == where]
                if any(one.deadline is not None for one in waiting):
                    self._judge_turns(where, [one for one in waiting if one.deadline and not one.met_full_device])
        if isinstance(event, ev.Allocate | ev.CreateSegment) and event.call in after:
            self._judge_deadline(event, after[event.call])
        granted = [one for call, one in gone.items() if not isinstance(answers.get(call), Denied)]
        if self.came and self.came.event.call not in after and self._is_granted(step):
            granted.append(self.came)
        if granted:
            last = _last_of(granted, step)
            if self._referee.recalls.has_guests(last.event.location):
                return  # they take turns
            final = isinstance(event, ev.InputsDrained) and last.event.call == event.call
            others = [one for one in after.values() if one.deadline is not None and not one.met_full_device]
            self._judge_order(last, others, final=final)

    def _is_granted(self, step: Step) -> bool:
        """Say whether the request that came was granted; its answer may come later."""
        session = self.came.event.session
        debits = [fact for fact in step.facts if isinstance(fact, ft.Debited | ft.SegmentBegan)]
        return any(
            getattr(fact, "session", None) == session or getattr(fact, "writer", None) == session for fact in debits
        )

    def _judge_told(self, gone: dict[int, Any], ended: Sequence[fx.Waited], answers: dict[int, Any]) -> None:
        """The end of a wait is told once: when the request is refused, or when the call that was granted is answered.

        A wait that began and ended with a refusal in one step is told too.
        """
        now, after = self._world.now, self._world.broker.waiting._waiters
        expected = {call: one for call, one in (self.granted | gone).items() if call in answers}
        self.granted |= {call: one for call, one in gone.items() if call not in answers}
        self.granted = {call: one for call, one in self.granted.items() if call not in answers and call not in after}
        told = Counter(one.call for one in ended)
        at_once = {call for call, one in expected.items() if not one.waited and call not in told}
        begun = {call for call in told if call not in expected}
        assert told == Counter((expected.keys() - at_once) | begun), "the end of a wait is told wrongly"
        assert all(isinstance(answers[call], Denied) for call in begun), "its wait has ended before it began"
        assert not any(isinstance(answers[call], Denied) for call in at_once), "a refusal is not told"
        for one in ended:
            self.ends[one.result] += 1
            assert (one.result == "granted") == (not isinstance(answers[one.call], Denied))
            waiter = expected.get(one.call)
            if waiter is not None:
                assert one.waited_ns in (waiter.waited, now - waiter.since)
                assert one.waited_ns <= now - waiter.since
                assert one.guaranteed == waiter.guaranteed

    def _judge_waiter(self, waiter: Any) -> None:
        world, recalls = self._world, self._referee.recalls
        event = waiter.event
        row = world.broker.ledger.sessions[event.session]
        assert row.state == "open" or waiter.deadline is None, "a session waits that is not connected"
        if waiter.deadline is None:
            return
        assert waiter.deadline > world.now, "a wait has not ended in time"
        in_vain = world.broker.books.draining or world.broker.books.stopping or world.broker.books.cannot_write
        assert not in_vain, "it waits, and nothing is lent"
        assert waiter.name in row.models, "it waits for a model that it left"
        if recalls.is_asked(event.session, waiter.name, event.location):
            guaranteed = self._referee.guarantees.is_guaranteed(waiter.name, event.location, waiter.size)
            assert guaranteed or self._has_room(waiter), f"{waiter} waits, and its session is asked for memory"

    # --- whose turn it is ---

    def _has_room(self, one: Any, undone: Any = None) -> bool:
        return self._referee.guarantees.may_borrow(one.name, one.event.location, one.size, borrower(one), undone)

    def _is_guaranteed(self, one: Any, less: int = 0) -> bool:
        where = one.event.location
        return self._referee.guarantees.is_guaranteed(one.name, where, one.size, {(one.name, where): less})

    def _left(self, one: Any, shares: Any, given: int = 0) -> float:
        """Return how far below its share a request leaves its model; `given` bytes of it are in the books."""
        return float(
            shares[one.name] - (self._referee.guarantees.lent(one.name, one.event.location) - given) - one.size
        )

    def _is_allowed(self, one: Any) -> bool:
        return self._referee.guarantees.is_allowed(one.name, one.event.location, one.size, borrower(one))

    def _held_beside(self, one: Any, shares: Any, holds: Any = None) -> float:
        """Return what the holds of other models keep from a request."""
        where, guarantees = one.event.location, self._referee.guarantees
        holds = self._world.broker.schedule.holds._holds if holds is None else holds
        others = [(name, hold.size) for (name, at), hold in holds.items() if at == where and name != one.name]
        return float(
            sum(max(0, min(size, shares.get(name, 0)) - guarantees.lent(name, where)) for name, size in others)
        )

    def _judge_turns(self, where: Location, waiting: Sequence[Any]) -> None:
        """A request whose turn it is does not wait, and what entitled requests lack is recalled."""
        ready = [one for one in waiting if self._has_room(one)]
        recalls, now = self._referee.recalls, self._world.now
        holds = [key for key in self._world.broker.schedule.holds._holds if key[1] == where]
        if not recalls.is_possible and not holds:
            assert not ready, f"{ready} wait, and there is room"
            return
        guaranteed = [one for one in waiting if self._is_guaranteed(one)]
        late = [one for one in ready if one in guaranteed]
        assert not late, f"{late} wait within a guarantee, and there is room"
        shares = divide(self._referee, where)
        self._judge_shares(where, shares)
        left = {one.event.call: self._left(one, shares) if self._is_allowed(one) else -SLACK for one in waiting}
        entitled = [one for one in waiting if left[one.event.call] >= SLACK]
        perhaps = [one for one in waiting if left[one.event.call] > -SLACK]
        if not guaranteed and ready:
            aged = any(now - one.since > 2 * self._world.broker.books.rules.recall_ns for one in perhaps)
            first = perhaps[:1] if aged else perhaps
            late = [one for one in ready if one in entitled and one in first]
            assert not late, f"{late} wait within a share, and there is room"
            if not perhaps and not recalls.has_guests(where):
                free = self._world.broker.ledger.totals[where].free
                late = [one for one in ready if one.size + SLACK <= free - self._held_beside(one, shares)]
                assert not late, f"{late} wait, and no other request comes first"
        if ready and not recalls.coming(where) and self._world.broker.recalls.room:
            late = [one for one in ready if one in entitled]
            keeping = {place[1].tenant for place in recalls.kept if place[2] == where}
            late = [one for one in late if one.name.tenant not in keeping]
            assert not late, f"{late} wait, have room, and nothing is on its way to those before them"
        if recalls.is_possible and (guaranteed or entitled):
            self._judge_recalled(where, guaranteed or entitled, shares)
        if guaranteed:
            self._judge_urgent(where, guaranteed)

    def _judge_shares(self, where: Location, shares: dict[ModelName, float]) -> None:
        """Shares are what the definition says: none is less than what is firm, nor than what of a guarantee is used."""
        broker, guarantees = self._world.broker, self._referee.guarantees
        found = broker.schedule.divide(where)
        total = broker.ledger.totals[where]
        room = total.capacity - total.releasing
        for name, size in found.items():
            assert abs(size - shares.get(name, 0)) <= SLACK, f"{name} has a share of {size}, not of {shares.get(name)}"
            assert size >= guarantees.firm(name, where), f"{name} has a share below its firm bytes"
        if guarantees.needed(where, {}) <= room:
            fit = guarantees.fit_limits(where) or not guarantees.above_limits(where)
            assert not fit or sum(found.values()) <= room, "there are more shares than memory"
            for name, size in found.items():
                own = guarantees.used(name, where)
                assert size >= own, f"{name} has a share of {size}, and uses {own} of its guarantee"

    def _judge_recalled(self, where: Location, waiting: Sequence[Any], shares: dict[ModelName, float]) -> None:
        """What they lack is recalled, as far as sessions have more than their model's share, and are not asked."""
        recalls, guarantees = self._referee.recalls, self._referee.guarantees
        if recalls.short(where, waiting, shares) <= SLACK:
            return
        for name in recalls.answering:
            if name not in self._world.broker.ledger.models:
                continue
            more = guarantees.lent(name, where) - recalls.coming_of(name, where) - shares.get(name, 0)
            able = recalls.able(name, where)
            assert more <= SLACK or not able, f"{waiting} wait, and {name} of {able} is not asked for {more}"

    def _judge_urgent(self, where: Location, guaranteed: Sequence[Any]) -> None:
        """So much of what is on its way is urgent as requests within guarantees lack, or all of it."""
        recalls = self._referee.recalls
        coming = recalls.coming(where)
        lacking = min(coming, recalls.short(where, guaranteed, {}) + coming)
        urgent = sum(one.left for place, one in recalls.asked.items() if place[2] == where and recalls.is_urgent(place))
        assert urgent >= lacking, f"{guaranteed} lack {lacking}, and {urgent} of {coming} on its way are urgent"

    def judge_rest(self, unfair: str) -> None:
        """When nothing moves any more, no request waits within a guarantee or a share.

        Where a tenant is `unfair`, and keeps all, none waits within a guarantee for what the others could release.
        """
        broker, guarantees, recalls = self._world.broker, self._referee.guarantees, self._referee.recalls
        for where, total in broker.ledger.totals.items():
            waiters = [one for one in broker.waiting._waiters.values() if one.deadline and one.event.location == where]
            waiters = [one for one in waiters if not one.met_full_device]
            guaranteed = [one for one in waiters if self._is_guaranteed(one)]
            if total.releasing or not waiters:
                continue
            if not unfair and guarantees.needed(where, {}) <= total.capacity:
                shares = divide(self._referee, where)
                within = [one for one in waiters if self._left(one, shares) >= SLACK and self._is_allowed(one)]
                assert not guaranteed + within, f"{guaranteed + within} wait for ever"
            elif unfair and guaranteed:
                keepers = {name for name in broker.ledger.models if name.tenant == unfair}
                shares = divide(self._referee, where, keepers=keepers)
                for name in broker.ledger.models.keys() - keepers:
                    more = recalls.of_model(name, where) and guarantees.lent(name, where) - shares.get(name, 0)
                    assert more <= SLACK, f"{guaranteed} wait, and {name} has {more} beyond its share"

    def _judge_deadline(self, event: ev.Allocate | ev.CreateSegment, waiter: Any) -> None:
        world = self._world
        guaranteed = self._referee.guarantees.is_guaranteed(waiter.name, event.location, waiter.size)
        assert waiter.guaranteed == guaranteed, (
            "it is told to be within a guarantee, and is not, or the other way round"
        )
        wait = event.wait_ns
        if wait is None:
            wait = world.broker.books.rules.guarantee_wait_ns if guaranteed else 0
        if waiter.deadline is not None:
            assert waiter.deadline == world.now + wait, "it waits for another time than it said"
        else:
            more = waiter.size > world.broker.books.rules.capacities[event.location]
            limited = self._referee.guarantees.is_limited(waiter.name, event.location, waiter.size)
            assert not wait or more or limited, "it does not wait, and said so"

    def _judge_order(self, last: Any, waiting: Sequence[Any], *, final: bool) -> None:
        """The last request that was granted went before no other that had a better right to as much.

        `final`: it did not wait, and was decided when others had been heard.
        """
        where = last.event.location
        others = [one for one in waiting if one.event.location == where and one.name.tenant != last.name.tenant]
        fitting = {one.event.call for one in others if one.size <= last.size and self._has_room(one, last)}
        if not (self._referee.recalls.is_possible and self._referee.recalls.coming(where)):
            others = [one for one in others if one.event.call in fitting]
        mine, shares = 0, None
        if not self._is_guaranteed(last, less=last.size) and (others or self._referee.recalls.holds):
            shares = divide(self._referee, where, undone=last)
            mine = self._class(last, shares, given=last.size)
        if mine == 2 and self._referee.recalls.is_possible:
            free = self._world.broker.ledger.totals[where].free
            held = self._held_beside(last, shares, self._referee.recalls.holds_at_grant)
            assert free + SLACK >= held, f"{last} was granted what is held for others"
        if not others:
            return
        better = 0
        for one in others:
            theirs = self._class(one, shares) if mine else 0 if self._is_guaranteed(one) else 2
            if theirs is None or mine is None:
                continue
            better += one.size if theirs < mine else 0
            left = self._world.broker.ledger.totals[where].free >= better  # for all of them
            assert mine <= theirs or (final and left), f"{last} went before {one}, which has a better right"
            held = mine == 2 and any(at == where for _, at in self._world.broker.schedule.holds._holds)
            if one.event.call in fitting and not final and mine == theirs and not held:
                assert last.event.call < one.event.call, f"{last} went before {one}, which is older"

    def _class(self, one: Any, shares: Any, given: int = 0) -> int | None:
        """Return 0 within a guarantee, 1 within a share, 2 beyond, before a grant; None: it is too close."""
        if self._is_guaranteed(one, less=given):
            return 0
        left = self._left(one, shares, given)
        if abs(left) < SLACK or (not given and not self._is_allowed(one)):
            return None
        return 1 if left > 0 else 2

    def judge_refusal(self, event: ev.Event, refused: fx.Answer) -> None:
        """What was refused for want of room had none, or others came first."""
        denied = refused.result
        assert isinstance(denied, Denied)
        one = self.before.get(refused.call)
        if one is None and self.came is not None and self.came.event.call == refused.call:
            one = self.came
        if one is None and isinstance(event, ev.NotMade):
            return  # the device was full, and meanwhile a limit was lowered
        if isinstance(event, ev.Declare) and event.call != refused.call:
            return  # it was decided before the newer declaration, which may have made room
        if one is None:  # a declaration
            assert isinstance(event, ev.Declare)
            tenant, model = str(denied.numbers["model"]).removeprefix("tenants/").split("/models/")
            one = SimpleNamespace(event=event, name=ModelName(tenant, model), size=denied.numbers["requested_bytes"])
        if not self._has_room(one):
            return
        assert denied.reason is Reason.CAPACITY, f"{one} was refused what it may borrow: {denied}"
        assert not self._is_guaranteed(one), f"{one} was refused what it is guaranteed: {denied}"
        self._judge_yielding(one, one.event.location)

    def _judge_yielding(self, one: Any, where: Location) -> None:
        """A request that has room is refused only for others that come first, or for what is held for them."""
        broker = self._world.broker
        others = [two for two in broker.waiting._waiters.values() if two.deadline and two.event.location == where]
        if any(self._is_guaranteed(two) for two in others) or self._referee.recalls.has_guests(where):
            return
        waiting = broker.waiting._waiters
        gone = [two for call, two in self.before.items() if call not in waiting and two.deadline and two is not one]
        if any(two.event.location == where for two in gone):
            return  # these came first, and were decided after it
        if any(at == where and hold.until <= self._world.now for (_, at), hold in self._referee.recalls.holds.items()):
            return  # it was decided before the hold ended
        shares = divide(self._referee, where, [one])
        assert self._left(one, shares) < SLACK or not self._is_allowed(one), f"{one} was refused within its share"
        if not any(self._left(two, shares) > -SLACK and self._is_allowed(two) for two in others):
            free = broker.ledger.totals[where].free
            assert one.size + SLACK > free - self._held_beside(one, shares), (
                f"{one} was refused, and no other request comes first"
            )


def _last_of(granted: Sequence[Any], step: Step) -> Any:
    """Return the request of the step's last debit: requests are granted in another order than they came.

    If one session got several for a model, the youngest is taken.
    """
    for fact in reversed(step.facts):
        if isinstance(fact, ft.Debited | ft.SegmentBegan):
            session = fact.session if isinstance(fact, ft.Debited) else fact.writer
            for one in reversed(granted):
                if (one.event.session, one.name, one.event.location) == (session, fact.name, fact.location):
                    return one
    return granted[-1]
