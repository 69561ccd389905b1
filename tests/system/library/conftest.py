"""One daemon for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, Shared


@pytest.fixture
def daemon(shared: Shared) -> Iterator[Daemon]:
    """A daemon that nobody uses: host driver, 256 MiB, the tenants red and blue. A model ends with its last session.

    Other tests of the file may have used it before: its log, its counters and its revision do not begin here.
    """
    with shared.borrowed() as one:
        yield one
