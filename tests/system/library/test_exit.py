"""The end of a program, or of its broker: no noise, no hang, and nothing stays lent."""

from __future__ import annotations

import signal
import struct

import pytest
from tests.support.daemons import Daemon, hold_still, running, until
from tests.support.fake_broker import Caller
from tests.support.processes import ends, heard, is_settled, mapped_extents, worker
from tests.support.segments import one_transport
from tests.support.sizes import PAGE

import membroker
from membroker.session import connection, reconnecting


class TestExit:
    def test_exit_without_close(self, daemon: Daemon, transport: str) -> None:
        """A script just ends, with pools, buffers and views in its globals: no noise, no hang, nothing lent."""
        script = """
import atexit
atexit.register(lambda: say("closed:", client.closed))  # runs after the library's own, which comes later
client = connect()
model = client.model("m")
pool = model.pool(page_size=PAGE)
pool.allocate(0, 4 * PAGE)
buffer = model.allocate(1)
view = {keeps}
client.device()
say("end")
"""
        for keeps in ("buffer.view()", "None"):
            with worker(script.format(keeps=keeps), daemon, transport) as process:
                assert heard(process) == "end"
                assert heard(process) == "closed: True"
                ends(process)
            until(lambda: is_settled(daemon) and not daemon.sessions())

    @one_transport
    def test_exit_with_threads_in_a_call(self, daemon: Daemon, transport: str) -> None:
        """Daemon threads still borrow while the interpreter ends."""
        script = """
client = connect()
model = client.model("m")
started = threading.Barrier(4)
def work():
    started.wait()
    while True:
        try:
            model.allocate(1).close()
        except membroker.ClosedError:
            return
for _ in range(3): threading.Thread(target=work, daemon=True).start()
started.wait()
model.allocate(1).close()
say("end")
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "end"
            ends(process)
        until(lambda: is_settled(daemon) and not daemon.sessions())


class TestBrokerGone:
    def test_silent_for_too_long(
        self, transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is stopped while memory goes back, and nobody waits for it any longer: it hears of it when it goes on."""
        with (
            running({"host_capacity": "64MiB"}) as daemon,
            membroker.connect(daemon.endpoint(), transport=transport) as client,
        ):
            model = client.model("m")
            buffer, pool = model.allocate(PAGE), model.pool(page_size=PAGE, virtual_capacity="64MiB")
            pool.allocate(0, PAGE)
            pool.offload(0, PAGE)
            segment = model.create_segment("weights", PAGE)
            segment.seal()
            again = client.attach("m/weights")
            with monkeypatch.context() as impatient, hold_still(daemon):
                impatient.setattr(reconnecting, "CONTROL_SECONDS", 0.2)
                if transport == "grpc":  # a release by gRPC waits for its answer
                    impatient.setattr(client._session.reconnecting, "_answer_within", 0.2)
                buffer.close()
                pool.close()
                segment.close()
            until(lambda: daemon.device().locations[1].lent_bytes == 0)
            again.delete()
            assert daemon.books().lent_bytes == PAGE
            again.close()
            until(lambda: daemon.books().lent_bytes == 0)
        assert not caplog.records, "what comes late is no fault of the broker"

    @one_transport
    @pytest.mark.deep
    def test_stopped_while_a_client_closes(
        self, daemon: Daemon, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits once, for the goodbye, and not for each piece of memory."""
        monkeypatch.setattr(reconnecting, "CONTROL_SECONDS", 3600.0)
        client = membroker.connect(daemon.endpoint(), transport=transport)
        buffers = [client.model("m").allocate(PAGE) for _ in range(3)]
        with hold_still(daemon):
            client.close()
        assert all(buffer.closed for buffer in buffers)
        assert mapped_extents() == 0

    def test_killed_while_threads_wait(self, daemon: Daemon, transport: str) -> None:
        """Every thread that waits for an answer is told; none hangs."""
        client = membroker.connect(daemon.endpoint(), transport=transport, outage=0)
        model = client.model("m")
        model.allocate(1).close()
        daemon.process.send_signal(signal.SIGSTOP)
        callers = [Caller(lambda: model.allocate(1)) for _ in range(4)]
        daemon.kill()
        assert [type(one.end().error) for one in callers] == [membroker.BrokerUnavailable] * 4
        client.close()
        assert mapped_extents() == 0


def test_a_stopped_daemon_with_a_full_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no room for so many releases. They give the connection up, and the resume says what is still held."""
    monkeypatch.setattr(connection, "_PATIENCE", struct.pack("@ll", 0, 200_000))
    pages = 800
    with running({"capacity": pages * PAGE}) as daemon, membroker.connect(daemon.endpoint()) as client:
        pool = client.model("m", virtual_capacity=pages * PAGE).pool(page_size=PAGE)
        pool.allocate(0, pages * PAGE)
        with hold_still(daemon):
            for page in range(pages):
                pool.free(page * PAGE, PAGE)
        until(lambda: daemon.books().lent_bytes == 0)
        pool.allocate(0, PAGE)


def test_a_close_ends_the_session_by_itself(daemon: Daemon) -> None:
    """It waits for the goodbye, and leaves the end to no other thread when the last memory goes."""
    for _ in range(100):
        client = membroker.connect(daemon.endpoint())
        buffer = client.model("m").allocate(PAGE)
        client.close()
        assert buffer.closed
        assert client._session.reconnecting._outages.state == "closed"
