"""Ctrl-C in a program that has segments; `tests/client/test_ctrl_c_anywhere.py` strikes each of their calls."""

from __future__ import annotations

import signal

import pytest
from tests.support.daemons import Daemon, until
from tests.support.processes import ends, heard, is_settled, is_waiting, tell, worker
from tests.support.segments import holders, one_transport
from tests.support.sizes import PAGE

import membroker

pytestmark = pytest.mark.deep

RAIN = """
armed = False
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = id  # an interrupt in one of gRPC's finalizers is lost; in a hook of Python code another could hit
def rain(work, every):
    global armed
    hits = 0
    for turn in range(60):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00002 * turn, every)
            while True:
                work()
        except KeyboardInterrupt:
            armed = False
            hits += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return hits
"""
"""Interrupts a call again and again, at other moments."""


class TestInterrupt:
    def test_ctrl_c_while_it_waits(self, daemon: Daemon, transport: str) -> None:
        """The program goes on at once. Sealed hours later, the weights are not held for it."""
        script = """
client = connect()
model = client.model("m")
try:
    say("attaches")
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
            segment = writer.model("m").create_segment("weights", 1)
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

    @pytest.mark.parametrize("transport", ["grpc"])
    def test_ctrl_c_in_calls_by_grpc(self, daemon: Daemon, transport: str) -> None:
        """Interrupts rain on a program that reads the books; none may leave gRPC's channel locked for other threads."""
        script = """
client = connect()
model = client.model("m")
client.segments()  # its gRPC channel stays open from here on
def work():
    client.segments()
    model.declare(0)
hits = rain(work, 0.005)
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
        with worker(RAIN + script, daemon, transport) as process:
            assert heard(process) == "60 1"
            ends(process)

    @one_transport
    @pytest.mark.parametrize("every", [0.005, 0.0002])  # the second: a Ctrl-C that comes while the first is handled
    def test_ctrl_c_while_another_thread_reads(self, daemon: Daemon, transport: str, every: float) -> None:
        """A thread in an attach reads the socket for all. It is served as if nothing had been."""
        script = f"""
client = connect()
model = client.model("m")
made = model.create_segment("weights", 1)
found = []
waiting = threading.Thread(target=lambda: found.append(client.attach("weights")))
waiting.start()
while client._session.connection._reader is None: pass
def work():
    try:
        client.attach("weights", timeout=0)
    except (membroker.SegmentNotSealed, membroker.TooMany):
        pass  # the second: calls given up before this one are not answered yet
hits = rain(work, {every})
made.seal()
waiting.join(120)
say(hits, len(found))
client.close()
"""
        with worker(RAIN + script, daemon, transport) as process:
            assert heard(process) == "60 1"
            ends(process)
