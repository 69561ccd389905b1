"""What can be read of the books: the device, models, sessions and segments, in pages, of one tenant or of all.

`BookMessages.read` answers a tenant, by gRPC and on the handoff alike. So every answer of it fits into a frame.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as pb
from membroker.v1 import resources_pb2 as rpb
from membroker.wire import names
from membroker.wire.build import version_text

from .. import __version__
from ..config.config import TenantConfig
from ..core import policy, snapshot
from ..core.denied import Reason, deny
from ..core.names import Location, ModelName
from ..core.rows import SegmentRow, SessionRow
from ..device.plan import Plan
from ..runtime.decisions import Decisions, waiting
from ..runtime.loop import Loop, clock
from ..system.pods import NO_POD, Pod
from . import convert, messages

READS: Mapping[str, str] = {
    "get_device": "device",
    "get_available": "available",
    "get_model": "model",
    "list_models": "models",
    "list_sessions": "sessions",
    "list_segments": "segments",
    "list_decisions": "decisions",
}
"""The frames that read the books, and the field of a Reply that each one's answer is in."""
DEFAULT_PAGE = 100
MAX_PAGE_BYTES = names.MAX_FRAME_BYTES - 1_024
"""The size of one page, so that it fits into a frame with room for its head. One row alone is smaller, too."""
SHARES_NS = 1_000_000_000
"""How long shares are shown before they are computed again: a list of 16,384 models has 60 pages."""
_ROW_HEAD_BYTES = 4
"""What a row takes in its page besides: the number of its field, and its length."""
MOST_WAITING = 16
"""How many of the requests that wait for one model are shown: the oldest."""
_REQUEST = re.compile(r"sessions/([0-9a-f]{1,16})/requests/([0-9]{1,20})")
_ID_KEY = re.compile(r"[0-9a-f]{16}")

_ListRequest = pb.ListModelsRequest | pb.ListSessionsRequest | pb.ListSegmentsRequest | apb.ListTenantsRequest
_Row = TypeVar("_Row")
_Shown = TypeVar("_Shown", bound=Message)


@dataclass(slots=True)
class BookMessages:
    """The books as messages."""

    loop: Loop
    plan: Plan
    decisions: Decisions
    pod_of: Callable[[int], Pod] = lambda _: NO_POD
    """The pod of a session's process."""
    metrics_url: str = ""
    start_time: float = field(default_factory=time.time)
    _shares: dict[Location, tuple[int, Mapping[ModelName, int]]] = field(default_factory=dict)
    """What is shown of each location, and until when."""

    def read(self, request: Message, tenant: str, session: int) -> Message:
        """Return the answer to a session of a tenant. Raises `Refused`."""
        match request:
            case pb.GetDeviceRequest():
                return self.get_device()
            case pb.GetAvailableRequest():
                return self.get_available(request, tenant, session)
            case pb.GetModelRequest():
                return self.get_model(request, tenant)
            case pb.ListModelsRequest():
                return self.list_models(request, tenant)
            case pb.ListSessionsRequest():
                return self.list_sessions(request, tenant)
            case pb.ListSegmentsRequest():
                return self.list_segments(request, tenant)
            case pb.ListDecisionsRequest():
                return self.list_decisions(request, tenant)
            case _:
                raise AssertionError(f"{type(request).__name__} reads nothing")

    def get_device(self) -> rpb.Device:
        """Return the device and its books."""
        guests, asleep_guests = self.loop.guests.counted()
        plan, figures = self.plan, self.loop.figures
        books, device = snapshot.take_device(self.loop.broker), plan.driver.device
        kept = {"device": (plan.headroom, plan.gate_reserve)}
        return rpb.Device(
            uuid=device.uuid,
            product=device.name,
            driver=device.driver,
            granularity_bytes=device.granularity,
            locations=[
                messages.from_location(row, figures.get(row.location), *kept.get(row.location, (0, 0)))
                for row in books.locations
            ],
            revision=books.revision,
            version=version_text(__version__),
            pid=os.getpid(),
            start_time=messages.timestamp(self.start_time),
            metrics_url=self.metrics_url,
            sessions=books.sessions,
            detached_sessions=books.detached,
            draining=self.loop.broker.books.draining,
            journal_full=bool(self.loop.broker.books.cannot_write),
            driver_fallback=plan.fell_back,
            device_lost=bool(self.loop.broker.books.device_lost),
            asleep_sessions=self.loop.idle_sleep.asleep(),
            guests=guests,
            asleep_guests=asleep_guests,
        )

    def get_available(self, request: pb.GetAvailableRequest, tenant: str, session: int) -> pb.Available:
        """Return how much a session could borrow now for one of its tenant's models."""
        name, location = self._find_model(request.model, tenant), convert.parse_location(request.location)
        broker = self.loop.broker
        if not broker.books.rules.capacities.get(location):
            raise convert.Refused(deny(Reason.LOCATION_UNAVAILABLE, location=location))
        now = 0
        share, more = broker.waiting.share(name, location, session)
        if broker.books.refuse_debit():
            more = 0
        else:
            now = broker.books.admission.available(name, location, self._device_room(location), session)
        return pb.Available(
            now_bytes=now,
            obtainable_bytes=more,
            guarantee_bytes=broker.books.admission.model_guarantee(name, location),
            limit_bytes=policy.model_limit(broker.ledger, broker.books.rules, name, location),
            share_bytes=share,
            tenant_limit_bytes=policy.limit_of(broker.ledger.quotas, broker.books.rules, (tenant, None, location)),
        )

    def _device_room(self, location: Location) -> int | None:
        """Return what the device could hold more of extents; None where it cannot say. Stock makes way for them.

        What others use is known from the last audit. What is lent is known now: memory that came or went since that
        audit must not pass for memory of others.
        """
        broker, info = self.loop.broker, self.loop.figures.get(location)
        others = broker.releasing.shown(location)
        if info is None or others is None:
            return None
        anchor = broker.books.rules.anchor_bytes if location == "device" else 0
        return info.total - others - anchor - broker.ledger.totals[location].charged - self.plan.gate_reserve

    def get_model(self, request: pb.GetModelRequest, tenant: str) -> rpb.Model:
        """Return one of a tenant's models."""
        name = self._find_model(request.name, tenant)
        return self._model(name, {})

    def _model(self, name: ModelName, shares: Mapping[str, Mapping[ModelName, int]]) -> rpb.Model:
        view, now_ns = snapshot.take_model(self.loop.broker, name), clock()
        guests = self.loop.guests.of_model(name, now_ns)
        return messages.from_model(view, shares, self.loop.idle_sleep.of_model(name), now_ns, guests)

    def _find_model(self, name: str, tenant: str) -> ModelName:
        """Return a model of the tenant. Raises `Refused`."""
        found = convert.parse_model(name)
        if found.tenant != tenant or found not in self.loop.broker.ledger.models:
            raise convert.Refused(deny(Reason.MODEL_NOT_FOUND, model=str(found)))
        return found

    def list_models(self, request: pb.ListModelsRequest, tenant: str | None = None) -> pb.ListModelsResponse:
        """Return a page of models, by tenant and name; `tenant` None means all tenants."""
        ledger = self.loop.broker.ledger
        shares = {str(where): self._shares_at(where) for where in ledger.totals}
        all_names, end = ledger.model_names, len(ledger.model_names)
        token = _token(request, names.parse_model)
        first = bisect_right(all_names, convert.parse_model(token)) if token else 0
        if tenant is not None:
            first = max(first, bisect_left(all_names, (tenant,)))
            end = max(first, bisect_left(all_names, (f"{tenant}\0",)))
        behind = all_names[first : min(end, first + names.MAX_PAGE_ROWS + 1)]
        models, token = _first_page(behind, str, request, lambda name: self._model(name, shares))
        return pb.ListModelsResponse(models=models, next_page_token=token)

    def _shares_at(self, location: Location) -> Mapping[ModelName, int]:
        """Return the share of each model while requests wait, at most SHARES_NS old: all pages of a list show it."""
        waits, now_ns = self.loop.broker.waiting, clock()
        if not waits.of_location(location)[1]:
            return {}
        until, shares = self._shares.get(location, (0, {}))
        if now_ns >= until:
            shares = waits.shares(location)
            self._shares[location] = now_ns + SHARES_NS, shares
        return shares

    def list_sessions(self, request: pb.ListSessionsRequest, tenant: str | None = None) -> pb.ListSessionsResponse:
        """Return a page of sessions, in the order they began; `tenant` None means all tenants."""
        rows = [row for row in self.loop.broker.ledger.sessions.values() if tenant in (None, row.tenant)]
        sessions, token = _page(rows, lambda row: f"{row.session:016x}", _ID_KEY.fullmatch, request, self.session)
        return pb.ListSessionsResponse(sessions=sessions, next_page_token=token)

    def session(self, row: SessionRow) -> rpb.Session:
        """Return a session."""
        return messages.from_session(snapshot.take_session(self.loop.broker, row), clock(), self.pod_of(row.session))

    def list_tenants(
        self, request: apb.ListTenantsRequest, configured: Mapping[str, TenantConfig]
    ) -> apb.ListTenantsResponse:
        """Return a page of tenants, by name: the configured ones, and all that hold something."""
        rows = snapshot.take_tenants(self.loop.broker, configured)

        def show(row: snapshot.TenantView) -> apb.Tenant:
            return messages.from_tenant(row, configured.get(row.tenant))

        tenants, token = _page(rows, lambda row: row.tenant, names.valid_tenant, request, show)
        return apb.ListTenantsResponse(tenants=tenants, next_page_token=token)

    def get_tenant(self, name: str, configured: Mapping[str, TenantConfig]) -> apb.Tenant:
        """Return one tenant, configured or not."""
        (row,) = [row for row in snapshot.take_tenants(self.loop.broker, (name,)) if row.tenant == name]
        return messages.from_tenant(row, configured.get(name))

    def list_segments(self, request: pb.ListSegmentsRequest, tenant: str | None = None) -> pb.ListSegmentsResponse:
        """Return a page of segments, in the order they began; `tenant` None means all tenants."""
        broker, now_ns = self.loop.broker, clock()
        rows = [row for row in broker.ledger.segments.values() if tenant in (None, row.name.tenant)]

        def show(row: SegmentRow) -> rpb.Segment:
            return messages.from_segment(broker.segments.view(row), now_ns=now_ns)

        segments, token = _page(rows, lambda row: f"{row.segment:016x}", _ID_KEY.fullmatch, request, show)
        return pb.ListSegmentsResponse(segments=segments, next_page_token=token)

    def list_decisions(self, request: pb.ListDecisionsRequest, tenant: str | None = None) -> pb.ListDecisionsResponse:
        """Return the decisions about a model or a request, the newest first; `tenant` None means any tenant's."""
        now_ns, waiters = clock(), self.loop.broker.waiting.waiters()
        if asked := _REQUEST.fullmatch(request.name):
            key = int(asked[1], 16), int(asked[2])
            now = [waiter for waiter in waiters if (waiter.event.session, waiter.event.request_id) == key]
            now = [waiter for waiter in now if tenant in (None, waiter.name.tenant)]
            found = list(self.decisions.of_request(tenant, *key))
        else:
            name = convert.parse_model(request.name)
            now, found = [waiter for waiter in waiters if waiter.name == name], self.decisions.of_model(name)
            known = now or found or name in self.loop.broker.ledger.models
            if not known or tenant not in (None, name.tenant):
                raise convert.Refused(deny(Reason.MODEL_NOT_FOUND, model=str(name)))
        found = [*(waiting(waiter, now_ns) for waiter in reversed(now[:MOST_WAITING])), *found]
        shown = (messages.from_decision(decision, tenant) for decision in found)
        return pb.ListDecisionsResponse(decisions=_fitting(shown))


def _page(
    rows: Sequence[_Row],
    key: Callable[[_Row], str],
    is_key: Callable[[str], object],
    request: _ListRequest,
    show: Callable[[_Row], _Shown],
) -> tuple[list[_Shown], str]:
    """Return a page of the rows that follow the request's token, and the token of the next page."""
    token = _token(request, is_key)
    behind = sorted((row for row in rows if key(row) > token), key=key)
    return _first_page(behind, key, request, show)


def _token(request: _ListRequest, is_key: Callable[[str], object]) -> str:
    """Return the key of the last row of the page before; "": the first page is asked for.

    That row may have ended since: the page begins after the place where it was.
    """
    size, token = request.page_size, request.page_token
    if size < 0:
        raise convert.Refused(deny(Reason.INVALID_ARGUMENT, what=f"a page has at least one row, not {size}"))
    if token and not is_key(token):
        raise convert.Refused(deny(Reason.INVALID_PAGE_TOKEN))
    return token


def _first_page(
    behind: Sequence[_Row], key: Callable[[_Row], str], request: _ListRequest, show: Callable[[_Row], _Shown]
) -> tuple[list[_Shown], str]:
    """Return a page of these rows, and the token of the next one.

    A page that grows too long ends early, but has at least one row.
    """
    wanted = min(request.page_size or DEFAULT_PAGE, names.MAX_PAGE_ROWS)
    page = _fitting(map(show, behind[:wanted]))
    return page, key(behind[len(page) - 1]) if len(behind) > len(page) else ""


def _fitting(rows: Iterable[_Shown]) -> list[_Shown]:
    """Return the first rows, as many as MAX_PAGE_BYTES have room for, and at least one."""
    page: list[_Shown] = []
    long = 0
    for shown in rows:
        long += shown.ByteSize() + _ROW_HEAD_BYTES
        if page and long > MAX_PAGE_BYTES:
            break
        page.append(shown)
    return page
