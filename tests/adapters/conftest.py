"""What a test borrows from the daemon of its file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon
from tests.support.garbage import collect

import membroker
from membroker.model import Model


@pytest.fixture
def client(daemon: Daemon) -> Iterator[membroker.Client]:
    """A client. That all it borrowed comes back is checked by the daemon that the file's tests share."""
    with membroker.connect(daemon.endpoint()) as client:
        yield client
    collect()


@pytest.fixture
def model(client: membroker.Client) -> Model:
    return client.model("llama", virtual_capacity="1GiB")
