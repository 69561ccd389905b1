"""Fixtures that every folder may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemons import Daemon, running


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of its own: host driver, 256 MiB, the tenants red and blue."""
    with running() as one:
        yield one


@pytest.fixture(params=["handoff", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each of the two ways to ask."""
    return str(request.param)
