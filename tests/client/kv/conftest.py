"""A lender that asks for memory back, and has all of it at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.support.daemons import until
from tests.support.toy_serving import Recalled


@pytest.fixture
def lender() -> Iterator[Recalled]:
    """As the lender of other tests, and with recalls. No thread of a cache is left."""
    lender = Recalled()
    yield lender
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("membroker-kv")])
    lender.settle()
    assert (lender.lent, lender.used_bytes, lender.recall_callback) == ({}, 0, None)
    lender.driver.close()
    lender.device.close()
