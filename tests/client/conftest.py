"""Fixtures of the library's tests: a broker that the test plays, and a lender in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import PlayedBroker, PlayedService, open_sockets, playing
from tests.support.fake_cuda import build_fake_cuda, run_beside_fake_cuda
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.processes import mapped_extents, open_extents, threads_of_library

import membroker
from membroker.pool.pool import VirtualMemoryPool


@pytest.fixture
def broker() -> Iterator[PlayedBroker]:
    with playing() as one:
        yield one


@pytest.fixture
def client(broker: PlayedBroker) -> Iterator[membroker.Client]:
    """A client of the first session, closed without a goodbye by who has not. It leaves no thread and no descriptor."""
    before, threads = open_sockets(), threads_of_library()
    one = broker.connect(timeout=DEADLINE_SECONDS)
    yield one
    broker.die()
    one._session.reconnecting._outages.outage = 0
    one.close()
    until(lambda: threads_of_library() <= threads)
    until(lambda: open_sockets() < before)  # the broker's own is closed, too
    assert mapped_extents() == open_extents() == 0


@pytest.fixture
def service(broker: PlayedBroker) -> Iterator[PlayedService]:
    """The broker's gRPC, which dies and comes back apart from its handoff socket."""
    one = PlayedService(broker.directory)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def lender() -> Iterator[Lender]:
    """A lender that has everything back at the end: by its books, by the device, and on the host."""
    threads = threads_of_library()
    lender = Lender()
    yield lender
    collect()
    lender.settle()
    # A pool that was closed ends with the last call that uses it, which may be that of the thread that borrows ahead.
    until(lambda: "membroker-ahead" not in {thread.name for thread in threads_of_library() - threads})
    lender.settle()  # what that thread had for the last may have left work, too
    assert lender.lent == {}
    assert lender.used_bytes == lender.declared_bytes == sum(lender.driver._pinned.values()) == 0
    assert lender.holdings == set()
    lender.driver.close()
    lender.device.close()  # the kernel gives a user 128 inotify instances, and garbage keeps one for a while


@pytest.fixture(scope="session")
def beside_fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a piece of code beside the fake libraries, on a card of its own, and return what it prints."""
    if os.environ.get("MEMBROKER_REQUIRE_FAKE_CUDA") != "1":
        pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
        pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    libraries = build_fake_cuda(tmp_path_factory.mktemp("fake_cuda"))
    if libraries is None:
        pytest.skip("no C compiler (gcc or cc) to build the fake libcuda with")
    return partial(run_beside_fake_cuda, libraries)


@pytest.fixture
def pool(lender: Lender) -> Iterator[VirtualMemoryPool]:
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool:
        yield pool
