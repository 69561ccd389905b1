"""What a client does while there is no broker: its calls wait, it can close, or its session is lost."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from itertools import repeat

import pytest
from tests.client.session.taking import enter, take_leave
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import PAGE, TOKEN, Caller, PlayedBroker, buffer, is_away, line, model
from tests.support.processes import ends, heard, is_waiting, mapped_extents, tell, worker

import membroker
from membroker import Client
from membroker.session import outages
from membroker.session.connection import Connection
from membroker.session.reconnecting import ReconnectingConnection


class TestOutage:
    """Calls wait, and the session tries, whatever stands in the way."""

    def test_a_call_waits_for_so_long(self, broker: PlayedBroker, client: Client) -> None:
        """Then it raises, with what was tried; the session goes on when somebody is there at last."""
        one, extent_id = buffer(broker, client)
        line(client)._outages.outage = 0.5
        broker.die()
        until(lambda: "nobody listens" in line(client)._outages.trouble)
        calls: list[Callable[[], object]] = [lambda: model(client).allocate(PAGE), lambda: model(client).declare(1)]
        for call in calls:
            with pytest.raises(membroker.BrokerUnavailable, match=r"(?=.*nobody listens)`membrokerd`.* 0\.5 s"):
                call()
        line(client)._outages.outage = DEADLINE_SECONDS
        broker.listen()
        assert list(broker.resume().extent_ids) == [extent_id]
        another, _ = buffer(broker, client)
        one.close()
        another.close()

    def test_nobody_calls(self, broker: PlayedBroker, client: Client, caplog: pytest.LogCaptureFixture) -> None:
        """A worker computes for hours: its session is taken up again all the same, with two lines in the log."""
        one, extent_id = buffer(broker, client)
        with caplog.at_level(logging.INFO, "membroker"):
            broker.hang_up()
            assert list(broker.resume().extent_ids) == [extent_id]
            until(lambda: len(caplog.messages) >= 2)
        assert [message.partition("/")[0] for message in caplog.messages] == ["the broker at "] * 2
        assert "is gone: mapped memory stays valid, reconnecting" in caplog.messages[0]
        assert "is back after" in caplog.messages[1]
        one.view()[:1] = b"x"

    def test_a_violation_is_heard_by_who_can_not_write(self, broker: PlayedBroker, client: Client) -> None:
        """The broker has closed, with frames unread: what it said before is behind the error of the socket."""
        one, _ = buffer(broker, client)
        broker.refuse(0, "PROTOCOL_VIOLATION")
        broker.end.close()  # its notices stay open, so that nobody else reads the end
        for call in (one.close, lambda: model(client).allocate(PAGE)):
            with pytest.raises(membroker.ProtocolError):
                call()
        assert line(client)._outages.state == "connected"

    @pytest.mark.parametrize("started", [0, 2])
    def test_ctrl_c_as_the_loss_is_found(
        self, broker: PlayedBroker, client: Client, monkeypatch: pytest.MonkeyPatch, started: int
    ) -> None:
        """It comes before the thread that reconnects is started, or so late that two are: one of them reconnects."""
        one, extent_id = buffer(broker, client)
        begin, struck = ReconnectingConnection._begin_to_reconnect, []

        def strike(self: ReconnectingConnection) -> None:
            struck.append(self)
            for _ in range(started if len(struck) == 1 else 1):
                begin(self)
            if len(struck) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(ReconnectingConnection, "_begin_to_reconnect", strike)
        monkeypatch.setattr(outages, "pauses", lambda: repeat(0.0))  # two would come at the same time
        broker.end.close()  # its notices stay open: it is this thread that finds the end
        with pytest.raises(KeyboardInterrupt):
            model(client).allocate(PAGE)
        until(broker.is_knocked_at)
        broker.hang_up()
        assert list(broker.resume().extent_ids) == [extent_id]
        until(lambda: all(thread.name != "membroker-reconnect" for thread in threading.enumerate()))
        assert not broker.is_knocked_at()
        one.close()

    def test_ctrl_c_while_the_last_words_are_read(
        self, broker: PlayedBroker, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It ends the reading, which is nobody's then: the thread that reconnects does not wait for it."""
        one, _ = buffer(broker, client)
        lost, drain, struck = line(client).connection, Connection._drain, []

        def strike(self: Connection) -> None:
            struck.append(self)
            if len(struck) == 1:
                raise KeyboardInterrupt
            drain(self)

        monkeypatch.setattr(Connection, "_drain", strike)
        broker.end.close()  # its notices stay open: it is this thread that finds the end
        with pytest.raises(KeyboardInterrupt):
            one.close()
        assert lost._reader is None
        until(broker.is_knocked_at)
        broker.hang_up()
        assert not broker.resume().extent_ids
        until(lambda: not is_away(client))  # or the end would wait for a broker

    def test_ctrl_c_while_a_call_waits(self, broker: PlayedBroker) -> None:
        """A person does not want to wait: the call raises, nothing stays mapped, and the session goes on later."""
        script = """
import logging
logging.disable()
from membroker.model import Model
from membroker.v1 import resources_pb2
client = connect()
pool = Model(client._session, resources_pb2.Model(name="m", virtual_capacity_bytes=1 << 30)).pool(page_size=PAGE)
say("connected")
try:
    pool.allocate(0, 3 * PAGE)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert "membroker-extent" not in open("/proc/self/maps").read()
say("interrupted")
pool.allocate(0, PAGE)
say("allocated")
client.close()
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            enter(broker, process)
            request_id = broker.hear("allocate").request_id
            broker.deliver_pages(request_id, 2, parts=2)
            broker.hear("ack")
            broker.die()
            until(lambda: mapped_extents(process.pid) == 0)
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            assert heard(process) == "interrupted"
            broker.listen()
            assert not broker.resume().extent_ids
            broker.lend(1)
            assert heard(process) == "allocated"
            broker.hear("release")
            take_leave(broker)
            ends(process)

    def test_fork_during_an_outage(self, broker: PlayedBroker) -> None:
        """A data loader is forked while the library reconnects: it has none of it, and the parent's session goes on."""
        script = """
import logging
logging.disable()
from membroker.model import Model
from membroker.v1 import resources_pb2
client = connect()
model = Model(client._session, resources_pb2.Model(name="m", virtual_capacity_bytes=1 << 30))
buffer = model.allocate(1)
say("lent")
wait()
while not client._session.connection.calls.is_lost or not client._session.reconnecting._outages.trouble: pass
child = os.fork()
if not child:
    signal.alarm(120)
    assert threading.active_count() == 1
    for call in (lambda: model.allocate(1), lambda: model.declare(1), buffer.view):
        try:
            call()
        except membroker.ClosedError:
            continue
        os._exit(1)
    buffer.close(); client.close()
    assert "membroker-extent" not in open("/proc/self/maps").read()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say("forked")
another = model.allocate(1)
say("lent again")
client.close()
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            broker.accept()
            broker.welcome()
            (extent_id,) = broker.lend()
            assert heard(process) == "lent"
            broker.die()
            tell(process)
            assert heard(process) == "forked"
            broker.listen()
            assert list(broker.resume().extent_ids) == [extent_id]
            broker.lend()
            assert heard(process) == "lent again"
            assert {broker.hear("release").WhichOneof("kind") for _ in range(2)} == {"release"}
            take_leave(broker)
            ends(process)


class TestClose:
    """Whatever the broker does, closing unmaps and raises nothing."""

    def test_the_broker_is_back_in_time(self, broker: PlayedBroker, client: Client) -> None:
        """A service shuts down during an upgrade: the new daemon hears that it left."""
        buffer(broker, client)
        broker.die()
        until(lambda: is_away(client))
        caller = Caller(client.close)
        until(lambda: mapped_extents() == len(line(client).inventory.held().extents) == 0)  # unmapped, then forgotten
        broker.listen()
        assert not broker.resume().extent_ids
        take_leave(broker)
        caller.value()

    def test_the_broker_is_not_back(self, broker: PlayedBroker, client: Client) -> None:
        """And a call of another thread that waits for it is told that the client is closed."""
        one, _ = buffer(broker, client)
        broker.die()
        waiting = Caller(lambda: model(client).allocate(PAGE))
        until(lambda: is_away(client) and line(client)._changed.waiting)
        line(client)._timeout = 0.01
        client.close()
        assert isinstance(waiting.end().error, membroker.ClosedError)
        assert one.closed
        assert mapped_extents() == 0
        with pytest.raises(membroker.ClosedError):
            model(client).allocate(PAGE)

    def test_a_view_outlives_the_outage(self, broker: PlayedBroker, client: Client) -> None:
        """A closed client's last array lives on over a restart: the session is there to end with it."""
        one, extent_id = buffer(broker, client)
        view = one.view()
        client.close()
        broker.hang_up()
        assert list(broker.resume().extent_ids) == [extent_id]
        until(lambda: not is_away(client))
        view[:1] = b"x"
        view.release()
        del view
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        take_leave(broker)

    def test_at_exit(self, broker: PlayedBroker) -> None:
        """A script ends while the broker is away: at once, and without a word. Its end is its goodbye."""
        script = """
import logging, time
logging.disable()
client = connect(timeout=24 * 3600, outage=24 * 3600)
say("connected")
wait()
while not client._session.connection.calls.is_lost: pass
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            enter(broker, process)
            broker.die()
            tell(process)
            assert process.wait(DEADLINE_SECONDS) == 0, "it waited for a broker to say goodbye to"
            ends(process)


class TestSessionLost:
    """The broker that is there now has never heard of the session."""

    @pytest.mark.parametrize("old", [False, True])
    def test_the_token_is_rejected(self, broker: PlayedBroker, client: Client, old: bool) -> None:
        """Its state was wiped, or it is of a version that opens another session: calls say so, closing still works."""
        told: list[membroker.Notice] = []
        client.on_notice(told.append)
        one, _ = buffer(broker, client)
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, PAGE))
        broker.hear("allocate")
        broker.hang_up()
        assert broker.accept().resume_token == TOKEN
        if old:
            broker.welcome()
        else:
            broker.refuse(1, "TOKEN_REJECTED")
        assert isinstance(caller.end().error, membroker.SessionLost)
        for call in (lambda: model(client).allocate(PAGE), lambda: pool.allocate(0, 1), lambda: client.attach("m/w")):
            with pytest.raises(membroker.SessionLost, match=r"connect\(\)"):
                call()
        one.view()[:5] = b"hello"
        until(lambda: told == [membroker.Disconnected(), membroker.Forgotten()])
        one.close()
        pool.close()
        assert mapped_extents() == 0
        client.close()
