"""A device of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import until
from tests.support.fake_lender import PAGE, FlakyDriver
from tests.support.garbage import collect

from membroker.vmm import Location


@pytest.fixture
def driver() -> Iterator[FlakyDriver]:
    """It has everything back at the end."""
    driver = FlakyDriver()
    driver.release(driver.create(PAGE))  # it opens descriptors of its own for the first
    yield driver
    collect()
    until(lambda: driver.memory(Location.DEVICE).used == driver.memory(Location.HOST).used == 0)
    driver.close()
