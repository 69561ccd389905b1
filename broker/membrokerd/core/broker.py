"""The machine: `step(event, now)` decides, changes the ledger by facts, and says what the world must do.

Sessions and models are here; lending is in `lending`, shared memory in `segments`, the dead are in `settling`. A
request that is refused changes nothing but the count of refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .books import Books, Step
from .denied import Denied, Reason, deny
from .hearing import Hearing
from .ledger import Ledger, ModelRow, SessionRow
from .lending import Lending
from .resuming import Resuming
from .segments import Segments
from .settling import Settling
from .stock import Stock


class Broker:
    """The books, the rules and the calls in flight of one device.

    `epoch` is a number that no earlier daemon of this device had; ids are (epoch, counter), so none comes twice.
    """

    def __init__(self, rules: policy.Rules, epoch: int, story: Iterable[ft.Fact] = ()) -> None:
        self.books = Books(rules, epoch, story)
        self.stock = Stock(self.books)
        self.lending = Lending(self)
        self.hearing = Hearing(self)
        self.segments = Segments(self)
        self.settling = Settling(self)
        self.resuming = Resuming(self)

    def step(self, event: ev.Event, now: int) -> Step:
        """Take one event at `now` (nanoseconds of CLOCK_BOOTTIME) and return what follows from it."""
        step = self.books.begin_step()
        self.handle(event, now)
        return step

    def handle(self, event: ev.Event, now: int) -> None:
        """Take an event as a part of a step."""
        _HANDLERS[type(event)](self, event, now)

    @property
    def deadline(self) -> int | None:
        """When the core wants to hear `Elapsed`, in nanoseconds of CLOCK_BOOTTIME; None: not at all."""
        return self.segments.deadline

    @property
    def ledger(self) -> Ledger:
        """The ledger: for reading."""
        return self.books.ledger

    @property
    def rules(self) -> policy.Rules:
        """What the configuration says."""
        return self.books.rules

    @property
    def denials(self) -> Mapping[tuple[ev.ModelName, Reason], int]:
        """How many calls about each model were refused, by reason."""
        return self.books.denials

    @property
    def draining(self) -> bool:
        """Whether an operator has ordered that nothing more is lent."""
        return self.books.draining

    @property
    def stopping(self) -> bool:
        """Whether the daemon is about to exit: only what gives memory back is taken."""
        return self.books.stopping

    @stopping.setter
    def stopping(self, stopping: bool) -> None:
        self.books.stopping = stopping

    @property
    def cannot_write(self) -> str:
        """Why debits cannot be journalled at the moment, so that nothing is lent; empty when they can."""
        return self.books.cannot_write

    @cannot_write.setter
    def cannot_write(self, why: str) -> None:
        self.books.cannot_write = why

    def refuse_request(self, session: int, request_id: int, *, gives_back: bool = False) -> Denied | None:
        """Return why no request of this session may be taken now, or None. Giving back is taken to the last."""
        row = self.ledger.sessions.get(session)
        if row is None or row.state not in ("open", "detached"):
            return deny(Reason.TOKEN_REJECTED)
        if self.resuming.under_way(session):
            return deny(Reason.DELIVERY_FAILED)
        if self.stopping and not gives_back:
            return deny(Reason.STOPPING)
        if self.lending.in_flight(session, request_id) or self.hearing.has(session, request_id):
            return deny(Reason.REQUEST_ID_IN_USE, request_id=request_id)
        return None

    def end_session(self, row: SessionRow, now: int) -> None:
        """Drop a session that is charged nothing any more."""
        self.books.record(ft.SessionEnded(row.session, now))
        self.lending.forget(row.session)
        self.books.emit(fx.Forget(row.session))

    # --- sessions ---

    def _open_session(self, event: ev.OpenSession, now: int) -> None:
        denied = self._refuse_session(event)
        if denied:
            self.books.answer(event.call, denied)
            return
        session = self.books.take_ids(1)[0]
        self.books.record(
            ft.SessionBegan(
                session,
                event.tenant,
                event.pid,
                event.uid,
                event.process,
                event.observer,
                event.client,
                now,
                event.endpoint,
                event.token_hash,
            )
        )
        self.lending.begin(session)
        self.books.answer(event.call, fx.SessionOpened(session))

    def _refuse_session(self, event: ev.OpenSession) -> Denied | None:
        if self.stopping:
            return deny(Reason.STOPPING)
        if self.cannot_write:
            return deny(Reason.JOURNAL_FULL, driver_says=self.cannot_write)
        rows = self.ledger.sessions.values()
        if len(rows) >= self.rules.max_sessions:
            return deny(Reason.TOO_MANY_SESSIONS, limit=self.rules.max_sessions, of="broker")
        mine = sum(1 for row in rows if row.process == event.process and row.state != "releasing")
        if mine >= self.rules.max_sessions_per_process:
            return deny(Reason.TOO_MANY_SESSIONS, limit=self.rules.max_sessions_per_process, of="process")
        bound = self.rules.max_sessions_per_tenant
        if bound is not None and sum(1 for row in rows if row.tenant == event.tenant) >= bound:
            return deny(Reason.TOO_MANY_SESSIONS, limit=bound, of="tenant")
        return None

    def _connection_lost(self, event: ev.ConnectionLost, now: int) -> None:
        row = self.ledger.sessions.get(event.session)
        if row is not None:
            self.detach(row, now)

    def detach(self, row: SessionRow, now: int) -> None:
        """A session has no connection any more; what is on its way to it never arrives."""
        self.resuming.give_up(row.session)
        if row.state in ("open", "leaving"):
            self.books.record(ft.SessionMoved(row.session, "connection lost", now))
            self.lending.give_up(row)
            self.segments.give_up(row.session)

    def _goodbye(self, event: ev.Goodbye, now: int) -> None:
        denied = self.refuse_request(event.session, event.request_id, gives_back=True)
        row = self.ledger.sessions.get(event.session)
        if denied or row is None or row.state != "open":
            self.books.answer(event.call, denied or deny(Reason.TOKEN_REJECTED))
            return
        self.books.record(ft.SessionMoved(row.session, "goodbye", now))
        self.books.answer(event.call, fx.Done())
        self.lending.give_up(row)
        self.segments.give_up(row.session)
        self.segments.writer_leaves(row)
        self.lending.finish_leaving(row, now)

    # --- models ---

    def _register_model(self, event: ev.RegisterModel, now: int) -> None:
        denied = self.refuse_request(event.session, event.request_id) or self._refuse_model(event)
        if denied:
            self.books.refuse(event.call, denied, event.session, event.name)
            return
        row, virtual = self.ledger.models.get(event.name), event.virtual_capacity
        if row is None:
            self.books.record(ft.ModelBegan(event.name, virtual, dict(event.limits)))
        elif (virtual, dict(event.limits)) != (row.virtual_capacity, row.limits):
            self._ask(row, virtual, event.limits)
        if event.name not in self.ledger.sessions[event.session].models:
            self.books.record(ft.ModelJoined(event.name, event.session))
        self.books.answer(event.call, fx.Registered(event.name))

    def _ask(self, row: ModelRow, virtual: int | None, limits: Mapping[ev.Location, int]) -> None:
        """Take the numbers that nobody has asked for yet; those that somebody has are the same."""
        more = {where: size for where, size in limits.items() if where not in row.limits}
        new = virtual if row.virtual_capacity is None else None
        if more or new is not None:
            self.books.record(ft.ModelAsked(row.name, new, more))

    def _refuse_model(self, event: ev.RegisterModel) -> Denied | None:
        row = self.ledger.models.get(event.name)
        if self.cannot_write:  # what room there is is for what is given back
            return deny(Reason.JOURNAL_FULL, driver_says=self.cannot_write)
        if self.ledger.sessions[event.session].observer:
            return deny(Reason.OBSERVER)
        if event.name.tenant != self.ledger.sessions[event.session].tenant:
            return deny(Reason.MODEL_NOT_FOUND, model=str(event.name))
        if not policy.valid_own_name(event.name.model):
            return deny(Reason.INVALID_NAME, name=event.name.model)
        for location, size in event.limits.items():
            if location not in self.rules.capacities:
                return deny(Reason.LOCATION_UNAVAILABLE, location=location)
            if not 0 <= size <= policy.MAX_BYTES:
                return deny(Reason.INVALID_SIZE, size_bytes=size, least_bytes=0, granularity_bytes=1)
        if event.virtual_capacity is not None and not 0 < event.virtual_capacity <= policy.MAX_BYTES:
            size = event.virtual_capacity
            return deny(Reason.INVALID_SIZE, size_bytes=size, least_bytes=1, granularity_bytes=1)
        if row is None:
            return self._refuse_new_model(event)
        if event.exclusive:
            return deny(Reason.MODEL_EXISTS, model=str(event.name))
        return _conflict(row, event)

    def _refuse_new_model(self, event: ev.RegisterModel) -> Denied | None:
        limit = self.rules.max_models_per_tenant
        if sum(1 for name in self.ledger.models if name.tenant == event.name.tenant) >= limit:
            return deny(Reason.TOO_MANY_MODELS, limit=limit, tenant=event.name.tenant)
        return None

    def _unregister_model(self, event: ev.UnregisterModel, now: int) -> None:
        denied = self.refuse_request(event.session, event.request_id) or self._refuse_leaving(event)
        if denied:
            self.books.refuse(event.call, denied, event.session, event.name)
            return
        self.books.record(ft.ModelLeft(event.name, event.session, now))
        self.end_model_if_idle(self.ledger.models[event.name])
        self.books.answer(event.call, fx.Done())

    def _refuse_leaving(self, event: ev.UnregisterModel) -> Denied | None:
        found = self.books.find_model(event.session, event.name)
        if isinstance(found, Denied):
            return found
        row = self.ledger.sessions[event.session]
        used = sum(charge.bytes for (name, _), charge in row.charges.items() if name == event.name)
        return deny(Reason.MODEL_IN_USE, model=str(event.name), used_bytes=used) if used else None

    def end_model_if_idle(self, row: ModelRow) -> None:
        """End a model that nobody uses, that is charged nothing, and that has not even a failed segment left."""
        segments = self.ledger.segments.values()
        if not row.sessions and not row.used() and not any(segment.name == row.name for segment in segments):
            self.books.record(ft.ModelEnded(row.name))
            for key in [key for key in self.books.denials if key[0] == row.name]:
                del self.books.denials[key]

    def _set_quota(self, event: ev.SetQuota, now: int) -> None:
        ends = event.limit is None and (event.tenant, event.model, event.location) in self.ledger.quotas
        if event.location not in self.rules.capacities and not ends:  # an earlier daemon may have lent there
            self.books.answer(event.call, deny(Reason.LOCATION_UNAVAILABLE, location=event.location))
        elif event.limit is not None and not 0 <= event.limit <= policy.MAX_BYTES:
            denied = deny(Reason.INVALID_SIZE, size_bytes=event.limit, least_bytes=0, granularity_bytes=1)
            self.books.answer(event.call, denied)
        else:
            self.books.record(ft.QuotaSet(event.tenant, event.model, event.location, event.limit))
            self.books.answer(event.call, fx.Done())

    def _set_draining(self, event: ev.SetDraining, now: int) -> None:
        self.books.draining = event.draining
        if event.draining:
            for location in self.rules.capacities:
                self.stock.drop_all(location)
        self.books.answer(event.call, fx.Done())


def _conflict(row: ModelRow, event: ev.RegisterModel) -> Denied | None:
    """Return the first number that differs from what somebody asked for before."""
    asked: list[tuple[str, int | None, int | None]] = [
        ("virtual_capacity", event.virtual_capacity, row.virtual_capacity),
        *((f"{where} limit", limit, row.limits.get(where)) for where, limit in event.limits.items()),
    ]
    for what, mine, theirs in asked:
        if mine is not None and theirs is not None and mine != theirs:
            return deny(Reason.MODEL_CONFLICT, model=str(row.name), what=what, asked=mine, registered=theirs)
    return None


_HANDLERS: dict[type, Callable[[Broker, Any, int], None]] = {
    ev.OpenSession: Broker._open_session,
    ev.ResumeSession: lambda broker, event, now: broker.resuming.resume(event, now),
    ev.StateHolds: lambda broker, event, now: broker.resuming.state_holds(event, now),
    ev.ForgetSession: lambda broker, event, now: broker.resuming.forget(event, now),
    ev.Restarted: lambda broker, event, now: broker.resuming.restarted(event, now),
    ev.SetDraining: Broker._set_draining,
    ev.ConnectionLost: Broker._connection_lost,
    ev.ProcessDied: lambda broker, event, now: broker.settling.process_died(event, now),
    ev.Goodbye: Broker._goodbye,
    ev.RegisterModel: Broker._register_model,
    ev.UnregisterModel: Broker._unregister_model,
    ev.Allocate: lambda broker, event, now: broker.lending.allocate(event, now),
    ev.Release: lambda broker, event, now: broker.lending.release(event),
    ev.Declare: lambda broker, event, now: broker.lending.declare(event, now),
    ev.CreateSegment: lambda broker, event, now: broker.segments.create(event, now),
    ev.SealSegment: lambda broker, event, now: broker.segments.seal(event),
    ev.AttachSegment: lambda broker, event, now: broker.segments.attach(event, now),
    ev.DetachSegment: lambda broker, event, now: broker.segments.detach(event),
    ev.DeleteSegment: lambda broker, event, now: broker.segments.delete(event),
    ev.Sealed: lambda broker, event, now: broker.segments.sealed(event),
    ev.NotSealed: lambda broker, event, now: broker.segments.not_sealed(event),
    ev.Stocked: lambda broker, event, now: broker.stock.stocked(event),
    ev.Dropped: lambda broker, event, now: broker.segments.dropped(event, now),
    ev.Elapsed: lambda broker, event, now: broker.segments.elapsed(now),
    ev.Acknowledge: lambda broker, event, now: broker.lending.acknowledge(event),
    ev.Made: lambda broker, event, now: broker.lending.made(event, now),
    ev.NotMade: lambda broker, event, now: broker.lending.not_made(event, now),
    ev.NotDelivered: lambda broker, event, now: broker.lending.not_delivered(event, now),
    ev.Audit: lambda broker, event, now: broker.settling.audit(event, now),
    ev.OthersHeard: lambda broker, event, now: broker.hearing.others_heard(event, now),
    ev.SetQuota: Broker._set_quota,
}
