"""Ends that fail, that are interrupted, and that meet a beginning: nothing is forgotten, and nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.driver_errors import named
from tests.support.fake_lender import PAGE
from tests.support.garbage import collect
from tests.support.sizes import MIB
from tests.support.threads import together

import membroker
from membroker import LocalSource, VirtualMemoryPool
from membroker.errors import ClosedError, DeviceFailure
from membroker.memory.buffer import Buffer
from membroker.memory.local_source import PACKET
from membroker.vmm.driver import Driver, DriverError, Location
from membroker.vmm.host.driver import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    """A device of the test's own, which has everything back at the end."""
    driver = HostDriver()
    yield driver
    collect()
    until(lambda: used(driver) == 0)
    driver.close()


def used(driver: Driver) -> int:
    memory = driver.memory(Location.DEVICE)
    assert memory is not None
    return memory.used


def fail_once(driver: Driver, call: str, number: int = 1) -> None:
    """Let the driver refuse one call, the `number`th from now on, as a GPU does while a graph is captured."""
    real, left = getattr(driver, call), number

    def flaky(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise DriverError(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)
        return real(*arguments, **options)

    setattr(driver, call, flaky)


@pytest.mark.parametrize(
    ("call", "number", "left"), [("synchronize", 1, 8), ("unmap", 1, 8), ("unmap", 2, 6), ("unreserve", 1, 0)]
)
def test_what_could_not_be_given_back_is_held_until_it_is_closed_again(
    driver: HostDriver, call: str, number: int, left: int
) -> None:
    """A pool of two runs, of 2 and 6 MiB: what is unmapped is credited, and the rest is not forgotten."""
    with LocalSource(driver) as source:
        pool = VirtualMemoryPool(source, 64 * MIB, PAGE)
        pool.allocate(0, 2 * MIB)
        pool.allocate(16 * MIB, 6 * MIB)
        fail_once(driver, call, number)
        with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
            pool.close()
        assert pool.closed
        assert source.physical_usage_bytes == used(driver) == left * MIB
        with pytest.raises(ClosedError):
            pool.allocate(0, PAGE)
        pool.close()
        assert source.physical_usage_bytes == used(driver) == 0


def test_what_an_allocation_could_not_take_back_is_spare(driver: HostDriver) -> None:
    """Memory comes for the first packet and not for the second: it is charged, can be used, and goes back."""
    with LocalSource(driver) as source:
        with VirtualMemoryPool(source, 2 * PACKET * PAGE, PAGE) as pool:
            fail_once(driver, "lend", 2)
            for _ in range(2):  # it is tried again
                fail_once(driver, "unmap")
            with pytest.raises(DeviceFailure, check=named("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")):
                pool.allocate(0, (PACKET + 1) * PAGE)
            assert source.physical_usage_bytes == used(driver) == pool.physical_usage_bytes == PACKET * PAGE
            pool.allocate(0, PACKET * PAGE)
        assert source.physical_usage_bytes == used(driver) == 0


def test_what_garbage_could_not_give_back_goes_with_the_next_that_can(
    driver: HostDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has it any more to close it again."""
    with LocalSource(driver) as source:
        buffer, other = Buffer(source, PAGE), Buffer(source, 2 * PAGE)
        fail_once(driver, "synchronize")
        del buffer
        until(lambda: "CAPTURE" in caplog.text)
        assert source.physical_usage_bytes == used(driver) == 3 * PAGE
        other.close()
        until(lambda: source.physical_usage_bytes == used(driver) == 0)


def test_a_source_that_could_not_end_all_is_closed_again(driver: HostDriver, caplog: pytest.LogCaptureFixture) -> None:
    source = LocalSource(driver)
    buffers = [Buffer(source, PAGE) for _ in range(3)]
    fail_once(driver, "unmap")
    source.close()
    assert "could not release" in caplog.text
    assert all(buffer.closed for buffer in buffers)
    until(lambda: used(driver) in (0, PAGE))  # the next one's end may have taken it along
    source.close()
    until(lambda: used(driver) == 0)


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


@pytest.mark.parametrize("make", ["pool", "buffer"])
@pytest.mark.parametrize("of", ["client", "source"])
def test_what_is_made_while_its_source_closes(
    daemon: Daemon, make: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, and its addresses are released."""
    reserved: list[tuple[int, int]] = []
    if of == "client":
        client = membroker.connect(daemon.endpoint())
        model = client.model("m", virtual_capacity="1GiB")
        lender: Any = model
        ends, driver = client.close, model.driver
    else:
        lender = source = LocalSource("host")
        ends, driver = source.close, source.driver
    reserve, unreserve = HostDriver.reserve, HostDriver.unreserve
    inside, go_on = threading.Event(), threading.Event()

    def slow(self: HostDriver, size: int, alignment: int = 0) -> int:
        address = reserve(self, size, alignment)
        reserved.append((address, size))
        inside.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return address

    def noted(self: HostDriver, address: int, size: int) -> None:
        unreserve(self, address, size)
        reserved.remove((address, size))

    monkeypatch.setattr(HostDriver, "reserve", slow)
    monkeypatch.setattr(HostDriver, "unreserve", noted)

    def begin() -> None:
        with pytest.raises(ClosedError):
            VirtualMemoryPool(lender, "1GiB", PAGE) if make == "pool" else Buffer(lender, PAGE)

    def end() -> None:
        assert inside.wait(DEADLINE_SECONDS)
        ends()
        go_on.set()

    together([begin, end])
    assert reserved == []
    until(lambda: _is_closed(driver))


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
