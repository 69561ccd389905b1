"""What bad input gets: a typed error or a closed connection, books that did not move, and a daemon that goes on.

Everything a stranger's program, a broken one, or one with bad intent may say, over both transports, against a real
daemon; beside it an honest worker of another tenant borrows and releases, and must never notice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.raw import Asker, Session, reason
from tests.support.scene import CONFIG, PAGE, Scene
from tests.support.sizes import MIB

from membroker.v1 import admin_pb2, broker_pb2_grpc, resources_pb2
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

MAX = (1 << 63) - 1
HOST = resources_pb2.LOCATION_HOST


# --- Sizes, counts, names, locations, ids ---

MINE, BLUE = "tenants/red/models/mine", "tenants/blue/models/honest"
WAITS = [(-1, 0), (0, -1), (-1, 2_000_000_000), (1, 1_000_000_000), (86_400, 1), (MAX, 0), (-MAX - 1, 0)]
"""Seconds and nanoseconds that no call may wait."""


def _wait(what: str, seconds: int, nanos: int, ask: Asker) -> Any:
    """Ask for memory that is there, and say that it may take that long."""
    kind, request = raw.allocation(MINE, PAGE), raw.segment_of(MINE, "s", PAGE)
    return ask.wait(kind if what == "allocate" else request, Duration(seconds=seconds, nanos=nanos))


REQUESTS: dict[str, tuple[str, Callable[[Asker], Any]]] = {
    "size 0": ("INVALID_SIZE", lambda ask: ask.allocate(MINE, 0, 1)),
    "size negative": ("INVALID_SIZE", lambda ask: ask.allocate(MINE, -PAGE, 1)),
    "size least": ("INVALID_SIZE", lambda ask: ask.allocate(MINE, -(1 << 63), 1)),
    "size unaligned": ("INVALID_SIZE", lambda ask: ask.allocate(MINE, PAGE + 4096, 1)),
    "size 2^63-1": ("INVALID_SIZE", lambda ask: ask.allocate(MINE, MAX, 1)),
    "size above capacity": ("CAPACITY", lambda ask: ask.allocate(MINE, 512 * MIB, 1)),
    "size 2^62": ("CAPACITY", lambda ask: ask.allocate(MINE, 1 << 62, 1)),
    "count 0": ("INVALID_COUNT", lambda ask: ask.allocate(MINE, PAGE, 0)),
    "count -1": ("INVALID_COUNT", lambda ask: ask.allocate(MINE, PAGE, -1)),
    "count 65,537": ("INVALID_COUNT", lambda ask: ask.allocate(MINE, PAGE, 65_537)),
    "count 2^63-1": ("INVALID_COUNT", lambda ask: ask.allocate(MINE, PAGE, MAX)),
    "the product above capacity": ("CAPACITY", lambda ask: ask.allocate(MINE, PAGE, 65_536)),
    "the product above int64": ("CAPACITY", lambda ask: ask.allocate(MINE, 1 << 62, 65_536)),
    "location 77": ("INVALID_ARGUMENT", lambda ask: ask.allocate(MINE, PAGE, 1, 77)),
    "location -1": ("INVALID_ARGUMENT", lambda ask: ask.declare(MINE, PAGE, -1)),
    "no host memory": ("LOCATION_UNAVAILABLE", lambda ask: ask.allocate(MINE, PAGE, 1, HOST)),
    "no host memory to declare": ("LOCATION_UNAVAILABLE", lambda ask: ask.declare(MINE, PAGE, HOST)),
    "declared -1": ("INVALID_SIZE", lambda ask: ask.declare(MINE, -1)),
    "declared 2^63-1": ("CAPACITY", lambda ask: ask.declare(MINE, MAX)),
    "another tenant's model": ("MODEL_NOT_FOUND", lambda ask: ask.allocate(BLUE, PAGE, 1)),
    "another tenant's model to declare": ("MODEL_NOT_FOUND", lambda ask: ask.declare(BLUE, PAGE)),
    "an unknown tenant": ("MODEL_NOT_FOUND", lambda ask: ask.allocate("tenants/nobody/models/mine", PAGE, 1)),
    "an unknown model": ("MODEL_NOT_FOUND", lambda ask: ask.allocate("tenants/red/models/other", PAGE, 1)),
    "no model": ("INVALID_NAME", lambda ask: ask.allocate("", PAGE, 1)),
    "a bare model": ("INVALID_NAME", lambda ask: ask.allocate("mine", PAGE, 1)),
    "a path": ("INVALID_NAME", lambda ask: ask.allocate("tenants/red/models/../../blue/models/honest", PAGE, 1)),
    "a line's end": ("INVALID_NAME", lambda ask: ask.allocate(MINE + "\n", PAGE, 1)),
    "a zero": ("INVALID_NAME", lambda ask: ask.allocate(MINE + "\0", PAGE, 1)),
    "unicode": ("INVALID_NAME", lambda ask: ask.declare("tenants/red/models/ünïcode", PAGE)),
    "unprintable": ("INVALID_NAME", lambda ask: ask.allocate("\U000e0001" * 2000, PAGE, 1)),
    "10 kB of name": ("INVALID_NAME", lambda ask: ask.allocate("tenants/red/models/" + "a" * 10_000, PAGE, 1)),
    "10 kB of quotes": ("INVALID_NAME", lambda ask: ask.declare('"\\' * 5_000, PAGE)),
    **{
        f"{what} of {seconds} s and {nanos} ns": ("INVALID_ARGUMENT", partial(_wait, what, seconds, nanos))
        for what in ("allocate", "create_segment")
        for seconds, nanos in WAITS
    },
    "no ids": ("INVALID_COUNT", lambda ask: ask.release()),
    "4,097 ids": ("INVALID_COUNT", lambda ask: ask.release(*range(1, 4_098))),
    "id 0": ("EXTENT_NOT_FOUND", lambda ask: ask.release(0)),
    "id 2^64-1": ("EXTENT_NOT_FOUND", lambda ask: ask.release((1 << 64) - 1)),
    "an id twice": ("INVALID_ARGUMENT", lambda ask: ask.release(7, 7)),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_that_makes_no_sense_is_refused(
    scene: Scene, unmoved: Callable[[], None], transport: str, case: str
) -> None:
    """Each wrong number or name gets its own reason, and moves nothing."""
    why, ask = REQUESTS[case]
    with Session(scene.daemon.endpoint()) as session:
        session.register("mine")
        before = scene.revision
        assert reason(ask(Asker(session, transport))) == why
        assert scene.revision == before
    unmoved()


def test_ids_of_others_and_of_the_past_are_unknown(scene: Scene, transport: str) -> None:
    """What is lent to another session, of any tenant, cannot be released; nor what was released already."""
    red, blue = scene.daemon.endpoint("red"), scene.daemon.endpoint("blue")
    with Session(red) as mine, Session(red) as sibling, Session(blue) as foreign:
        ids = mine.borrow(mine.register("mine"), PAGE, 3)
        theirs = sibling.borrow(sibling.register("mine"), PAGE)
        strangers = foreign.borrow(foreign.register("other"), PAGE)
        ask = Asker(mine, transport)
        before = scene.revision
        for wrong in (theirs, strangers, [*ids, *theirs], [*ids, *ids], [ids[0], ids[-1] + 1000]):
            assert reason(ask.release(*wrong)) in ("EXTENT_NOT_FOUND", "INVALID_ARGUMENT")
        assert scene.revision == before
        assert ask.release(ids[1]).released_bytes == PAGE
        before = scene.revision
        assert reason(ask.release(ids[1])) == "EXTENT_NOT_FOUND"
        assert reason(ask.release(*ids)) == "EXTENT_NOT_FOUND"
        assert scene.revision == before, "a release that names one wrong id released the others"
        assert ask.release(ids[0], ids[2]).released_bytes == 2 * PAGE
    scene.unharmed()


def test_a_refused_release_that_wants_no_reply_is_a_notice(scene: Scene) -> None:
    with Session(scene.daemon.endpoint()) as session:
        request = bpb.ReleaseExtentsRequest(extent_ids=[99], no_reply=True)
        session.send(pb.Frame(request_id=900_001, release=request))
        notice = handoff.receive(session.notices).frame
        assert notice.request_id == 900_001
        assert reason(notice.notice.release_refused) == "EXTENT_NOT_FOUND"
        assert not raw.is_readable(session.sock)


MODEL_IDS = [
    "",
    "mine~",
    "-a",
    ".a",
    "a/b/c",
    "../a",
    "a b",
    "a\n",
    "a\0",
    "ünï",
    "a" * 97,
    "a" * 10_000,
    "\U000e0001" * 99,
]


@pytest.mark.parametrize("model", MODEL_IDS, ids=range(len(MODEL_IDS)))
def test_model_ids_of_bad_grammar(scene: Scene, unmoved: Callable[[], None], model: str) -> None:
    with Session(scene.daemon.endpoint()) as session:
        before = scene.revision
        assert reason(_register(session, model_id=model)) == "INVALID_NAME"
        assert scene.revision == before
    unmoved()


def _register(session: Session, **fields: Any) -> Any:
    return raw.grpc_call(session.endpoint, session.token, "RegisterModel", bpb.RegisterModelRequest(**fields))


def _limits(*pairs: tuple[int, int]) -> list[resources_pb2.Limit]:
    return [resources_pb2.Limit(location=where, limit_bytes=size) for where, size in pairs]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("INVALID_SIZE", {"virtual_capacity_bytes": 0}),
        ("INVALID_SIZE", {"virtual_capacity_bytes": -1}),
        ("INVALID_SIZE", {"limits": _limits((1, -1))}),
        ("INVALID_SIZE", {"limits": _limits((0, -(1 << 63)))}),
        ("INVALID_ARGUMENT", {"limits": _limits((1, PAGE), (1, PAGE))}),
        ("INVALID_ARGUMENT", {"limits": _limits((0, PAGE), (1, PAGE))}),
        ("INVALID_ARGUMENT", {"limits": _limits((9, PAGE))}),
        ("LOCATION_UNAVAILABLE", {"limits": _limits((2, PAGE))}),
    ],
)
def test_a_model_with_impossible_numbers(scene: Scene, why: str, fields: dict[str, Any]) -> None:
    with Session(scene.daemon.endpoint()) as session:
        before = scene.revision
        assert reason(_register(session, model_id="odd", **fields)) == why
        assert scene.revision == before
    assert "tenants/red/models/odd" not in {model.name for model in scene.daemon.models()}


def test_names_of_models_that_one_may_not_leave(scene: Scene) -> None:
    """Another tenant's, an unknown and a malformed name; then one that is still charged."""
    with Session(scene.daemon.endpoint()) as session:
        name = session.register("mine", virtual_capacity_bytes=2 * PAGE)
        ids = session.borrow(name, PAGE)
        before = scene.revision
        for wrong, why in ((BLUE, "MODEL_NOT_FOUND"), ("x", "INVALID_NAME"), (name, "MODEL_IN_USE")):
            request = bpb.UnregisterModelRequest(name=wrong)
            assert reason(raw.grpc_call(session.endpoint, session.token, "UnregisterModel", request)) == why
        assert reason(_register(session, model_id="mine", exclusive=True)) == "MODEL_EXISTS"
        assert reason(_register(session, model_id="mine", virtual_capacity_bytes=PAGE)) == "MODEL_CONFLICT"
        assert scene.revision == before
        session.call(release=bpb.ReleaseExtentsRequest(extent_ids=ids))


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


def test_an_observer_borrows_nothing(scene: Scene, unmoved: Callable[[], None], transport: str) -> None:
    with Session(scene.daemon.endpoint(), observer=True) as observer:
        before = scene.revision
        ask = Asker(observer, transport)
        assert reason(ask.allocate(MINE, PAGE, 1)) == "OBSERVER"
        assert reason(ask.declare(MINE, PAGE)) == "OBSERVER"
        assert reason(ask.release(1)) == "EXTENT_NOT_FOUND"
        assert reason(_register(observer, model_id="mine")) == "OBSERVER"
        assert scene.revision == before
    unmoved()


# --- Tokens ---


def test_tokens(scene: Scene, unmoved: Callable[[], None]) -> None:
    """Missing, empty, wrong, another endpoint's, one whose session has ended: each call of the service refuses it."""
    red, blue = scene.daemon.endpoint("red"), scene.daemon.endpoint("blue")
    with Session(red) as ended:
        old = ended.token
    with Session(red) as session, Session(blue) as foreign:
        name = session.register("mine")
        requests = {
            "RegisterModel": bpb.RegisterModelRequest(model_id="mine"),
            "UnregisterModel": bpb.UnregisterModelRequest(name=name),
            "AllocateExtents": raw.allocation(name, PAGE),
            "ReleaseExtents": bpb.ReleaseExtentsRequest(extent_ids=[1]),
            "DeclareMemory": bpb.DeclareMemoryRequest(model=name, declared_bytes=1),
            "GetDevice": bpb.GetDeviceRequest(),
            "GetAvailable": bpb.GetAvailableRequest(model=name),
            "GetModel": bpb.GetModelRequest(name=name),
            "ListModels": bpb.ListModelsRequest(),
            "ListSessions": bpb.ListSessionsRequest(),
            "CreateSegment": bpb.CreateSegmentRequest(model=name, segment_id="weights", size_bytes=PAGE),
            "SealSegment": bpb.SealSegmentRequest(generation=1),
            "AttachSegment": bpb.AttachSegmentRequest(name=f"{name}/segments/weights"),
            "DetachSegment": bpb.DetachSegmentRequest(generation=1),
            "DeleteSegment": bpb.DeleteSegmentRequest(name=f"{name}/segments/weights"),
            "ListSegments": bpb.ListSegmentsRequest(),
            "ListDecisions": bpb.ListDecisionsRequest(name=name),
        }
        assert requests.keys() == {method.name for method in bpb.DESCRIPTOR.services_by_name["BrokerService"].methods}
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


def test_100_kilobytes_of_metadata(scene: Scene, unmoved: Callable[[], None]) -> None:
    """gRPC itself refuses it, before anything of ours sees it."""
    unmoved()
    with pytest.raises(grpc.RpcError) as caught:
        raw.grpc_call(scene.daemon.endpoint(), "x" * 100_000, "GetDevice", bpb.GetDeviceRequest())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_body_that_is_no_message_and_one_that_is_too_long(scene: Scene, unmoved: Callable[[], None]) -> None:
    """The first is refused by us, with a reason and without a traceback in the log; the second by gRPC."""
    unmoved()
    method = "/membroker.v1.BrokerService/AllocateExtents"
    with grpc.insecure_channel(f"unix:{scene.daemon.endpoint()}/grpc.sock") as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        for body in (b"\xff" * 100, b"\x0a\x7f"):
            with pytest.raises(grpc.RpcError) as caught:
                call(body, timeout=DEADLINE_SECONDS)
            assert reason(raw.status_of(caught.value)) == "PROTOCOL_VIOLATION"
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(300_000), timeout=DEADLINE_SECONDS)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


# --- Pages ---


@pytest.mark.parametrize("method", ["ListModels", "ListSessions"])
@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("INVALID_PAGE_TOKEN", {"page_token": "zzz"}),
        ("INVALID_PAGE_TOKEN", {"page_token": "\n"}),
        ("INVALID_PAGE_TOKEN", {"page_token": "a" * 50_000}),
        ("INVALID_ARGUMENT", {"page_size": -1}),
        ("INVALID_ARGUMENT", {"page_size": -(1 << 31)}),
    ],
    ids=["garbage", "a line's end", "50 kB", "-1", "-2^31"],
)
def test_pages_that_nobody_gave_out(
    scene: Scene, unmoved: Callable[[], None], method: str, why: str, fields: dict[str, Any]
) -> None:
    request = getattr(bpb, f"{method}Request")(**fields)
    with Session(scene.daemon.endpoint()) as session:
        assert reason(raw.grpc_call(session.endpoint, session.token, method, request)) == why
    with scene.daemon.admin_stub() as stub, pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request, timeout=DEADLINE_SECONDS)
    assert reason(raw.status_of(caught.value)) == why
    unmoved()


def test_pages_of_every_size_hold_everything(scene: Scene) -> None:
    with ExitStack() as stack, scene.daemon.admin_stub() as stub:
        for _ in range(5):
            stack.enter_context(Session(scene.daemon.endpoint()))
        every = [one.name for one in scene.daemon.sessions()]
        assert len(every) >= 6
        for size in (1, 2, 5, 1 << 30):
            names, token = [], ""
            while True:
                page = stub.ListSessions(bpb.ListSessionsRequest(page_size=size, page_token=token))
                names += [one.name for one in page.sessions]
                token = page.next_page_token
                if not token:
                    break
            assert names == every


# --- The admin endpoint ---


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("INVALID_NAME", {"name": ""}),
        ("INVALID_NAME", {"name": "red"}),
        ("INVALID_NAME", {"name": "tenants/"}),
        ("INVALID_NAME", {"name": "tenants/red/models/"}),
        ("INVALID_NAME", {"name": "tenants/red/models/a/b/c"}),
        ("INVALID_NAME", {"name": "tenants/red\n"}),
        ("INVALID_NAME", {"name": "tenants/" + "r" * 10_000}),
        ("TENANT_NOT_FOUND", {"name": "tenants/green"}),
        ("TENANT_NOT_FOUND", {"name": "tenants/green/models/a"}),
        ("INVALID_SIZE", {"name": "tenants/red", "limit_bytes": -1}),
        ("INVALID_SIZE", {"name": "tenants/red/models/a", "limit_bytes": -(1 << 63)}),
        ("INVALID_ARGUMENT", {"name": "tenants/red", "limit_bytes": 1, "location": 9}),
        ("LOCATION_UNAVAILABLE", {"name": "tenants/red", "limit_bytes": 1, "location": 2}),
    ],
)
def test_quotas_that_make_no_sense(scene: Scene, unmoved: Callable[[], None], why: str, fields: dict[str, Any]) -> None:
    unmoved()
    with scene.daemon.admin_stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.SetQuota(admin_pb2.SetQuotaRequest(**fields), timeout=DEADLINE_SECONDS)
    assert reason(raw.status_of(caught.value)) == why
    with scene.daemon.admin_stub() as stub:
        assert not stub.ListQuotas(admin_pb2.ListQuotasRequest()).quotas


def test_each_endpoint_has_its_own_service_only(scene: Scene) -> None:
    """A tenant cannot command quotas, and the admin endpoint lends nothing."""
    with grpc.insecure_channel(f"unix:{scene.daemon.endpoint()}/grpc.sock") as channel:
        command = channel.unary_unary("/membroker.v1.AdminService/SetQuota", bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            command(b"", timeout=DEADLINE_SECONDS)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(f"unix:{scene.daemon.admin}/grpc.sock") as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.AllocateExtents(raw.allocation(MINE, PAGE), timeout=DEADLINE_SECONDS)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert not (scene.daemon.admin / "handoff.sock").exists()


def test_more_models_than_a_tenant_may_have(scene: Scene) -> None:
    with Session(scene.daemon.endpoint()) as session:
        names = {model.name for model in scene.daemon.models() if model.name.startswith("tenants/red/")}
        made = [session.register(f"m{number}") for number in range(CONFIG["max_models_per_tenant"] - len(names))]
        before = scene.revision
        assert reason(_register(session, model_id="one-more")) == "TOO_MANY_MODELS"
        assert scene.revision == before
        for name in made:
            raw.grpc_call(session.endpoint, session.token, "UnregisterModel", bpb.UnregisterModelRequest(name=name))
