"""Calls that wait for memory, from the worker's side: what grants them, what ends them, and what outlasts them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tests.support import raw
from tests.support.daemons import Daemon, until
from tests.support.segments import one_transport
from tests.support.sizes import MIB
from tests.support.workers import Worker, worker

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2_grpc

CAPACITY = 256 * MIB
LONG = 600
"""Seconds that no test waits for."""
CALLS = {
    "a buffer": "held = model.allocate(64 * MIB, timeout={wait})",
    "pages": "held = pool.allocate(0, 64 * MIB, timeout={wait})",
    "pages anywhere": "held = pool.allocate_anywhere(64 * MIB, timeout={wait})",
    "a pool that grows": "held = pool.grow(64 * MIB, timeout={wait})",
    "spare pages": "pool.prepare(64 * MIB, timeout={wait})",
    "a growable buffer": "held = model.growable_buffer(64 * MIB, CAPACITY, PAGE, timeout={wait})",
    "a buffer that grows": "held = grown.grow(64 * MIB, timeout={wait})",
    "tiles": "held = array.back(*range(32), timeout={wait})",
    "rows": "held = array.write(0, bytes(64 * MIB), timeout={wait})",
    "a segment": "held = model.create_segment('s', 64 * MIB, timeout={wait})",
    "a shared pool": "held = shared.allocate_for_model('own', 64 * MIB, timeout={wait})",
}
PREPARE = f"""
import threading, time
CAPACITY = {CAPACITY}
model = client.model('m', virtual_capacity='1GiB')
pool = model.pool(page_size=PAGE)
grown = model.growable_buffer(0, CAPACITY, PAGE)
array = model.sparse_array((CAPACITY // PAGE, PAGE), 'U8')
shared = membroker.SharedMemoryPool(client, page_size=PAGE)
shared.register_model('own', '1GiB')

def ended(call):
    error = None
    try:
        call()
    except BaseException as raised:
        error = raised
    return type(error).__name__, getattr(error, 'reason', ''), getattr(error, 'waited_seconds', 0.0)

class Thread(threading.Thread):
    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.outcome = call, None
        self.start()
    def run(self):
        self.outcome = ended(self.call)
    def result(self):
        self.join(120)
        return self.outcome
"""


NOTE_WAITS = """
from collections import defaultdict
from membroker.session import connection
asked, let_wait = defaultdict(list), connection._let_wait
def note(request, until):
    let_wait(request, until)
    asked[request.extent_bytes * request.count].append(request.wait.ToNanoseconds() / 1e9)
connection._let_wait = note
"""
"""Note for how many seconds a request of each size asks a daemon to let it wait."""


def waiting(daemon: Daemon) -> int:
    """Return how many requests wait for memory."""
    return sum(books.waiting_requests for model in daemon.models() for books in model.books)


@contextmanager
def full(daemon: Daemon, transport: str = "handoff") -> Iterator[Worker]:
    """Yield a worker of the tenant blue that has borrowed all there is; `buffers` are of 64 MiB each."""
    with worker() as holder:
        holder.connect(daemon, "blue", transport).do("other = client.model('other')")
        holder.do("buffers = [other.allocate(64 * MIB) for _ in range(4)]")
        yield holder


@pytest.fixture
def asker(daemon: Daemon, transport: str) -> Iterator[Worker]:
    """A worker of the tenant red that has borrowed nothing yet."""
    with worker() as one:
        one.connect(daemon, "red", transport).do(PREPARE)
        yield one


def test_a_release_grants_what_waits(daemon: Daemon, asker: Worker, transport: str) -> None:
    """The memory is full. A worker waits for 64 MiB, and gets them as another process releases them; by each call."""
    with full(daemon, transport) as holder:
        for code in CALLS.values():
            asker.begin(code.format(wait=LONG))
            until(lambda: waiting(daemon) == 1)
            holder.do("buffers.pop().close()")
            asker.result()
            assert (waiting(daemon), daemon.books().lent_bytes) == (0, CAPACITY)
            asker.do("client.close()")
            holder.do("buffers.append(other.allocate(64 * MIB, timeout=600))")
            asker.connect(daemon, "red", transport).do(PREPARE)


def test_a_refusal_comes_at_the_deadline_with_its_numbers(daemon: Daemon, asker: Worker) -> None:
    """Nobody releases anything. The call is refused when its time is over, and at once if it has none.

    The broker is told what is left of the time when the call is sent: on a busy machine that may be nothing.
    """

    def waited(code: str, wait: float) -> bool:
        """Make the call, and return whether the broker has let it wait."""
        began = time.monotonic()
        refused = asker.refused(code.format(wait=wait))
        assert time.monotonic() - began >= wait
        assert (refused.error, refused.reason) == ("OutOfMemory", "CAPACITY"), code
        # Nobody releases memory: a wait could bring nothing.
        assert (refused.metadata["share_bytes"], refused.metadata["obtainable_bytes"]) == ("0", "0")
        return int(refused.metadata.get("waited_ms", 0)) > 0

    with full(daemon):
        for code in CALLS.values():
            assert not waited(code, 0)
            until(lambda code=code: waited(code, 0.1))
        for wait in (-1, 86_401, True, "'1'", "float('nan')"):
            assert asker.refused(CALLS["pages"].format(wait=wait)).error == "InvalidRequest", wait
        assert daemon.books().lent_bytes == CAPACITY


# --- What ends a wait ---


def test_ctrl_c_ends_a_wait(daemon: Daemon, asker: Worker) -> None:
    """A person gives up. The prompt is back at once, nobody waits at the broker, and the session goes on."""
    with full(daemon) as holder:
        for call in ("a segment", "pages"):
            asker.begin(f"def call():\n    {CALLS[call].format(wait=LONG)}\nanswer = ended(call)")
            until(lambda: waiting(daemon) == 1)
            asker.process.send_signal(signal.SIGINT)
            kind, _, _ = asker.result()
            assert kind == "KeyboardInterrupt"
            until(lambda: waiting(daemon) == 0)
        holder.do("buffers.pop().close()")
        asker.do(CALLS["pages"].format(wait=0))
        assert daemon.books().lent_bytes == CAPACITY


def test_closing_the_client_ends_its_waits(daemon: Daemon, asker: Worker) -> None:
    """Two threads wait, and another closes the client: they get `ClosedError`, at once."""
    with full(daemon):
        asker.do(f"threads = [Thread(lambda: pool.allocate(0, 64 * MIB, timeout={LONG}))]")
        asker.do(f"threads.append(Thread(lambda: model.create_segment('s', 64 * MIB, timeout={LONG})))")
        until(lambda: waiting(daemon) == 2)
        asker.do("client.close()")
        assert [kind for kind, _, _ in asker.ask("[thread.result() for thread in threads]")] == ["ClosedError"] * 2
        until(lambda: [session.tenant for session in daemon.sessions()] == ["tenants/blue"])
        assert waiting(daemon) == 0
        assert daemon.books().lent_bytes == CAPACITY


@one_transport
def test_a_drain_ends_all_waits(daemon: Daemon, asker: Worker) -> None:
    """An operator empties the device: a call that waits is told why it is refused."""
    with full(daemon), daemon.admin_stub() as admin:
        asker.do(f"threads = [Thread(lambda: model.allocate(64 * MIB, timeout={LONG})) for _ in range(3)]")
        until(lambda: waiting(daemon) == 3)
        admin.Drain(apb.DrainRequest())
        outcomes = asker.ask("[thread.result() for thread in threads]")
        assert {(kind, reason) for kind, reason, _ in outcomes} == {("BrokerUnavailable", "DRAINING")}
        assert waiting(daemon) == 0
        admin.Undrain(apb.UndrainRequest())


@contextmanager
def waiting_by_grpc(daemon: Daemon, session: raw.Session, model: str, timeout: float | None) -> Iterator[Any]:
    """Yield a call of AllocateExtents that waits, of a client without our library."""
    request = raw.allocation(model, 64 * MIB)
    request.request_id, request.wait.seconds = 7, LONG
    with grpc.insecure_channel(f"unix:{session.endpoint}/grpc.sock") as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        call = stub.AllocateExtents.future(request, metadata=(("membroker-token", session.token),), timeout=timeout)
        until(lambda: waiting(daemon) == 1 or call.done())  # its own deadline may have passed
        yield call


def test_a_grpc_call_that_ends_waits_no_more(daemon: Daemon) -> None:
    """Its caller cancels it, or its own deadline passes: nothing is lent to a caller that has gone."""
    with full(daemon) as holder, raw.Session(daemon.endpoint()) as session:
        model = session.register("m")
        with waiting_by_grpc(daemon, session, model, 1.0) as call:
            assert call.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED
            until(lambda: waiting(daemon) == 0)
        with waiting_by_grpc(daemon, session, model, None) as call:
            assert call.cancel()
            until(lambda: waiting(daemon) == 0)
        holder.do("buffers.pop().close()")
        assert daemon.books().lent_bytes == CAPACITY - 64 * MIB
        assert session.borrow(model, 64 * MIB), "its request id, or the session, was still taken"


@pytest.mark.deep
def test_a_wait_goes_on_after_the_daemons_death(daemon: Daemon, transport: str) -> None:
    """Two calls are under way. Each asks the next daemon, for the rest of its time, by a clock that is put forward."""
    with full(daemon) as holder, worker() as patient:
        patient.connect(daemon, "red", transport, outage=24 * LONG).do(PREPARE)
        patient.do("clock, passed = time.monotonic, 0; time.monotonic = lambda: clock() + passed")
        patient.do(NOTE_WAITS)
        patient.do(f"granted = Thread(lambda: model.allocate(64 * MIB, timeout={2 * LONG}))")
        patient.do(f"refused = Thread(lambda: model.allocate(128 * MIB, timeout={LONG}))")
        until(lambda: waiting(daemon) == 2)
        daemon.kill()
        patient.do(f"passed = {LONG - 2}")
        daemon.start_again()
        assert patient.ask("refused.result()[:2]") == ["OutOfMemory", "CAPACITY"]
        rest, most = patient.ask("asked[128 * MIB][-1], asked[64 * MIB][-1]")
        assert rest <= 2 < most <= LONG + 2, "the second daemon lets one wait for all of its time"
        until(lambda: waiting(daemon) == 1)
        holder.do("buffers.pop().close()")
        assert patient.ask("granted.result()[0]") == "NoneType"
