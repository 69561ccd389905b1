"""A lender that asks for memory back, can be asked to sleep, and has all of its memory at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.support.daemons import until
from tests.support.toy_serving import Recalled


class Slept(Recalled):
    """A lender that an operator can ask."""

    def __init__(self) -> None:
        super().__init__()
        self.sleep_callback: object = None

    def on_sleep(self, callback: object) -> None:
        self.sleep_callback = callback


@pytest.fixture
def lender() -> Iterator[Slept]:
    """As the lender of other tests, and with questions of the broker. No thread of a cache is left."""
    lender = Slept()
    yield lender
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith(("membroker-kv", "membroker-sl"))])
    lender.settle()
    assert (lender.lent, lender.used_bytes, lender.recall_callback, lender.sleep_callback) == ({}, 0, None, None)
    lender.driver.close()
    lender.device.close()
