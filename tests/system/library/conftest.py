"""One daemon for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, Shared

import membroker


@pytest.fixture
def daemon(shared: Shared) -> Iterator[Daemon]:
    """One for the file: its log and counters may be older than the test. A model ends with its last session."""
    with shared.borrowed() as one:
        yield one


@pytest.fixture
def client(daemon: Daemon, transport: str) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint(), transport=transport) as one:
        yield one
