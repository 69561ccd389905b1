"""The daemon's own memory is bounded, whatever peers keep open, begin and never end.

`BOUND` is the formula of docs/bounds.md ("The daemon's memory"); the worst mix of all that its terms stand for must
stay below it. Streams, calls and header blocks of gRPC are where it was once unbounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.daemons import DEADLINE_SECONDS, Daemon, hold_still, running, until
from tests.support.honest_worker import COUNTED, Honest, State, check_turns
from tests.support.http2 import Peer
from tests.support.raw import Session, grpc_call
from tests.support.sizes import KIB, MIB
from tests.support.workers import Worker, worker, workers
from tests.system.test_reload import reload
from tests.system.test_turns import BEGIN

from membroker.v1 import broker_pb2 as bpb
from membroker.wire.names import DESCRIPTORS_IN_FLIGHT
from membroker.wire.sessions import sessions_for
from membrokerd.edge.rpc.interceptor import MAX_CALLS, MAX_STREAMS, MAX_WATCHES
from membrokerd.edge.rpc.proxy import CONNECTIONS_BESIDE
from membrokerd.edge.rpc.server import MAX_PENDING

pytestmark = pytest.mark.deep

SERVED = "membroker.v1.BrokerService"
MAX_SESSIONS, ENDPOINTS, EXTENTS, MODELS, SEGMENTS = 64, 3, 65_536, 240, 16
CONNECTIONS = MAX_SESSIONS + CONNECTIONS_BESIDE


def bound(*, sessions: int, models: int, segments: int, extents: int, endpoints: int = ENDPOINTS) -> int:
    """Return the formula of docs/bounds.md, in bytes."""
    return (
        48 * MIB
        + endpoints * (MIB + MAX_PENDING * 32 * KIB + (sessions + CONNECTIONS_BESIDE) * 96 * KIB)
        + MAX_CALLS * 128 * KIB
        + sessions * (32 * KIB + models * 160)
        + models * 4 * KIB
        + segments * 2 * KIB
        + extents * KIB
        + min(extents, sessions * DESCRIPTORS_IN_FLIGHT) * 3 * KIB // 2
    )


BOUND = bound(sessions=MAX_SESSIONS, models=MODELS, segments=SEGMENTS, extents=EXTENTS)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    config = {"capacity": "160GiB", "max_sessions": MAX_SESSIONS, "log": {"level": "info"}}
    with running(config, module=COUNTED) as one:
        yield one


@pytest.fixture
def flood(daemon: Daemon) -> Iterator[Worker]:
    """A process of red that knows the wire, with sixteen sessions of a model."""
    with worker() as process:
        process.do(BEGIN.format(endpoint=str(daemon.endpoint("red"))))
        process.do("sessions = [Session(endpoint) for _ in range(16)]")
        process.do("models = [session.register('m') for session in sessions]")
        yield process


def _channel(daemon: Daemon, number: int = 0) -> grpc.Channel:
    """Return a channel of its own: gRPC would share one connection among those of the same options."""
    return grpc.insecure_channel(f"unix:{daemon.endpoint()}/grpc.sock", (("number", number),))


def _watch(channel: grpc.Channel, name: str) -> object:
    request = health_pb2.HealthCheckRequest(service=name)
    return health_pb2_grpc.HealthStub(channel).Watch(request, timeout=DEADLINE_SECONDS)


def test_streams_that_nothing_ends_are_bounded(daemon: Daemon) -> None:
    """An endpoint serves sixteen streams of health and reflection at a time, over however many connections."""
    with ExitStack() as stack:
        channels = [stack.enter_context(_channel(daemon, number)) for number in range(2)]
        watches = [_watch(channels[number % 2], SERVED) for number in range(MAX_WATCHES)]
        for watch in watches:
            next(watch)
        for refused in (
            _watch(channels[0], SERVED),
            _reflect(channels[1], iter([reflection_pb2.ServerReflectionRequest()])),
        ):
            with pytest.raises(grpc.RpcError) as error:
                next(refused)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert health_pb2_grpc.HealthStub(channels[0]).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        watches[0].cancel()
        request = reflection_pb2.ServerReflectionRequest(list_services="")

        def served() -> list[str]:
            try:
                return [one.name for one in next(_reflect(channels[1], iter([request]))).list_services_response.service]
            except grpc.RpcError:  # the end of the stream that was cancelled is not told yet
                return []

        assert SERVED in until(served)
        with pytest.raises(grpc.RpcError) as error:  # nobody can make the daemon keep a name that is not served
            next(_watch(channels[0], "x" * 60_000))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def _reflect(channel: grpc.Channel, requests: Iterator[object]) -> object:
    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=DEADLINE_SECONDS)


_CALLS = """
from tests.support.http2 import Peer
from grpc_health.v1 import health_pb2
REGISTER = '/membroker.v1.BrokerService/RegisterModel'
WATCH = '/grpc.health.v1.Health/Watch'
def message(size):
    body = health_pb2.HealthCheckRequest(service='x' * size).SerializeToString()
    return b'\\0' + len(body).to_bytes(4, 'big') + body
def fill(peers, calls, data):
    # Until the server opens no window any more.
    sent, idle = dict.fromkeys(calls, 0), 0
    while idle < 20:
        moved = 0
        for peer in peers:
            peer.hear(0)
        for peer, stream in calls:
            if stream not in peer.ended:
                count = peer.fill(stream, data[sent[peer, stream]:])
                sent[peer, stream] += count
                moved += count
        idle = 0 if moved else idle + 1
        if not moved:
            time.sleep(0.05)
    return sum(sent.values())
"""


def test_the_worst_mix_stays_within_the_bound(daemon: Daemon, state: State) -> None:
    """Sessions, extents and models; calls that are begun, watches of long names, more calls than are taken at once."""
    at_start = daemon.resident_bytes()
    with worker() as flood, worker() as other:
        for each in (flood, other):
            each.do(BEGIN.format(endpoint=str(daemon.endpoint("red"))))
            each.do("sessions = [Session(endpoint) for _ in range(16)]")
            each.do(f"for session in sessions[:8]:\n    for n in range({MODELS}):\n        session.register(f'm{{n}}')")
        flood.do(
            f"for n in range({SEGMENTS}):\n"
            "    sessions[1].call(create_segment=segment_of('tenants/red/models/m0', f's{n}', PAGE))"
        )
        flood.do(f"""
session = sessions[0]
session.send(pb.Frame(request_id=7, allocate=allocation('tenants/red/models/m0', PAGE, {EXTENTS - 16})))
_, ids = session.answer(7)
""")
        for half in ("ids[::4]", "ids[1::4]"):  # what is left is in the books one by one, and in the journal again
            flood.do(f"""
some = {half}
for first in range(0, len(some), 4_096):
    session.call(release=bpb.ReleaseExtentsRequest(extent_ids=some[first:first + 4_096]))
""")
        flood.do(_CALLS)
        connected = daemon.descriptors()
        flood.do(f"peers = [Peer(endpoint) for _ in range({CONNECTIONS - 2})]\nfor peer in peers: peer.hear(1)")
        watches = f"calls = [(peer, peer.begin(WATCH, 4_000)) for peer in peers for _ in range({MAX_STREAMS})]"
        flood.do(f"{watches}\nanswer = fill(peers, calls, message(60_000))")
        calls = daemon.resident_bytes()
        state("RssAnon with watches of long names", f"{calls // MIB} MiB")
        flood.do("for peer in peers: peer.close()")
        until(lambda: daemon.descriptors() <= connected)
        flood.do(f"peers = [Peer(endpoint) for _ in range({CONNECTIONS - 2})]\nfor peer in peers: peer.hear(1)")
        flood.do(f"calls = [(peer, peer.begin(REGISTER, 8_000)) for peer in peers[:16] for _ in range({MAX_STREAMS})]")
        state("bytes of calls that never end", str(flood.ask("fill(peers[:16], calls, message(65_000)[:-1])")))
        with hold_still(daemon):
            flood.do("for peer in peers[16:]: peer.sock.setblocking(False)")
            flood.do(f"""
for peer in peers[16:]:
    with suppress(BlockingIOError):
        for _ in range({MAX_STREAMS}):
            peer.begin(REGISTER, 8_000)
        peer.begin_block(REGISTER, 15_000)
""")
        peak = max(_resident_while(daemon, 100))
        figures = f"{at_start // MIB}, {peak // MIB}, {BOUND // MIB} MiB"
        state("RssAnon at the start, with the worst mix, and its bound", figures)
        assert max(peak, calls) < BOUND
        check_turns(daemon, state, "the worst mix")


_LENT = """
for number in range({models}):
    name = sessions[0].register(f'lent{{number}}', answers_recalls=True)
    sessions[0].borrow(name, {size}, {extents})
    sessions[0].register(f'lent{{number}}', answers_recalls=False)
"""
_RECALLABLE = "for number in range({models}): sessions[0].register(f'lent{{number}}', answers_recalls=True)"
_WAITS = """
for session in sessions:
    for number in range({waits}):
        request = allocation(session.register(f'{{place + sessions.index(session)}}-{{number}}'), PAGE)
        request.wait.FromSeconds(3_600)
        session.send(pb.Frame(request_id=1_000 + number, allocate=request))
"""
_UNFINISHED = """
from tests.support.http2 import Peer
peers = [Peer(endpoint) for _ in range({connections})]
for peer in peers:
    peer.hear(1)
for peer in peers:
    for _ in range({streams}):
        peer.fill(peer.begin('/membroker.v1.BrokerService/RegisterModel', 8_000), b'\\0' + bytes(60_000))
    peer.begin_block('/membroker.v1.BrokerService/RegisterModel', 15_000)
"""


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    ("descriptors", "sessions", "tenants"),
    [(1_024, sessions_for(1_024), 5), (6_000, sessions_for(6_000), 5), (20_000, 1_025, 16)],
)
def test_the_worst_mix_of_so_many_descriptors_stays_within_the_bound(
    state: State, descriptors: int, sessions: int, tenants: int
) -> None:
    """All at once: recalls that nobody answers, waits of many models of all tenants, and unfinished frames.

    Each session has a request of as many models as it may wait for, half of them within a guarantee that another tenant
    has borrowed; then all of that can be recalled. At six endpoints up to 32 connections each have calls without an
    end, and a header block without. The daemon serves on, the books are right, and nothing is left when all have gone.

    Descriptors bound the sessions: 1,024 are what distributions give a process. 16,384 waits, as many as there can be
    by default, need a daemon that counts fewer for each session: see `faulty_daemon.wait_only`.
    """
    reds, lent, extents = [f"red{number}" for number in range(tenants)], 60, 8
    waits = (sessions - 1) * 16
    size = -(-2 * waits // (lent * extents)) * 2 * MIB
    capacity = lent * extents * size
    fits = sessions <= sessions_for(descriptors)
    config = {
        "capacity": capacity,
        "tenants": {"blue": {}, **{red: {"guarantee": capacity // 2 // tenants} for red in reds}},
        "max_sessions": None if fits else sessions,
        "max_models_per_tenant": 65_536,
        "recall_seconds": 3_600.0,
        "model_grace_seconds": 0,
        "log": {"level": "info"},
    }
    module = COUNTED if fits else "tests.support.faulty_daemon wait_only"
    with running(config, descriptors, module) as daemon, ExitStack() as stack:
        at_start, before = daemon.resident_bytes(), daemon.descriptors()
        until(lambda: f"max_sessions={sessions}" in daemon.log())
        books = {"models": lent + waits, "segments": 0, "extents": lent * extents}
        most = bound(sessions=sessions, endpoints=2 + len(reds), **books)
        blue, *others = stack.enter_context(workers(1 + -(-(sessions - 1) // 16)))
        blue.do(BEGIN.format(endpoint=str(daemon.endpoint("blue"))))
        blue.do("sessions = [Session(endpoint)]")
        blue.do(_LENT.format(models=lent, size=size, extents=extents))
        left = sessions - 1
        for number, each in enumerate(others):
            each.do(BEGIN.format(endpoint=str(daemon.endpoint(reds[number % len(reds)]))))
            each.do(f"sessions = [Session(endpoint) for _ in range({min(16, left)})]\nplace = {16 * number}")
            each.begin(_WAITS.format(waits=16))
            left -= 16
        for each in others:
            each.result()
        until(lambda: daemon.books().waiting_requests == waits)
        blue.do(_RECALLABLE.format(models=lent))
        recalled = [row for row in daemon.models() if any(one.recalled_bytes for one in row.books)]
        connections = min(32, sessions + CONNECTIONS_BESIDE - 16)
        flooding = [blue, *others[:5]]
        for each in flooding:
            each.do(_UNFINISHED.format(connections=connections, streams=MAX_STREAMS))
        peak = max(_resident_while(daemon, 100))
        state("requests that wait, and models with open recalls", f"{waits}, {len(recalled)}")
        unfinished = f"{len(flooding) * connections}, {daemon.descriptors()}"
        state("connections with unfinished frames, and descriptors", unfinished)
        figures = f"{at_start // MIB}, {peak // MIB}, {most // MIB} MiB"
        state(f"RssAnon at the start, with the worst mix of {descriptors:,} descriptors, and its bound", figures)
        assert recalled
        assert peak < most
        assert daemon.descriptors() < descriptors
        assert daemon.books().waiting_requests == waits
        blue.do("sessions[0].close()")  # what it had borrowed is granted
        until(lambda: daemon.books().waiting_requests < waits)
        stack.close()
        until(lambda: daemon.is_unused() and daemon.descriptors() <= before)
        if fits:
            check_turns(daemon, state, f"the worst mix of {descriptors:,} descriptors")
        else:  # see docs/bounds.md: what a step costs beside as many waits is counted in test_looks.py
            longest = daemon.figure("membroker_loop_longest_turn_cpu_seconds")
            state("CPU time of the longest turn beside 16,384 waits", f"{longest * 1e3:.1f} ms")


_ENDLESS = {
    "header blocks that never end": (
        "frame(HEADERS, 0, 1, begun)",
        "frame(CONTINUATION, 0, 1, (b'\\0\\4name\\1x') * 2_000)",
        True,
    ),
    "header blocks of nothing": ("frame(HEADERS, 0, 1, begun)", "frame(CONTINUATION, 0, 1, b'') * 1_000", True),
    "settings, whose answers nobody reads": ("b''", "frame(SETTINGS, 0, 0, b'') * 1_000", False),
}


@pytest.mark.parametrize("what", _ENDLESS)
def test_what_never_ends_takes_no_memory(daemon: Daemon, state: State, what: str) -> None:
    """Every connection sends on for as long as the daemon reads; an honest worker goes on beside them."""
    begun, more, is_cut = _ENDLESS[what]
    with worker() as flood, worker() as other:
        honest = Honest(other, daemon, "handoff")
        flood.do(BEGIN.format(endpoint=str(daemon.endpoint("red"))))
        flood.do("from tests.support.http2 import *")
        flood.do(f"peers = [Peer(endpoint) for _ in range({CONNECTIONS - 2})]\nfor peer in peers: peer.hear(1)")
        before = daemon.resident_bytes()
        flood.do(f"begun = b'\\x83\\x86'\nfirst, more = {begun}, {more}")
        sent = honest.beside_flood(
            state,
            what,
            flood,
            f"""
import select
waiting, answer, cut = {{peer: first for peer in peers}}, 0, 0
for peer in peers: peer.sock.setblocking(False)
while waiting and answer < {CONNECTIONS * 8 * MIB}:
    able = select.select([], [peer.sock for peer in waiting], [], 1)[1]
    if not able:
        break  # the daemon reads no more
    for peer in [peer for peer in waiting if peer.sock in able]:
        data = waiting[peer] or more
        try:
            count = peer.sock.send(data)
            waiting[peer] = data[count:]
            answer += count
        except BlockingIOError:
            pass
        except OSError:
            del waiting[peer]
            cut += 1
answer = [answer, cut == len(peers)]
""",
        )
        grown = daemon.resident_bytes() - before
        state(f"RssAnon after {sent[0] // MIB} MiB of {what}", f"{grown // KIB:+} KiB")
        assert sent[1] is is_cut
        assert daemon.resident_bytes() < 49 * MIB + CONNECTIONS * 96 * KIB, "more than the bound of what is there"


def test_requests_that_wait_keep_nothing_that_nobody_knows(daemon: Daemon, flood: Worker, state: State) -> None:
    """Each waits for an hour, in a frame with 60,000 bytes of a field that this broker does not know."""
    flood.do("sessions[0].send(pb.Frame(request_id=7, allocate=allocation(models[0], 1 << 30, 160)))")
    until(lambda: daemon.books().free_bytes == 0)
    before = daemon.resident_bytes()
    flood.do("""
request = allocation(models[0], PAGE)
request.wait.FromSeconds(3_600)
unknown = b'\\xba\\x3e\\xe0\\xd4\\x03' + bytes(60_000)  # the field 999, with its length
for session in sessions[1:]:
    for number in range(16):
        session.sock.send(pb.Frame(request_id=1_000 + number, allocate=request).SerializeToString() + unknown)
""")
    until(lambda: daemon.books().waiting_requests == 15 * 16)
    grown = daemon.resident_bytes() - before
    state("RssAnon for 240 requests that wait, each in a frame of 60 KiB", f"{grown // KIB:+} KiB")
    assert grown < 16 * 32 * KIB + MIB


def test_deliveries_that_nobody_acknowledges_are_bounded(daemon: Daemon, flood: Worker, state: State) -> None:
    """The call that brought an extent is kept until then, of each session for 128 of them."""
    before = daemon.resident_bytes()
    flood.do(
        """
for session, model in zip(sessions, models, strict=True):
    for number in range(WINDOW + 1):
        session.send(pb.Frame(request_id=1_000 + number, allocate=allocation(model, PAGE)))
        if number < WINDOW:
            assert session.receive().frame.delivery.HasField("reply")
""".replace("WINDOW", str(DESCRIPTORS_IN_FLIGHT))
    )
    until(lambda: daemon.books().lent_bytes == 16 * (DESCRIPTORS_IN_FLIGHT + 1) * 2 * MIB)
    grown = daemon.resident_bytes() - before
    state("RssAnon for 2,048 deliveries that nobody acknowledges", f"{grown // KIB:+} KiB")
    assert grown < 16 * DESCRIPTORS_IN_FLIGHT * (KIB + 3 * KIB // 2)


def test_answers_that_nobody_takes_are_bounded(daemon: Daemon, flood: Worker, stack: ExitStack, state: State) -> None:
    """Each connection asks for as many long listings as it may, and lets no byte of an answer through."""
    share = MAX_CALLS // ENDPOINTS
    flood.do(f"for session in sessions:\n    for n in range({MODELS}): session.register('m' * 92 + str(n))")
    token = flood.ask("sessions[0].token")
    before = daemon.resident_bytes()
    request = bpb.ListSessionsRequest(page_size=1_000).SerializeToString()
    peers = [Peer(daemon.endpoint("red")) for _ in range(share // MAX_STREAMS + 2)]
    for peer in peers:
        stack.callback(peer.close)
        peer.close_windows()
        peer.hear(1)
        for _ in range(MAX_STREAMS):
            peer.ask("/membroker.v1.BrokerService/ListSessions", token, request)
    until(lambda: _running(peers) <= (share + 1) // 2)  # the answer of each is a frame long, and counts as one more
    grown = daemon.resident_bytes() - before
    state("RssAnon for as many listings as are kept and nobody takes", f"{grown // MIB:+} MiB")
    assert grown < share * 128 * KIB


def test_tenants_that_a_reload_adds_share_one_bound_of_calls(state: State) -> None:
    """Each begins calls and never ends them: together they get no more than the bound. Others go on meanwhile."""
    with running({"tenants": {"red": {}, "blue": {}}, "max_sessions": MAX_SESSIONS}) as daemon, ExitStack() as stack:
        honest = Honest(stack.enter_context(worker()), daemon, "handoff")
        peers = _begin_calls(daemon, stack, ["red"], MAX_CALLS // 3)
        until(lambda: _running(peers) == MAX_CALLS // 3)
        names = [f"new-{number}" for number in range(8)]
        reload(daemon, tenants={name: {} for name in ("red", "blue", *names[:2])})
        peers += _begin_calls(daemon, stack, names[:2], MAX_CALLS // 5)
        until(lambda: _running(peers) == MAX_CALLS // 3 + 2 * (MAX_CALLS // 5))
        reload(daemon, tenants={name: {} for name in ("red", "blue", *names)})
        peers += _begin_calls(daemon, stack, names[2:], MAX_CALLS // 11)  # the earlier ones keep their larger shares
        begun = len(peers) * MAX_STREAMS
        until(lambda: _running(peers) == MAX_CALLS)
        honest.beside(state, f"{begun} gRPC calls that nothing ends")
        for peer in peers:
            peer.close()
        until(lambda: _serves(daemon))
        Honest(stack.enter_context(worker()), daemon, "grpc").turns(10)


def test_no_user_of_one_endpoint_takes_all_its_calls() -> None:
    """A flood without a session gets half of the calls, one with a worker's own token a quarter."""
    with running({"tenants": None, "max_sessions": MAX_SESSIONS}) as daemon, ExitStack() as stack:
        share, endpoint = MAX_CALLS // 2, daemon.endpoint("default")
        flood = _begin_calls(daemon, stack, ["default"], share)
        until(lambda: _running(flood) == share // 2)
        with Session(endpoint) as session:

            def served() -> bool:
                try:
                    grpc_call(endpoint, session.token, "ListModels", bpb.ListModelsRequest())
                except grpc.RpcError:
                    return False
                return True

            assert served()
            own = _begin_calls(daemon, stack, ["default"], share, session.token)
            until(lambda: _running(own) == share // 4)
            assert not served()
            for peer in flood:
                peer.close()
            until(served)


def _begin_calls(daemon: Daemon, stack: ExitStack, tenants: list[str], share: int, token: str = "") -> list[Peer]:
    """Begin more than `share` calls of each tenant, and send no request of them."""
    peers = [Peer(daemon.endpoint(tenant)) for tenant in tenants for _ in range(share // MAX_STREAMS + 2)]
    for peer in peers:
        stack.callback(peer.close)
        peer.hear(1)
        for _ in range(MAX_STREAMS):
            peer.begin("/membroker.v1.BrokerService/RegisterModel", 100, token)
    return peers


def _running(peers: list[Peer]) -> int:
    """Return how many of their calls the daemon has not ended."""
    for peer in peers:
        peer.hear(0)
    return len(peers) * MAX_STREAMS - sum(len(peer.ended) for peer in peers)


def _serves(daemon: Daemon) -> bool:
    with grpc.insecure_channel(f"unix:{daemon.endpoint('blue')}/grpc.sock") as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        except grpc.RpcError:
            return False
    return True


def _resident_while(daemon: Daemon, calls: int) -> Iterator[int]:
    """Look at its memory while it answers so many calls: what came before them is handled then."""
    for _ in range(calls):
        daemon.device()
        yield daemon.resident_bytes()
