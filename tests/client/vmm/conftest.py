"""A driver of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from membroker.vmm.host.driver import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    driver.abandon()
