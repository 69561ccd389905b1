"""Wraps every gRPC call: refusals become rich statuses, faults become INTERNAL, and both are counted.

It also bounds the calls: their number, and streams that never end; and each begins when it is its tenant's turn.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.text_format import MessageToString
from google.rpc.status_pb2 import Status

from membroker.v1.admin_pb2 import ReloadResponse
from membroker.wire.names import STATUS_METADATA, TOKEN_METADATA

from ...core.denied import Denied, Reason, deny
from ...system import logs
from ..convert import LONG_BYTES, Refused, known_of
from ..dispatch import Dispatcher
from ..errors import to_status
from .callers import caller_of

_CODES = {code.value[0]: code for code in grpc.StatusCode}
MAX_WATCHES = 16
"""Streams of health and reflection that one endpoint serves at a time: the peer decides how long they last."""
MAX_STREAMS = 32
"""Calls of one connection at a time."""
MAX_CALLS = 1_024
"""Calls at a time of all endpoints together. Each endpoint has an equal part, at least one connection's."""


ANSWER_BYTES = 32 * 1024
"""A call counts as one more for each of these in its answer: gRPC keeps an answer twice until its peer has taken it."""
MOST_SHOWN = 400
"""Characters of an operator's request in the log."""
TOO_MANY = "the broker has too many gRPC calls at a time"


class CallCount:
    """Counts the calls of all endpoints. A call counts from its first frame on, and until its task ends.

    `endpoints` says how many share the bound now: a reload adds some.
    """

    def __init__(self, endpoints: Callable[[], int]) -> None:
        self._endpoints = endpoints
        self._running: Counter[str] = Counter()
        self._of_users: Counter[tuple[str, str]] = Counter()
        """By endpoint and tenant, where users are tenants. No entry is zero."""

    def begin(self, endpoint: str, count: int = 1, *, user: str = "") -> bool:
        """Count the call of the running task, or return False if the endpoint, or all of them, have too many.

        Or count it as some more, for a long answer, which is kept until the peer takes it. `user` is its tenant where
        users are tenants: each may have as many calls as are left then, so the first half, the next a quarter, and
        none keeps all others out.
        """
        share = max(MAX_STREAMS, MAX_CALLS // self._endpoints())
        running, key = self._running[endpoint] + count, (endpoint, user)
        if running > share or self._running.total() + count > MAX_CALLS:
            return False
        if user and self._of_users.get(key, 0) + running > share:
            return False
        task = asyncio.current_task()
        assert task is not None
        self._running[endpoint] += count
        if user:
            self._of_users[key] += count

        def end(_: object) -> None:
            self._running[endpoint] -= count
            if user:
                self._of_users[key] -= count
                if not self._of_users[key]:
                    del self._of_users[key]

        task.add_done_callback(end)
        return True


class Guard(grpc.aio.ServerInterceptor):
    """Wraps one endpoint's calls. Those of health and reflection are not counted, but their streams are bounded.

    `has_users`: each user is a tenant there. Calls without a session's token count as those of one user more.
    `is_admin`: the log has a line for each call, with the process that made it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        calls: CallCount,
        endpoint: str,
        *,
        has_users: bool = False,
        is_admin: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._has_users = has_users
        self._is_admin = is_admin
        self._turns = dispatcher.loop.turns
        self._calls = calls
        self._endpoint = endpoint
        self._watches = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the method's handler, guarded."""
        user = self._tenant_of(details) if self._has_users else ""
        if not self._calls.begin(self._endpoint, user=user):
            return grpc.stream_stream_rpc_method_handler(_refuse)  # for any kind of call: it waits for no request
        handler = await continuation(details)
        method: str = details.method
        if handler is not None and handler.response_streaming:
            return self._bound(handler)
        if handler is None or not method.startswith("/membroker."):
            return handler
        name = method.rpartition("/")[2]

        async def guarded(request: Any, context: Any) -> Any:
            start = time.perf_counter()
            result = "OK"
            try:
                tenant = self._tenant_of(details)
                answer = await self._begin(tenant, name, lambda: handler.unary_unary(request, context), request)
                if inspect.isawaitable(answer):
                    answer = await answer
                if not isinstance(answer, Denied):
                    if isinstance(answer, ReloadResponse) and answer.problems:
                        result = "REFUSED"
                    return self._bytes_of(answer, context, user)
                result = answer.reason.value
                _answer(context, to_status(answer))
            except Refused as refused:
                result = refused.denied.reason.value
                _answer(context, to_status(refused.denied))
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the daemon: no request may end it
                result = Reason.INTERNAL.value
                logs.fault(error, method=name)
                _answer(context, to_status(deny(Reason.INTERNAL)))
            finally:
                self._dispatcher.times_of(name, "grpc")(time.perf_counter() - start)
                if self._is_admin:
                    _log_operator(name, request, context.peer(), result)

        def deserialize(body: bytes) -> Any:
            # gRPC logs an exception from here as our fault, with a traceback: a hostile client could fill the log.
            try:
                message = handler.request_deserializer(body)
            except DecodeError:
                return None
            return known_of(message) if len(body) > LONG_BYTES and name != "ReleaseExtents" else message

        return grpc.unary_unary_rpc_method_handler(guarded, deserialize)

    def _bytes_of(self, answer: Message, context: Any, user: str) -> bytes:
        """Return an answer's bytes, or refuse the call for want of room for them.

        gRPC would keep the message beside its bytes, until the peer has taken them.
        """
        body = answer.SerializeToString()
        more = len(body) // ANSWER_BYTES
        if more and not self._calls.begin(self._endpoint, more, user=user):
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MANY)
        return body

    def _tenant_of(self, details: grpc.HandlerCallDetails) -> str:
        """Return the tenant whose time a call takes: its session's, or the endpoint's without a valid token."""
        token = dict(details.invocation_metadata or ()).get(TOKEN_METADATA, "")
        try:
            return self._dispatcher.find(str(token), self._endpoint).tenant
        except Refused:
            return self._endpoint

    async def _begin(self, tenant: str, name: str, call: Callable[[], Any], request: Any) -> Any:
        """Begin a call when it is its tenant's turn. Return what it returns, which may be a future, or its refusal."""
        began: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def begin() -> bool:
            if began.done():  # it was cancelled
                return False
            # What is raised must not get into the future: the two would keep each other, see `refuse`.
            try:
                if request is None:
                    what = f"the body is not a request of {name}"
                    began.set_result(deny(Reason.PROTOCOL_VIOLATION, what=what))
                else:
                    began.set_result(call())
            except Refused as refused:
                began.set_result(refused.denied)
            except Exception as error:  # noqa: BLE001 - as above
                logs.fault(error, method=name)
                began.set_result(deny(Reason.INTERNAL))
            return False

        self._turns.put(tenant, begin)
        try:
            return await began
        except asyncio.CancelledError:
            if began.done() and not began.cancelled() and isinstance(answer := began.result(), asyncio.Future):
                answer.cancel()
            raise

    def _bound(self, handler: Any) -> Any:
        """Return the handler of a stream that is refused if the endpoint has too many."""
        serve = handler.stream_stream or handler.unary_stream

        async def bounded(request: Any, context: Any) -> None:
            if self._watches >= MAX_WATCHES:
                refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} streams are open here already")
                return
            self._watches += 1
            try:
                answers = serve(request, context)
                if inspect.isasyncgen(answers):
                    async for answer in answers:
                        await context.write(answer)
                else:
                    await answers
            finally:
                self._watches -= 1

        kind = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
        return kind(bounded, handler.request_deserializer, handler.response_serializer)


def refuse(context: Any, code: grpc.StatusCode, details: str = "") -> None:
    """End a call with an error, when its handler returns.

    Not by `context.abort`: the call would then keep the exception, whose traceback has the call. Only a full garbage
    collection frees such a cycle, and one of a flood's refused calls took 25 ms of a turn.
    """
    context.set_code(code)
    context.set_details(details)


def _log_operator(method: str, request: Any, peer: str, result: str) -> None:
    """Log which process asked for what. Questions are logged at DEBUG: `membroker top` asks several each second."""
    text = "" if request is None else MessageToString(request, as_one_line=True)[:MOST_SHOWN]
    say = logs.debug if method.startswith(("Get", "List")) else logs.log
    say("an operator's call", method=method, request=text, result=result, **caller_of(peer))


async def _refuse(_requests: Any, context: Any) -> None:
    refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_MANY)


def _answer(context: Any, status: Status) -> None:
    refuse(context, _CODES[status.code], status.message)
    context.set_trailing_metadata(((STATUS_METADATA, status.SerializeToString()),))
