"""What every step must keep of sessions that are taken up again, forgotten and inherited, and of the honest."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.parts import Counting

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core.books import Step
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.names import Location, ModelName

if TYPE_CHECKING:
    from tests.simulation.processes import Worker
    from tests.simulation.world import World

_BY_FORCE = "forgotten"
"""Why somebody is credited who may have it all."""


class ResumingReferee(Counting):
    """Judges what a step did to sessions."""

    COUNTED = ("ends", "forgotten", "waited")

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: dict[int, tuple[set[int], set[int], set[ModelName]]] = {}
        """By session: the unknown extents and segments, and the models, that must be told to it."""
        self.declared: dict[int, dict[tuple[ModelName, Location], int]] = {}
        """What sessions that resume had declared before the step."""
        self._declared_before = 0
        self._in_the_middle = False
        """Whether somebody asks who is being taken up."""
        self.ends: Counter[str] = Counter()
        """How resumes ended."""
        self.forgotten = 0
        self.waited = 0
        """Answers that waited for a name."""

    def before(self, event: ev.Event) -> None:
        """Take down what a step may credit."""
        sessions = self.world.broker.ledger.sessions
        stated = [worker.session for worker in self.world.workers.values() if worker.resuming == "stated"]
        self.declared = {
            session: {key: charge.declared for key, charge in sessions[session].charges.items()}
            for session in stated
            if session in sessions
        }
        row = sessions.get(event.session) if isinstance(event, ev.Declare) else None
        charge = row.charges.get((event.name, event.location)) if row and isinstance(event, ev.Declare) else None
        self._declared_before = charge.declared if charge else 0
        worker = self.world.workers.get(getattr(event, "session", None) or 0)
        self._in_the_middle = worker is not None and bool(worker.resuming) and hasattr(event, "request_id")

    def judge(self, event: ev.Event, step: Step) -> None:
        """Hold one step to all that is known of sessions."""
        for fact in step.facts:
            self._judge_fact(fact, step)
        for effect in step.effects:
            if isinstance(effect, fx.Answer):
                self._judge_answer(event, effect)
        match event:
            case ev.Restarted():
                self._judge_restart(step)
            case ev.SetDraining(draining=True):
                assert not any(total.stock for total in self.world.broker.ledger.totals.values()), "a stock is kept"
            case ev.ResumeSession() | ev.StateHolds() | ev.ForgetSession():
                self._judge_request(event, step)
        if self._in_the_middle and hasattr(event, "call"):
            answers = [one.result for one in step.effects if isinstance(one, fx.Answer) and one.call == event.call]
            assert all(isinstance(result, Denied) for result in answers), "asked in the middle of a resume"
            assert answers, "somebody waits who is being taken up"
        if self.world.broker.books.draining or self.world.broker.books.cannot_write:
            self._judge_orders(event, step)

    # --- facts ---

    def _judge_fact(self, fact: ft.Fact, step: Step) -> None:
        match fact:
            case ft.Credited(session, ids, cause):
                worker = self.world.workers.get(session)
                if worker is not None and not worker.liar and worker.process.alive and cause != _BY_FORCE:
                    assert worker.held.isdisjoint(ids), f"{worker.session} has what is credited: {cause}"
            case ft.SessionMoved(session, "resumed"):
                self._judge_resumed(self.world.workers[session], step)
            case ft.SessionMoved(session, "forgotten"):
                self.forgotten += 1

    def _judge_resumed(self, worker: Worker, step: Step) -> None:
        """The books of a session are what its worker states, as far as they had it."""
        row, stated = self.world.broker.ledger.sessions[worker.session], worker.stated
        assert stated is not None, "a session is taken up that stated nothing"
        assert row.extents.keys() <= stated.extents, "what is not held is charged"
        for fact in step.facts:
            if isinstance(fact, ft.Credited) and fact.cause == "not held" and fact.session == worker.session:
                assert stated.extents.isdisjoint(fact.ids), "what is held is credited"
        if worker.process.alive and not worker.liar:
            assert row.extents.keys() == worker.held, "the books have less than a worker has"
            times = Counter(segment for segment, _ in worker.maps)  # over gRPC it may have let go of some since
            assert row.segments == times, f"the books have {row.segments}, and the worker {times}"
        before = self.declared[worker.session]
        for key, size in before.items():
            charge, said = row.charges.get(key), max(0, stated.declarations.get(key, 0))
            assert (charge.declared if charge else 0) == min(size, said), f"{key} is not declared as it was stated"
        unknown = {segment for segment in stated.segments if segment not in row.segments}
        self.told[worker.session] = set(stated.extents - row.extents.keys()), unknown, set(row.models)

    # --- answers ---

    def _judge_answer(self, event: ev.Event, answer: fx.Answer) -> None:
        match answer.result:
            case fx.Reconciled(extents, segments, models):
                worker = self._who_stated(answer.call)
                assert worker is not None, "somebody is taken up who is gone"
                told = set(extents), set(segments), set(models)
                assert self.told.pop(worker.session) == told, "it is told something else than what is"
                self.ends["agreed"] += 1
                self.waited += not isinstance(event, ev.StateHolds)
            case fx.SessionResumed(session, tenant):
                worker = self.world.workers[session]
                assert worker.tenant == tenant
                assert self.world.state(worker) == "detached", "a session is taken up, and was not let go of"
            case Denied(reason) if self._who_stated(answer.call):
                self.ends[reason] += 1

    def _who_stated(self, call: int) -> Worker | None:
        stated = [one for one in self.world.workers.values() if one.stated and one.stated.call == call]
        return stated[0] if stated else None

    def judge_names(self, worker: Worker) -> None:
        """What a worker was making and has undone it can make anew, under the same name, when it is answered."""
        ledger = self.world.broker.ledger
        for name in worker.cut_names:
            row = ledger.segments[ledger.labels[name]] if name in ledger.labels else None
            if row is not None and row.writer == worker.session and not row.holders:
                assert row.state not in ("writing", "ending"), "nobody will ever end what was undone"
                assert row.state != "dropping" or row.uncertain, "the answer came before the name was free"

    def _judge_request(self, event: ev.ResumeSession | ev.StateHolds | ev.ForgetSession, step: Step) -> None:
        results = [one.result for one in step.effects if isinstance(one, fx.Answer) and one.call == event.call]
        worker = self.world.workers.get(event.session)
        refused = results[0] if results and isinstance(results[0], Denied) else None
        match event:
            case ev.ResumeSession(process=process):
                assert len(results) == 1, "a Hello waits for its answer"
                if worker is None or process != worker.process.name:
                    assert refused is not None, "a session is given to somebody else"
                    assert refused.reason is Reason.TOKEN_REJECTED
                    assert not step.facts or self.world.referee.waiting.decided()
                    effects = [one for one in step.effects if not isinstance(one, fx.SendRecall)]  # after a reload
                    assert len(effects) == 1 or self.world.referee.waiting.decided(), "a refused Hello has an effect"
            case ev.StateHolds():
                if worker is None or worker.stated is not event:
                    assert refused is not None, "Holds are taken from nobody who resumed"
                    assert refused.reason is Reason.PROTOCOL_VIOLATION
            case ev.ForgetSession():
                assert len(results) == 1, "an operator waits for an answer"
                if refused is None:
                    assert event.session not in self.world.broker.ledger.sessions, "what is forgotten is there"
                    moved = [one.cause for one in step.facts if isinstance(one, ft.SessionMoved)]
                    assert moved == ["forgotten"], "a session is forgotten that was not detached"

    # --- restarts and orders ---

    def _judge_restart(self, step: Step) -> None:
        """Nobody is connected, nothing is on its way, and all that is to end is ending."""
        ledger = self.world.broker.ledger
        states = {row.state for row in ledger.sessions.values()}
        assert states <= {"detached", "releasing"}, f"a successor has sessions that are {states}"
        dropping = sorted(row.segment for row in ledger.segments.values() if row.state == "dropping")
        assert dropping == sorted(one.segment for one in step.effects if isinstance(one, fx.Drop)), "not all is dropped"
        for row in ledger.segments.values():
            assert row.state != "sealing", "a seal is waited for that nobody makes"
            assert row.state not in ("ending", "retired") or row.holders, "a segment is not dropped that nobody holds"
            assert row.state != "writing" or row.writer in row.holders, "a segment is written by nobody"
        for row in ledger.sessions.values():
            assert row.state != "releasing" or not row.segments, "the dead hold a segment"

    def _judge_orders(self, event: ev.Event, step: Step) -> None:
        """Nothing is lent."""
        for fact in step.facts:
            assert not isinstance(fact, ft.Debited | ft.SegmentBegan | ft.SegmentHeld), "something is lent"
            if isinstance(fact, ft.DeclarationSet) and isinstance(event, ev.Declare):
                assert fact.declared_bytes <= self._declared_before, "more is declared"
        assert not self.world.broker.books.draining or not any(isinstance(one, fx.Stock) for one in step.effects), (
            "made ahead"
        )

    def inherit(self) -> None:
        """Nobody is told anything any more of what it stated to a dead daemon."""
        self.told.clear()

    def at_the_end(self) -> None:
        """Nobody is left in the middle."""
        assert not self.world.broker.sessions.stated
        assert not self.world.broker.sessions._expected
        assert not self.world.broker.sessions._answers
