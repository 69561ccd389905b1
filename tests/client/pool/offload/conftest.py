"""A pool over a lender in this process, and random bytes to fill it with."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.support.fake_lender import PAGE
from tests.support.seeds import chosen_seed

from membroker.pool import offload


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two pages and blocks of three, so that a few MiB are many chunks on their way."""
    monkeypatch.setattr(offload, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 3 * PAGE)


@pytest.fixture
def random_bytes() -> Callable[[int], bytes]:
    """Bytes of a seed that is printed."""
    seed = chosen_seed()
    return random.Random(seed).randbytes
