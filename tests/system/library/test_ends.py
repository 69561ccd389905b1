"""The end of a client that fails, or meets a beginning: nothing is forgotten, and nothing is left."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.driver_errors import fail_once
from tests.support.fake_broker import Caller
from tests.support.fake_lender import PAGE
from tests.support.threads import together

import membroker
from membroker import LocalSource, VirtualMemoryPool
from membroker.errors import ClosedError
from membroker.memory.buffer import Buffer
from membroker.vmm.driver import Driver, DriverError, Location
from membroker.vmm.host.driver import HostDriver


def test_a_client_that_could_not_end_all_keeps_its_session_until_it_can(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The books never say that memory is free which is mapped."""
    client = membroker.connect(daemon.endpoint())
    model = client.model("m")
    buffer = model.allocate(3 * PAGE)
    fail_once(model.driver, "unmap")
    client.close()
    assert client.closed
    assert buffer.closed
    assert "could not release" in caplog.text
    assert (daemon.books().lent_bytes, len(daemon.sessions())) == (3 * PAGE, 1)
    client.close()
    until(lambda: (daemon.books().lent_bytes, len(daemon.sessions())) == (0, 0))


def test_what_is_made_while_its_source_closes(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and its addresses are released. The source is a client's, or this process's own."""
    reserved = set[int]()
    reserve, unreserve = HostDriver.reserve, HostDriver.unreserve
    inside, go_on = threading.Event(), threading.Event()

    def slow(self: HostDriver, size: int, alignment: int = 0) -> int:
        address = reserve(self, size, alignment)
        reserved.add(address)
        inside.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return address

    def noted(self: HostDriver, address: int, size: int) -> None:
        unreserve(self, address, size)
        reserved.remove(address)

    monkeypatch.setattr(HostDriver, "reserve", slow)
    monkeypatch.setattr(HostDriver, "unreserve", noted)
    for make in (lambda lender: VirtualMemoryPool(lender, "1GiB", PAGE), lambda lender: Buffer(lender, PAGE)):
        client, source = membroker.connect(daemon.endpoint()), LocalSource("host")
        model = client.model("m", virtual_capacity="1GiB")
        for lender, driver, close in ((model, model.driver, client.close), (source, source.driver, source.close)):
            inside.clear()
            go_on.clear()
            making = Caller(partial(make, lender))
            assert inside.wait(DEADLINE_SECONDS)
            close()
            go_on.set()
            assert isinstance(making.end().error, ClosedError)
            assert not reserved
            until(partial(_is_closed, driver))


def test_a_segment_that_is_mapped_while_its_client_closes(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The session ends with it: its addresses were released under its extents, which failed, and kept both."""
    with membroker.connect(daemon.endpoint()) as writer:
        model = writer.model("m")
        with model.create_segment("weights", PAGE) as segment:
            segment.seal()
        client = membroker.connect(daemon.endpoint())
        set_access = HostDriver.set_access

        def closing(self: HostDriver, *arguments: Any) -> None:
            monkeypatch.undo()
            together([client.close])
            set_access(self, *arguments)

        monkeypatch.setattr(HostDriver, "set_access", closing)
        attached = client.attach("m/weights")
        assert attached.closed
        until(lambda: [one.name for one in daemon.sessions()] == [writer.session])
    assert "could not release" not in caplog.text


def _is_closed(driver: Driver) -> bool:
    try:
        driver.memory(Location.DEVICE)
    except DriverError:
        return True
    return False


def test_a_forked_child_closes_while_another_thread_had_the_lock(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock stays held in the child forever: leaving an inherited `with connect()` takes none."""
    with membroker.connect(daemon.endpoint()) as client:
        with client._session._lock:
            child = os.fork()
            if not child:
                client.close()
                os._exit(7)
        ended = until(lambda: [status for pid, status in [os.waitpid(child, os.WNOHANG)] if pid])
        assert os.waitstatus_to_exitcode(ended[0]) == 7
