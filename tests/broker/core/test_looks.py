"""What one look at the requests that wait costs, counted in calls: times say little on a busy machine."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from benchmarks.load import core

MOST_CALLS = 3_200


def test_one_look_at_many_requests_that_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """A release is enough for one of 32 requests, each of another model, while 32 models are asked for memory.

    The shares are divided once. The host lends nothing: nobody waits there, so nothing is divided.
    """
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    release = core.crowd()
    sys.setprofile(count)
    try:
        release()
    finally:
        sys.setprofile(None)
    with capsys.disabled():
        print(f"\none look at the requests that wait: {calls.total():,} Python calls")
    assert calls["Shares.divide"] == 1, calls.most_common(20)
    assert calls.total() <= MOST_CALLS, calls.most_common(20)
