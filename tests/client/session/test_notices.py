"""What a client learns without asking: notices, and a broker that starts later."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import PAGE, Caller, PlayedBroker, buffer, is_away, line, model, playing

import membroker
from membroker import Buffer, Client
from membroker.v1 import handoff_pb2 as pb


class TestNotices:
    def test_a_life(self, broker: PlayedBroker, client: Client, caplog: pytest.LogCaptureFixture) -> None:
        """An operator drains the device, thinks better of it, and restarts the daemon: each is told, in order."""
        told: list[membroker.types.Notice] = []
        deadline = Timestamp()
        deadline.FromDatetime(datetime(2030, 1, 2, 3, 4, tzinfo=UTC))

        def fail(notice: membroker.types.Notice) -> None:
            raise ValueError("a user's mistake")

        client.on_notice(fail)
        client.on_notice(told.append)
        broker.notice(draining=pb.Draining(deadline=deadline))
        broker.notice(draining=pb.Draining())
        broker.notice(undrained=pb.Undrained())
        broker.notice(stopping=pb.Stopping())
        until(lambda: len(told) == 4)
        broker.hang_up()
        broker.resume()
        until(lambda: len(told) == 6)
        assert told[:5] == [
            membroker.Draining(datetime(2030, 1, 2, 3, 4, tzinfo=UTC)),
            membroker.Draining(None),
            membroker.Undrained(),
            membroker.Stopping(),
            membroker.Disconnected(),
        ]
        assert isinstance(told[5], membroker.Resumed)
        assert 0 < told[5].outage_seconds < DEADLINE_SECONDS
        broker.notice(undrained=pb.Undrained())
        until(lambda: told[6:] == [membroker.Undrained()])
        assert "a user's mistake" in caplog.text

    def test_a_drain_that_goes_on(self, broker: PlayedBroker, client: Client) -> None:
        """The notice came between connect() and on_notice(): it is told, and after its end no more."""
        line(client).notices.on_notice(lambda _: None)
        broker.notice(draining=pb.Draining())
        until(lambda: line(client).notices.draining)
        told: list[membroker.types.Notice] = []
        client.on_notice(told.append)
        until(lambda: told == [membroker.Draining(None)])
        broker.notice(undrained=pb.Undrained())
        until(lambda: not line(client).notices.draining)
        broker.notice(draining=pb.Draining())
        until(lambda: line(client).notices.draining)
        broker.hang_up()
        broker.resume()
        until(lambda: not is_away(client))
        late: list[membroker.types.Notice] = []
        client.on_notice(late.append)
        broker.notice(undrained=pb.Undrained())
        until(lambda: membroker.Undrained() in late)
        assert membroker.Draining(None) not in late, "a drain of the broker before"

    def test_a_callback_that_exits(
        self, broker: PlayedBroker, client: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A program wants to end when its broker does, and says so in the library's thread: that goes on, and says so.

        Else nothing that is garbage would ever be given back, and no other callback hear anything.
        """
        told: list[membroker.types.Notice] = []
        client.on_notice(lambda _: sys.exit("the user's own end"))
        client.on_notice(told.append)
        broker.notice(stopping=pb.Stopping())
        until(lambda: told == [membroker.Stopping()])
        line(client).notices.later(lambda: sys.exit("what a finalizer left"))
        broker.notice(undrained=pb.Undrained())
        until(lambda: told[1:] == [membroker.Undrained()])
        assert "the user's own end" in caplog.text
        assert "what a finalizer left" in caplog.text

    def test_a_callback_may_call(self, broker: PlayedBroker, client: Client) -> None:
        """It gives back what it can when the broker drains, and borrows when it is back: nothing stands still."""
        one, extent_id = buffer(broker, client)
        bought: list[Buffer] = []

        def react(notice: membroker.types.Notice) -> None:
            if isinstance(notice, membroker.Draining):
                one.close()
            if isinstance(notice, membroker.Disconnected):
                bought.append(model(client).allocate(PAGE))

        client.on_notice(react)
        broker.notice(draining=pb.Draining())
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        broker.hang_up()
        broker.resume()
        broker.lend()
        until(lambda: bought)
        bought.pop().close()


class TestConnect:
    """The first one waits for the other."""

    def test_a_broker_that_starts_later(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A pod's worker is quicker than its daemon, and names no endpoint.

        It meets an empty runtime directory, then no socket, one that hangs up, one that stops, and a broker.
        """
        with playing() as broker, caplog.at_level(logging.INFO, "membroker"):
            broker.die()
            (broker.directory / "handoff.sock").unlink()
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(broker.directory))
            caller = Caller(lambda: membroker.connect(timeout=DEADLINE_SECONDS))
            until(lambda: caplog.messages)
            tenants = broker.directory / "membroker" / "host" / "tenants"
            tenants.mkdir(parents=True)
            (tenants / "default").symlink_to(broker.directory)
            broker.listen()
            broker.accept()
            broker.refuse(1, "STOPPING")
            for _ in range(2):
                broker.hang_up()
                broker.accept()
            broker.welcome()
            client = caller.value()
            assert [message[:34] for message in caplog.messages] == ["waiting up to 120 s for a broker: "]
            broker.die()
            client._session.reconnecting._outages.outage = 0
            client.close()

    @pytest.mark.parametrize("reason", ["ENDPOINT_FORBIDDEN", "UNSUPPORTED_VERSION", "TOO_MANY_SESSIONS"])
    def test_what_waiting_does_not_mend(self, broker: PlayedBroker, reason: str) -> None:
        caller = Caller(lambda: membroker.connect(broker.directory, timeout=3600))
        broker.accept()
        broker.refuse(1, reason)
        assert getattr(caller.end().error, "reason", "") == reason
