"""A pool over a lender in this process, and random bytes to fill it with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from tests.client.pool.offload.pages import PAGES, pinned_bytes
from tests.support.fake_lender import PAGE, Lender
from tests.support.garbage import collect
from tests.support.seeds import chosen_seed

from membroker.pool import offload
from membroker.pool.pool import VirtualMemoryPool


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two pages and blocks of three, so that a few MiB are many chunks on their way."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 3 * PAGE)


@pytest.fixture
def lender() -> Iterator[Lender]:
    """A lender that has everything back at the end: by its books, by the device, and on the host."""
    lender = Lender()
    yield lender
    collect()
    lender.settle()
    assert (lender.lent, lender.used_bytes, lender.declared_bytes) == ({}, 0, 0)
    assert pinned_bytes(lender) == 0
    assert lender.holdings == set()
    lender.driver.close()
    lender.device.close()


@pytest.fixture
def pool(lender: Lender) -> Iterator[VirtualMemoryPool]:
    with VirtualMemoryPool(lender, PAGES * PAGE, PAGE) as pool:
        yield pool


@pytest.fixture
def random_bytes() -> Callable[[int], bytes]:
    """Bytes of a seed that is printed."""
    seed = chosen_seed()
    return random.Random(seed).randbytes
