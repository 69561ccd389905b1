"""The last decisions about each model: what was refused, what waited, and what was recalled, with the reason.

Owns a bounded record of them in memory, for `membroker explain`. It must never decide anything. A tenant's requests
push out only the tenant's own records, as long as few enough tenants have any.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..core import effects as fx
from ..core.denied import Denied, Reason
from ..core.names import Location, ModelName
from ..core.requests import DebitRequest

KEPT_OF_A_MODEL, MODELS_OF_A_TENANT, TENANTS = 8, 16, 32
"""A record is at most 2 KiB, so that all of them are at most 8 MiB."""
_MS = 1_000_000

EXPLAINED = frozenset(
    (
        *(Reason.MODEL_LIMIT, Reason.TENANT_LIMIT, Reason.CAPACITY, Reason.DEVICE_FULL),
        *(Reason.DRIVER_FAILED, Reason.DESCRIPTORS_EXHAUSTED, Reason.JOURNAL_FULL, Reason.DRAINING),
        *(Reason.STOPPING, Reason.TOO_MANY_REQUESTS),
    )
)
"""The refusals that are recorded: their numbers are the broker's own. The error explains a worker's mistakes."""

Kind = Literal["refused", "waited", "waiting", "recalled"]


class DecisionRecord(NamedTuple):
    """One decision at the time `at` (Unix seconds). `why` of a wait is the refusal that it would have got instead."""

    kind: Kind
    at: float
    name: ModelName
    location: Location
    session: int
    request_id: int
    size: int
    returned: int
    after_ms: int
    result: str
    why: Denied | None
    guaranteed: bool = False
    wanted_by: ModelName | None = None


class Decisions:
    """The record of one daemon, by tenant and model; the least recently used are dropped first."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[ModelName, deque[DecisionRecord]]] = OrderedDict()

    def refused(
        self, session: int, request_id: int, name: ModelName, location: Location, size: int, denied: Denied
    ) -> None:
        """Note a refusal."""
        after_ms = int(denied.numbers.get("waited_ms", 0))
        self._note(
            DecisionRecord(
                kind="refused",
                at=time.time(),
                name=name,
                location=location,
                session=session,
                request_id=request_id,
                size=size,
                returned=0,
                after_ms=after_ms,
                result=denied.reason.value,
                why=denied,
            )
        )

    def waited(self, waited: fx.Waited) -> None:
        """Note the end of a wait. One that was refused is noted as the refusal."""
        if waited.result != "refused":
            self._note(
                DecisionRecord(
                    kind="waited",
                    at=time.time(),
                    name=waited.name,
                    location=waited.location,
                    session=waited.session,
                    request_id=waited.request_id,
                    size=waited.size,
                    returned=0,
                    after_ms=waited.waited_ns // _MS,
                    result=waited.result,
                    why=waited.why,
                    guaranteed=waited.guaranteed,
                )
            )

    def recalled(self, recalled: fx.Recalled) -> None:
        """Note the end of a recall, or that it is late."""
        self._note(
            DecisionRecord(
                kind="recalled",
                at=time.time(),
                name=recalled.name,
                location=recalled.location,
                session=recalled.session,
                request_id=0,
                size=recalled.size,
                returned=recalled.returned,
                after_ms=recalled.after_ns // _MS,
                result=recalled.result,
                why=None,
                wanted_by=recalled.wanted_by,
            )
        )

    def _note(self, decision: DecisionRecord) -> None:
        models = self._tenants.setdefault(decision.name.tenant, OrderedDict())
        self._tenants.move_to_end(decision.name.tenant)
        models.setdefault(decision.name, deque(maxlen=KEPT_OF_A_MODEL)).append(decision)
        models.move_to_end(decision.name)
        while len(models) > MODELS_OF_A_TENANT:
            models.popitem(last=False)
        while len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def of_model(self, name: ModelName) -> list[DecisionRecord]:
        """Return the decisions about a model, the newest first."""
        models = self._tenants.get(name.tenant)
        return list(models.get(name, ()))[::-1] if models else []

    def of_request(self, tenant: str | None, session: int, request_id: int) -> Iterator[DecisionRecord]:
        """Yield the decisions about one request of a tenant, or of any."""
        for known, models in self._tenants.items():
            if tenant in (None, known):
                for decisions in models.values():
                    yield from (
                        record for record in decisions if (record.session, record.request_id) == (session, request_id)
                    )


def waiting(waiter: DebitRequest, now_ns: int) -> DecisionRecord:
    """Return a request that waits now, as a decision; `now_ns` is CLOCK_MONOTONIC."""
    event, waited_ns = waiter.event, now_ns - waiter.since
    return DecisionRecord(
        kind="waiting",
        at=time.time() - waited_ns / 1e9,
        name=waiter.name,
        location=event.location,
        session=event.session,
        request_id=event.request_id,
        size=waiter.size,
        returned=0,
        after_ms=waited_ns // _MS,
        result="",
        why=waiter.why,
        guaranteed=waiter.guaranteed,
    )
