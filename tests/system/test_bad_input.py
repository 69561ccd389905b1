"""What bad input gets: a typed error or a closed connection, books that did not move, and a daemon that goes on.

Everything a stranger's program, a broken one, or one with bad intent may say, over both transports, against a real
daemon; beside it an honest worker of another tenant borrows and releases, and must never notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.raw import Asker, Session, reason
from tests.support.scene import PAGE, Scene
from tests.support.sizes import MIB

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2 as rpb

MINE, BLUE = "tenants/red/models/mine", "tenants/blue/models/honest"
REQUESTS: dict[str, tuple[str, Callable[[Asker], Any]]] = {
    "size above capacity": ("CAPACITY", lambda ask: ask.allocate(MINE, 512 * MIB, 1)),
    "the product above int64": ("CAPACITY", lambda ask: ask.allocate(MINE, 1 << 62, 65_536)),
    "no host memory to declare": ("LOCATION_UNAVAILABLE", lambda ask: ask.declare(MINE, PAGE, rpb.LOCATION_HOST)),
    "declared 2^63-1": ("CAPACITY", lambda ask: ask.declare(MINE, (1 << 63) - 1)),
    "another tenant's model": ("MODEL_NOT_FOUND", lambda ask: ask.allocate(BLUE, PAGE, 1)),
    "another tenant's model to declare": ("MODEL_NOT_FOUND", lambda ask: ask.declare(BLUE, PAGE)),
    "a bare model": ("INVALID_NAME", lambda ask: ask.allocate("mine", PAGE, 1)),
    "unprintable": ("INVALID_NAME", lambda ask: ask.allocate("\U000e0001" * 2000, PAGE, 1)),
    "4,097 ids": ("INVALID_COUNT", lambda ask: ask.release(*range(1, 4_098))),
    "id 2^64-1": ("EXTENT_NOT_FOUND", lambda ask: ask.release((1 << 64) - 1)),
}


def test_a_request_that_makes_no_sense_is_refused(scene: Scene, unmoved: Callable[[], None], transport: str) -> None:
    """Each wrong number or name gets its own reason, and moves nothing. Its sentence fits what a client may receive."""
    with Session(scene.daemon.endpoint()) as session:
        session.register("mine")
        before = scene.revision
        for case, (why, ask) in REQUESTS.items():
            assert reason(ask(Asker(session, transport))) == why, case
        assert scene.revision == before
    unmoved()


def test_a_tenants_refusals_are_not_counted_for_anothers_model(scene: Scene, transport: str) -> None:
    """Red asks in blue's name in every way there is; blue's counters, which alerts stand on, do not move."""

    def denials() -> dict[str, int]:
        return dict(next(model for model in scene.daemon.models() if model.name == BLUE).denials_total)

    before = denials()
    with Session(scene.daemon.endpoint()) as session, Session(scene.daemon.endpoint(), observer=True) as observer:
        mine = session.register("mine")
        session.send(pb.Frame(request_id=800_000, allocate=raw.allocation(mine, PAGE)))
        delivered = session.receive().frame
        assert delivered.HasField("delivery")
        session.send(pb.Frame(request_id=800_000, allocate=raw.allocation(BLUE, PAGE)))
        assert reason(session.receive().frame.reply.error) == "REQUEST_ID_IN_USE"
        session.send(pb.Frame(request_id=800_000, ack=pb.Ack(part=0)))
        assert reason(Asker(session, transport).allocate(BLUE, PAGE, 1)) == "MODEL_NOT_FOUND"
        assert reason(Asker(observer, transport).allocate(BLUE, PAGE, 1)) == "OBSERVER"
        assert reason(Asker(observer, transport).declare(BLUE, PAGE)) == "OBSERVER"
    assert denials() == before


def test_tokens(scene: Scene, unmoved: Callable[[], None]) -> None:
    """Missing, empty, wrong, another endpoint's, one whose session has ended: each call of the service refuses it."""
    red, blue = scene.daemon.endpoint("red"), scene.daemon.endpoint("blue")
    with Session(red) as ended:
        old = ended.token
    with Session(red) as session, Session(blue) as foreign:
        methods = bpb.DESCRIPTOR.services_by_name["BrokerService"].methods
        requests = {method.name: GetMessageClass(method.input_type)() for method in methods}
        before = scene.revision
        for method, request in requests.items():
            for token in (None, ""):
                assert reason(raw.grpc_call(red, token, method, request)) == "TOKEN_REQUIRED"
            for token in ("x", old, foreign.token, session.token[:-1], session.token + "x", "x" * 8_000):
                assert reason(raw.grpc_call(red, token, method, request)) == "TOKEN_REJECTED"
            assert reason(raw.grpc_call(blue, session.token, method, request)) == "TOKEN_REJECTED"
        assert scene.revision == before
        assert session.token not in scene.daemon.log()
    unmoved()


def test_what_is_no_message_or_too_long(scene: Scene, unmoved: Callable[[], None]) -> None:
    """No message is refused by us, with a reason and without a traceback in the log; a body that is too long, by gRPC.

    Metadata that is too long ends the connection before gRPC has seen it, and the log says why.
    """
    unmoved()
    with pytest.raises(grpc.RpcError) as caught:
        raw.grpc_call(scene.daemon.endpoint(), "x" * 100_000, "GetDevice", bpb.GetDeviceRequest())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    until(lambda: "a header block has more than 16384 bytes" in scene.daemon.log())
    method = "/membroker.v1.BrokerService/AllocateExtents"
    with grpc.insecure_channel(f"unix:{scene.daemon.endpoint()}/grpc.sock") as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff" * 100, timeout=DEADLINE_SECONDS)
        assert reason(raw.status_of(caught.value)) == "PROTOCOL_VIOLATION"
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(300_000), timeout=DEADLINE_SECONDS)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_pages_that_nobody_gave_out(scene: Scene, unmoved: Callable[[], None]) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("INVALID_PAGE_TOKEN", {"page_token": "a" * 50_000}),
        ("INVALID_PAGE_TOKEN", {"page_token": "\n"}),
        ("INVALID_ARGUMENT", {"page_size": -1}),
    ]
    with Session(scene.daemon.endpoint()) as session:
        for method, (why, fields) in itertools.product(("ListModels", "ListSessions"), wrong):
            request = getattr(bpb, f"{method}Request")(**fields)
            assert reason(raw.grpc_call(session.endpoint, session.token, method, request)) == why
            assert reason(raw.admin_call(scene.daemon.admin, method, request)) == why
    unmoved()
