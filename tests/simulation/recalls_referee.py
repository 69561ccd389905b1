"""Judges recalls: what may be asked of a session, what its answer means, and what cannot be recalled any more.

It keeps books of its own about the questions and answers, from the events, the effects and the facts alone. The core's
are held to them, and so is what counts as firm. Shares are taken from the division in `shares`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation import recallable_sums
from tests.simulation.parts import Counting, once_a_step
from tests.simulation.shares import SLACK, divide

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.referee import Referee

Place = tuple[int, ModelName, Location]
KEPT_NS = 2_000_000_000
LONGEST_NS = 128_000_000_000
HOLD_NS = 500_000_000
LEAST_STEP, MOST_STEP = 64, 8
GUEST_NS_PER_GIB = 1_000_000_000
"""All stated here, not taken from the core."""


@dataclass(slots=True)
class Asked:
    """A recall that has no answer yet. The first notice asked for `first` of its `size` bytes."""

    number: int
    first: int
    size: int
    left: int
    since: int
    deadline: int
    late: bool = False
    urgent: bool = False
    """It was said that a request within a guarantee waits for it."""


class RecallsReferee(Counting):
    """Follows every recall from the question to its end."""

    COUNTED = ("ends",)

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self.answering: dict[ModelName, set[int]] = {}
        self.asked: dict[Place, Asked] = {}
        self.away: dict[Place, Asked] = {}
        """In time, of sessions that have lost their connection: nobody counts on them, and their time goes on."""
        self.kept: dict[Place, tuple[int, int]] = {}
        self.marks: dict[tuple[ModelName, Location], tuple[int, int, int]] = {}
        """How often in a row a model did not release, until when that counts against it, and the bytes."""
        self.debts: dict[tuple[str, Location], tuple[int, int, int]] = {}
        """When a tenant should have released what it was asked for first, until when it keeps that, and the bytes."""
        self.in_force: set[tuple[ModelName, Location]] = set()
        self.ends: Counter[str] = Counter()
        self._stated: dict[int, ev.StateHolds] = {}
        self._last_number = 0
        self._rules: Any = None
        """Those of the step before."""
        self._kept_ended = False
        self._lent: defaultdict[tuple[ModelName, Location], list[int]] = defaultdict(list)
        """The bytes that this step has lent to each model, in order."""
        self._sizes: list[tuple[Place, int]] = []
        """Of the extents that a Release names."""
        self._extents: dict[int, dict[int, tuple[Place, int]]] = {}
        """By session that may resume in this step: its extents."""
        self._not_held: defaultdict[int, list[tuple[Place, int]]] = defaultdict(list)
        """By session that resumes in this step: what it has released meanwhile."""
        self.guests: dict[Place, tuple[int, int | None]] = {}
        """When each declared something last, and when its slice ends; None: that is over."""
        self.declared: Counter[Place] = Counter()
        """What sessions have declared."""
        self._slice_ended = False
        self.holds: dict[Any, Any] = {}
        self._asked_for: set[ModelName | None] = set()
        """As they were before the step."""
        self._told: Counter[tuple[object, ...]] = Counter()
        """The ends of recalls that this step must tell."""
        self._again: dict[int, Asked] = {}
        """By number: the recalls that this step must repeat."""
        self._new: list[tuple[Place, int]] = []
        """What this step asks for more than before."""
        self._taken_back = False
        """Whether a raise was not heard before an answer."""
        self._granted: list[ev.Declare] = []
        """Declarations that this step has granted, and whose facts are not followed yet."""

    @property
    def _world(self) -> Any:
        return self._referee.world

    # --- what can be recalled ---

    @property
    def is_possible(self) -> bool:
        """Whether any session answers recalls."""
        return any(self.answering.values())

    def answers(self, session: int | None, name: ModelName) -> bool:
        """Say whether a session is connected and answers recalls of a model."""
        if session is None or session not in self.answering.get(name, ()):
            return False
        return bool(self._world.broker.ledger.sessions[session].state == "open")

    def is_trusted(self, session: int | None, name: ev.ModelName, where: ev.Location) -> bool:
        """Say whether what a session borrows can be recalled: it answers, and no recall of it is late."""
        asked = self.asked.get((session, name, where)) if session is not None else None
        return self.answers(session, name) and not (asked is not None and asked.late)

    def bytes_of(self, place: Place) -> int:
        """Return the bytes of extents that a session can be asked for."""
        session, name, where = place
        charge = self._world.broker.ledger.sessions[session].charges.get((name, where))
        if charge is None or not self.is_trusted(session, name, where):
            return 0
        if place in self.guests:
            return charge.bytes - self.kept.get(place, (0, 0))[0] if self.can_go(place) else 0
        return max(0, charge.bytes - charge.declared - self.kept.get(place, (0, 0))[0])

    def has_guests(self, where: Location) -> bool:
        """Say whether there is a guest at a location, or one waits."""
        waiting = [one.event for one in self._world.broker.waiting._waiters.values()]
        waits = any(isinstance(one, ev.Declare) and one.recallable and one.location == where for one in waiting)
        return waits or any(place[2] == where for place in self.guests)

    def can_go(self, place: Place, wanted_by: str | None = None) -> bool:
        """Say whether a guest can be asked for all: those that are asked go first, then the idlest.

        Its model and its tenant keep what they are guaranteed; its tenant's own guests may take what that is.
        """
        guarantees, (_, name, where) = self._referee.guarantees, place
        of_tenant = sum(
            guarantees.lent(one, where) for one in self._world.broker.ledger.models if one.tenant == name.tenant
        )
        of_models: Counter[ModelName] = Counter()
        order = sorted((one not in self.asked, used, one) for one, (used, _) in self.guests.items() if one[2] == where)
        for _, _, one in order:
            if one[1].tenant != name.tenant or self.guests[one][1] is not None or one in self.kept:
                continue
            size = self._world.broker.ledger.sessions[one[0]].charges[one[1], where].bytes
            own = self._referee.set_for((name.tenant, None, where)).guarantee or 0
            holds = guarantees.lent(one[1], where) - of_models[one[1]] - size >= guarantees.guarantee(one[1], where)
            if wanted_by != name.tenant:
                holds = holds and of_tenant - size >= own
            if one == place:
                return holds
            if holds:
                of_models[one[1]] += size
                of_tenant -= size
        return False

    @once_a_step
    def of_model(self, name: ModelName, where: Location) -> int:
        """Return the bytes of a model that can be recalled."""
        return sum(self.bytes_of((session, name, where)) for session in self.answering.get(name, ()))

    @once_a_step
    def of_tenant(self, tenant: str, where: Location) -> int:
        """Return the bytes of a tenant's models that can be recalled."""
        return sum(self.of_model(name, where) for name in self.answering if name.tenant == tenant)

    def is_asked(self, session: int, name: ModelName, where: Location) -> bool:
        """Say whether a session owes bytes of a model."""
        asked = self.asked.get((session, name, where))
        return asked is not None and asked.left > 0

    def is_urgent(self, place: Place) -> bool:
        """Say whether a session in time puts nothing off of what it is asked for: for a guarantee, or as a guest."""
        return not self.asked[place].late and (self.asked[place].urgent or place in self.guests)

    def is_marked(self, name: ModelName, where: Location) -> bool:
        """Say whether a session of a model owes bytes since a deadline, or lately kept all that it was asked for."""
        late = any(one.late and one.left for place, one in self.asked.items() if place[1:] == (name, where))
        return late or (name, where) in self.in_force

    def coming_of(self, name: ModelName, where: Location) -> int:
        """Return the bytes that recalls will bring of a model, if they are answered with bytes."""
        return sum(one.left for place, one in self.asked.items() if place[1:] == (name, where) and not one.late)

    def coming(self, where: Location) -> int:
        """Return the bytes that recalls will bring, if they are answered with bytes."""
        return sum(one.left for place, one in self.asked.items() if place[2] == where and not one.late)

    @property
    def holds_at_grant(self) -> dict[Any, Any]:
        """The holds when a request of this step was granted: those that it has begun or raised came after that."""
        holds = self._world.broker.schedule.holds._holds
        return {key: hold for key, hold in self.holds.items() if key in holds and self._goes_on(key)}

    def _goes_on(self, key: Any) -> bool:
        """Say whether a hold was in force when the step began: its time was not over, or a recall was open for it."""
        return key in self.holds and (self.holds[key].until > self._world.now or key[0] in self._asked_for)

    # --- each step ---

    def before(self, event: ev.Event) -> None:
        """Take down what a step may change."""
        broker = self._world.broker
        self.holds = dict(broker.schedule.holds._holds)
        self._asked_for = {one.wanted_by for one in broker.books.recallable.recalls.values() if not one.late}
        self._sizes = []
        if isinstance(event, ev.Release) and self.asked and event.session in broker.ledger.sessions:
            extents = broker.ledger.sessions[event.session].extents
            loans = [extents[one] for one in set(event.ids) if one in extents]
            self._sizes = [((event.session, loan.name, loan.location), loan.extent_bytes) for loan in loans]
        resuming = {*self._stated, *([event.session] if isinstance(event, ev.StateHolds) else [])}
        self._extents = {
            session: {
                one: ((session, loan.name, loan.location), loan.extent_bytes)
                for one, loan in broker.ledger.sessions[session].extents.items()
            }
            for session in resuming & {place[0] for place in [*self.asked, *self.away]}
        }
        self._not_held.clear()

    def follow(self, event: ev.Event, step: Step) -> None:
        """Take into the books what the step says. Other referees look at these books."""
        self._kept_ended = self._taken_back = self._slice_ended = False
        self._granted = [
            self._world.declaring[one.call]
            for one in step.effects
            if isinstance(one, fx.Answer) and isinstance(one.result, fx.Declared) and one.call in self._world.declaring
        ]
        self._new = []
        self._lent.clear()
        self._told.clear()
        self._again.clear()
        refused = any(isinstance(one.result, Denied) for one in _answers(step, getattr(event, "call", -1)))
        if isinstance(event, ev.StateHolds) and not refused:
            self._stated[event.session] = event
        for fact in step.facts:
            self._follow_fact(fact)
        self._shrink_holds()
        match event:
            case ev.Elapsed():
                self._elapsed()
            case ev.AnswerRecall():
                self._answered(event.session, [event.recall], event.size)
            case ev.RegisterModel() if event.answers is not None:
                if not refused:
                    self._set_answers(event.session, event.name, event.answers)
        self._bound_kept(step)
        told = Counter(
            (one.session, one.name, one.location, one.size, one.returned, one.after_ns, one.result)
            for one in step.effects
            if isinstance(one, fx.Recalled)
        )
        assert told == self._told, f"the ends of recalls are {self._told}, and {told} were told"
        for effect in step.effects:
            if isinstance(effect, fx.SendRecall):
                self._follow_question(effect)
        left = [one for one in self._again.values() if self._is_open(one)]
        assert not left, f"{left} were not repeated"

    def _is_open(self, asked: Asked) -> bool:
        session = next(place[0] for place, one in self.asked.items() if one is asked)
        return bool(self._world.broker.ledger.sessions[session].state == "open")

    def _follow_fact(self, fact: ft.Fact) -> None:
        match fact:
            case ft.Debited():
                self._lent[fact.name, fact.location].append(fact.extent_bytes * fact.count)
            case ft.SegmentBegan():
                self._lent[fact.name, fact.location].append(fact.extent_bytes * (fact.count - 1) + fact.last_bytes)
            case ft.DeclarationSet():
                self._follow_declaration(fact)
            case ft.Credited(cause="released"):
                for place, size in self._sizes:
                    self._released(place, size)
            case ft.ModelLeft():
                self._forget(fact.session, [fact.name])
            case ft.ModelEnded():
                for key in [key for key in self.marks if key[0] == fact.name]:
                    del self.marks[key]
                    self.in_force.discard(key)
            case ft.Credited(cause="not held") if fact.session in self._extents:
                extents = self._extents[fact.session]
                self._not_held[fact.session] += [extents[one] for one in fact.ids]
            case ft.SessionMoved(session, "connection lost"):
                for place in [place for place, one in self.asked.items() if place[0] == session and not one.late]:
                    self.away[place] = self.asked.pop(place)
            case ft.SessionMoved(session, "resumed"):
                self._resumed(session)
            case ft.SessionMoved(session, "goodbye" | "process died" | "forgotten"):
                self._forget(
                    session,
                    [*self.answering, *(place[1] for place in [*self.asked, *self.away, *self.kept, *self.guests])],
                )

    def _follow_declaration(self, fact: ft.DeclarationSet) -> None:
        place, now = (fact.session, fact.name, fact.location), self._world.now
        less = self.declared[place] - fact.declared_bytes
        self.declared[place] = fact.declared_bytes
        if less < 0:
            self._lent[fact.name, fact.location].append(-less)
        own = [one for one in self._granted if (one.session, one.name, one.location) == place]
        event = next((one for one in own if one.declared_bytes == fact.declared_bytes), None)
        if event is None:  # it was stated in a resume
            if place in self.guests:
                self._not_held[fact.session].append((place, less))
                if not fact.declared_bytes:
                    del self.guests[place]
            return
        self._granted.remove(event)
        if not event.recallable and place not in self.guests:
            return
        before = self.guests.pop(place, None)
        if event.recallable and fact.declared_bytes:
            slice_ns = self._world.broker.books.rules.slice_ns
            self.guests[place] = now, before[1] if before else (now + slice_ns if slice_ns else None)
        if less > 0:
            self._released(place, less)

    def _resumed(self, session: int) -> None:
        """What is not late goes on, with the rest of its time and of its bytes, if the session answers still."""
        self.asked |= {place: self.away.pop(place) for place in list(self.away) if place[0] == session}
        for place, size in self._not_held[session]:
            self._released(place, size)
        before, guests = set(self.guests), self._stated[session].guests
        for name, where in self._world.broker.ledger.sessions[session].charges:
            if (name, where) not in guests:
                self.guests.pop((session, name, where), None)
            elif (session, name, where) not in self.guests:
                self.guests[session, name, where] = self._world.now, None
        stated = self._stated.pop(session).answering
        for name in self._world.broker.ledger.sessions[session].models:
            sessions = self.answering.setdefault(name, set())
            (sessions.add if name in stated else sessions.discard)(session)
        for place, one in list(self.asked.items()):
            if place[0] != session:
                continue
            if not one.late:
                one.first = one.size = one.left
            if one.late or (place[1] in stated and (place in self.guests or place not in before)):
                self._again[one.number] = one
            else:
                self._answered(session, [one.number], one.size)

    def _forget(self, session: int, names: Iterable[ModelName]) -> None:
        for name in set(names):
            self.answering.get(name, set()).discard(session)
            for books in (self.asked, self.away, self.kept, self.guests):
                for place in [place for place in books if place[:2] == (session, name)]:
                    del books[place]

    def _released(self, place: Place, size: int) -> None:
        asked = self.asked.get(place)
        if asked is not None:
            asked.left = max(0, asked.left - size)
            if not asked.left and not asked.late:
                self._forgive(place, asked.size)
                self._end(place, "returned")

    def _owe(self, place: Place, one: Asked) -> bool:
        """Whether the tenant still keeps something although its first answer was due."""
        key = place[1].tenant, place[2]
        due, until, size = self.debts.get(key, (0, -1, 0))
        if one.since > until:
            due, size = one.deadline, 0
        self.debts[key] = due, self._world.now + 2 * KEPT_NS, size + one.left
        return due < self._world.now

    def _mark(self, place: Place, kept: int) -> int:
        times, until, size = self.marks.get(place[1:], (0, 0, 0))
        if place[1:] not in self.in_force:
            times = times + 1 if self._world.now - until <= LONGEST_NS else 1
            until, size = self._world.now + min(LONGEST_NS, KEPT_NS * 2 ** (times - 1)), 0
        self.marks[place[1:]] = times, until, max(size, kept)
        self.in_force.add(place[1:])
        return until

    def _forgive(self, place: Place, size: int) -> None:
        due, until, owed = self.debts.pop((place[1].tenant, place[2]), (0, 0, 0))
        if owed > size:
            self.debts[place[1].tenant, place[2]] = due, until, owed - size
        if size >= self.marks.get(place[1:], (0, 0, 0))[2]:
            self.marks.pop(place[1:], None)
            self.in_force.discard(place[1:])

    def _answered(self, session: int, numbers: Iterable[int], heard: int) -> None:
        """An answer is for what the session had heard of, and at least for what the first notice asked for."""
        for place, one in list(self.asked.items()):
            if place[0] == session and one.number in numbers:
                released, known = one.size - one.left, min(one.size, max(one.first, heard))
                if known < one.size:
                    self.ends["taken back"] += 1
                    self._taken_back = True
                    one.size, one.left = known, max(0, known - released)
                overdue = self._owe(place, one) if one.left else False
                if one.left == one.size:
                    self.kept[place] = 1 << 62, self._mark(place, one.left)
                elif one.left:
                    self.kept[place] = self.kept.get(place, (0, 0))[0] + one.left, self._world.now + KEPT_NS
                    if overdue:
                        self._mark(place, one.left)
                else:
                    self._forgive(place, one.size)
                is_part = 0 < one.left < one.size
                self._end(place, "late" if overdue and is_part else "kept" if one.left else "returned")

    def _set_answers(self, session: int, name: ModelName, answers: bool) -> None:
        sessions = self.answering.setdefault(name, set())
        if answers:
            sessions.add(session)
        else:
            mine = [one for place, one in self.asked.items() if place[:2] == (session, name)]
            self._answered(session, [one.number for one in mine], 1 << 63)
            sessions.discard(session)

    def _end(self, place: Place, result: str) -> None:
        one = self.asked.pop(place)
        self.ends[f"{result} late" if one.late else result] += 1
        if not one.late:
            self._tell(place, one, result)

    def _tell(self, place: Place, one: Asked, result: str) -> None:
        self._told[(*place, one.size, one.size - one.left, self._world.now - one.since, result)] += 1

    def _bound_kept(self, step: Step) -> None:
        """A session keeps no more than it had when the step's question was decided, before the grants that follow."""
        sessions = self._world.broker.ledger.sessions
        for place, (size, until) in self.kept.items():
            debits = [fact for fact in step.facts if isinstance(fact, ft.Debited)]
            new = [
                fact.extent_bytes * fact.count for fact in debits if (fact.session, fact.name, fact.location) == place
            ]
            charge = sessions[place[0]].charges.get(place[1:])
            has = charge.bytes - (0 if place in self.guests else charge.declared) - sum(new) if charge else 0
            self.kept[place] = min(size, has), until

    def _elapsed(self) -> None:
        now = self._world.now
        self.in_force = {key for key in self.in_force if self.marks[key][1] > now}
        for place, (used, until) in self.guests.items():
            if until is not None and until <= now:
                self.guests[place] = used, None
                self._slice_ended = True
        self._kept_ended = any(until <= now for _, until in self.kept.values())
        self.kept = {place: (size, until) for place, (size, until) in self.kept.items() if until > now}
        for place in [place for place, one in self.away.items() if one.deadline <= now]:
            self.asked[place] = self.away.pop(place)
        for place, one in self.asked.items():
            if one.deadline <= now:
                if not one.late:
                    self._tell(place, one, "late")
                    self.ends["late"] += 1
                one.late, one.deadline = True, now + self._world.broker.books.rules.recall_ns
                self._again[one.number] = one

    def _follow_question(self, effect: fx.SendRecall) -> None:
        place = (effect.session, effect.name, effect.location)
        one, rules = self.asked.get(place), self._world.broker.books.rules
        now = self._world.now
        if one is not None and one.number == effect.recall and effect.size > one.size:
            more = effect.size - one.size
            assert place not in self.guests, "a guest is asked for more than all"
            assert not one.late, "a late recall is raised"
            assert one.since <= now <= (one.since + one.deadline) / 2, (
                "it is raised with less than half of its time left"
            )
            assert effect.within_ns == one.deadline - now, "a raise moves the deadline"
            assert one.left + more <= self.bytes_of(place), f"{effect} asks for what cannot be recalled"
            assert effect.is_guaranteed >= one.urgent, "a raise takes back that it is urgent"
            one.size, one.left, one.urgent = one.size + more, one.left + more, effect.is_guaranteed
            self._new.append((place, more))
            self.ends["raised"] += 1
            return
        if one is not None and one.number == effect.recall and effect.is_guaranteed > one.urgent:
            assert one.left, "it is urgent, and brings nothing"
            assert not one.late, "a late recall becomes urgent"
            assert place not in self.guests, "a guest is told that it is urgent"
            assert (effect.size, effect.within_ns) == (one.size, one.deadline - now), "it is raised at the same time"
            one.urgent = True
            self.ends["made urgent"] += 1
            return
        if one is not None and one.number == effect.recall:
            assert effect.is_guaranteed == one.urgent, "it is not urgent any more"
            within = rules.recall_ns if one.late else max(0, one.deadline - now)
            assert effect.within_ns == within, "a repetition moves the deadline"
            assert self._again.pop(one.number, None) is one, "it is repeated too early"
            assert effect.size == one.left, "another size is asked for in the repetition"
            self.ends["repeated"] += 1
            return
        more_time = (effect.size * GUEST_NS_PER_GIB >> 30) if place in self.guests else 0
        assert effect.within_ns == rules.recall_ns + more_time
        assert one is None, "a session is asked twice at once"
        assert effect.recall > self._last_number, "a number is used twice"
        if place in self.guests:
            self._judge_guest(place, effect)
        else:
            assert 0 < effect.size <= self.bytes_of(place), f"{effect} asks for what cannot be recalled"
        self._last_number = effect.recall
        deadline = now + effect.within_ns
        self.asked[place] = Asked(
            effect.recall, effect.size, effect.size, effect.size, now, deadline, urgent=effect.is_guaranteed
        )
        self._new.append((place, effect.size))
        self.ends["asked"] += 1

    def _judge_guest(self, place: Place, effect: fx.SendRecall) -> None:
        """A guest is asked for all that it has, after its slice, and keeps guarantees; but not from its own tenant."""
        session, name, where = place
        assert self.answers(session, name), "a guest is asked that does not answer"
        assert self.guests[place][1] is None, "a guest is asked in its slice"
        assert place not in self.kept, "a guest is asked for what it keeps"
        charge = self._world.broker.ledger.sessions[session].charges[name, where]
        assert effect.size == charge.bytes, "a guest is asked for a part"
        assert self.can_go(place) or self.can_go(place, name.tenant), f"{effect} goes below a guarantee"
        self.ends["guests asked"] += 1

    # --- what the core has made of it ---

    def judge(self, event: ev.Event, step: Step) -> None:
        """Hold the core to the books, and each question to the shares."""
        broker = self._world.broker
        mine = {place: (one.number, one.size, one.left, one.late) for place, one in self.asked.items()}
        core = {
            tuple(one): (it.number, it.size, it.left, it.late) for one, it in broker.books.recallable.recalls.items()
        }
        assert core == mine, f"the core follows the recalls {core}, and they are {mine}"
        asked = [*self.asked.values(), *self.away.values()]
        ends = [one.deadline for one in asked] + [until for _, until in self.kept.values()]
        ends += [self.marks[key][1] for key in self.in_force]
        ends += [until for _, until in self.guests.values() if until is not None]
        core_guests = {tuple(one): (it.used, it.slice_until) for one, it in broker.books.recallable.guests.items()}
        assert core_guests == self.guests, f"the core knows the guests {core_guests}, and they are {self.guests}"
        if ends:
            assert broker.deadline is not None
            assert broker.deadline <= min(ends), "the core is not told the time when it is late"
        recallable_sums.check(broker, self)
        self._judge_firm()
        for where in broker.books.rules.capacities:
            self._judge_questions(event, step, where, [one for one in self._new if one[0][2] == where])
        self._judge_limits(step)
        self._judge_holds(event, step, {place[2] for place, _ in self._new})

    def _shrink_holds(self) -> None:
        """What the models have released in this step, before it lent anything, is not kept for them."""
        for key, hold in self.holds.items():
            lent = self._referee.guarantees.lent(*key)
            released = max(0, hold.lent + sum(self._lent[key]) - lent)
            self.holds[key] = hold._replace(size=hold.size - released, lent=lent)

    def _judge_firm(self) -> None:
        broker, guarantees = self._world.broker, self._referee.guarantees
        if not (self.answering or broker.books.recallable.is_possible):
            return
        for where, total in broker.ledger.totals.items():
            for name in self._world.broker.ledger.models:
                assert broker.books.admission.firm(name, where) == guarantees.firm(name, where), (
                    f"{name} has other firm bytes"
                )
            more = guarantees.needed(where, {}) - (total.capacity - total.releasing)
            assert broker.books.admission.shortfall(where) == max(0, more), "the guarantees lack something else"

    def _judge_questions(self, event: ev.Event, step: Step, where: Location, asks: list[tuple[Place, int]]) -> None:
        """No model is asked for its guarantee, nor for its share, but for what is above a limit."""
        if not asks or any(place in self.guests for place, _ in asks):
            return  # what is asked of guests is more than is wanted: `_judge_guest`
        guarantees, answered = (
            self._referee.guarantees,
            {one.call for one in step.effects if isinstance(one, fx.Answer)},
        )
        gone = [one for call, one in self._referee.waiting.before.items() if call in answered]
        without, beside = dict(divide(self._referee, where)), dict(divide(self._referee, where, gone))
        above = guarantees.above_limits(where)
        keepers = self._keepers(where)
        if keepers:  # others are asked as if all that these have were firm
            with_keepers = [divide(self._referee, where, others, keepers=keepers) for others in ((), gone)]
            for name in self._world.broker.ledger.models:
                if name not in keepers:
                    without[name] = min(without[name], with_keepers[0][name])
                    beside[name] = min(beside[name], with_keepers[1][name])
        for name in {place[1] for place, _ in asks}:
            lent, asked = guarantees.lent(name, where), self.coming_of(name, where)
            if asked <= above.get(name, 0):
                continue
            new = sum(more for place, more in asks if place[1] == name)
            assert lent - new >= guarantees.used(name, where), f"{name} is asked for its guarantee"
            share = min(without[name], beside.get(name, 0))
            if isinstance(event, ev.NotMade):  # for the device, of which others use a part
                continue
            assert asked <= lent - share + SLACK, f"{name} is asked for {asked} of {lent}, and its share is {share}"
        if not above:
            short = self.short(where, [*self._waiters(where), *gone], divide(self._referee, where))
            full = sum(one.size for one in self._waiters(where) if one.met_full_device)
            wanted = max(0, short + self.coming(where)) + full
            assert self.coming(where) <= wanted + SLACK, "more is asked for than is wanted"

    def _keepers(self, where: Location) -> set[ModelName]:
        """Return the models of each tenant of which one is marked."""
        models = self._world.broker.ledger.models
        tenants = {name.tenant for name in models if self.is_marked(name, where)}
        return {name for name in models if name.tenant in tenants}

    def _waiters(self, where: Location) -> list[Any]:
        waiters = self._world.broker.waiting._waiters.values()
        return [one for one in waiters if one.event.location == where]

    def short(self, where: Location, waiting: Iterable[Any], shares: Any) -> float:
        """Return how many bytes are missing of what requests, and the holds, want."""
        guarantees = self._referee.guarantees
        wanted: Counter[ModelName] = Counter()
        for one in waiting:
            wanted[one.name] += one.size
        for (name, at), hold in self._world.broker.schedule.holds._holds.items():
            if at == where:
                more = min(hold.size, shares.get(name, 0)) - guarantees.lent(name, where)
                wanted[name] = max(wanted[name], more)
        tenants = {name.tenant for name in wanted}
        needed = sum(
            max(
                0,
                sum(size for name, size in wanted.items() if name.tenant == tenant) - guarantees.unlent(tenant, where),
            )
            for tenant in tenants
        )
        free = self._world.broker.ledger.totals[where].free - guarantees.unlent_beside(None, where)
        return float(needed - free - self.coming(where))

    def _judge_holds(self, event: ev.Event, step: Step, asked_at: set[Location]) -> None:
        broker, now = self._world.broker, self._world.now
        for key, hold in broker.schedule.holds._holds.items():
            assert now < hold.until <= now + HOLD_NS or broker.waiting.left_over, "a hold does not end"
            before = self.holds.get(key)
            if hold == before:
                continue
            where = key[1]
            assert hold.until == now + HOLD_NS
            before = before if self._goes_on(key) else None
            if before is not None and before[:3] == hold[:3] and before.until <= now:
                continue
            assert where in asked_at, "a hold begins, or goes on, without a recall"
            self._judge_size(event, step, key, hold, before)

    def _judge_size(self, event: ev.Event, step: Step, key: Any, hold: Any, before: Any) -> None:
        """A hold is of what the model had and its requests want, or of a step more that doubles each time.

        It was begun or raised before, between or behind what the step lent to the model, for some of the requests
        that waited: for all of those that are guaranteed and wait on, or for one that does not wait.
        """
        (name, where), rules = key, self._world.broker.books.rules
        capacity = rules.capacities[where]
        most = capacity // MOST_STEP
        steps = {min(2 * before.step, most) if before else capacity // LEAST_STEP}
        if self._is_refused(event, name):  # a recall for the request that is refused, and one for those that wait
            steps |= {min(2 * size, most) for size in steps}
        assert hold.step in steps, "a step is not doubled"
        lent = [self._referee.guarantees.lent(name, where)]
        for size in reversed(self._lent[key]):
            lent.append(lent[-1] - size)
        sizes = self._wanted_together(event, name, where)
        wasted = self._world.broker.schedule.holds._wasted.get(name.tenant)
        if wasted is not None and self._world.now < wasted.until:
            sizes = self._wanted_together(event, name, where, hints=False)
        more = {max(min(size, capacity), hold.step - hold.step % rules.granularity) for size in sizes}
        least = before.size if before else 0
        found = {max(least, had + size) for had in lent for size in more}
        assert hold.size in found, f"a hold of {name} is of {hold.size} bytes, and not one of {sorted(found)}"

    def _is_refused(self, event: ev.Event, name: ModelName) -> bool:
        """Say whether the step ended a request of this model that does not wait."""
        of_step = self._referee.waiting.all_of_step
        return isinstance(event, ev.InputsDrained) and any(
            one.event.call == event.call and one.name == name for one in of_step
        )

    def _wanted_together(self, event: ev.Event, name: ModelName, where: Location, *, hints: bool = True) -> set[int]:
        """Return what the requests of a model, that others may have been asked for at once, want together.

        Of a session it is the sizes of its requests, or the most that one of them says.
        """
        waiting, after = self._referee.waiting, self._world.broker.waiting._waiters
        sessions: defaultdict[int, set[tuple[int, int]]] = defaultdict(lambda: {(0, 0)})
        alone: set[int] = set()
        for one in waiting.all_of_step:
            if (one.name, one.event.location) != (name, where):
                continue
            hinted = one.event.wanted_bytes if hints and isinstance(one.event, ev.Allocate) else 0
            wanted = max(one.size, hinted)
            waiter = after.get(one.event.call)
            if getattr(event, "call", None) == one.event.call and isinstance(event, ev.InputsDrained):
                alone.add(wanted)
            elif (
                waiter is not None
                and waiter.deadline is not None
                and not waiter.met_full_device
                and self._referee.guarantees.is_guaranteed(name, where, one.size)
            ):
                both = sessions[one.event.session]
                sessions[one.event.session] = {(size + one.size, max(most, wanted)) for size, most in both}
            else:
                both = sessions[one.event.session]
                both |= {(size + one.size, max(most, wanted)) for size, most in both}
        sums = {0}
        for found in sessions.values():
            sums = {total + max(both) for total in sums for both in found}
        return (sums - {0}) | alone

    def _judge_limits(self, step: Step) -> None:
        """After limits have changed, or what was kept is not, what is above them is recalled, as far as it can be."""
        broker, guarantees = self._world.broker, self._referee.guarantees
        changed = any(isinstance(fact, ft.QuotaSet) for fact in step.facts) or self._rules is not broker.books.rules
        self._rules = broker.books.rules
        if not (changed or self._kept_ended or self._taken_back or self._slice_ended):
            return
        for where in broker.books.rules.capacities:
            rest = {name: guarantees.lent(name, where) - self.coming_of(name, where) for name in broker.ledger.models}
            idle = {name for name in rest if self.able(name, where)}
            for name in idle:
                limit = guarantees.limit(name, where)
                assert limit is None or rest[name] <= limit, f"{name} is above its limit, and is not asked"
                limit = self._referee.set_for((name.tenant, None, where)).limit
                whole = sum(size for one, size in rest.items() if one.tenant == name.tenant)
                assert limit is None or whole <= limit, f"{name.tenant} is above its limit, and {name} is not asked"

    def able(self, name: ModelName, where: Location) -> list[int]:
        """Return the sessions of a model that can be asked for more: half of the time for the last question is left."""
        now, able = self._world.now, []
        for session in self.answering.get(name, ()):
            place = session, name, where
            asked = self.asked.get(place)
            if asked is not None and place in self.guests:
                continue  # it gives all that it has, also what it has declared since
            if asked is None or (not asked.late and now <= (asked.since + asked.deadline) / 2):
                able += [session] * (self.bytes_of(place) > (asked.left if asked else 0))
        return able

    # --- others ---

    def inherit(self, dead: Broker, *, torn: bool) -> None:
        """A daemon begins: no session is connected, and nothing is asked. It knows the guests of the dead one."""
        for books in (
            self.answering,
            self.asked,
            self.away,
            self.kept,
            self.marks,
            self.debts,
            self.in_force,
            self._stated,
        ):
            books.clear()
        now = self._world.now
        self.guests = {
            (row.session, name, where): (times.used_at, times.slice_until if times.slice_until > now else None)
            for row in self._world.broker.ledger.sessions.values()
            if row.state in ("open", "detached")
            for (name, where), times in row.guests.items()
        }
        before = {
            tuple(place): (one.used, one.slice_until if one.slice_until and one.slice_until > now else None)
            for place, one in dead.books.recallable.guests.items()
        }
        assert torn or self.guests == before, f"the guests on file are {self.guests}, and were {before}"
        self.declared = Counter(
            {
                (row.session, name, where): charge.declared
                for row in self._world.broker.ledger.sessions.values()
                for (name, where), charge in row.charges.items()
            }
        )

    def at_the_end(self) -> None:
        """Every recall has ended."""
        assert not self.asked
        assert not self.away
        recallable_sums.check_nothing_is_left(self._world.broker)


def _answers(step: Step, call: int) -> list[fx.Answer]:
    return [one for one in step.effects if isinstance(one, fx.Answer) and one.call == call]
