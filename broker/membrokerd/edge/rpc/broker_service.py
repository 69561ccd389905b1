"""BrokerService: what a tenant asks at its own endpoint, each call with the token of a session."""

from __future__ import annotations

import asyncio
from typing import Any

from membroker.v1 import broker_pb2 as pb
from membroker.v1 import broker_pb2_grpc, resources_pb2
from membroker.wire.names import TOKEN_METADATA

from ...core import effects as fx
from ...core import events as ev
from ...core.denied import Denied
from ...core.rows import SessionRow
from ..convert import Refused
from ..dispatch import Dispatcher
from ..listings import BookMessages


class BrokerService(broker_pb2_grpc.BrokerServiceServicer):
    """One endpoint's service. No method waits: what it returns is the response, or a future of it.

    So all the work of a call is done when it is its tenant's turn (`Guard`).
    """

    def __init__(self, endpoint: str, dispatcher: Dispatcher, views: BookMessages) -> None:
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._views = views

    def _move(self, request: Any, context: Any) -> asyncio.Future[Any]:
        """Put a request to the core, and return its response, later, or its refusal.

        Descriptors go to the handoff socket before that.
        """
        row = self._session(context)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def respond(result: fx.Result | Denied) -> None:
            if answer.done():  # a caller that gave up has cancelled it
                return
            if isinstance(result, Denied):
                method = type(request).__name__.removesuffix("Request")
                self._dispatcher.refused(row.session, request.request_id, method, request, result)
                answer.set_result(result)
                return
            try:
                _, response = self._dispatcher.response(result)
            except Refused as refused:
                response = refused.denied
            answer.set_result(response)

        call = self._dispatcher.request(row.session, row.tenant, request.request_id, request, respond)

        def ended(answer: asyncio.Future[Any]) -> None:
            # The call was cancelled, or its deadline has passed. It waits no longer; what was granted is still done.
            if call is not None and answer.cancelled():
                self._dispatcher.loop.tell(ev.CancelWait(call))

        answer.add_done_callback(ended)
        return answer

    RegisterModel = UnregisterModel = DeclareMemory = AllocateExtents = ReleaseExtents = _move
    CreateSegment = SealSegment = AttachSegment = DetachSegment = DeleteSegment = _move

    def GetDevice(self, request: pb.GetDeviceRequest, context: Any) -> resources_pb2.Device:
        """Return the device and its books."""
        self._session(context)
        return self._views.get_device()

    def GetAvailable(self, request: pb.GetAvailableRequest, context: Any) -> pb.Available:
        """Return how much could be borrowed now for a model of the tenant."""
        row = self._session(context)
        return self._views.get_available(request, row.tenant, row.session)

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> resources_pb2.Model:
        """Return one of the tenant's own models."""
        return self._views.get_model(request, self._session(context).tenant)

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """Return a page of the tenant's own models."""
        return self._views.list_models(request, self._session(context).tenant)

    def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        """Return a page of the tenant's own sessions."""
        return self._views.list_sessions(request, self._session(context).tenant)

    def ListSegments(self, request: pb.ListSegmentsRequest, context: Any) -> pb.ListSegmentsResponse:
        """Return a page of the tenant's own segments."""
        return self._views.list_segments(request, self._session(context).tenant)

    def ListDecisions(self, request: pb.ListDecisionsRequest, context: Any) -> pb.ListDecisionsResponse:
        """Return why requests of one of the tenant's own models were refused or waited, and why it was recalled."""
        return self._views.list_decisions(request, self._session(context).tenant)

    def _session(self, context: Any) -> SessionRow:
        metadata = dict(context.invocation_metadata())
        return self._dispatcher.find(str(metadata.get(TOKEN_METADATA, "")), self._endpoint)
