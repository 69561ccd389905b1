"""A broker that dies or is restarted, and the calls by gRPC: once or not at all, and memory as on the handoff.

Both of the broker's sockets are played by the test; they die and come back apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, PlayedService, abort, drop_all, is_away, model
from tests.support.processes import mapped_extents

import membroker
from membroker import Client
from membroker.session import outages
from membroker.v1 import broker_pb2, resources_pb2


@pytest.fixture(autouse=True)
def no_end_is_noticed_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call by gRPC fails, and only a second later it would not wait for the end of the handoff connection."""
    monkeypatch.setattr(outages, "NOTICING_SECONDS", DEADLINE_SECONDS)


class TestControlCalls:
    """Calls by gRPC: once or not at all, over a restart."""

    def restart(self, broker: PlayedBroker, service: PlayedService, **answer: object) -> None:
        """End both, and be there again, the handoff socket a little before the other."""
        service.stop()
        broker.hang_up()
        broker.resume(**answer)
        service.start()

    def begun(
        self, service: PlayedService, method: str, then: Callable[[object, object], object]
    ) -> tuple[threading.Event, threading.Event]:
        """Let the first call of a method stand still in the broker until it dies."""
        came, go_on = threading.Event(), threading.Event()

        def answer(request: object, context: object) -> object:
            service.answers[method] = then
            came.set()
            go_on.wait(DEADLINE_SECONDS)
            return None

        service.answers[method] = answer
        return came, go_on

    @pytest.mark.parametrize(("before", "done"), [(False, True), (False, False), (True, True)])
    def test_an_exclusive_registration(
        self, broker: PlayedBroker, client: Client, service: PlayedService, before: bool, done: bool
    ) -> None:
        """It had been done, and its answer was lost: the model is this session's. Or it had not: it is asked again.

        If the session had the model long before, the answer would have been a refusal, and is.
        """

        def register(request: Any, context: Any) -> resources_pb2.Model:
            if done and request.exclusive:
                abort(context, "MODEL_EXISTS")
            return resources_pb2.Model(name=MODEL)

        if before:
            service.answers["RegisterModel"] = register
            client.model("m")
        came, go_on = self.begun(service, "RegisterModel", register)
        caller = Caller(lambda: client.model("m", exclusive=True))
        assert came.wait(DEADLINE_SECONDS)
        self.restart(broker, service, models=[MODEL] if done else [])
        go_on.set()
        if before:
            assert isinstance(caller.end().error, membroker.ModelAlreadyExists)
        else:
            assert caller.value().resource_name == MODEL
            assert [request.exclusive for _, request in service.asked] == [True, not done]

    def test_unregistered_twice(self, broker: PlayedBroker, client: Client, service: PlayedService) -> None:
        came, go_on = self.begun(service, "UnregisterModel", lambda _, context: abort(context, "MODEL_NOT_FOUND"))
        caller = Caller(model(client).unregister)
        assert came.wait(DEADLINE_SECONDS)
        self.restart(broker, service)
        go_on.set()
        caller.value()
        with pytest.raises(membroker.ModelNotFound):
            model(client).unregister()

    def test_a_stranger_answers_first(self, broker: PlayedBroker, client: Client, service: PlayedService) -> None:
        """A daemon without the old one's state is up: by gRPC too the session is lost, and not the access denied."""

        dead = threading.Event()

        def reject(_: object, context: object) -> None:
            broker.die()
            dead.set()
            abort(context, "TOKEN_REJECTED")

        service.answers["GetDevice"] = reject
        caller = Caller(client.device)
        assert dead.wait(DEADLINE_SECONDS)
        until(lambda: is_away(client))
        broker.listen()
        broker.accept()
        broker.refuse(1, "TOKEN_REJECTED")
        assert isinstance(caller.end().error, membroker.SessionLost)


class TestByGrpc:
    """Memory by gRPC, descriptors on the handoff socket: the same promises."""

    @pytest.fixture
    def client(self, broker: PlayedBroker, service: PlayedService) -> Iterator[Client]:
        one = broker.connect(timeout=DEADLINE_SECONDS, transport="grpc")
        yield one
        broker.die()
        until(lambda: is_away(one))  # or what it holds would be given back by gRPC, to a service that has no answer
        one._session.reconnecting._outages.outage = 0
        one.close()

    def allocation(self, broker: PlayedBroker, ids: list[int]) -> Callable[[object, object], object]:
        def answer(request: broker_pb2.AllocateExtentsRequest, context: object) -> object:
            ids.extend(broker.deliver_pages(request.request_id, request.count, parts=1))
            return broker_pb2.AllocateExtentsResponse(count=request.count, extent_bytes=PAGE)

        return answer  # type: ignore[return-value]

    def test_an_allocation_is_made_anew(self, broker: PlayedBroker, client: Client, service: PlayedService) -> None:
        came, go_on, ids = threading.Event(), threading.Event(), []

        def stand_still(request: broker_pb2.AllocateExtentsRequest, context: object) -> object:
            broker.deliver_pages(request.request_id, 1, parts=2)
            service.answers["AllocateExtents"] = self.allocation(broker, ids)
            came.set()
            go_on.wait(DEADLINE_SECONDS)
            return None

        service.answers["AllocateExtents"] = stand_still  # type: ignore[assignment]
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, 2 * PAGE))
        assert came.wait(DEADLINE_SECONDS)
        broker.hear("ack")
        service.stop()
        broker.hang_up()
        assert not broker.resume().extent_ids
        assert mapped_extents() == 0
        service.start()
        go_on.set()
        broker.hear("ack")
        assert caller.value() == pool.base_address
        assert mapped_extents() == 2
        broker.hang_up()
        assert list(broker.resume().extent_ids) == ids

    def test_a_release_ends_before_the_holds(
        self, broker: PlayedBroker, client: Client, service: PlayedService
    ) -> None:
        """It is on its way when the handoff breaks: what it released is not stated, and it is not repeated."""
        ids: list[int] = []
        service.answers["AllocateExtents"] = self.allocation(broker, ids)
        one, two = model(client).allocate(PAGE), model(client).allocate(PAGE)
        for _ in ids:
            broker.hear("ack")
        caller = Caller(one.close)
        broker.hear("release")
        drop_all(broker, client)
        assert list(broker.resume().extent_ids) == ids[1:]
        caller.value()
        until(lambda: not is_away(client))
        assert broker.hears_nothing()
        drop_all(broker, client)
        two.close()
