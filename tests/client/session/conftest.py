"""A connection of the library whose other end the test plays."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.client.session.taking import Pair
from tests.support.fake_broker import PlayedEnd
from tests.support.processes import descriptors

from membroker.session.connection import Connection
from membroker.session.inventory import Inventory


@pytest.fixture
def options() -> dict[str, Any]:
    """What else a connection is made with: the broker's revision, or calls by gRPC."""
    return {}


@pytest.fixture
def pair(options: dict[str, Any]) -> Iterator[Pair]:
    """A connection and its broker. At the end no descriptor is left over."""
    before = descriptors()
    mine, yours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(mine, "/test/handoff.sock", Inventory(), **options)
    if "grpc" in options:
        connection.start_reader()
    yield connection, PlayedEnd(yours)
    connection.close()
    yours.close()
    assert descriptors() == before
