"""Offload a pool over a real daemon: its books, its death, and the worker's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.client.pool.offload.pages import digest, fill, sizes
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.fake_lender import PAGE
from tests.support.processes import heard, worker
from tests.support.sizes import MIB

import membroker
from membroker.errors import InvalidRequest


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
            model = client.model("m", virtual_capacity="1GiB", host_limit="40MiB")
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
                with pytest.raises(InvalidRequest, match=" 33554432 "):
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

    def test_a_broker_that_lends_nothing_of_the_host(self) -> None:
        with running() as daemon, membroker.connect(daemon.endpoint()) as client:
            pool = client.model("m").pool(page_size=PAGE)
            pool.allocate(0, PAGE)
            with pytest.raises(membroker.InvalidRequest, match="host_capacity"):
                pool.offload()
            assert sizes(pool) == (1, 0)

    @pytest.mark.parametrize("what", ["pool.offload(progress=told)", "pool.offload(); pool.restore(progress=told)"])
    def test_killed_in_the_middle(self, daemon: Daemon, what: str) -> None:
        """SIGKILL while chunks are on their way: nothing stays charged at either location."""
        script = f"""
from membroker.pool import offload
offload.CHUNK_BYTES = PAGE
client = connect()
pool = client.model('m').pool(page_size=PAGE)
pool.allocate(0, 16 * PAGE)
def told(done, total):
    if done == 4 * PAGE:
        say('half')
        wait()
{what}
"""
        with worker(script, daemon, "handoff") as process:
            assert heard(process) == "half"
            device, host = self.books(daemon)
            assert 0 < device <= 16 * PAGE
            assert host == 32 * MIB
            process.kill()
            process.wait()
            until(lambda: self.books(daemon) == (0, 0))

    @pytest.mark.parametrize("away", [True, False])
    def test_the_broker_dies_meanwhile(self, daemon: Daemon, away: bool, random_bytes: Callable[[int], bytes]) -> None:
        """The call goes on with the next daemon, whose books are right at both locations."""
        with membroker.connect(daemon.endpoint(), timeout=DEADLINE_SECONDS) as client:
            pool = client.model("m").pool(page_size=PAGE)
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

    def test_host_bytes_are_freed_while_no_broker_runs(self, daemon: Daemon) -> None:
        """Nobody waits for it; the next daemon is told what is declared still."""
        with membroker.connect(daemon.endpoint(), timeout=DEADLINE_SECONDS) as client:
            model = client.model("m")
            model.declare("5MiB", "host")
            pool = model.pool(page_size=PAGE)
            pool.allocate(0, 6 * PAGE)
            pool.offload()
            assert self.books(daemon) == (0, 17 * MIB)
            daemon.kill()
            pool.free(0, 3 * PAGE)
            daemon.start_again()
            until(lambda: self.books(daemon) == (0, 11 * MIB))
            pool.restore()
            until(lambda: self.books(daemon) == (6 * MIB, 5 * MIB))
