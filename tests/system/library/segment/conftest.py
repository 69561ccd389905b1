"""One daemon for the tests of a file about segments. Each test leaves no segment, no hold and no mapping."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.processes import is_settled, mapped_extents, open_extents

import membroker
from membroker.v1 import broker_pb2, resources_pb2


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all tests: each leaves it as it was, which `nothing_is_left` holds it to."""
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left(daemon: Daemon) -> Iterator[None]:
    """Delete what a test has sealed; then nothing is held, charged or mapped."""
    yield
    with daemon.admin_stub() as admin:
        for one in admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments:
            if one.state == resources_pb2.Segment.SEALED:
                admin.DeleteSegment(broker_pb2.DeleteSegmentRequest(name=one.name))
        until(lambda: not daemon.sessions())
        until(lambda: not admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments)
    until(lambda: is_settled(daemon))
    assert (mapped_extents(), open_extents()) == (0, 0)


@pytest.fixture
def model(client: membroker.Client) -> membroker.Model:
    return client.model("m")
