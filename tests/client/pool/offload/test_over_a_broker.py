"""Offload a pool over a real daemon: its books, its death, and the worker's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.client.pool.offload.pages import digest, fill, sizes
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.fake_lender import PAGE
from tests.support.processes import ends, heard, worker
from tests.support.sizes import MIB

import membroker
from membroker.errors import (
    InvalidRequest,
)


class TestOverABroker:
    @pytest.fixture
    def daemon(self) -> Iterator[Daemon]:
        with running({"host_capacity": "64MiB", "settle_seconds": 1.0}) as one:
            yield one

    def books(self, daemon: Daemon) -> tuple[int, int]:
        """Bytes charged at the device and at the host."""
        device, host = daemon.device().locations
        return device.lent_bytes + device.releasing_bytes, host.lent_bytes + host.releasing_bytes

    def test_the_books(self, daemon: Daemon, transport: str, random_bytes: Callable[[int], bytes]) -> None:
        """Both charges move in opposite directions, and what the user declares himself is counted beside."""
        with membroker.connect(daemon.endpoint(), transport=transport) as client:
            model = client.register_model("m", virtual_capacity="1GiB", host_limit="40MiB")
            model.declare("3MiB", "host")
            with model.pool(page_size=PAGE) as pool:
                pool.allocate(0, 16 * PAGE)
                fill(pool, 0, random_bytes(16 * PAGE))
                before = digest(pool, *range(0, 16 * PAGE, PAGE))
                assert pool.offload() == 16 * PAGE
                assert self.books(daemon) == (0, 35 * MIB)
                model.declare("8MiB", "host")
                assert model.stats().books["host"].declared_bytes == 40 * MIB
                with pytest.raises(membroker.OutOfMemory):
                    model.declare("9MiB", "host")
                with pytest.raises(InvalidRequest, match="33554432 that are declared already"):
                    model.declare((1 << 63) - 1, "host")
                assert pool.restore() == 16 * PAGE
                assert self.books(daemon) == (32 * MIB, 8 * MIB)
                assert digest(pool, *range(0, 16 * PAGE, PAGE)) == before
                pool.allocate(16 * PAGE, PAGE)
                with pytest.raises(membroker.OutOfMemory) as refused:
                    pool.offload()
                assert (refused.value.level, refused.value.available_bytes) == ("model", 32 * MIB)
                assert sizes(pool) == (17, 0)
                model.declare(0, "host")
                pool.offload()
            assert self.books(daemon) == (0, 0)

    def test_no_room_to_come_back(self, daemon: Daemon, transport: str) -> None:
        """Another tenant took the room: the broker's numbers come beside the pool's."""
        with (
            membroker.connect(daemon.endpoint(), transport=transport) as client,
            membroker.connect(daemon.endpoint("blue")) as other,
        ):
            pool = client.register_model("m").pool(page_size=PAGE)
            pool.allocate(0, 16 * PAGE)
            pool.offload()
            with other.register_model("m").allocate("234MiB"):
                with pytest.raises(membroker.OutOfMemory) as refused:
                    pool.restore()
                assert refused.value.level == "capacity"
                assert refused.value.metadata["restored_bytes"] == str(10 * PAGE)
                assert sizes(pool) == (10, 6)
            assert pool.restore() == 6 * PAGE

    def test_a_broker_that_lends_nothing_of_the_host(self, transport: str) -> None:
        with running() as daemon, membroker.connect(daemon.endpoint(), transport=transport) as client:
            pool = client.register_model("m").pool(page_size=PAGE)
            pool.allocate(0, PAGE)
            with pytest.raises(membroker.InvalidRequest, match="host_capacity"):
                pool.offload()
            assert sizes(pool) == (1, 0)

    @pytest.mark.parametrize("what", ["pool.offload(progress=told)", "pool.offload(); pool.restore(progress=told)"])
    def test_killed_in_the_middle(self, daemon: Daemon, transport: str, what: str) -> None:
        """SIGKILL while chunks are on their way: nothing stays charged at either location."""
        script = f"""
from membroker.pool import offload
offload.CHUNK_BYTES = PAGE
client = connect()
pool = client.register_model('m').pool(page_size=PAGE)
pool.allocate(0, 16 * PAGE)
def told(done, total):
    if done == 4 * PAGE:
        say('half')
        wait()
{what}
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "half"
            device, host = self.books(daemon)
            assert 0 < device <= 16 * PAGE
            assert host == 32 * MIB
            process.kill()
            process.wait()
            until(lambda: self.books(daemon) == (0, 0))

    @pytest.mark.parametrize("away", [True, False])
    def test_the_broker_dies_meanwhile(
        self, daemon: Daemon, transport: str, away: bool, random_bytes: Callable[[int], bytes]
    ) -> None:
        """The call goes on with the next daemon, whose books are right at both locations."""
        with membroker.connect(daemon.endpoint(), transport=transport, timeout=DEADLINE_SECONDS) as client:
            pool = client.register_model("m").pool(page_size=PAGE)
            pool.allocate(0, 12 * PAGE)
            fill(pool, 0, random_bytes(12 * PAGE))
            every = range(0, 12 * PAGE, PAGE)
            before = digest(pool, *every)
            if not away:
                pool.offload()

            def die(done: int, total: int) -> None:
                if done == 4 * PAGE:
                    daemon.kill()
                    daemon.start_again()

            assert (pool.offload(progress=die) if away else pool.restore(progress=die)) == 12 * PAGE
            until(lambda: self.books(daemon) == ((0, 24 * MIB) if away else (24 * MIB, 0)))
            pool.restore()
            assert digest(pool, *every) == before
            pool.close()
            until(lambda: self.books(daemon) == (0, 0))

    def test_host_bytes_are_freed_while_no_broker_runs(self, daemon: Daemon, transport: str) -> None:
        """Nobody waits for it; the next daemon is told what is declared still."""
        with membroker.connect(daemon.endpoint(), transport=transport, timeout=DEADLINE_SECONDS) as client:
            model = client.register_model("m")
            model.declare("5MiB", "host")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 6 * PAGE)
            pool.offload()
            assert self.books(daemon) == (0, 17 * MIB)
            daemon.kill()
            pool.deallocate(0, 3 * PAGE)
            daemon.start_again()
            until(lambda: self.books(daemon) == (0, 11 * MIB))
            pool.restore()
            until(lambda: self.books(daemon) == (6 * MIB, 5 * MIB))


def test_a_forked_child_has_none_of_it(daemon: Daemon, transport: str) -> None:
    """It can neither restore nor hold its parent's host bytes; the parent goes on."""
    del daemon
    script = """
client = connect()
pool = client.register_model('m').pool(page_size=PAGE)
pool.allocate(0, 4 * PAGE)
pool.view(0, 5)[:] = b'first'
pool.offload()
child = os.fork()
if not child:
    try:
        pool.restore()
    except membroker.ClosedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
pool.restore()
assert bytes(pool.view(0, 5)) == b'first'
client.close()
"""
    with running({"host_capacity": "64MiB"}) as one, worker(script, one, transport) as process:
        ends(process)
