"""Models: the names under which memory is charged, what their workers asked for, and the limits that operators set.

A model begins with the first session that registers it, and ends a while after the last one has left.
"""

from __future__ import annotations

import itertools

from membroker.wire.names import valid_model

from . import effects as fx
from . import events as ev
from . import facts as ft
from . import policy
from .admission import misfits
from .books import Books
from .denied import Denied, Reason, deny
from .recalls import Recalls
from .rows import ModelRow, Quota

MOST_ENDED = 256
"""How many models end at one audit because nobody uses them any more."""


class Models:
    """The beginning and the end of every model."""

    def __init__(self, books: Books, recalls: Recalls) -> None:
        self._books = books
        self._recalls = recalls

    def register(self, event: ev.RegisterModel, now: int) -> None:
        """Let a session use a model, and create the model if the name is new."""
        denied = self._refuse_model(event)
        if denied:
            self._books.refuse(event.call, denied, event.session, event.name)
            return
        row, virtual = self._books.ledger.models.get(event.name), event.virtual_capacity
        if row is None:
            self._books.record(ft.ModelBegan(event.name, virtual, dict(event.limits)))
        else:  # the numbers that no session has set yet, or that this one replaces
            more = {where: size for where, size in event.limits.items() if row.limits.get(where) != size}
            new = None if virtual == row.virtual_capacity else virtual
            if more or new is not None:
                self._books.record(ft.ModelAsked(row.name, new, more))
        if event.name not in self._books.ledger.sessions[event.session].models:
            self._books.record(ft.ModelJoined(event.name, event.session))
        if event.answers is not None:
            self._recalls.set_answers(event.session, event.name, event.answers, now)
        self._books.answer(event.call, fx.Registered(event.name))

    def _refuse_model(self, event: ev.RegisterModel) -> Denied | None:
        row = self._books.ledger.models.get(event.name)
        if self._books.cannot_write:  # the journal's last room is for releases
            return deny(Reason.JOURNAL_FULL, driver_says=self._books.cannot_write)
        if self._books.ledger.sessions[event.session].observer:
            return deny(Reason.OBSERVER)
        if event.name.tenant != self._books.ledger.sessions[event.session].tenant:
            return deny(Reason.MODEL_NOT_FOUND, model=str(event.name))
        if not valid_model(event.name.model):
            return deny(Reason.INVALID_NAME, kind="model", name=event.name.model)
        for location, size in event.limits.items():
            if location not in self._books.rules.capacities:
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
        return _conflict(row, event) if self._is_used_beside(row, event.session) else None

    def _is_used_beside(self, row: ModelRow, session: int) -> bool:
        """Say whether another process that may be alive uses a model. Only then do its numbers bind this session."""
        sessions = self._books.ledger.sessions
        users = [sessions[one] for one in row.sessions]
        return any(one.state != "releasing" and one.process != sessions[session].process for one in users)

    def _refuse_new_model(self, event: ev.RegisterModel) -> Denied | None:
        limit = self._books.rules.max_models_per_tenant
        if self._books.ledger.models_of[event.name.tenant] >= limit:
            return deny(Reason.TOO_MANY_MODELS, limit=limit, tenant=event.name.tenant)
        most = self._books.rules.max_models
        if most is not None and len(self._books.ledger.models) >= most:
            return deny(Reason.TOO_MANY_MODELS, limit=most)
        return None

    def unregister(self, event: ev.UnregisterModel, now: int) -> None:
        """Let a session leave a model that it is charged nothing for."""
        denied = self._refuse_leaving(event)
        if denied:
            self._books.refuse(event.call, denied, event.session, event.name)
            return
        self._books.record(ft.ModelLeft(event.name, event.session, now))
        self._end_if_idle(self._books.ledger.models[event.name])
        self._books.answer(event.call, fx.Done())

    def _refuse_leaving(self, event: ev.UnregisterModel) -> Denied | None:
        row = self._books.ledger.sessions[event.session]
        if event.name not in row.models:  # another tenant's model looks like one that does not exist
            return deny(Reason.MODEL_NOT_FOUND, model=str(event.name))
        used = sum(charge.bytes for (name, _), charge in row.charges.items() if name == event.name)
        return deny(Reason.MODEL_IN_USE, model=str(event.name), used_bytes=used) if used else None

    def _end_if_idle(self, row: ModelRow) -> None:
        """End a model, if it has no sessions, no charges and no segments in whatever state."""
        if not row.sessions and not row.used() and not row.segments:
            self._books.record(ft.ModelEnded(row.name))
            self._books.denials.pop(row.name, None)

    def end_idle(self, now: int) -> None:
        """End models that have had no session for their grace period: a portion, and others at the next audit."""
        ledger, grace = self._books.ledger, self._books.rules.model_grace_ns
        idle = (row for row in ledger.models.values() if not row.sessions and now - row.idle_since >= grace)
        able = (row for row in idle if not row.used() and not row.segments)
        if ended := list(itertools.islice(able, MOST_ENDED)):
            with self._books.recallable.guests_counted_once():
                for row in ended:
                    self._end_if_idle(row)

    def set_quota(self, event: ev.SetQuota) -> None:
        """Set or remove the limit, the guarantee and the weight of a model or a tenant, as an operator orders."""
        denied = self.refuse_quota(event)
        if denied:
            self._books.answer(event.call, denied)
            return
        self._books.record(
            ft.QuotaSet(event.tenant, event.model, event.location, event.limit, event.guarantee, event.weight)
        )
        self._books.answer(event.call, fx.Done())

    def refuse_quota(self, event: ev.SetQuota) -> Denied | None:
        """Return why a quota cannot be set, or None."""
        books, key = self._books, (event.tenant, event.model, event.location)
        quotas, quota = books.ledger.quotas, Quota(event.limit, event.guarantee, event.weight)
        if event.undo:
            return None
        if event.location not in books.rules.capacities:
            if key in quotas and only_removes(quotas[key], quota):  # an earlier daemon may have lent there
                return None
            return deny(Reason.LOCATION_UNAVAILABLE, location=event.location)
        if event.weight is not None and not 0 <= event.weight <= policy.MAX_WEIGHT:
            return deny(Reason.INVALID_ARGUMENT, what=f"a weight is between 0 and {policy.MAX_WEIGHT:,}")
        for size in (quota.limit, quota.guarantee):
            if size is not None and not 0 <= size <= policy.MAX_BYTES:
                return deny(Reason.INVALID_SIZE, size_bytes=size, least_bytes=0, granularity_bytes=1)
        before = {misfit[:3]: misfit for misfit in misfits(quotas, books.rules, event.location)}
        for misfit in misfits({**quotas, key: quota}, books.rules, event.location):
            was = before.get(misfit[:3])
            if was is None or misfit.size - misfit.most > was.size - was.most:  # a command may mend it step by step
                return deny(
                    Reason.QUOTA_CONFLICT,
                    what=misfit.what,
                    asked_bytes=misfit.size,
                    bound=misfit.bound,
                    limit_bytes=misfit.most,
                    location=event.location,
                )
        return None


def only_removes(before: Quota, after: Quota) -> bool:
    """Say whether a quota only loses numbers."""
    return all(new is None or new == old for old, new in zip(before, after, strict=True))


def _conflict(row: ModelRow, event: ev.RegisterModel) -> Denied | None:
    """Return the first number that differs from the one that was set before."""
    asked: list[tuple[str, int | None, int | None]] = [
        ("virtual_capacity", event.virtual_capacity, row.virtual_capacity),
    ]
    if not event.replaces:
        asked += [(f"{where} limit", limit, row.limits.get(where)) for where, limit in event.limits.items()]
    for what, mine, theirs in asked:
        if mine is not None and theirs is not None and mine != theirs:
            return deny(Reason.MODEL_CONFLICT, model=str(row.name), what=what, asked=mine, registered=theirs)
    return None
