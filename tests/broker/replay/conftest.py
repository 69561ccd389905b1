"""What is recorded is written before a test reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.daemons import DEADLINE_SECONDS

from membrokerd.replay import recorder


@pytest.fixture(autouse=True)
def patient_close() -> Iterator[None]:
    """A close waits for the recorder's thread, however late that has a core; a daemon's waits for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "CLOSE_SECONDS", DEADLINE_SECONDS)
        yield
