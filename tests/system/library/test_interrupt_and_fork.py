"""Ctrl-C and fork in a program that uses the library: nothing deadlocks, and nothing is leaked."""

from __future__ import annotations

import signal
import threading

import pytest
from tests.support.daemons import Daemon, until
from tests.support.fake_broker import Caller
from tests.support.processes import ends, heard, is_settled, is_waiting, mapped_extents, tell, worker
from tests.support.segments import one_transport
from tests.support.sizes import PAGE

import membroker


class TestInterrupt:
    def test_ctrl_c_while_the_broker_is_silent(self, daemon: Daemon, transport: str) -> None:
        """A person presses Ctrl-C on a program that waits; it goes on, and the broker keeps nothing of the call."""
        script = """
client = connect()
model = client.model("m")
pool = model.pool(page_size=PAGE, virtual_capacity="256MiB")
pool.allocate(0, PAGE)
say("before")
wait()
try:
    say("calls")
    pool.allocate(PAGE, 100 * PAGE)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    pass
assert pool.stats().mapped_pages == 1
say("interrupted")
wait()
pool.allocate(PAGE, 100 * PAGE)
assert pool.stats().mapped_pages == 101
say(model.stats().books["device"].used_bytes // PAGE)
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "before"
            daemon.process.send_signal(signal.SIGSTOP)
            try:
                tell(process)
                assert heard(process) == "calls"
                until(lambda: is_waiting(process.pid))
                process.send_signal(signal.SIGINT)
                assert heard(process) == "interrupted"
            finally:
                daemon.process.send_signal(signal.SIGCONT)
            until(lambda: daemon.books().lent_bytes == PAGE)
            tell(process)
            assert heard(process) == "101"
            ends(process)
        until(lambda: is_settled(daemon))

    @one_transport
    @pytest.mark.parametrize("outage", [30.0, 0.0])
    def test_other_threads_go_on(self, daemon: Daemon, transport: str, outage: float) -> None:
        """One thread's Ctrl-C drops the connection again and again: the others' calls are repeated, each done once."""
        stop = threading.Event()

        def work() -> None:
            with model.pool(page_size=PAGE, virtual_capacity="16MiB") as pool:
                while not stop.is_set():
                    pool.allocate(0, 3 * PAGE)
                    pool.view(0, 3 * PAGE)[:] = b"\xa5" * 3 * PAGE
                    pool.free(0, 3 * PAGE)

        with membroker.connect(daemon.endpoint(), transport=transport, outage=outage) as client:
            model = client.model("m")
            kept = model.allocate(PAGE)
            workers = [Caller(work) for _ in range(3)]
            for _ in range(5):
                before = client._session.connection
                client._session.reconnecting.interrupted()
                until(lambda before=before: client._session.connection is not before)
            stop.set()
            for one in workers:
                one.value()
            until(lambda: daemon.books().lent_bytes == PAGE)
            kept.close()
            until(lambda: is_settled(daemon))
        assert mapped_extents() == 0


class TestFork:
    def test_a_child_holds_nothing(self, daemon: Daemon, transport: str) -> None:
        """A data loader forks: the child can't use the parent's client, and holds neither memory nor sockets of it."""
        script = """
import contextlib
client = connect()
model = client.model("m")
pool = model.pool(page_size=PAGE)
pool.allocate(0, 4 * PAGE)
buffer = model.allocate(1)
made = model.create_segment("weights", 1)
made.write(0, b"hello")
made.seal()
attached, half = client.attach("weights"), model.create_segment("half", 1)
def open_sockets():
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # a thread of gRPC may close one meanwhile
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith("socket:")}
sockets = open_sockets()
def refuses(call):
    try:
        call()
    except membroker.ClosedError as error:
        assert "forked" in str(error), error
        return True
child = os.fork()
if not child:
    try:
        calls = [lambda: pool.allocate(4 * PAGE, 1), lambda: pool.free(0, 1), lambda: pool.grow(1), pool.stats,
                 lambda: pool.is_mapped(0), lambda: pool.view(0, 1), lambda: pool.base_address,
                 buffer.view, lambda: buffer.address, lambda: model.allocate(1), model.pool, model.stats,
                 lambda: model.declare(0), model.unregister, client.models, client.sessions, client.device,
                 lambda: client.model("x")]
        calls += [client.segments, lambda: client.attach("weights"), lambda: client.delete_segment("weights"),
                  lambda: model.create_segment("x", 1)]
        for one in (made, attached, half):
            calls += [one.view, one.seal, one.delete, one.index, one.tensors, lambda one=one: one.read(0, 1),
                      lambda one=one: one.write(0, b"x"), lambda one=one: one.address]
            assert one.closed and one.size == PAGE
        assert all(refuses(call) for call in calls)
        for one in (made, attached, half, buffer, pool, client):
            one.close()
        assert "membroker-extent" not in open("/proc/self/maps").read()
        if sys.argv[2] == "handoff":
            assert not open_sockets() & sockets
        del made, attached, half, one, calls, buffer, pool, model, client
        collect()
        own = connect()
        assert own.model("own").allocate(1).extent_size == PAGE
        assert own.attach("weights").read(0, 5) == b"hello"
        own.close()
    except BaseException as error:
        import traceback
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
pool.allocate(4 * PAGE, PAGE)
pool.view(0, 5)[:] = b"hello"
assert attached.read(0, 5) == made.read(0, 5) == b"hello"
half.write(0, b"on")
half.seal()
say(model.stats().books["device"].used_bytes // PAGE, *(f"{one.state}:{one.sessions}" for one in client.segments()))
wait()
made.delete()
half.delete()
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "8 sealed:1 sealed:1"
            tell(process)
            ends(process)
        until(lambda: is_settled(daemon))
