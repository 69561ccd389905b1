"""Ctrl-C, forks and the end of a program that has segments."""

from __future__ import annotations

import signal

import pytest
from tests.support.daemons import Daemon, until
from tests.support.processes import (
    ends,
    heard,
    is_settled,
    is_waiting,
    tell,
    worker,
)
from tests.support.segments import holders
from tests.support.sizes import MIB

import membroker

pytestmark = pytest.mark.deep

PAGE = 2 * MIB


class TestInterrupt:
    def test_ctrl_c_while_it_waits(self, daemon: Daemon, transport: str) -> None:
        """A person gives up waiting for weights: the program goes on at once, whatever the writer does, and when the
        writer seals them hours later they are not held for a call that nobody waits for.
        """
        script = """
client = connect()
model = client.register_model("m")
say("attaches")
try:
    client.attach("weights", timeout=24 * 3600)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    say("interrupted")
buffer = model.allocate(1)
assert client.device().locations["device"].lent_bytes == 2 * PAGE
del buffer  # a finalizer's work must not stand behind the call that was given up
collect()
wait()
with client.attach("weights") as segment:
    say(segment.read(0, 4).decode())
wait()
client.close()
"""
        with membroker.connect(daemon.endpoint()) as writer, worker(script, daemon, transport) as process:
            segment = writer.register_model("m").create_segment("weights", 1)
            assert heard(process) == "attaches"
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            assert heard(process) == "interrupted"
            until(lambda: daemon.books().lent_bytes == PAGE)
            segment.write(0, b"late")
            segment.seal()
            until(lambda: holders(writer) == {"weights": 1})
            tell(process)
            assert heard(process) == "late"
            until(lambda: holders(writer) == {"weights": 1})
            segment.delete()
            segment.close()
            until(lambda: is_settled(daemon) and not writer.segments())
            tell(process)
            ends(process)

    def test_a_forgotten_client_does_not_wait_for_a_call_that_was_given_up(
        self, daemon: Daemon, transport: str
    ) -> None:
        """After Ctrl-C the program drops its client and works on: the session ends, though nobody has sealed."""
        script = """
def work():
    client = connect()
    say("attaches")
    client.attach("weights", timeout=24 * 3600)
try:
    work()
except KeyboardInterrupt:
    pass
say("interrupted")
for _ in sys.stdin:
    gc.collect()  # more than once: the thread that attached may not have ended yet
"""
        with membroker.connect(daemon.endpoint()) as writer, worker(script, daemon, transport) as process:
            held = writer.register_model("m").create_segment("weights", 1)
            assert heard(process) == "attaches"
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            assert heard(process) == "interrupted"
            until(lambda: tell(process) or len(daemon.sessions()) == 1)
            assert held.writable
            tell(process)
            ends(process)

    def test_ctrl_c_in_calls_by_grpc(self, daemon: Daemon, transport: str) -> None:
        """Interrupts rain on a program that reads the books; none may leave gRPC's channel locked for other threads."""
        script = """
client = connect()
model = client.register_model("m")
client.segments()  # its gRPC channel stays open from here on
hits, armed = 0, False
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = id  # an interrupt in one of gRPC's finalizers is lost; in a hook of Python code another could hit
for turn in range(100):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00002 * (turn % 50), 0.005)
        while True:
            client.segments()
            model.declare(0)
    except KeyboardInterrupt:
        armed = False
        hits += 1
signal.setitimer(signal.ITIMER_REAL, 0)
found = []
def ask():
    while not found:
        try:
            found.append(client.device().pid)
        except membroker.BrokerUnavailable:
            pass  # the broker still has too many calls that were given up
other = threading.Thread(target=ask, daemon=True)
other.start()
other.join(120)
say(hits, len(found))
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "100 1"
            ends(process)

    @pytest.mark.parametrize("every", [0.005, 0.0002])  # the second: a Ctrl-C that comes while the first is handled
    def test_ctrl_c_while_another_thread_reads(self, daemon: Daemon, transport: str, every: float) -> None:
        """A thread waits in an attach and reads the socket for all; the main thread's calls are interrupted beside it,
        each by a KeyboardInterrupt, and the thread is served as if nothing had been.
        """
        script = f"""
client = connect()
model = client.register_model("m")
made = model.create_segment("weights", 1)
found = []
waiting = threading.Thread(target=lambda: found.append(client.attach("weights")))
waiting.start()
while client._session.connection._reader is None: pass
hits, armed = 0, False
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = id  # an interrupt in one of gRPC's finalizers is lost; in a hook of Python code another could hit
for turn in range(60):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00001 * (turn % 100), {every})
        while True:
            try:
                client.attach("weights", timeout=0)
            except membroker.SegmentNotSealed:
                pass
            except membroker.TooMany:
                pass  # calls given up before this one are not answered yet
    except KeyboardInterrupt:
        armed = False
        hits += 1
signal.setitimer(signal.ITIMER_REAL, 0)
made.seal()
waiting.join(120)
say(hits, len(found))
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "60 1"
            ends(process)

    def test_ctrl_c_at_any_moment(self, daemon: Daemon, transport: str) -> None:
        """Interrupts rain on a loop that makes, seals and attaches segments: nothing stays mapped, held or charged."""
        script = """
client = connect()
model = client.register_model("m")
hits, armed = 0, False
model.create_segment("first", 1).close()  # imports what is imported late: no import is to be interrupted
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = id  # an interrupt in one of gRPC's finalizers is lost; in a hook of Python code another could hit
for turn in range(120):
    name = f"s{turn}"
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.0001 * (turn % 40))
        made = model.create_segment(name, 1)
        made.write(0, b"x")
        made.seal()
        with client.attach(name) as attached:
            assert attached.read(0, 1) == b"x"
        made.delete()
        made.close()
        armed = False
    except KeyboardInterrupt:
        armed = False
        hits += 1
    except membroker.TooMany:
        armed = False
    made = attached = None
    gc.collect()
# A seal that was interrupted may come to its end after its caller has gone on.
while left := [one for one in client.segments() if one.state in ("writing", "sealed")]:
    for one in left:
        if one.state == "sealed":
            client.delete_segment(one.name)
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
            assert daemon.sessions()[0].segments == []
            tell(process)
            assert int(heard(process)) < 40
            ends(process)


class TestFork:
    def test_a_child_holds_nothing(self, daemon: Daemon, transport: str) -> None:
        """A data loader forks: its copies of the segments raise, map nothing and end nothing of the parent's."""
        script = """
client = connect()
model = client.register_model("m")
made = model.create_segment("weights", 1)
made.write(0, b"hello")
made.seal()
attached, half = client.attach("weights"), model.create_segment("half", 1)
def refuses(call):
    try:
        call()
    except membroker.ClosedError as error:
        assert "forked" in str(error), error
        return True
child = os.fork()
if not child:
    try:
        for one in (made, attached, half):
            calls = [one.view, one.seal, one.delete, one.index, one.tensors, lambda: one.read(0, 1),
                     lambda: one.write(0, b"x"), lambda: one.address]
            assert all(refuses(call) for call in calls)
            assert one.closed and one.size == PAGE
            one.close()
        calls = [client.segments, lambda: client.attach("weights"), lambda: client.delete_segment("weights"),
                 lambda: model.create_segment("x", 1)]
        assert all(refuses(call) for call in calls)
        assert "membroker-extent" not in open("/proc/self/maps").read()
        del made, attached, half, one, model, client
        gc.collect()
        own = connect()
        assert own.attach("weights").read(0, 5) == b"hello"
        own.close()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert attached.read(0, 5) == made.read(0, 5) == b"hello"
half.write(0, b"on")
half.seal()
say(*(f"{one.state}:{one.sessions}" for one in client.segments()))
wait()
made.delete()
half.delete()
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "sealed:1 sealed:1"
            tell(process)
            ends(process)
        until(lambda: is_settled(daemon) and not daemon.sessions())
