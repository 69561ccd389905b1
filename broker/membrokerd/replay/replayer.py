"""The replayer: the recorded programs around the core, with a clock that stands still but for the rows.

The core is the daemon's own, and so are its decisions. Around it, extents are made at once, and programs do what they
did: they ask at the same times, keep a loan as long, and answer recalls after the same time with the same part. The
device shows dead workers' memory free when it did. Nothing here decides about memory.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..ext import Broker, Denied, Location, ModelName, SegmentName, SessionRow, policy
from ..ext import effects as fx
from ..ext import events as ev
from ..ext import facts as ft
from . import trace
from .changes import Changes, Unplayable
from .deaths import Deaths
from .figures import Tally
from .reading import TracePart
from .recording import BorrowerKey, RecordedAnswer, RecordedLoan, Recording, is_uncounted

AUDIT_NS = 100_000_000
LAST = math.inf
"""The place of what the trace does not place: behind the rows of the same time."""
MAX_DEADLINES = 5_000_000
"""How many deadlines of the core may pass in one part. A recall without an answer has one every `recall_seconds`."""
QUIET_NS = 3_600_000_000_000
"""When nothing has happened for an hour but repeated recalls that nobody answers, their further repeats are left out:
they change nothing, and the next row may be a century later."""
Reply = Callable[[fx.Result | Denied, fx.Waited | None], None]


class Replayer:
    """One part, replayed with other numbers. `replayed` counts what becomes of the requests."""

    def __init__(self, part: TracePart, recording: Recording, changes: Changes, replayed: Tally) -> None:
        self._part, self._recording, self._changes = part, recording, changes
        self._tally = replayed
        self._rules = changes.rules(part.begin.rules)
        # What was lent when the part began was lent under earlier rules.
        self.broker = Broker(self._rules if part.is_journal else changes.without_quotas(self._rules), epoch=1)
        self.now = part.begin.now
        self._index: float = 0
        self._numbers = itertools.count(1 << 63)
        """Beyond those that a daemon gives: a request that is in the trace has its call there."""
        self._later: list[tuple[int, float, int, Callable[[], None] | tuple[int, list[range]]]] = []
        self._events: deque[ev.Event] = deque()
        self._replies: dict[int, Reply] = {}
        """By call, until it is answered."""
        self._sessions: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        """By session of the core: the session in the trace."""
        self._loans: dict[int, RecordedLoan] = {}
        """By call of the core, which is the request id, too."""
        self.extents: dict[RecordedLoan, range] = {}
        self._models: dict[ModelName, tuple[int | None, dict[Location, int]]] = {}
        self._answers = Answers(self, recording)
        self._deaths = Deaths(self.broker, self.tell)
        self._quotas: list[ft.QuotaSet] = []
        """What commands have set one after the other, at the same time, and is not in force yet."""
        self._stuck: int | None = None
        self._happened_at = self.now
        """When something happened last that was no repeat of a recall."""
        self._deadlines = 0

    def run(self, progress: Callable[[int], None]) -> None:
        """Replay all rows; `progress` is told how many are done, now and then."""
        for index, (at, row) in enumerate(self._part.rows):
            if self._quotas and (type(row) is not ft.QuotaSet or at > self.now):
                self._set_quotas()
            self._until(at, index)
            self.now, self._index = max(self.now, at), index
            self._happened_at = self.now
            act = _ACTS.get(type(row))
            if act is not None:
                act(self, row)
            if not index % 1024:
                progress(index)
        if self._quotas:
            self._set_quotas()
        self._until(self.now + 1, LAST)  # what follows from the last row at once

    # --- time ---

    def _until(self, at: int, index: float) -> None:
        """Let everything happen that is due before the row `index` at the time `at`."""
        while True:
            due = self._later[0] if self._later and self._later[0][:2] < (at, index) else None
            deadline = self.broker.deadline
            if deadline is not None and deadline != self._stuck and deadline <= (due[0] if due else at):
                self.now = max(self.now, deadline, self._leap(due[0] if due else at))
                self._deadlines += 1
                if self._deadlines > MAX_DEADLINES:
                    raise Unplayable(
                        f"a part of the recording has more than {MAX_DEADLINES:,} deadlines, as of recalls that are "
                        "never answered and repeated for months: give a shorter recording"
                    )
                self.tell(ev.Elapsed())
                # A deadline that stays would be told again and again; the core hears of the next row all the same.
                self._stuck = deadline if deadline and self.broker.deadline == deadline else None
            elif due is not None:
                heapq.heappop(self._later)
                self.now, self._index = max(self.now, due[0]), due[1]
                self._happened_at = self.now
                if callable(due[3]):
                    due[3]()
                else:
                    self.release(due[3][0], itertools.chain.from_iterable(self._with_others(due, due[3][1])))
            else:
                return

    def _leap(self, until: int) -> int:
        """Return the time to which the clock may leap, at most `until`: 0 unless only recalls are repeated for long."""
        broker = self.broker
        if self.now - self._happened_at < QUIET_NS or broker.waiting.left_over:
            return 0
        others = (broker.segments.attaches.deadline, broker.waiting.deadline, broker.schedule.holds.deadline)
        return min([until, *(at for at in others if at is not None)])

    def _with_others(self, due: tuple[int, float, int, Any], ids: list[range]) -> list[range]:
        """Return the extents of this release, and those that the same request released of other loans."""
        found = list(ids)
        while self._later and self._later[0][:2] == due[:2] and not callable(other := self._later[0][3]):
            if other[0] != due[3][0]:
                break
            found += other[1]
            heapq.heappop(self._later)
        return found

    def do_later(self, at: int, index: float, what: Callable[[], None] | tuple[int, list[range]]) -> None:
        """Do something at a time, in the place of the row `index`; or let a session release extents."""
        heapq.heappush(self._later, (at, index, next(self._numbers), what))

    # --- the core ---

    def tell(self, event: ev.Event) -> None:
        """Give the core an event, and then all that follows from it at once."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            step = self.broker.step(self._events[0], self.now)
            if step.facts or not all(map(self._answers.is_repeated, step.effects)):
                self._happened_at = self.now
            waits = {waited.call: waited for waited in step.effects if isinstance(waited, fx.Waited)}
            for effect in step.effects:
                if isinstance(effect, fx.Answer):
                    reply = self._replies.pop(effect.call, None)
                    if reply is not None:
                        reply(effect.result, waits.get(effect.call))
                else:
                    obey = _EFFECTS.get(type(effect))
                    if obey is not None:
                        obey(self, effect)
            self._events.popleft()

    def _ask(self, make: Callable[[int], ev.Event], reply: Reply = lambda result, wait: None, call: int = 0) -> None:
        """Give the core what asks for an answer. `call` 0: it is not in the trace."""
        call = call or next(self._numbers)
        assert call not in self._replies, "two requests are one call"
        self._replies[call] = reply
        self.tell(make(call))

    def _request(self, kind: Callable[..., ev.Event], session: int | None, *numbers: Any) -> None:
        """Let a session ask for something that is not in the trace."""
        self._ask(lambda call: kind(call, session, call, *numbers))

    def _make(self, make: fx.Make) -> None:
        loan = self._loans[make.request_id]
        if not make.part:
            self.extents[loan] = range(make.ids.start, make.ids.start + loan.count)
        failure = loan.failures[0] if loan.failures else None
        end = make.part * policy.PACKET_EXTENTS + len(make.ids)
        session, request, part = make.session, make.request_id, make.part
        if failure is not None and (loan.is_segment or failure[1] < end):
            loan.failures.pop(0)
            self._events.append(ev.NotMade(session, request, part, failure[2], {"location": make.location}))
            self.do_later(self.now + AUDIT_NS, LAST, self._deaths.audit)
        else:
            self._events += (ev.Made(session, request, part), ev.Acknowledge(session, request, part))

    def _drain(self, drain: fx.DrainInputs) -> None:
        """Let a request be refused when it was, in the trace; else behind this row."""
        at, index = self._recording.drained.get(drain.call, (self.now, self._index))
        self.do_later(max(self.now, at), index, lambda: self.tell(ev.InputsDrained(drain.call)))

    def _row(self, session: int) -> SessionRow | None:
        return self.broker.ledger.sessions.get(self._sessions.get(session, 0))

    # --- sessions and models ---

    def _session_began(self, row: ft.SessionBegan) -> None:
        def opened(result: fx.Result | Denied, _: fx.Waited | None) -> None:
            if isinstance(result, fx.SessionOpened):
                self._sessions[row.session], self._recorded[result.session] = result.session, row.session

        self._ask(
            lambda call: ev.OpenSession(
                call=call, tenant=row.tenant, pid=0, uid=0, process="", observer=row.observer, client=""
            ),
            opened,
        )

    def _session_moved(self, row: ft.SessionMoved) -> None:
        found = self._row(row.session)
        if found is None:
            return
        session = found.session
        if row.cause == "connection lost":
            self.tell(ev.ConnectionLost(session))
        elif row.cause == "goodbye":
            self._request(ev.Goodbye, session)
        elif row.cause == "process died":
            self.tell(ev.ProcessDied(session, self._deaths.seen()))
        elif row.cause == "forgotten":
            self._ask(lambda call: ev.ForgetSession(call, session))
        elif row.cause == "resumed":
            self._resume(found)

    def _resume(self, row: SessionRow) -> None:
        """Let a process resume its session with all that it has. What it had lost shows as released in the trace."""
        declared = {where: charge.declared for where, charge in row.charges.items() if charge.declared}
        extents, segments, guests = frozenset(row.extents), dict(row.segments), frozenset(row.guests)
        self._ask(lambda call: ev.ResumeSession(call, row.session, row.process))
        self._ask(lambda call: ev.StateHolds(call, row.session, extents, segments, declared, guests=guests))

    def _settled(self, row: ft.SessionEnded | ft.LocationSettled) -> None:
        location = row.location if isinstance(row, ft.LocationSettled) else None
        self._deaths.settled(self._row(row.session), location)

    def _model_began(self, row: ft.ModelBegan) -> None:
        self._models[row.name] = row.virtual_capacity, dict(row.limits)

    def _model_asked(self, row: ft.ModelAsked) -> None:
        virtual, limits = self._models.get(row.name, (None, {}))
        self._models[row.name] = row.virtual_capacity or virtual, {**limits, **row.limits}
        model = self.broker.ledger.models.get(row.name)
        for session in sorted(model.sessions)[:1] if model else ():
            self._register(session, row.name, None)

    def _model_joined(self, row: ft.ModelJoined) -> None:
        self._register(self._sessions.get(row.session, 0), row.name, None)

    def _answering(self, row: trace.AnswersRecalls) -> None:
        self._register(self._sessions.get(row.session, 0), row.name, row.answers)

    def _register(self, session: int, name: ModelName, answers: bool | None) -> None:
        virtual, limits = self._models.get(name, (None, {}))
        known = {where: size for where, size in limits.items() if where in self.broker.books.rules.capacities}
        if session:
            self._request(ev.RegisterModel, session, name, virtual, known, False, answers)

    def _model_left(self, row: ft.ModelLeft) -> None:
        """Let a session leave a model, after it has released what it would have had to release before."""
        found = self._row(row.session)
        if found is None:
            return
        session = found.session
        self.release(session, [extent for extent, loan in found.extents.items() if loan.name == row.name])
        for name, where in [key for key in found.charges if key[0] == row.name]:
            self._request(ev.Declare, session, name, where, 0)
        self._request(ev.UnregisterModel, session, row.name)

    # --- requests ---

    def _allocate(self, _: ev.Allocate | trace.Create | ft.Debited | ft.SegmentBegan) -> None:
        for loan in self._recording.loans.get(int(self._index), ()):
            found = self._row(loan.session)
            if loan.outcome is not None and loan.is_decided:
                if not is_uncounted(loan):
                    self._tally.answered(loan.name, loan.location, loan.outcome.reason, None)
            elif found is not None:
                self._borrow(loan, found.session)
            elif loan.is_segment and not loan.call:
                self._borrow_for_nobody(loan)

    def _borrow(self, loan: RecordedLoan, session: int) -> None:
        def make(call: int) -> ev.Event:
            self._loans[call] = loan
            if not loan.is_segment:
                return ev.Allocate(
                    call=call,
                    session=session,
                    request_id=call,
                    name=loan.name,
                    location=loan.location,
                    extent_bytes=loan.extent_bytes,
                    count=loan.count,
                    wait_ns=loan.wait_ns,
                    ahead=loan.ahead,
                    wanted_bytes=loan.wanted_bytes,
                )
            name = SegmentName(loan.name.tenant, loan.name.model, f"s{call}")
            return ev.CreateSegment(
                call=call,
                session=session,
                request_id=call,
                name=name,
                location=loan.location,
                size=loan.size,
                wait_ns=loan.wait_ns,
            )

        self._ask(make, lambda result, wait: self._decided(loan, session, result, wait), loan.call)

    def _borrow_for_nobody(self, loan: RecordedLoan) -> None:
        """Lend a segment whose writer had left before the part began: another session writes it, and leaves."""
        writer = -self.broker.ledger.revision - 1
        self._session_began(
            ft.SessionBegan(
                session=writer,
                tenant=loan.name.tenant,
                pid=0,
                uid=0,
                process="",
                observer=False,
                client="",
                at=self.now,
            )
        )
        if (found := self._row(writer)) is not None:
            self._register(found.session, loan.name, None)
            self._borrow(loan, found.session)
            self._request(ev.Goodbye, found.session)

    def _decided(self, loan: RecordedLoan, session: int, result: fx.Result | Denied, wait: fx.Waited | None) -> None:
        reason = result.reason.value if isinstance(result, Denied) else ""
        if (self._part.is_journal and not loan.call) or not is_uncounted(loan):
            self._tally.answered(loan.name, loan.location, reason, wait.waited_ns if wait else None)
        if reason:
            self._tally.unfit_bytes += 0 if loan.call or self._part.is_journal else loan.size
            return
        self._tally.granted_now += bool(loan.outcome and loan.outcome.reason)
        if isinstance(result, fx.SegmentView):
            self._seal(loan, session, result)
            return
        for after, index, positions in self._recording.life_of(loan):
            ids = self.extents[loan]
            self.do_later(
                self.now + after,
                index if loan.granted_at is not None else LAST,
                (session, [ids[run.start : run.stop] for run in positions]),
            )

    def _seal(self, loan: RecordedLoan, session: int, segment: fx.SegmentView) -> None:
        """Seal a segment at once, so that it lasts until it is deleted. Sessions that attach it are charged nothing."""
        number, name = segment.segment, segment.name
        self._request(ev.SealSegment, session, number)
        self._request(ev.DetachSegment, session, number)
        if life := self._recording.life_of(loan):
            delete_at = self.now + life[-1].after
            self.do_later(delete_at, LAST, lambda: self._request(ev.DeleteSegment, None, name, number))

    def release(self, session: int, ids: Iterable[int]) -> None:
        """Let a session release what it has of these extents."""
        row = self.broker.ledger.sessions.get(session)
        held = [extent for extent in ids if extent in row.extents] if row is not None else []
        for start in range(0, len(held), policy.MAX_RELEASE):
            self._request(ev.Release, session, tuple(held[start : start + policy.MAX_RELEASE]))

    def _declare(self, row: ev.Declare) -> None:
        asked, session = self._recording.declared.get(int(self._index)), self._sessions.get(row.session, 0)
        if asked is None:
            return

        def answered(result: fx.Result | Denied, wait: fx.Waited | None) -> None:
            if not is_uncounted(asked):
                reason = result.reason.value if isinstance(result, Denied) else ""
                self._tally.answered(asked.name, asked.location, reason, wait.waited_ns if wait else None)

        if session:
            self._ask(
                lambda call: dataclasses.replace(row, call=call, session=session, request_id=call), answered, row.call
            )

    def declare(self, session: int, name: ModelName, location: Location, size: int) -> None:
        """Let a guest declare less, because it is recalled."""
        row = self.broker.ledger.sessions.get(session)
        charge = row.charges.get((name, location)) if row is not None else None
        if charge is not None and size < charge.declared:
            self._request(ev.Declare, session, name, location, size, True)

    def _declaration_set(self, row: ft.DeclarationSet) -> None:
        session = self._sessions.get(row.session, 0)
        if session and int(self._index) in self._recording.unasked_declarations:
            self._request(ev.Declare, session, row.name, row.location, row.declared_bytes)

    def _guest(self, row: ft.GuestSet) -> None:
        """Let a session be the guest that it was when the part began. A journal's times are not those of its replay."""
        found = self._row(row.session)
        if (
            found
            and (row.name, row.location) in found.charges
            and row.used_at is not None
            and not self._part.is_journal
        ):
            self.broker.ledger.apply(dataclasses.replace(row, session=found.session))

    def _turn(self, row: ft.TurnBegan) -> None:
        if not self._part.is_journal:
            self.broker.ledger.apply(row)

    def _cancel(self, row: ev.CancelWait) -> None:
        if row.call in self._replies:
            self.tell(row)

    # --- operators ---

    def _books_complete(self, _: trace.BooksComplete) -> None:
        self.broker.change_rules(self._rules)
        self.broker.recalls.restarted(self.now)

    def _quota(self, row: ft.QuotaSet) -> None:
        self._quotas.append(self._changes.left_of(row))

    def _set_quotas(self) -> None:
        """Set the quotas that follow each other at one time. The core looks at all that it has once, at the last."""
        *first, last = self._quotas
        self._quotas = []
        for row in first:
            self.broker.ledger.apply(row)
        numbers = {"limit": last.limit, "guarantee": last.guarantee, "weight": last.weight}
        self._ask(lambda call: ev.SetQuota(call, last.tenant, last.model, last.location, **numbers, undo=True))

    def _stopping(self, _: trace.DaemonStops) -> None:
        self.broker.books.stopping = True
        self.tell(ev.Elapsed())


@dataclass(slots=True)
class _Asked:
    """A recall that a program works on. It looks at the `size` when it releases: `heard` is what it saw last."""

    size: int
    heard: int
    given: int = 0


class Answers:
    """How programs answer recalls: as they did, after the same time and with the same part of what is asked."""

    def __init__(self, replayer: Replayer, recording: Recording) -> None:
        self._replayer = replayer
        self._recording = recording
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._answered: Counter[BorrowerKey] = Counter()

    def is_repeated(self, effect: fx.Effect) -> bool:
        """Whether an effect is a recall that a program works on, or never answers."""
        return isinstance(effect, fx.SendRecall) and (effect.session, effect.recall) in self._asked

    def recall(self, recall: fx.SendRecall, recorded: int) -> None:
        """Answer a recall of the session that is `recorded` in the trace.

        Its first as its first there, and so on; one more as its last, or else as another session of its model.
        """
        asked = self._asked.get((recall.session, recall.recall))
        if asked is not None:  # it is raised; or late, and repeated with what is left
            asked.size = max(asked.size, recall.size)
            return
        self._asked[recall.session, recall.recall] = _Asked(recall.size, recall.size)
        borrower = recorded, recall.name, recall.location
        number, known = self._answered[borrower], self._recording.answers.get(borrower, [])
        self._answered[borrower] += 1
        answer = known[min(number, len(known) - 1)] if known else None
        if answer is None:
            answer = next(
                (found[-1] for key, found in self._recording.answers.items() if key[1:] == borrower[1:]), None
            )
        if answer is None:  # nothing like it was recorded: it releases all that is asked, at once
            self._give_later(recall, Fraction(1), (), 0, LAST)
            self._say(recall, 0, has_heard=True)
        else:
            self._answer(recall, answer)

    def _answer(self, recall: fx.SendRecall, answer: RecordedAnswer) -> None:
        total = after = 0
        for row, together in itertools.groupby(answer.released, lambda entry: entry[0].row):
            own: list[int] = []
            size = of = 0
            for released, loan, asked in together:
                of = asked
                ids, after = self._replayer.extents.get(loan, range(0)), released.after
                for positions in released.positions:
                    own += ids[positions.start : positions.stop]
                    size += len(positions) * loan.extent_bytes
            total += size
            self._give_later(recall, Fraction(total, max(1, of)), tuple(own), after, row)
        for after, index, before, left in answer.declared:
            total += before - left
            self._declare_later(recall, left, after, index)
        if answer.after is not None:
            self._say(recall, answer.after, has_heard=answer.has_heard)
        elif total >= answer.size:  # its last byte ended it
            self._say(recall, after, has_heard=False)

    def _give_later(self, recall: fx.SendRecall, part: Fraction, own: tuple[int, ...], after: int, row: float) -> None:
        """Release, in some time, what is then missing of a part of all that is asked for."""

        def give() -> None:
            asked = self._asked.get((recall.session, recall.recall))
            if asked is not None:
                asked.heard = asked.size
                size = math.ceil(part * asked.size) - asked.given
                asked.given += size
                self._give_back(recall, size, own)

        self._replayer.do_later(self._replayer.now + after, row, give)

    def _declare_later(self, recall: fx.SendRecall, size: int, after: int, row: float) -> None:
        replayer = self._replayer
        replayer.do_later(
            replayer.now + after, row, lambda: replayer.declare(recall.session, recall.name, recall.location, size)
        )

    def _say(self, recall: fx.SendRecall, after: int, *, has_heard: bool) -> None:
        def say() -> None:
            asked = self._asked.pop((recall.session, recall.recall), None)
            if asked is not None:
                size = asked.size if has_heard else asked.heard
                self._replayer.tell(ev.AnswerRecall(recall.session, recall.recall, size))

        self._replayer.do_later(self._replayer.now + after, LAST, say)

    def _give_back(self, recall: fx.SendRecall, size: int, own: tuple[int, ...]) -> None:
        """Let a session release `size` bytes: the extents that it did release, if it has them, then its newest ones."""
        row = self._replayer.broker.ledger.sessions.get(recall.session)
        if row is None:
            return
        if (recall.name, recall.location) in row.guests:
            self._replayer.declare(recall.session, recall.name, recall.location, 0)
        mine = {
            extent: loan.extent_bytes
            for extent, loan in row.extents.items()
            if (loan.name, loan.location) == (recall.name, recall.location)
        }
        chosen: list[int] = []
        for extent in [*(extent for extent in own if extent in mine), *sorted(mine.keys() - set(own), reverse=True)]:
            if size <= 0:
                break
            chosen.append(extent)
            size -= mine[extent]
        self._replayer.release(recall.session, chosen)


_ACTS: Mapping[type, Callable[[Replayer, Any], None]] = {
    ft.SessionBegan: Replayer._session_began,
    ft.SessionMoved: Replayer._session_moved,
    ft.SessionEnded: Replayer._settled,
    ft.LocationSettled: Replayer._settled,
    ft.ModelBegan: Replayer._model_began,
    ft.ModelAsked: Replayer._model_asked,
    ft.ModelJoined: Replayer._model_joined,
    ft.ModelLeft: Replayer._model_left,
    ft.ModelEnded: lambda replayer, _: replayer._deaths.audit(),
    ft.Debited: Replayer._allocate,
    ft.SegmentBegan: Replayer._allocate,
    ft.DeclarationSet: Replayer._declaration_set,
    ft.GuestSet: Replayer._guest,
    ft.TurnBegan: Replayer._turn,
    ft.QuotaSet: Replayer._quota,
    trace.BooksComplete: Replayer._books_complete,
    trace.AnswersRecalls: Replayer._answering,
    trace.Create: Replayer._allocate,
    trace.DaemonStops: Replayer._stopping,
    ev.Allocate: Replayer._allocate,
    ev.Declare: Replayer._declare,
    ev.CancelWait: Replayer._cancel,
    ev.SetDraining: lambda replayer, row: replayer.tell(ev.SetDraining(0, row.draining)),
}
"""What happens by each kind of row; the others are what followed then."""
_EFFECTS: Mapping[type, Callable[[Replayer, Any], None]] = {
    fx.Make: Replayer._make,
    fx.DrainInputs: Replayer._drain,
    fx.SendRecall: lambda replayer, recall: replayer._answers.recall(recall, replayer._recorded[recall.session]),
    fx.Recalled: lambda replayer, recalled: replayer._tally.recalled(recalled),
    fx.Seal: lambda replayer, effect: replayer._events.append(ev.Sealed(effect.segment)),
    fx.Drop: lambda replayer, effect: replayer._events.append(ev.Dropped(effect.segment)),
}
"""What the core's effects lead to; the others are for a daemon."""
