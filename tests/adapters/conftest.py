"""A daemon of each file's tests, and what a test borrows from it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, running, until

import membroker
from membroker.model import Model


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[membroker.Client]:
    """A client; at the end of the test everything that it borrowed has come back."""
    with membroker.connect(str(shared_daemon.endpoint())) as client:
        yield client
    gc.collect()
    until(lambda: shared_daemon.books().lent_bytes == 0)


@pytest.fixture
def model(client: membroker.Client) -> Model:
    return client.register_model("llama", virtual_capacity="1GiB")
