"""AdminService: the operator's calls. Every process that can open the admin endpoint's socket is an operator."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC
from functools import partial
from typing import Any

from membroker.v1 import admin_pb2 as pb
from membroker.v1 import admin_pb2_grpc, broker_pb2, resources_pb2
from membroker.v1.handoff_pb2 import Draining, Notice, Undrained
from membroker.wire.names import session_name

from ...core import effects as fx
from ...core import events as ev
from ...core import policy
from ...core.denied import Denied, Reason, deny
from ...core.models import only_removes
from ...core.names import Location, ModelName
from ...core.rows import Quota
from ...device.suspects import SeenProcess, command_of
from ...runtime.drain import Drain
from ...runtime.eviction import Evictions
from ...runtime.loop import Loop, MakeEvent
from ...runtime.reload import Reloader
from ...system import logs
from ...system.pods import NO_POD, Pod
from ...system.process import pod_of_pid
from .. import convert
from ..convert import Refused
from ..listings import BookMessages
from ..messages import LOCATION_NUMBERS
from ..tenants import Tenants

QUOTAS_AT_ONCE = 256
"""How many quotas a listing looks at in one turn of the event loop: 2 ms."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The service of the whole device."""

    def __init__(
        self,
        loop: Loop,
        views: BookMessages,
        tenants: Tenants,
        drain: Drain,
        evictions: Evictions,
        reloader: Reloader,
    ) -> None:
        self._loop = loop
        self._views = views
        self._tenants = tenants
        self._drain = drain
        self._evictions = evictions
        self._reloader = reloader

    async def GetDevice(self, request: broker_pb2.GetDeviceRequest, context: Any) -> resources_pb2.Device:
        """Return the device and its books."""
        return self._get_device()

    def _get_device(self) -> resources_pb2.Device:
        """Return what a tenant sees, and what is wrong with the configuration, which names other tenants."""
        device, state = self._views.get_device(), self._reloader.state
        device.reload_problems.extend(state.problems)
        device.pending_keys.extend(state.pending)
        return device

    async def ListModels(self, request: broker_pb2.ListModelsRequest, context: Any) -> broker_pb2.ListModelsResponse:
        """Return a page of the models of all tenants."""
        return self._views.list_models(request)

    async def ListSessions(
        self, request: broker_pb2.ListSessionsRequest, context: Any
    ) -> broker_pb2.ListSessionsResponse:
        """Return a page of the sessions of all tenants."""
        return self._views.list_sessions(request)

    async def ListSegments(
        self, request: broker_pb2.ListSegmentsRequest, context: Any
    ) -> broker_pb2.ListSegmentsResponse:
        """Return a page of the segments of all tenants."""
        return self._views.list_segments(request)

    async def ListDecisions(
        self, request: broker_pb2.ListDecisionsRequest, context: Any
    ) -> broker_pb2.ListDecisionsResponse:
        """Return why requests of a model of any tenant were refused or waited, and why it was recalled."""
        return self._views.list_decisions(request)

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Any) -> pb.ListTenantsResponse:
        """Return a page of the tenants."""
        return self._views.list_tenants(request, self._tenants.config.tenants)

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: Any) -> pb.Tenant:
        """Make a tenant."""
        return self._tenant(await self._tenants.create(request))

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, context: Any) -> pb.Tenant:
        """Change settings of a tenant."""
        return self._tenant(await self._tenants.update(request))

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Any) -> pb.Tenant:
        """Begin to delete a tenant."""
        return self._tenant(await self._tenants.delete(request))

    def _tenant(self, name: str) -> pb.Tenant:
        return self._views.get_tenant(name, self._tenants.config.tenants)

    async def DeleteSegment(self, request: broker_pb2.DeleteSegmentRequest, context: Any) -> resources_pb2.Segment:
        """End a segment of any tenant."""
        name, generation, left = convert.parse_segment(request.name), request.generation, request.only_if_left
        result = await self._ask(lambda call: ev.DeleteSegment(call, None, request.request_id, name, generation, left))
        _, response = convert.from_result(result)
        return response  # type: ignore[no-any-return]

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.Quota:
        """Set a limit, a guarantee or a weight, or remove one that was set."""
        # A caller that goes away ends nothing: the file and the books must say the same.
        return await asyncio.shield(self._set_quota(request))

    async def _set_quota(self, request: pb.SetQuotaRequest) -> pb.Quota:
        tenant, model = convert.parse_quota_name(request.name)
        location = convert.parse_location(request.location)
        broker, key = self._loop.broker, (tenant, model, location)
        async with self._tenants.lock:
            self._tenants.check_not_deleting(tenant)
            before = broker.ledger.quotas.get(key, Quota())
            after = convert.changed_quota(before, request)
            if before == Quota() or not only_removes(before, after):  # a quota of a removed tenant can still be removed
                self._tenants.check(tenant)
            if denied := broker.models.refuse_quota(convert.quota_event(0, key, after)):
                raise Refused(denied)
            if request.validate_only:
                return self._quota(tenant, model, location, self._shortfalls(), would_be=after)
            await self._tenants.keep_quotas({key: after})  # before the step: that may lend at once
            try:
                await self._ask(partial(convert.quota_event, key=key, quota=after))
            except Refused:  # a reload has changed the rules meanwhile
                await self._tenants.keep_quotas({})
                raise
        return self._quota(tenant, model, location, self._shortfalls())

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:
        """Return the quotas that were set. The event loop goes on in between: there may be many thousands."""
        broker = self._loop.broker
        rules = broker.books.rules
        configured = {*rules.limits, *rules.guarantees, *rules.weights} if request.all else set()
        rows = sorted({*broker.ledger.quotas, *configured}, key=lambda key: (key[0], key[1] or "", key[2]))
        shortfalls = self._shortfalls()
        response = pb.ListQuotasResponse()
        for first in range(0, len(rows), QUOTAS_AT_ONCE):
            portion = rows[first : first + QUOTAS_AT_ONCE]
            response.quotas.extend([self._quota(*key, shortfalls, in_force=request.all) for key in portion])
            await asyncio.sleep(0)
        return response

    async def ForgetSession(self, request: pb.ForgetSessionRequest, context: Any) -> resources_pb2.Session:
        """End a detached session, and return its last state."""
        session = convert.parse_session(request.name)
        row = self._loop.broker.ledger.sessions.get(session)
        before = None if row is None else self._views.session(row)
        await self._ask(lambda call: ev.ForgetSession(call, session))
        assert before is not None, "what is not known was forgotten"
        return before

    async def EvictSession(self, request: pb.EvictSessionRequest, context: Any) -> resources_pb2.Session:
        """End the process of a session, and return the session's last state."""
        session = convert.parse_session(request.name)
        row = self._loop.broker.ledger.sessions.get(session)
        if denied := self._evictions.evict(session, row):
            raise Refused(denied)
        assert row is not None, "an unknown session was evicted"
        return self._views.session(row)

    async def SleepModel(self, request: pb.SleepModelRequest, context: Any) -> pb.SleepModelResponse:
        """Ask the sessions of a model to sleep or to wake, and return how far each is."""
        model, ledger = convert.parse_model(request.name), self._loop.broker.ledger
        if model not in ledger.models:
            raise Refused(deny(Reason.MODEL_NOT_FOUND, model=str(model)))
        question = convert.to_sleep(request)
        rows = [ledger.sessions[session] for session in sorted(ledger.models[model].sessions)]
        answers = await self._loop.sleeping.ask([row.session for row in rows if row.state == "open"], question)
        return pb.SleepModelResponse(
            sessions=[
                pb.SessionSleep(
                    session=session_name(row.session),
                    pid=row.pid,
                    status=answers.get(row.session),
                    detached=row.state == "detached",
                )
                for row in rows
            ]
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> resources_pb2.Device:
        """Lend nothing more, and tell the workers."""
        deadline = request.deadline if request.HasField("deadline") else None
        try:
            by = None if deadline is None else deadline.ToDatetime(UTC)
        except (ValueError, OverflowError) as error:
            raise Refused(deny(Reason.INVALID_ARGUMENT, what=f"the deadline is not a valid time: {error}")) from error
        await self._ask(lambda call: ev.SetDraining(call, True))
        self._loop.drain = Notice(draining=Draining(deadline=deadline))
        self._loop.say(self._loop.drain)
        self._drain.begin(by, exits=request.exit)
        return self._get_device()

    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadResponse:
        """Read the configuration again, and return what has become of it."""
        state = await self._reloader.reload()
        return pb.ReloadResponse(problems=state.problems, pending_keys=state.pending)

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> resources_pb2.Device:
        """Lend again."""
        await self._ask(lambda call: ev.SetDraining(call, False))
        self._loop.drain = None
        self._loop.say(Notice(undrained=Undrained()))
        self._drain.end()
        logs.log("undrained")
        return self._get_device()

    async def ListProcesses(self, request: pb.ListProcessesRequest, context: Any) -> pb.ListProcessesResponse:
        """Return the processes that use the device, as the driver sees them."""
        answer: asyncio.Future[list[SeenProcess] | Denied] = asyncio.get_running_loop().create_future()

        def listed(found: list[SeenProcess] | Denied) -> None:
            if not answer.cancelled():  # the caller may be gone before the driver answers
                answer.set_result(found)

        self._loop.processes.find(listed)
        found = await answer
        if isinstance(found, Denied):
            raise Refused(found)
        pods = [await self._pod_of(process) for process in found]
        return pb.ListProcessesResponse(processes=map(_from_process, found, pods))

    async def _pod_of(self, process: SeenProcess) -> Pod:
        if not (uid := pod_of_pid(process.pid)):
            return NO_POD
        name: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._loop.pod_names.find(uid, lambda found: None if name.done() else name.set_result(found))
        return Pod(uid, await name)

    async def _ask(self, make_event: MakeEvent) -> fx.Result:
        answer: asyncio.Future[fx.Result | Denied] = asyncio.get_running_loop().create_future()
        self._loop.ask(make_event, answer.set_result)
        result = await answer
        if isinstance(result, Denied):
            raise Refused(result)
        return result

    def _shortfalls(self) -> dict[Location, int]:
        admission = self._loop.broker.books.admission
        return {where: admission.shortfall(where) for where in self._loop.broker.ledger.totals}

    def _quota(
        self,
        tenant: str,
        model: str | None,
        location: Location,
        shortfalls: Mapping[Location, int],
        *,
        in_force: bool = False,
        would_be: Quota | None = None,
    ) -> pb.Quota:
        """Return a quota as commanded, or as it would be. With `in_force`, what was not commanded is as configured."""
        broker, key = self._loop.broker, (tenant, model, location)
        ledger = broker.ledger
        if model is None:
            name, used = f"tenants/{tenant}", ledger.tenant_charged(tenant, location)
        else:
            name = f"tenants/{tenant}/models/{model}"
            row = ledger.models.get(ModelName(tenant, model))
            charge = row.charges.get(location) if row else None  # only an earlier daemon may have lent at the location
            used = charge.bytes if charge else 0
        quota = would_be or ledger.quotas.get(key, Quota())
        if in_force:
            quota = policy.quota_of(ledger.quotas, broker.books.rules, key)
        return pb.Quota(
            name=name,
            location=LOCATION_NUMBERS[location],
            limit_bytes=quota.limit,
            guarantee_bytes=quota.guarantee,
            weight=quota.weight,
            used_bytes=used,
            shortfall_bytes=shortfalls.get(location, 0),
        )


def _from_process(process: SeenProcess, pod: Pod) -> pb.Process:
    return pb.Process(
        pid=process.pid,
        command=command_of(process.pid),
        used_bytes=process.used,
        charged_bytes=process.charged,
        segment_bytes=process.segments,
        excess_bytes=process.excess,
        sessions=map(session_name, process.sessions),
        models=map(str, process.models),
        pod_uid=pod.uid,
        pod_name=pod.name,
    )
