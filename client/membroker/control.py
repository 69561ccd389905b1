"""The calls of a session that move no memory, by gRPC: each is made anew when its broker was lost under it.

Owns what makes "anew" mean "once": a call whose answer was lost may have been done. It must never wait by itself.
"""

from __future__ import annotations

from typing import Any

from membroker.connection import Connection
from membroker.errors import ModelNotFound
from membroker.grpc_calls import CONTROL_SECONDS
from membroker.line import Line
from membroker.v1 import broker_pb2 as pb
from membroker.v1 import resources_pb2


class Control:
    """The calls over one line. Each raises the broker's refusal, `BrokerUnavailable`, `SessionLost`, `ClosedError`."""

    def __init__(self, line: Line) -> None:
        self._line = line

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
            request.request_id = connection.new_request_id()
            model: resources_pb2.Model = self._call("RegisterModel", request)
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
            request = pb.UnregisterModelRequest(request_id=connection.new_request_id(), name=name)
            try:
                self._call("UnregisterModel", request)
            except ModelNotFound:
                if not again:
                    raise
            self._line.registry.left(name)

        self._line.conduct(attempt)

    def _call(self, method: str, request: Any) -> Any:
        return self._line.calls.call(method, request, CONTROL_SECONDS)
