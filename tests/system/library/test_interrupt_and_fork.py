"""Ctrl-C and fork in a program that uses the library: nothing deadlocks, and nothing is leaked."""

from __future__ import annotations

import signal
import threading

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.processes import (
    ends,
    heard,
    is_settled,
    is_waiting,
    mapped_extents,
    tell,
    worker,
)
from tests.support.sizes import MIB

import membroker

PAGE = 2 * MIB


class TestInterrupt:
    def test_ctrl_c_while_the_broker_is_silent(self, daemon: Daemon, transport: str) -> None:
        """A person presses Ctrl-C on a program that waits; it goes on, and the broker keeps nothing of the call."""
        script = """
client = connect()
model = client.register_model("m")
pool = model.pool(page_size=PAGE, virtual_capacity="256MiB")
pool.allocate(0, PAGE)
say("before")
wait()
say("calls")
try:
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

    @pytest.mark.parametrize("outage", [30.0, 0.0])
    def test_other_threads_go_on(self, daemon: Daemon, transport: str, outage: float) -> None:
        """One thread's Ctrl-C drops the connection again and again: the others' calls are repeated, each done once."""
        errors: list[BaseException] = []
        stop = threading.Event()

        def work(model: membroker.Model) -> None:
            try:
                with model.pool(page_size=PAGE, virtual_capacity="16MiB") as pool:
                    while not stop.is_set():
                        pool.allocate(0, 3 * PAGE)
                        pool.view(0, 3 * PAGE)[:] = b"\xa5" * 3 * PAGE
                        pool.deallocate(0, 3 * PAGE)
            except BaseException as error:  # noqa: BLE001 - a thread hands on what it raised
                errors.append(error)

        with membroker.connect(daemon.endpoint(), transport=transport, outage=outage) as client:
            model = client.register_model("m")
            kept = model.allocate(PAGE)
            threads = [threading.Thread(target=work, args=(model,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(5):
                before = client._session.connection
                client._session.interrupted()
                until(lambda before=before: client._session.connection is not before)
            stop.set()
            for thread in threads:
                thread.join(DEADLINE_SECONDS)
            assert not any(thread.is_alive() for thread in threads)
            assert errors == []
            until(lambda: daemon.books().lent_bytes == PAGE)
            kept.close()
            until(lambda: is_settled(daemon))
        assert mapped_extents() == 0

    def test_ctrl_c_before_a_declaration_is_taken_back(self, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It strikes while pinned memory is freed: the broker is told all the same, or it would be charged for good."""
        with (
            running({"host_capacity": "64MiB"}) as daemon,
            membroker.connect(daemon.endpoint(), transport=transport) as client,
        ):
            model = client.register_model("m")
            pool = model.pool(page_size=PAGE, virtual_capacity="64MiB")
            pool.allocate(0, PAGE)
            pool.offload()
            unpin = model.driver.unpin

            def interrupted(address: int) -> None:
                signal.raise_signal(signal.SIGINT)
                unpin(address)

            monkeypatch.setattr(model.driver, "unpin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.close()
            until(lambda: daemon.device().locations[1].lent_bytes == 0)

    @pytest.mark.deep
    def test_ctrl_c_at_any_moment(self, daemon: Daemon, transport: str) -> None:
        """Interrupts strike a loop that borrows and releases, at any point: nothing is left mapped or lent."""
        script = """
client = connect()
model = client.register_model("m")
pool = model.pool(page_size=PAGE, virtual_capacity="256MiB")
hits, armed, buffers = 0, False, []
# Python itself loses an interrupt in the finalizers of a WeakSet and of a thread, and prints that on stderr.
lost, of_python = sys.unraisablehook, ("_weakrefset", "threading")
def is_of_python(one):
    return one.exc_type is KeyboardInterrupt and getattr(one.object, "__module__", "") in of_python
sys.unraisablehook = lambda one: is_of_python(one) or lost(one)
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
for turn in range(150):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.0001 * (turn % 60))
        try:
            pool.allocate(0, 20 * PAGE)
            pool.deallocate(0, 20 * PAGE)
            buffers.append(model.allocate(1))
            buffers[-1].close()
        except membroker.OutOfMemory:
            pass  # earlier calls that were abandoned are still being released
        armed = False
    except KeyboardInterrupt:
        armed = False
        hits += 1
    while any(row.state == "changing" for row in pool.mappings()):
        __import__("time").sleep(0.001)  # what struck the boundary itself is cleaned up in another thread
    mapped = pool.stats().mapped_pages
    assert mapped in (0, 20), mapped
    if mapped:
        pool.deallocate(0, 20 * PAGE)
buffers.clear()
gc.collect()
say(hits)
wait()
assert "membroker-extent" not in open("/proc/self/maps").read()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
say(len(os.listdir("/proc/self/fd")))
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert int(heard(process)) > 0
            until(lambda: is_settled(daemon))
            tell(process)
            assert int(heard(process)) < 40
            ends(process)


class TestFork:
    def test_a_child_holds_nothing(self, daemon: Daemon, transport: str) -> None:
        """A data loader forks: the child can't use the parent's client, and holds neither memory nor sockets of it."""
        script = """
import contextlib
client = connect()
model = client.register_model("m")
pool = model.pool(page_size=PAGE)
pool.allocate(0, 4 * PAGE)
buffer = model.allocate(1)
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
        calls = [lambda: pool.allocate(4 * PAGE, 1), lambda: pool.deallocate(0, 1), lambda: pool.grow(1), pool.stats,
                 lambda: pool.is_mapped(0), lambda: pool.view(0, 1), lambda: pool.base_address,
                 buffer.view, lambda: buffer.address, lambda: model.allocate(1), model.pool, model.stats,
                 lambda: model.declare(0), model.unregister, client.models, client.sessions, client.device,
                 lambda: client.register_model("x")]
        assert all(refuses(call) for call in calls)
        buffer.close(); pool.close(); client.close()
        assert "membroker-extent" not in open("/proc/self/maps").read()
        if sys.argv[2] == "handoff":
            assert not open_sockets() & sockets
        del buffer, pool, model, client
        collect()
        own = connect()
        assert own.register_model("own").allocate(1).extent_size == PAGE
        own.close()
    except BaseException as error:
        import traceback
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
pool.allocate(4 * PAGE, PAGE)
pool.view(0, 5)[:] = b"hello"
say(model.stats().books["device"].used_bytes // PAGE)
wait()
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "6"
            tell(process)
            ends(process)
        until(lambda: is_settled(daemon))

    @pytest.mark.deep
    def test_fork_while_other_threads_hold_locks(self, daemon: Daemon, transport: str) -> None:
        """Fork in the middle of other threads' calls: the child must not wait for a lock that nobody will open."""
        script = """
client = connect()
model = client.register_model("m")
pools = [model.pool(page_size=PAGE, virtual_capacity="8MiB") for _ in range(4)]
stop = threading.Event()
def work(pool):
    while not stop.is_set():
        pool.allocate(0, PAGE)
        pool.deallocate(0, PAGE)
threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
for thread in threads: thread.start()
import time
def gone_well(child):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if (ended := os.waitpid(child, os.WNOHANG))[0]:
            return ended[1] == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)  # also where it hangs before its first line
try:
    for number in range(20):
        child = os.fork()
        if not child:
            for pool in pools:
                try:
                    pool.allocate(0, 1)
                except membroker.ClosedError:
                    continue
                os._exit(1)
            client.close()
            os._exit(0)
        assert gone_well(child), f"child {number}"
finally:
    stop.set()
for thread in threads: thread.join()
client.close()
say("well")
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "well"
            ends(process)
        until(lambda: is_settled(daemon))
