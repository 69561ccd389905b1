"""Near the limit of descriptors, RLIMIT_NOFILE, on the broker's side and on the worker's.

The process that is short is told so, with a reason of its own. No descriptor and no byte is lost. When there is room
again, everything goes on as before, on the same connections.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.honest_worker import State, honest, other_user, spare_descriptors, unprivileged
from tests.support.raw import Connection, Session, hello, reason
from tests.support.workers import (
    ANCHOR_BYTES,
    OF_A_CHANNEL,
    OF_A_SESSION,
    PAGE,
    Worker,
    descriptors_at_start,
    proc_of,
    until_clean,
    worker,
)

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import broker_pb2_grpc
from membroker.v1 import handoff_pb2 as pb
from membroker.wire import frames as handoff
from membroker.wire.sessions import descriptors_for

# --- The broker's side ---


def test_an_honest_worker_while_the_broker_has_no_descriptor_left(daemon: Daemon, transport: str) -> None:
    """It is told why, keeps its connection and what it has, gives that back, and is lent more when there is room."""
    at_start = descriptors_at_start(daemon)
    with honest(daemon, transport) as one:
        held = at_start + OF_A_SESSION + OF_A_CHANNEL * (transport == "grpc")  # the keeper has its copies
        one.do("buffer = model.allocate(PAGE)")
        until(lambda: daemon.descriptors() <= held)  # it closes the extent's own after the worker has it
        spare_descriptors(daemon.process.pid, 0)
        for _ in range(20):
            assert one.refused("model.allocate(PAGE)").reason == "DESCRIPTORS_EXHAUSTED"
        one.do("buffer.close(); model.declare(PAGE); model.declare(0)")
        spare_descriptors(daemon.process.pid, None)
        one.turns(20)
        until(lambda: daemon.books().lent_bytes == 0)
    until_clean(daemon, at_start)


@pytest.mark.parametrize("spare", range(5))
def test_the_first_connection_for_which_there_are_few_descriptors(daemon: Daemon, spare: int) -> None:
    """It is greeted, or told that the broker is out of descriptors, or waits; it leaves nothing that it did not get.

    The first of all takes more than others: the daemon finds out what its kernel can tell of a process.
    """
    before = descriptors_at_start(daemon)
    spare_descriptors(daemon.process.pid, spare)
    with Connection(daemon.endpoint()) as newcomer:
        with suppress(BrokenPipeError):  # it may be refused before it has said anything
            newcomer.send(hello())
        if not spare:
            until(lambda: "reason=DESCRIPTORS_EXHAUSTED" in daemon.log())
            assert not raw.is_readable(newcomer.sock)
            spare_descriptors(daemon.process.pid, None)
        try:
            packet = handoff.receive(newcomer.sock)
        except ConnectionResetError:  # said once, before what is there to read
            packet = handoff.receive(newcomer.sock)
        handoff.close_all(packet.descriptors)
        if packet.frame.HasField("welcome"):
            newcomer.send(pb.Frame(request_id=2, goodbye=pb.Goodbye()))
            assert newcomer.receive().frame.reply.HasField("goodbye")
        else:
            assert reason(packet.frame.reply.error) == "DESCRIPTORS_EXHAUSTED"
    until(lambda: daemon.descriptors() == before)
    spare_descriptors(daemon.process.pid, None)
    assert daemon.sessions() == []
    with Session(daemon.endpoint()) as again:
        assert again.borrow(again.register("m"), PAGE)
    until(lambda: daemon.descriptors() == before and daemon.books().lent_bytes == 0)


def test_a_grpc_connection_for_which_there_is_no_descriptor(daemon: Daemon) -> None:
    """It waits where the kernel has put it, and its call is answered when there is room; those that stand go on."""
    at_start = descriptors_at_start(daemon)
    with Session(daemon.endpoint()) as session, ExitStack() as stack:
        token = (("membroker-token", session.token),)

        def ask(number: int) -> Any:
            channel = grpc.insecure_channel(f"unix:{session.endpoint}/grpc.sock", (("number", number),))
            stub = broker_pb2_grpc.BrokerServiceStub(stack.enter_context(channel))
            return lambda: stub.GetDevice.future(bpb.GetDeviceRequest(), metadata=token)

        standing, new = ask(1), ask(2)
        assert standing().result(DEADLINE_SECONDS).locations
        before = at_start + OF_A_SESSION + OF_A_CHANNEL
        until(lambda: daemon.descriptors() == before)  # copies of the new session's pidfd are with the keeper by then
        spare_descriptors(daemon.process.pid, 0)
        call = new()
        assert standing().result(DEADLINE_SECONDS).locations
        assert not call.done()
        spare_descriptors(daemon.process.pid, None)
        assert call.result(DEADLINE_SECONDS).locations
        stack.close()
        until(lambda: daemon.descriptors() < before)
    until_clean(daemon, at_start)


def test_a_scrape_for_which_there_is_no_descriptor(daemon: Daemon) -> None:
    """It waits in the kernel's queue, and so does the daemon: a wait that burns a core starves the honest."""
    at_start = descriptors_at_start(daemon)
    address = daemon.device().metrics_url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
    until(lambda: daemon.descriptors() == at_start)
    spare_descriptors(daemon.process.pid, 0)
    with socket.create_connection((address[0], int(address[1]))) as scrape:
        until(lambda: _is_idle(daemon))
        spare_descriptors(daemon.process.pid, None)
        scrape.settimeout(DEADLINE_SECONDS)
        scrape.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert scrape.recv(12) == b"HTTP/1.0 200"


def _is_idle(daemon: Daemon) -> bool:
    """Say whether all threads of the daemon sleep, and none has run since a look before: no load of others hides it."""

    def look() -> list[tuple[str, str]]:
        pid = daemon.process.pid
        threads = sorted(os.listdir(f"/proc/{pid}/task"))
        stats = [proc_of(pid, f"task/{one}/stat").rpartition(") ")[2][:1] for one in threads]
        return list(zip(stats, [proc_of(pid, f"task/{one}/schedstat") for one in threads], strict=True))

    before = look()
    return {state for state, _ in before} == {"S"} and look() == before


LIMIT = descriptors_for(3)
"""Enough for three sessions, by the daemon's own rule; too few for 64 silent connections of each of six tenants."""


_ANY_TURNS = """
pool = model.pool(page_size=PAGE, virtual_capacity=64 * PAGE)
def turns(count):
    seconds, refused = [], []
    for number in range(count):
        began = time.perf_counter()
        try:
            if number % 2:
                model.allocate(PAGE).close()
            else:
                pool.allocate(0, 64 * PAGE)  # their descriptors are open in the daemon together
                pool.free(0, 64 * PAGE)
        except membroker.MembrokerError as error:
            refused.append(error.reason)
        seconds.append(time.perf_counter() - began)
    return seconds, refused
"""


_STRANGERS = """
import signal, socket
from pathlib import Path
from tests.support.raw import *
tenants = [Path(path) for path in {tenants}]
def crowd():
    silent = []
    for path in tenants * 150:
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].connect(str(path / 'handoff.sock'))
    signal.pause()
"""


@pytest.mark.deep
def test_a_daemon_that_strangers_fill_to_its_limit(state: State) -> None:
    """Six tenants' silent connections take every descriptor that the daemon may have, again and again.

    The seventh tenant's worker has its connection. What it asks for is granted or refused for that reason, and what it
    releases is taken. When they are gone, all is as before.
    """
    strange = [f"strange-{number}" for number in range(6)]
    tenants: dict[str, dict[str, str]] = {name: {} for name in ("blue", *strange)}
    with unprivileged({"tenants": tenants, "settle_seconds": 1.0}, LIMIT) as daemon:
        at_start = descriptors_at_start(daemon)
        with honest(daemon) as one, worker() as strangers:
            strangers.do(_STRANGERS.format(tenants=[str(daemon.endpoint(name)) for name in strange]))
            strangers.do("sessions = [Session(tenants[0]) for _ in range(2)]")
            with Connection(daemon.endpoint("blue")) as fourth:
                fourth.send(hello())
                assert reason(fourth.last_words()) == "TOO_MANY_SESSIONS"
            kept = at_start + OF_A_SESSION  # the honest worker's: it only borrows, and opens no gRPC channel
            until(lambda: daemon.descriptors() == kept + 2 * OF_A_SESSION)
            one.do(_ANY_TURNS)
            one.do("kept = model.allocate(PAGE)")
            assert one.ask("turns(10)")[1] == [], "refused though the table has room"
            strangers.begin("crowd()")
            until(lambda: daemon.descriptors() == LIMIT)
            seconds, reasons = one.ask("turns(100)")
            assert set(reasons) == {"DESCRIPTORS_EXHAUSTED"}
            state("turns of an honest worker beside a full table of descriptors", f"{len(reasons)} of 100 refused")
            state("the slowest of them", f"{max(seconds) * 1e3:.2f} ms")
            one.do("kept.close()")
            assert daemon.descriptors() > LIMIT - 64 - 2 * 64, "they are gone already"
            strangers.kill()
            until(lambda: daemon.descriptors() == kept)
            one.turns(100)
            for name in tenants:
                Session(daemon.endpoint(name)).close()
        until_clean(daemon, at_start)


def test_descriptors_that_another_process_of_the_same_user_has_under_way() -> None:
    """The kernel counts them for the user. The session is not to blame: its delivery waits or is refused."""
    with unprivileged({"audit_seconds": 0.1}, LIMIT) as daemon, ExitStack() as stack:
        at_start = descriptors_at_start(daemon)
        session = stack.enter_context(Session(daemon.endpoint()))
        model = session.register("mine")
        other = Worker(user=other_user())
        stack.callback(other.close)
        other.do("import socket; from membroker.wire import frames as handoff")
        other.do("pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)")
        other.do(f"for _ in range({LIMIT // 64 + 2}): handoff.send(pair[0], b'x', [0] * 64)")
        session.send(pb.Frame(request_id=7, allocate=raw.allocation(model, PAGE)))
        until(lambda: raw.is_readable(session.sock) or daemon.books().device_used_bytes > ANCHOR_BYTES)
        other.kill()
        answer, ids = session.answer(7)
        assert ids if not isinstance(answer, Status) else reason(answer) == "DESCRIPTORS_EXHAUSTED"
        assert session.borrow(model, PAGE)
        stack.close()
        until_clean(daemon, at_start)


def test_a_daemon_without_a_descriptor_stops_as_it_should(daemon: Daemon) -> None:
    """SIGTERM finds it with its table full: it says what it says at each stop, and its status is 0."""
    at_start = descriptors_at_start(daemon)
    with Session(daemon.endpoint()) as session:
        until(lambda: daemon.descriptors() == at_start + OF_A_SESSION)
        spare_descriptors(daemon.process.pid, 0)
        status = daemon.stop()
        notice = handoff.receive(session.notices).frame.notice
    assert notice.HasField("stopping"), "its workers were not told"
    assert status == 0, daemon.log()
    assert " stopped" in daemon.log().splitlines()[-1]


# --- The worker's side ---

PAGES = 100
"""Of an allocation: 64 and 36 descriptors, and one more for each import."""


def test_an_allocation_for_which_the_worker_has_few_descriptors(daemon: Daemon) -> None:
    """The kernel drops what there is no room for: it is `DescriptorLimit` or granted, all or nothing, at every step."""
    at_start = descriptors_at_start(daemon)
    outcomes = {}
    with honest(daemon) as beside, worker() as one:
        one.connect(daemon)
        one.do("model = client.model('m'); pool = model.pool(page_size=PAGE, virtual_capacity=300 * PAGE)")
        one.do("pool.allocate(0, PAGE)")
        one.do("pool.view(0, 4)[:] = b'mine'")
        one.do(_TRY)
        one.ask(f"tried(lambda: pool.allocate(PAGE, {PAGES} * PAGE))")
        opened = one.ask("len(os.listdir('/proc/self/fd'))")
        for spare in [*range(10), *range(10, 72, 5), *range(72, 240, 12)]:
            spare_descriptors(one.pid, spare)
            outcomes[spare] = one.ask(f"tried(lambda: pool.allocate(PAGE, {PAGES} * PAGE))")
            spare_descriptors(one.pid, None)
            assert one.ask("len(os.listdir('/proc/self/fd'))") == opened, f"with {spare} to spare"
            assert one.ask("pool.stats().mapped_pages") == 1
            assert one.ask("bytes(pool.view(0, 4)).decode()") == "mine"
            until(lambda: daemon.books().lent_bytes == PAGE)
        assert {outcome for spare, outcome in outcomes.items() if spare < 64} == {"DescriptorLimit"}
        assert set(outcomes.values()) == {"DescriptorLimit", "granted"}
        beside.turns(10)
        one.do("client.close()")
    until_clean(daemon, at_start)


_TRY = """
def tried(borrow):
    try:
        borrow()
    except membroker.MembrokerError as error:
        return type(error).__name__
    pool.free(PAGE, pool.stats().mapped_pages * PAGE - PAGE)
    return 'granted'
"""


def test_connecting_with_few_descriptors(daemon: Daemon, transport: str) -> None:
    """A worker that is near its limit from the first: it is told so at whichever step, and it lives."""
    at_start = descriptors_at_start(daemon)
    with worker() as one:
        one.do(_WHOLE_LIFE)
        path = str(daemon.endpoint())
        assert one.ask(f"life({path!r}, {transport!r})") == "lived"  # everything is imported by then
        opened = one.ask("len(os.listdir('/proc/self/fd'))")
        outcomes = []
        for spare in range(24):
            spare_descriptors(one.pid, spare)
            outcomes.append(one.ask(f"life({path!r}, {transport!r})"))
            spare_descriptors(one.pid, None)
            until(lambda: one.ask("len(os.listdir('/proc/self/fd'))") <= opened)  # gRPC's threads close theirs later
        assert set(outcomes) == {"DescriptorLimit", "lived"}, list(enumerate(outcomes))
    until_clean(daemon, at_start)


_WHOLE_LIFE = """
def life(path, transport):
    try:
        with membroker.connect(path, transport=transport) as client:
            with client.model('m').allocate(PAGE) as buffer:
                buffer.view()[:4] = b'mine'
    except Exception as error:
        return type(error).__name__
    return 'lived'
"""
