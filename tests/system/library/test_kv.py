"""Two engines with elastic caches over one real daemon: what one does not need, the other gets, and no token is wrong.

The engines compute nothing, but each request writes to its blocks and finds its own bytes there. A block without memory
ends the process.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.seeds import chosen_seed
from tests.support.sizes import MIB
from tests.support.toy_engine import Memory, Request, ToyEngine

import membroker
from membroker.kv import ElasticCache, Layout, Strided

pytestmark = pytest.mark.deep

PAGE = 4 * MIB
BLOCK = 7 * MIB // 4
BLOCKS = 256
"""448 MiB of addresses, and the daemon lends 256 MiB."""
GUARANTEES: dict[str, Any] = {
    "tenants": {"red": {"models": {"m": {"guarantee": "96MiB"}}}, "blue": {"models": {"m": {"guarantee": "96MiB"}}}}
}


class Server:
    """An engine in a thread of its own, as a server has it. It rests while it has no request."""

    def __init__(self, cache: ElasticCache, engine: ToyEngine) -> None:
        self.cache, self.engine = cache, engine
        self._arrived: list[Request] = []
        self._changed = threading.Event()
        self._ended = False
        self.error: BaseException | None = None
        self.peak = 0
        """The most bytes that it was charged."""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def add(self, request: Request) -> None:
        self._arrived.append(request)
        self._changed.set()

    def _serve(self) -> None:
        try:
            self.cache.attach(self.engine)
            while not self._ended:
                self._changed.clear()
                while self._arrived:
                    self.cache.wake()
                    self.engine.add(self._arrived.pop(0))
                if self.engine.waiting or self.engine.running:
                    self.cache.grow()
                    self.engine.step()
                    if not self.engine.running:
                        self.cache.wait(0.001)
                    self.cache.turn()
                    self.peak = max(self.peak, lent(self))
                    time.sleep(0.001)  # the GPU computes
                else:
                    self.cache.rest()
                    self._changed.wait()
        except BaseException as error:
            self.error = error
            raise

    def end(self) -> None:
        self._ended = True
        self._changed.set()
        self._thread.join()
        assert self.error is None


@contextmanager
def serving(daemon: Daemon, tenant: str, seed: int) -> Iterator[Server]:
    with (
        membroker.connect(daemon.endpoint(tenant)) as client,
        client.model("m", virtual_capacity=BLOCKS * BLOCK + PAGE).pool(page_size=PAGE) as pool,
    ):
        engine = ToyEngine(BLOCKS, random.Random(seed))
        tensor = Strided(pool.base_address, BLOCK, BLOCK)
        Memory([tensor], engine)
        layout = Layout(pool.base_address, PAGE, BLOCKS, [tensor])
        with ElasticCache(pool, layout) as cache:
            server = Server(cache, engine)
            try:
                yield server
            finally:
                server.end()


@pytest.fixture
def seed() -> int:
    return chosen_seed()


def lent(server: Server) -> int:
    return server.cache.stats().charged_bytes


def test_two_engines_trade_memory(daemon: Daemon, seed: int) -> None:
    """The first takes nearly all; when it rests, the second does, and back. Each burst ends with all requests done."""
    with serving(daemon, "red", seed) as red, serving(daemon, "blue", seed + 1) as blue:
        for turn in range(3):
            for server, other in ((red, blue), (blue, red)):
                before, server.peak = server.engine.finished, 0
                growth, server.engine.growth = server.engine.growth, 0.0
                burst = [Request(30, decode_left=1 << 60) for _ in range(4)]
                for request in burst:
                    server.add(request)
                until(lambda server=server: len(server.engine.running) == 4)
                server.engine.growth = growth
                for request in burst:
                    request.decode_left = 200
                until(lambda server=server, before=before: server.engine.finished == before + 4)
                assert server.peak > 160 * MIB
                until(lambda server=server: lent(server) == PAGE)
                assert other.engine.finished == 4 * (turn + (server is blue))
        assert daemon.books().lent_bytes == 2 * PAGE


def test_a_busy_engine_gives_way_to_a_guarantee(seed: int) -> None:
    """Red has nearly all and work without end. Blue gets its guarantee, and what red preempts for it goes on later."""
    with (
        # However busy this machine is, what is asked back is returned and not late, and a request for it waits.
        running({**GUARANTEES, "recall_seconds": 3600, "guarantee_wait_seconds": 3600}) as daemon,
        serving(daemon, "red", seed) as red,
        serving(daemon, "blue", seed + 1) as blue,
    ):
        red.engine.growth = 0.0
        work = [Request(12, decode_left=1 << 60) for _ in range(12)]
        for request in work:
            red.add(request)
        until(lambda: lent(red) > 200 * MIB and len(red.engine.running) == 11)
        assert red.engine.preempted == 0
        for _ in range(2):
            blue.add(Request(24, decode_left=50))
        until(lambda: blue.engine.finished == 2)
        assert red.engine.preempted
        for request in work:
            request.decode_left = 2
        until(lambda: red.engine.finished == 12)
        assert red.engine.held.isdisjoint(red.engine.used)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_ends_whose_session_is_unknown(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The daemon's state went with its pod. The engine serves what fits, and ends when nothing does."""
    with running() as daemon, serving(daemon, "red", seed) as red:
        red.engine.growth = 0.0
        running_one = Request(30, decode_left=1_000_000)
        red.add(running_one)
        until(lambda: red.engine.running)
        daemon.kill()
        shutil.rmtree(daemon.root / "state")
        daemon.start_again()
        red.add(Request(60, decode_left=2))
        steps = red.engine.clock
        until(lambda: red.engine.clock > steps + 50)
        assert red.error is None
        running_one.decode_left = 1
        until(lambda: red.error)
        assert isinstance(red.error, membroker.ClosedError)
        assert "does not know this session" in caplog.text
        red.error = None
