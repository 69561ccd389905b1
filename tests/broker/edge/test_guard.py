"""What every gRPC call goes through before its method: the turn of its tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from membroker.v1 import broker_pb2
from membroker.wire.names import TOKEN_METADATA
from membrokerd.core.denied import Reason, deny
from membrokerd.edge.convert import Refused
from membrokerd.edge.rpc.interceptor import Guard


class FakeDispatcher:
    """Knows one session, of the tenant blue, and does what is put into a turn at once."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.loop = SimpleNamespace(turns=SimpleNamespace(put=self._put))

    def _put(self, tenant: str, work: Callable[[], bool]) -> None:
        self.served.append(tenant)
        assert not work(), "a call is one step"

    def find(self, token: str, endpoint: str) -> Any:
        if token != "blues":
            raise Refused(deny(Reason.TOKEN_REJECTED))
        return SimpleNamespace(tenant="blue")

    def times_of(self, method: str, transport: str) -> Callable[[float], None]:
        return lambda seconds: None


@pytest.mark.parametrize(("token", "tenant"), [("blues", "blue"), ("another", "red"), ("", "red")])
def test_a_call_takes_the_time_of_its_sessions_tenant(token: str, tenant: str) -> None:
    """Without a session it takes that of the endpoint, which every process there has in common."""
    dispatcher, answer = FakeDispatcher(), broker_pb2.ListModelsResponse(next_page_token="more")
    guard = Guard(cast(Any, dispatcher), cast(Any, SimpleNamespace(begin=lambda *_, **__: True)), "red")
    details: Any = SimpleNamespace(
        method="/membroker.v1.BrokerService/ListModels", invocation_metadata=((TOKEN_METADATA, token),)
    )

    async def continuation(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)

    async def call() -> Any:
        handler = await guard.intercept_service(continuation, details)
        return await handler.unary_unary(broker_pb2.ListModelsRequest(), None)

    assert asyncio.run(call()) == answer.SerializeToString()
    assert dispatcher.served == [tenant]
