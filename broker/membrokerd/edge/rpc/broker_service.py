"""BrokerService: what a tenant asks at its own endpoint, each call with the token of a session."""

from __future__ import annotations

import asyncio
from typing import Any

from membroker.v1 import broker_pb2_grpc
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

    def _read(self, request: Any, context: Any) -> Any:
        """Return what a request reads of the books."""
        row = self._session(context)
        return self._views.read(request, row.tenant, row.session)

    GetDevice = GetAvailable = GetModel = ListModels = ListSessions = ListSegments = ListDecisions = _read

    def _session(self, context: Any) -> SessionRow:
        metadata = dict(context.invocation_metadata())
        return self._dispatcher.find(str(metadata.get(TOKEN_METADATA, "")), self._endpoint)
