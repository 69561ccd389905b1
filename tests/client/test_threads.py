"""A process that may have no more threads: each call says so, with what to do, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.client.session.taking import take_leave
from tests.support.daemons import DEADLINE_SECONDS, running, until
from tests.support.fake_broker import Caller, PlayedBroker, buffer, drop_all, is_away, line, model
from tests.support.forks import in_a_child
from tests.support.interrupts import interrupted_at
from tests.support.processes import descriptors
from tests.support.sizes import MIB, PAGE

import membroker
from membroker import LocalSource
from membroker.errors import ThreadLimit
from membroker.threads import start_thread

_start = threading.Thread.start


class Limit:
    """How many threads of the library may still start; None: any number."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.refused: list[str] = []

    def start(self, thread: threading.Thread) -> None:
        if thread.name.startswith("membroker") and self.left is not None:
            if not self.left:
                self.refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            self.left -= 1
        _start(thread)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    found = Limit()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: found.start(thread))
    return found


def refused(work: Callable[[], Any]) -> ThreadLimit:
    with pytest.raises(ThreadLimit, match=r"`ulimit -u`.*`TasksMax=`.*`pids.max`") as caught:
        work()
    assert isinstance(caught.value, RuntimeError)
    return caught.value


@pytest.mark.parametrize(("transport", "left"), [("handoff", 0), ("grpc", 0), ("grpc", 1)])
def test_a_client(broker: PlayedBroker, limit: Limit, transport: str, left: int) -> None:
    before = descriptors()
    limit.left = left
    caller = Caller(lambda: membroker.connect(broker.endpoint(), transport=transport))
    broker.accept()
    broker.welcome()
    with pytest.raises(ThreadLimit):
        caller.value()
    broker.hang_up()
    assert descriptors() == before


def test_a_callback(broker: PlayedBroker, limit: Limit) -> None:
    """The client goes on without it."""
    with broker.connect() as client:
        one, before = model(client), descriptors()
        limit.left = 0
        refused(lambda: one.on_recall(lambda recall: None))
        assert descriptors() == before
        held, _ = buffer(broker, client)
        line(client)._timeout = 0.01  # nobody is back for a goodbye
        broker.hang_up()
        held.close()


def test_a_lost_connection(broker: PlayedBroker, limit: Limit) -> None:
    """No thread can reconnect. A call that waits tries again, so that the session goes on when one can."""
    client = broker.connect(outage=DEADLINE_SECONDS)
    held, _ = buffer(broker, client)
    limit.left = 0
    drop_all(broker, client)
    until(lambda: "membroker-reconnect" in limit.refused)
    caller = Caller(lambda: model(client).allocate(PAGE))
    until(lambda: limit.refused.count("membroker-reconnect") > 1)
    assert is_away(client)
    limit.left = None
    assert len(broker.resume().extent_ids) == 1
    broker.lend()
    caller.value().close()
    held.close()
    assert not line(client).connection.calls.at_broker
    for _ in range(2):
        broker.hear("release")
    closing = Caller(client.close)
    take_leave(broker)
    closing.value()


def test_a_source_without_a_broker(limit: Limit) -> None:
    LocalSource("host").close()
    before = descriptors()
    limit.left = 0
    refused(lambda: LocalSource("host"))
    assert descriptors() == before


def test_grpc_would_end_the_process() -> None:
    """Under a real limit: gRPC aborts where it cannot start its threads, so the library looks first."""
    code = """
import os, resource
import grpc
from pathlib import Path
from membroker.errors import ThreadLimit
from membroker.session.rpc import GrpcCalls
from membroker.v1 import broker_pb2, broker_pb2_grpc
if not os.getuid():
    os.setgid(61234)
    os.setuid(61234)
resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
try:
    GrpcCalls(Path("/nowhere/grpc.sock")).call("GetDevice", broker_pb2.GetDeviceRequest(), 1.0)
except ThreadLimit as error:
    print(error, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "`ulimit -u`" in done.stdout, (done.returncode, done.stderr[-2000:])
    assert done.returncode == 0, done.stderr


def test_a_worker_reads_without_threads_of_grpc() -> None:
    """It borrows and reads the books where it may start three threads at most, and never imports gRPC.

    Only root can set such a limit: the process becomes a user who runs nothing else. Before that it does the work once,
    to import all of the library, which the new user may not be able to read.
    """
    code = """
import os, resource, sys
import membroker
def work():
    with membroker.connect(sys.argv[1]) as client:
        model = client.model("small")
        with model.allocate("2MiB"), model.pool(page_size="2MiB") as pool:
            pool.allocate(0, "4MiB")
            pool.free(0, "4MiB")
            used = model.stats().books["device"].used_bytes
            print(model.available().now_bytes, used, client.device().uuid, client.model_status("small").sessions)
            print(len(client.models()), len(client.sessions()), len(client.segments()), len(client.decisions("small")))
        model.unregister()
        try:
            model.allocate(1)
        except membroker.ModelNotFound:
            print("left")
work()
if not os.getuid():
    os.setgid(61235)
    os.setuid(61235)
    resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
work()
assert "grpc" not in sys.modules
"""
    with running() as daemon:
        endpoint = daemon.endpoint()
        for path in (endpoint, *endpoint.parents):
            if daemon.directory in (path, *path.parents):
                path.chmod(0o755)
        (endpoint / "handoff.sock").chmod(0o666)
        command = [sys.executable, "-c", code, str(endpoint)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert done.stdout.split() == [str(254 * MIB), str(PAGE), "host", "1", "1", "1", "0", "0", "left"] * 2


def test_ctrl_c_while_a_thread_starts() -> None:
    """Python waits for the new thread, and makes an error of its own of an interrupt that comes then."""
    in_a_child(strike)  # what is left of a thread that did not start ends with it


def strike() -> None:
    """Interrupt the start of a thread at every point. Whatever else comes of it is raised."""

    def start() -> threading.Thread:
        return start_thread(lambda: None, "membroker-of-a-test")

    points, _ = interrupted_at(None, start)
    for point in range(1, points + 1):
        interrupted_at(point, start)
