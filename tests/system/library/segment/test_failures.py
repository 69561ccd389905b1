"""Each way in which a segment's memory cannot be mapped, read or written, and threads that share a segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.driver_errors import named
from tests.support.fake_broker import Caller
from tests.support.processes import is_settled, mapped_extents, open_extents
from tests.support.segments import SickDriver, holders, one_transport, sealed
from tests.support.sizes import GIB, PAGE
from tests.support.threads import together

import membroker

LARGE = 2 * GIB + PAGE
"""Three extents in two packets: 1 GiB twice, and the rest."""

FAILURES: dict[str, dict[str, Any]] = {
    "import in the first packet": {"imports_left": 0},
    "import in the second": {"imports_left": 2},
    "reserve": {"reserves": False},
    "map": {"maps_left": 1},
    "set_access": {"lost": True},
}


@pytest.fixture(scope="module")
def large_daemon() -> Iterator[Daemon]:
    """A daemon with room for large segments, which are never written to."""
    with running({"capacity": "8GiB"}) as one:
        yield one


class TestFailures:
    @pytest.mark.parametrize("what", FAILURES)
    @one_transport
    def test_half_way(self, large_daemon: Daemon, transport: str, what: str) -> None:
        """A create and an attach that fail at any step hold nothing afterwards: here, on the device, in the books."""
        daemon, driver = large_daemon, SickDriver()
        well = dict(vars(driver))
        with membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client:
            model = client.model("m")
            sealed(model, size=LARGE)
            client.attach("weights").close()
            for call in (lambda: client.attach("weights"), lambda: model.create_segment("other", LARGE)):
                vars(driver).update(FAILURES[what])
                with pytest.raises(membroker.DeviceFailure):
                    call()
                vars(driver).update({key: well[key] for key in FAILURES[what]})
                until(lambda: holders(client) == {"weights": 0})
                assert (mapped_extents(), open_extents()) == (0, 0)
                until(lambda: daemon.books().lent_bytes == LARGE)
                call().close()
            client.delete_segment("weights")
        until(lambda: is_settled(daemon) and not daemon.sessions())

    @one_transport
    def test_the_device_is_lost_before_the_seal(self, daemon: Daemon, transport: str) -> None:
        """The work that fills the segment has failed on the GPU: it is not sealed."""
        driver = SickDriver()
        with membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client:
            segment = client.model("m").create_segment("weights", 1)
            driver.lost = True
            with pytest.raises(membroker.DeviceFailure, check=named("CUDA_ERROR_ILLEGAL_ADDRESS")):
                segment.seal()
            driver.lost = False
            assert segment.writable
            assert [one.state for one in client.segments()] == ["writing"]
            segment.view()[:2] = b"ok"
            segment.seal()
            assert segment.read(0, 2) == b"ok"

    def test_the_broker_is_gone(self, transport: str) -> None:
        """The daemon dies: weights stay readable, one being written can be written on, and closing raises nothing."""
        with running() as daemon:
            client = membroker.connect(daemon.endpoint(), transport=transport, outage=0)
            model = client.model("m")
            sealed(model, data=b"hello")
            attached, written = client.attach("weights"), model.create_segment("other", 1)
            waiting = Caller(lambda: client.attach("other"))
            daemon.kill()
            assert isinstance(waiting.end().error, membroker.BrokerUnavailable)
            assert attached.read(0, 5) == b"hello"
            written.write(0, b"on")
            for call in (written.seal, attached.delete, lambda: client.attach("weights"), client.segments):
                with pytest.raises(membroker.BrokerUnavailable):
                    call()
            assert written.writable
            written.write(0, b"and on")
            attached.close()
            written.close()
            assert mapped_extents() == 0
            client.close()


@one_transport
def test_threads_share_a_segment(client: membroker.Client) -> None:
    """Eight threads of an engine attach, read and close the same weights again and again, and one deletes them."""

    def work() -> None:
        for _ in range(10):
            with client.attach("weights") as segment:
                assert segment.read(PAGE - 4, 4) == b"last"

    sealed(client.model("m"), data=bytes(PAGE - 4) + b"last")
    together([work] * 8)
    until(lambda: holders(client) == {"weights": 0})
