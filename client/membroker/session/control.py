"""The calls of a session that move no memory: each is made again when its broker was lost under it.

Owns what makes "again" mean "once": a call whose answer was lost may have been done. It must never wait by itself.
"""

from __future__ import annotations

from typing import Any, cast

from ..errors import ModelNotFound
from ..v1 import broker_pb2 as pb
from ..v1 import resources_pb2
from ..v1.handoff_pb2 import Frame
from .connection import Connection
from .reconnecting import Line
from .rpc import CONTROL_SECONDS


class Control:
    """The calls over one line. Each raises the broker's refusal, `BrokerUnavailable`, `SessionLost`, `ClosedError`.

    Models are registered `by_handoff`, where the broker knows how: a session that only borrows needs no gRPC channel.
    """

    def __init__(self, line: Line, *, by_handoff: bool) -> None:
        self._line = line
        self._by_handoff = by_handoff

    def ask(self, method: str, request: Any) -> Any:
        """Make a call that changes nothing."""
        return self._line.conduct(lambda _connection, _again: self._call(method, request))

    def register_model(self, request: pb.RegisterModelRequest) -> resources_pb2.Model:
        """Register a model or join it."""
        name = f"{self._line.welcome.tenant}/models/{request.model_id}"

        def attempt(connection: Connection, again: bool) -> resources_pb2.Model:
            if again and name in connection.models and name not in self._line.registry.models:
                # Registered for this session, and not by a call that returned: it was this one.
                request.exclusive = False
            if self._by_handoff and connection.revision:
                answer = connection.call(Frame(register_model=request), timeout=CONTROL_SECONDS)
            else:
                request.request_id = connection.new_request_id()
                answer = self._call("RegisterModel", request)
            model = cast("resources_pb2.Model", answer)
            self._line.registry.registered(model.name)
            return model

        return self._line.conduct(attempt)

    def leave_model(self, name: str) -> None:
        """Take one registration back: leave a model unless this session has registered it more often."""
        if self._line.registry.strike_registration(name):
            self.unregister_model(name)

    def unregister_model(self, name: str) -> None:
        """Leave a model."""

        def attempt(connection: Connection, again: bool) -> None:
            request = pb.UnregisterModelRequest(name=name)
            try:
                if self._by_handoff and connection.revision:
                    connection.call(Frame(unregister_model=request), timeout=CONTROL_SECONDS)
                else:
                    request.request_id = connection.new_request_id()
                    self._call("UnregisterModel", request)
            except ModelNotFound:
                if not again:
                    raise
            self._line.registry.left(name)

        self._line.conduct(attempt)

    def _call(self, method: str, request: Any) -> Any:
        return self._line.calls.call(method, request, CONTROL_SECONDS)
