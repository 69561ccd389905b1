"""What stands before every gRPC call: refusals become rich statuses, faults become INTERNAL, and both are counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from .. import logs
from ..core.denied import Reason, deny
from .convert import Refused
from .errors import to_status

STATUS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Guard(grpc.aio.ServerInterceptor):
    """Wraps the calls of our own services; health and reflection pass untouched."""

    def __init__(self, observe: Callable[[str, str, float], None]) -> None:
        self._observe = observe

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the method's handler, guarded."""
        handler = await continuation(details)
        method: str = details.method
        if handler is None or handler.unary_unary is None or not method.startswith("/membroker."):
            return handler
        name = method.rpartition("/")[2]

        async def guarded(request: Any, context: Any) -> Any:
            start = time.perf_counter()
            try:
                if request is None:
                    raise Refused(deny(Reason.PROTOCOL_VIOLATION, what=f"the body is not a request of {name}"))
                return await handler.unary_unary(request, context)
            except Refused as refused:
                await _abort(context, to_status(refused.denied))
            except (grpc.aio.AbortError, TimeoutError):
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the daemon: no request may end it
                logs.fault(error, method=name)
                await _abort(context, to_status(deny(Reason.INTERNAL)))
            finally:
                self._observe(name, "grpc", time.perf_counter() - start)

        def deserialize(body: bytes) -> Any:
            # What is raised here gRPC logs as a fault of ours, with a traceback, and a stranger could fill the log.
            try:
                return handler.request_deserializer(body)
            except DecodeError:
                return None

        return grpc.unary_unary_rpc_method_handler(guarded, deserialize, handler.response_serializer)


async def _abort(context: Any, status: Status) -> None:
    await context.abort(
        _CODES[status.code], status.message, trailing_metadata=((STATUS_KEY, status.SerializeToString()),)
    )
