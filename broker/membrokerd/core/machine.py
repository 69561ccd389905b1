"""The machine: `step(event, now)` is the only way into the core. It hands each event to the part that handles it.

The parts stand in a straight stack: books, recalls, schedule, waiting, lending, segments, models, sessions,
releasing. Each is given the books and the parts below it that it uses, and knows nothing above it. Where one event
concerns several parts, the machine calls them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .books import Books, Step
from .deaths import Releasing
from .denied import Denied, Reason, deny
from .lending import Lending
from .models import Models
from .names import ModelName
from .recalls import MOST_AT_ONCE, Recalls
from .request_lines import RequestLines
from .schedule import Schedule
from .segments import Segments
from .sessions import Sessions
from .shares import PORTION
from .stock import WarmPool
from .waiting import Waiting

_REQUESTS = (ev.Request, ev.DeleteSegment)
_RELEASES = (ev.Goodbye, ev.Release, ev.DetachSegment, ev.DeleteSegment)
"""Requests that are taken while the daemon stops."""
_OUTCOMES = (ev.Made, ev.NotMade)
"""Outcomes that may come inside the step that asked for the packet."""


class Broker:
    """The core of one device's daemon.

    `epoch` is a number that no earlier daemon of this device had; ids are (epoch, counter), so none is used twice.
    """

    def __init__(self, rules: policy.Rules, epoch: int, facts: Iterable[ft.Fact] = ()) -> None:
        books = self.books = Books(rules, epoch, facts)
        self.ledger = books.ledger
        """The ledger: for reading."""
        self.denials = books.denials
        """How many calls about each model were refused, by reason."""
        stock = self.stock = WarmPool(books)
        recalls = self.recalls = Recalls(books)
        lines = self.lines = RequestLines(books)
        schedule = self.schedule = Schedule(books, recalls, lines)
        waiting = self.waiting = Waiting(books, schedule, lines)
        lending = self.lending = Lending(books, stock, recalls, waiting)
        segments = self.segments = Segments(books, waiting, lending)
        models = self.models = Models(books, recalls)
        sessions = self.sessions = Sessions(books, recalls, lending, segments)
        releasing = self.releasing = Releasing(books, lending, segments, sessions)
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            ev.OpenSession: sessions.open,
            ev.ResumeSession: sessions.resume,
            ev.StateHolds: sessions.state_holds,
            ev.ForgetSession: sessions.forget,
            ev.Restarted: self._restarted,
            ev.SetDraining: self._set_draining,
            ev.ConnectionLost: sessions.connection_lost,
            ev.ProcessDied: releasing.process_died,
            ev.Goodbye: sessions.goodbye,
            ev.RegisterModel: models.register,
            ev.UnregisterModel: models.unregister,
            ev.Allocate: lending.allocate,
            ev.Release: lending.release,
            ev.Declare: lending.declare,
            ev.CreateSegment: segments.create,
            ev.SealSegment: lambda event, _: segments.seal(event),
            ev.AttachSegment: segments.attach,
            ev.DetachSegment: lambda event, _: segments.detach(event),
            ev.DeleteSegment: lambda event, _: segments.delete(event),
            ev.Sealed: lambda event, _: segments.sealed(event),
            ev.NotSealed: lambda event, _: segments.not_sealed(event),
            ev.Stocked: lambda event, _: stock.stocked(event),
            ev.Dropped: self._dropped,
            ev.Elapsed: self._elapsed,
            ev.AnswerRecall: recalls.answer,
            ev.Acknowledge: lending.acknowledge,
            ev.AcknowledgeUpTo: lending.acknowledge_up_to,
            ev.Made: self._made,
            ev.NotMade: self._not_made,
            ev.NotDelivered: self._not_delivered,
            ev.Audit: self._audit,
            ev.SetQuota: lambda event, _: models.set_quota(event),
            ev.CancelWait: self._cancel_wait,
            ev.InputsDrained: lambda event, now: waiting.inputs_drained(event.call, now),
        }

    def step(self, event: ev.Event, now: int) -> Step:
        """Take one event at `now` (nanoseconds of CLOCK_MONOTONIC) and return what follows from it."""
        books, waiting, recalls, attaches = self.books, self.waiting, self.recalls, self.segments.attaches
        effects, facts = books.begin_step()
        if attaches.deadline is not None:
            attaches.begin_step()
        if not isinstance(event, _OUTCOMES):
            recalls.room = MOST_AT_ONCE
        if waiting.busy:
            waiting.begin_step(event)
            if self.schedule.holds.elapsed(now):
                self.schedule.divide_again()
        if isinstance(event, _REQUESTS) and (denied := self._refuse_request(event)) is not None:
            self._answer_refused(event, denied)
        else:
            self._handlers[type(event)](event, now)
        if books.limits_changed:
            self.schedule.recall_above_limits(now)
        while waiting.busy and (request := waiting.next(now)) is not None:
            waiting.settle(request, now)
            if books.limits_changed:
                self.schedule.recall_above_limits(now)
        if waiting.deferred:
            waiting.drain()
        if books.recallable.moved:
            self.lines.follow()
        if len(books.ledger.touched) > PORTION or self.schedule.holds.deadline is not None:
            self.schedule.follow()
        is_quiet = not waiting.busy and recalls.deadline is None and attaches.deadline is None
        return Step(effects, facts, None if is_quiet and recalls.room else self.deadline)

    def _cancel_wait(self, event: ev.CancelWait, now: int) -> None:
        self.waiting.cancel(event, now)
        self.segments.attaches.cancel(event.call)

    @property
    def deadline(self) -> int | None:
        """When the core wants to hear `Elapsed`: see `Step.deadline`."""
        if self.waiting.left_over or not self.recalls.room:
            return 0
        ends = (
            self.segments.attaches.deadline,
            self.waiting.deadline,
            self.recalls.deadline,
            self.schedule.holds.deadline,
        )
        first = None
        for at in ends:
            if at is not None and (first is None or at < first):
                first = at
        return first

    def change_rules(self, rules: policy.Rules) -> None:
        """Apply other limits and times from the next step on. Memory that is lent stays lent; no books change."""
        self.books.change_rules(rules)

    # --- every request ---

    def _refuse_request(self, event: ev.Request | ev.DeleteSegment) -> Denied | None:
        """Return why no request of this session may be taken now, or None."""
        session, books = event.session, self.books
        if session is None:  # an operator's
            return None
        row = books.ledger.sessions.get(session)
        if row is None or row.state not in ("open", "detached"):
            return deny(Reason.TOKEN_REJECTED)
        if self.sessions.under_way(session):
            return deny(Reason.DELIVERY_FAILED)
        if books.stopping and not isinstance(event, _RELEASES):
            return deny(Reason.STOPPING)
        if self.lending.in_flight(session, event.request_id):
            return deny(Reason.REQUEST_ID_IN_USE, request_id=event.request_id)
        return None

    def _answer_refused(self, event: ev.Request | ev.DeleteSegment, denied: Denied) -> None:
        """Refuse a request before any part has seen it; one about a model counts among the refusals of the model."""
        match event:
            case ev.RegisterModel() | ev.UnregisterModel() | ev.Allocate() | ev.Declare():
                self.books.refuse(event.call, denied, event.session, event.name)
            case ev.CreateSegment():
                name = ModelName(event.name.tenant, event.name.model)
                self.books.refuse(event.call, denied, event.session, name)
            case _:
                self.books.answer(event.call, denied)

    # --- events that concern several parts ---

    def _made(self, event: ev.Made, now: int) -> None:
        self.lending.made(event)
        self.sessions.packet_decided(event.session, now)
        self.stock.fill()

    def _not_made(self, event: ev.NotMade, now: int) -> None:
        self.lending.not_made(event, now)
        self.sessions.packet_decided(event.session, now)

    def _not_delivered(self, event: ev.NotDelivered, now: int) -> None:
        self.lending.not_delivered(event)
        self.sessions.packet_decided(event.session, now)

    def _elapsed(self, _: ev.Elapsed, now: int) -> None:
        self.segments.attaches.elapsed(now)
        self.recalls.elapsed(now)

    def _dropped(self, event: ev.Dropped, now: int) -> None:
        row = self.segments.dropped(event)
        if row.uncertain:
            self.releasing.segment_dropped(row, now)
        self.sessions.answer_ready()

    def _audit(self, event: ev.Audit, now: int) -> None:
        if self.books.device_lost:  # extents of a device that comes back after a reset are dead
            self._drop_stock()
        self.releasing.audit(event, now)
        self.waiting.try_again()
        self.stock.forget_stale(now)
        self.models.end_idle(now)

    def _restarted(self, event: ev.Restarted, now: int) -> None:
        self.releasing.restarted(event.seen, now)
        self.sessions.restarted(event, now)

    def _set_draining(self, event: ev.SetDraining, now: int) -> None:
        self.books.draining = event.draining
        if event.draining:
            self._drop_stock()
        self.books.answer(event.call, fx.Done())

    def _drop_stock(self) -> None:
        for location in self.books.rules.capacities:
            self.stock.drop_all(location)
