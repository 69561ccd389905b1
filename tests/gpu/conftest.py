"""What the tests on a GPU share: the GPU itself, and a broker with a client of it in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, find_root, running, until

import membroker
from membroker import Client
from membroker.model import Model
from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of pytest-timeout where it is not installed. There the marker has no effect."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, which is not installed here")


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDriver]:
    """The first GPU as a broker sees it, without a context: its figures are NVML's."""
    try:
        driver = CudaDriver()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU to test on: {error}")
    yield driver
    driver.close()


@pytest.fixture
def worker(gpu: CudaDriver) -> Iterator[CudaDriver]:
    """The first GPU as a worker uses it, with a context."""
    driver = CudaDriver(context=True)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def daemon(gpu: CudaDriver) -> Iterator[Daemon]:
    """A daemon that owns 4 GiB of the GPU."""
    with running({"driver": "cuda", "capacity": "4GiB"}) as daemon:
        yield find_root(daemon)


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    """One client for all: its driver retains the context that the frameworks compute in."""
    with membroker.connect(str(daemon.endpoint())) as client:
        yield client


@pytest.fixture
def model(daemon: Daemon, client: Client) -> Iterator[Model]:
    """A model; at the end of each test all its memory has been released."""
    yield client.model("llama", virtual_capacity="8GiB")
    gc.collect()
    until(lambda: daemon.books().lent_bytes == 0)
