"""What bad input gets: a typed error or a closed connection, books that did not move, and a daemon that goes on.

Everything a stranger's program, a broken one, or one with bad intent may say, over both transports, against a real
daemon; beside it an honest worker of another tenant borrows and releases, and must never notice.
"""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.status_pb2 import Status
from tests.support import raw
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Asker, Connection, Session, reason
from tests.support.sizes import MIB

import membroker
from membroker.v1 import admin_pb2, broker_pb2_grpc, resources_pb2
from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff

PAGE = 2 * MIB
ROOT = Path(__file__).parents[2]
MAX = (1 << 63) - 1
HOST = resources_pb2.LOCATION_HOST
CONFIG = {"max_models_per_tenant": 4}


class Scene(NamedTuple):
    """A daemon, and an honest worker of the tenant blue that is connected all the while."""

    daemon: Daemon
    worker: Any
    model: Any

    @property
    def revision(self) -> int:
        return int(self.daemon.device().revision)

    def unharmed(self) -> None:
        """The honest worker borrows, writes and releases."""
        with self.model.allocate(PAGE) as buffer:
            buffer.view()[:5] = b"hello"
            assert bytes(buffer.view()[:5]) == b"hello"


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """One daemon for all requests that are refused: none of them may leave anything behind."""
    with running(CONFIG) as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        scene = Scene(daemon, worker, worker.register_model("honest"))
        yield scene
        scene.unharmed()


@pytest.fixture
def unmoved(scene: Scene) -> Iterator[Callable[[], None]]:
    """Yield a function that starts the watch; afterwards the books' revision must be what it was."""
    at: list[int] = []
    yield lambda: at.append(scene.revision)
    assert at
    assert scene.revision == at[0], "a refused request changed the books"
    scene.unharmed()


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
                call(body, timeout=raw.SECONDS)
            assert reason(raw.status_of(caught.value)) == "PROTOCOL_VIOLATION"
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(300_000), timeout=raw.SECONDS)
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
        getattr(stub, method)(request, timeout=raw.SECONDS)
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
        stub.SetQuota(admin_pb2.SetQuotaRequest(**fields), timeout=raw.SECONDS)
    assert reason(raw.status_of(caught.value)) == why
    with scene.daemon.admin_stub() as stub:
        assert not stub.ListQuotas(admin_pb2.ListQuotasRequest()).quotas


def test_each_endpoint_has_its_own_service_only(scene: Scene) -> None:
    """A tenant cannot command quotas, and the admin endpoint lends nothing."""
    with grpc.insecure_channel(f"unix:{scene.daemon.endpoint()}/grpc.sock") as channel:
        command = channel.unary_unary("/membroker.v1.AdminService/SetQuota", bytes, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            command(b"", timeout=raw.SECONDS)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(f"unix:{scene.daemon.admin}/grpc.sock") as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.AllocateExtents(raw.allocation(MINE, PAGE), timeout=raw.SECONDS)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert not (scene.daemon.admin / "handoff.sock").exists()


# --- Before a Hello ---

TOO_LONG = raw.hello(client="x" * 70_000).SerializeToString()
UNGREETED: dict[str, tuple[str | None, bytes]] = {
    "garbage": ("PROTOCOL_VIOLATION", b"\xff" * 40),
    "text": ("PROTOCOL_VIOLATION", b"GET / HTTP/1.1\r\n\r\n"),
    "a frame cut short": ("PROTOCOL_VIOLATION", raw.hello(client="raw client").SerializeToString()[:-4]),
    "a frame of no kind": ("PROTOCOL_VIOLATION", pb.Frame(request_id=1).SerializeToString()),
    "a frame of a later kind": ("PROTOCOL_VIOLATION", b"\x08\x01\xa2\x06\x00"),
    "no UTF-8": ("PROTOCOL_VIOLATION", b"\x12\x04\x1a\x02\xff\xff"),
    "an empty packet": (None, b""),
    "65,537 bytes": ("PROTOCOL_VIOLATION", TOO_LONG[:65_537]),
    "200 kB": ("PROTOCOL_VIOLATION", b"\x12" * 200_000),
    "version 0": ("UNSUPPORTED_VERSION", raw.hello(0).SerializeToString()),
    "version 2": ("UNSUPPORTED_VERSION", raw.hello(2).SerializeToString()),
    "version 2^32-1": ("UNSUPPORTED_VERSION", raw.hello((1 << 32) - 1).SerializeToString()),
    "no Hello: allocate": (
        "PROTOCOL_VIOLATION",
        pb.Frame(request_id=1, allocate=raw.allocation(MINE, PAGE)).SerializeToString(),
    ),
    "no Hello: release": (
        "PROTOCOL_VIOLATION",
        pb.Frame(release=bpb.ReleaseExtentsRequest(no_reply=True)).SerializeToString(),
    ),
    "no Hello: ack": ("PROTOCOL_VIOLATION", pb.Frame(ack=pb.Ack()).SerializeToString()),
    "no Hello: goodbye": ("PROTOCOL_VIOLATION", pb.Frame(goodbye=pb.Goodbye()).SerializeToString()),
    "the broker's Welcome": ("PROTOCOL_VIOLATION", pb.Frame(welcome=pb.Welcome()).SerializeToString()),
}


@pytest.mark.parametrize("case", UNGREETED)
def test_what_is_no_hello_ends_the_connection(scene: Scene, unmoved: Callable[[], None], case: str) -> None:
    why, packet = UNGREETED[case]
    unmoved()
    with Connection(scene.daemon.endpoint()) as stranger:
        stranger.send_bytes(packet)
        last = stranger.last_words()
    assert (last and reason(last)) == why


def test_the_last_word_is_heard_whatever_was_sent_behind(scene: Scene, unmoved: Callable[[], None]) -> None:
    """A client that did not wait for its Welcome still reads why it was turned away, not ECONNRESET."""
    unmoved()
    for _ in range(20):
        with Connection(scene.daemon.endpoint()) as eager:
            eager.send(raw.hello(7))
            with suppress(BrokenPipeError):
                for _ in range(5):
                    eager.send_bytes(b"x" * 100)
            assert reason(eager.receive().frame.reply.error) == "UNSUPPORTED_VERSION"


def test_descriptors_unasked_are_never_installed(scene: Scene, unmoved: Callable[[], None]) -> None:
    """A stranger cannot fill the daemon's table of descriptors, nor hand it one that wakes it up."""
    unmoved()
    before = scene.daemon.descriptors()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        for _ in range(20):
            with Connection(scene.daemon.endpoint()) as stranger:
                stranger.send_bytes(raw.hello().SerializeToString(), [theirs.fileno()] * 64)
                last = stranger.last_words()
                assert last is not None
                assert reason(last) == "PROTOCOL_VIOLATION"
    until(lambda: scene.daemon.descriptors() <= before)


def test_noise(scene: Scene, unmoved: Callable[[], None]) -> None:
    """Mutations of honest frames, from a printed seed: whatever they say, the daemon stands and lends on."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    honest = [
        raw.hello(2).SerializeToString(),
        pb.Frame(request_id=3, allocate=raw.allocation(MINE, PAGE, 5)).SerializeToString(),
        pb.Frame(request_id=4, release=bpb.ReleaseExtentsRequest(extent_ids=range(50))).SerializeToString(),
        pb.Frame(request_id=5, reply=pb.Reply(error=Status(code=3, message="x"))).SerializeToString(),
    ]
    unmoved()
    for _ in range(400):
        packet = bytearray(chance.choice(honest))
        for _ in range(chance.randrange(1, 8)):
            packet[chance.randrange(len(packet))] = chance.randrange(256)
        with Connection(scene.daemon.endpoint()) as stranger:
            stranger.send_bytes(bytes(packet[: chance.randrange(1, len(packet) + 1)]))
            # A mutation may be a Hello of version 1: hanging up then leaves a session, so it says Goodbye.
            stranger.sock.shutdown(socket.SHUT_WR)
            frames = []
            try:
                while True:
                    frames.append(stranger.receive().frame)
            except (handoff.EndOfConnection, ConnectionResetError):
                pass
            assert not any(frame.HasField("welcome") for frame in frames), "the seeds have version 2; mutate less"


# --- After a Hello: each of these ends the connection, and the session stays charged until its process ends ---


def _acked_twice(session: Session) -> None:
    name = session.register("mine")
    session.send(pb.Frame(request_id=5, allocate=raw.allocation(name, PAGE)))
    session.answer(5)
    session.send(pb.Frame(request_id=5, ack=pb.Ack(part=0)))


def _acked_a_part_that_is_not(session: Session) -> None:
    name = session.register("mine")
    session.send(pb.Frame(request_id=5, allocate=raw.allocation(name, PAGE)))
    session.answer(5, acknowledge=False)
    session.send(pb.Frame(request_id=5, ack=pb.Ack(part=(1 << 32) - 1)))


def _sends(frame: pb.Frame, *descriptors: int) -> Callable[[Session], None]:
    return lambda session: session.send_bytes(frame.SerializeToString(), descriptors)


VIOLATIONS: dict[str, Callable[[Session], None]] = {
    "Hello twice": _sends(raw.hello()),
    "a Welcome": _sends(pb.Frame(welcome=pb.Welcome(token="x"))),
    "a Delivery": _sends(pb.Frame(delivery=pb.Delivery(parts=1, extent_ids=[1]))),
    "a Reply": _sends(pb.Frame(reply=pb.Reply(goodbye=pb.GoodbyeResponse()))),
    "a Notice": _sends(pb.Frame(notice=pb.Notice(stopping=pb.Stopping()))),
    "an Ack of nothing": _sends(pb.Frame(request_id=77, ack=pb.Ack())),
    "an Ack twice": _acked_twice,
    "an Ack of part 2^32-1": _acked_a_part_that_is_not,
    "descriptors": _sends(pb.Frame(request_id=1, allocate=raw.allocation(MINE, PAGE)), 0, 1, 2),
    "garbage": lambda session: session.send_bytes(b"\xff" * 9),
    "200 kB": lambda session: session.send_bytes(bytes(200_000)),
    "an empty packet": lambda session: session.send_bytes(b""),
}


def test_violations_end_the_connection_and_nothing_else() -> None:
    """Each ends its own connection; its session stays charged, detached; nobody else notices."""
    with running(CONFIG) as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        scene = Scene(daemon, worker, worker.register_model("honest"))
        for case, violate in VIOLATIONS.items():
            session = Session(daemon.endpoint())
            with session:
                violate(session)
                last = session.last_words()
                name = session.welcome.session
            if case != "an empty packet":
                assert last is not None, case
                assert reason(last) == "PROTOCOL_VIOLATION", case
            until(lambda name=name: _state(daemon, name) == resources_pb2.Session.DETACHED)
            answer = raw.grpc_call(daemon.endpoint(), session.token, "AllocateExtents", raw.allocation(MINE, PAGE))
            assert isinstance(answer, Status), "a session without a connection was lent memory"
        scene.unharmed()
        assert daemon.books().lent_bytes == 2 * PAGE, "what was delivered to two of them"


def _state(daemon: Daemon, name: str) -> Any:
    return next((one.state for one in daemon.sessions() if one.name == name), None)


# --- Bounds ---


def test_a_17th_session_of_one_process(daemon: Daemon) -> None:
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(Session(daemon.endpoint()))
        before = daemon.device().revision
        with Connection(daemon.endpoint("blue")) as one_more:
            one_more.send(raw.hello())
            last = one_more.last_words()
        assert last is not None
        assert reason(last) == "TOO_MANY_SESSIONS"
        assert daemon.device().revision == before
    with Session(daemon.endpoint()) as again:
        assert again.token


def test_more_models_than_a_tenant_may_have(scene: Scene) -> None:
    with Session(scene.daemon.endpoint()) as session:
        names = {model.name for model in scene.daemon.models() if model.name.startswith("tenants/red/")}
        made = [session.register(f"m{number}") for number in range(CONFIG["max_models_per_tenant"] - len(names))]
        before = scene.revision
        assert reason(_register(session, model_id="one-more")) == "TOO_MANY_MODELS"
        assert scene.revision == before
        for name in made:
            raw.grpc_call(session.endpoint, session.token, "UnregisterModel", bpb.UnregisterModelRequest(name=name))


def test_a_17th_call_and_an_id_that_is_in_flight(scene: Scene) -> None:
    """A client that acknowledges nothing fills its own window and its own calls; then it is refused, and only it."""
    with Session(scene.daemon.endpoint()) as session:
        name = session.register("mine")
        for request_id in range(1, 19):  # two go out, sixteen stand behind the window
            session.send(pb.Frame(request_id=request_id, allocate=raw.allocation(name, PAGE)))
            if request_id <= 2:
                assert session.answer(request_id, acknowledge=False)[0].count == 1
        before = scene.revision
        for request_id, why in ((19, "TOO_MANY_REQUESTS"), (18, "REQUEST_ID_IN_USE"), (1, "REQUEST_ID_IN_USE")):
            session.send(pb.Frame(request_id=request_id, allocate=raw.allocation(name, PAGE)))
            assert reason(session.receive().frame.reply.error) == why
        request = raw.allocation(name, PAGE)
        for request_id, why in ((20, "TOO_MANY_REQUESTS"), (17, "REQUEST_ID_IN_USE")):
            request.request_id = request_id
            answer = raw.grpc_call(session.endpoint, session.token, "AllocateExtents", request)
            assert reason(answer) == why
        assert scene.revision == before
        scene.unharmed()
    assert all(model.books[0].used_bytes == 0 for model in scene.daemon.models())


# --- Intent ---


def test_a_client_name_forges_no_line(scene: Scene) -> None:
    """Newlines, escapes and a mile of text in the name: one line of the log, and nothing a terminal would obey."""
    forged = "x\n2026-01-01T00:00:00Z INFO ready pid=1\x1b[2J\r\u202e\u2028" + "y" * 10_000
    with Session(scene.daemon.endpoint(), client=forged) as session:
        shown = next(one.client for one in scene.daemon.sessions() if one.name == session.welcome.session)
    assert shown.endswith("y")
    assert len(shown) <= 128
    assert shown.isprintable()
    lines = scene.daemon.log().splitlines()
    assert not [line for line in lines if line.startswith("2026-01-01T00:00:00Z")]
    assert "\x1b" not in scene.daemon.log()


def test_a_peer_that_says_goodbye_and_does_not_read_is_cut() -> None:
    """A full socket may not keep a connection whose session is over: nobody would count it any more.

    One client finds out how many answers a socket takes; the next asks for exactly so many, reads none of them,
    and says Goodbye.
    """
    refused = pb.Frame(request_id=1, release=bpb.ReleaseExtentsRequest(extent_ids=[1]))
    with running() as daemon:
        with Session(daemon.endpoint()) as honest, Connection(daemon.endpoint()) as probe:
            probe.send(raw.hello())
            probe.receive()
            probe.sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    probe.send(refused)
            taken = _steady(honest, lambda: daemon.log().count("method=ReleaseExtents"))
        # The last one found the socket full. What a packet weighs differs a little, so one more may fit.
        assert any(_mute_goodbye(daemon, refused, taken - 1 + more) for more in range(4)), (
            "no Goodbye met a full socket"
        )


def _mute_goodbye(daemon: Daemon, request: pb.Frame, count: int) -> bool:
    """Say Goodbye behind `count` unread answers; return whether its own answer found no room, and was cut off."""
    with Connection(daemon.endpoint()) as mute:
        mute.send(raw.hello())
        session = mute.receive().frame.welcome.session
        for _ in range(count):
            mute.send(request)
        mute.send(pb.Frame(request_id=2, goodbye=pb.Goodbye()))
        until(lambda: _state(daemon, session) is None)
        hung_up = select.poll()
        hung_up.register(mute.sock, select.POLLHUP)
        if hung_up.poll(0):
            return False
        assert hung_up.poll(15_000), "the connection stays for as long as its peer likes"
        return True


def _steady(honest: Session, count: Callable[[], int]) -> int:
    """Return the count once the daemon has had many turns in which it did not grow."""
    last = -1
    while True:
        for _ in range(20):
            assert reason(honest.call(declare=bpb.DeclareMemoryRequest(model="x"))) == "INVALID_NAME"
        now = count()
        if now == last:
            return now
        last = now


def test_a_dead_process_takes_no_others_watch_with_it() -> None:
    """A process dies and its child keeps its memory; a second one connects; then the first's memory goes.

    The second's pidfd has the number that the first's had. Its own death must still be noticed.
    """
    with running() as daemon, ExitStack() as stack:
        first = stack.enter_context(_process(daemon, fork=True))
        first.kill()
        first.wait()
        until(lambda: daemon.books().releasing_bytes == PAGE)
        second = stack.enter_context(_process(daemon))
        assert first.stdin is not None
        first.stdin.close()  # the child ends
        until(lambda: not daemon.books().releasing_bytes)
        assert daemon.books().lent_bytes == PAGE
        second.kill()
        until(lambda: not daemon.sessions())
        assert daemon.books().lent_bytes == 0


_BORROWER = """
import ctypes, os, pathlib, signal, sys
from tests.support.raw import *
session = Session(pathlib.Path(sys.argv[1]))
session.send(pb.Frame(request_id=1, allocate=allocation(session.register("m"), 2 << 20)))
memory = handoff.receive(session.sock)
if sys.argv[2] == "True":
    reader, writer = os.pipe()
    if not ctypes.PyDLL(None).fork():
        os.write(writer, b".")
        os.read(0, 1)
        os._exit(0)
    os.read(reader, 1)
print("ready", flush=True)
signal.pause()
"""


def _process(daemon: Daemon, fork: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BORROWER, str(daemon.endpoint()), str(fork)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_uid_that_is_not_admitted_is_told_so() -> None:
    """The endpoint of somebody else: refused with the uid, though its Hello was sent before the broker looked."""
    with running({"tenants": {"red": {"uids": [os.getuid() + 1]}, "blue": {}}}) as other:
        before = other.device().revision
        for _ in range(20):
            with Connection(other.endpoint()) as stranger:
                with suppress(BrokenPipeError):
                    stranger.send(raw.hello())
                assert reason(stranger.receive().frame.reply.error) == "ENDPOINT_FORBIDDEN"
        assert other.device().revision == before


def test_many_that_say_nothing_make_room(scene: Scene) -> None:
    """Silent connections are bounded: the oldest is closed, and a client that says Hello gets in."""
    with ExitStack() as stack:
        silent = [stack.enter_context(Connection(scene.daemon.endpoint("blue"))) for _ in range(200)]
        assert silent[0].last_words() is None
        assert not raw.is_readable(silent[-1].sock)
        with Session(scene.daemon.endpoint("blue")) as session:
            assert session.token
    scene.unharmed()


def test_idle_grpc_connections_of_one_tenant_leave_the_others_room() -> None:
    """They cost their tenant nothing and the daemon a descriptor each: above a bound they are closed at once."""
    with running({"max_sessions": 8}) as daemon, ExitStack() as stack:
        before = daemon.descriptors()
        for _ in range(200):
            idle = stack.enter_context(socket.socket(socket.AF_UNIX))
            idle.settimeout(raw.SECONDS)
            idle.connect(str(daemon.endpoint("red") / "grpc.sock"))
        with suppress(ConnectionResetError):
            assert idle.recv(1) == b"", "greeted, though far above the bound"
        until(lambda: daemon.descriptors() <= before + 8 + 16 + 8)
        with Session(daemon.endpoint("blue")) as session:
            session.register("m")


def test_leaving_models_leaves_nothing_behind(scene: Scene) -> None:
    """A session that registers, declares and leaves under ever new names grows no table that anybody can see."""
    with Session(scene.daemon.endpoint()) as session:
        for number in range(30):
            name = session.register(f"m{number}")
            assert session.call(declare=bpb.DeclareMemoryRequest(model=name, declared_bytes=5)).declared_bytes == 5
            assert session.call(declare=bpb.DeclareMemoryRequest(model=name)).declared_bytes == 0
            raw.grpc_call(session.endpoint, session.token, "UnregisterModel", bpb.UnregisterModelRequest(name=name))
        row = next(one for one in scene.daemon.sessions() if one.name == session.welcome.session)
        assert not row.models
        assert not row.books
    assert "tenants/red/models/m7" not in scene.daemon.metrics()


def test_a_request_is_counted_once(daemon: Daemon, transport: str) -> None:
    with Session(daemon.endpoint()) as session:
        session.register("mine")
        Asker(session, transport).release(1)
    family = f'membroker_request_seconds_count{{gpu_uuid="host",method="ReleaseExtents",transport="{transport}"}}'
    assert [line.split()[-1] for line in daemon.metrics().splitlines() if line.startswith(family)] == ["1.0"]


def test_refusals_leave_no_descriptor_open(scene: Scene) -> None:
    """All of the above in one heap: afterwards the daemon has as many descriptors open as before."""
    before = scene.daemon.descriptors()
    for packet in [packet for _, packet in UNGREETED.values()] * 5:
        with Connection(scene.daemon.endpoint()) as stranger:
            stranger.send_bytes(packet)
            stranger.last_words()
    until(lambda: scene.daemon.descriptors() <= before)
    scene.unharmed()


def test_nobody_fills_the_log_by_being_refused() -> None:
    """A client that connects and sends garbage in a loop is counted each time, and written down once a second."""
    with running() as daemon:
        for _ in range(200):
            with Connection(daemon.endpoint()) as one:
                one.sock.send(b"garbage")
                assert reason(one.receive().frame.reply.error) == "PROTOCOL_VIOLATION"
        assert (
            'membroker_connections_refused_total{gpu_uuid="host",reason="PROTOCOL_VIOLATION"} 200.0' in daemon.metrics()
        )
        assert 1 <= daemon.log().count("connection refused") <= 20
