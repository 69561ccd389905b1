"""What some work costs, counted in calls or lines: times say little on a busy machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.garbage import without_collections


def calls_of(work: Callable[[], Any]) -> Counter[str]:
    """Return how often each function of Python is called by some work."""
    calls = Counter[str]()

    def count_calls(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    with without_collections():
        sys.setprofile(count_calls)
        try:
            work()
        finally:
            sys.setprofile(None)
    return calls


def lines_of(work: Callable[[], Any]) -> Counter[str]:
    """Return how many lines each function of Python runs in some work: also loops that call nothing count."""
    lines = Counter[str]()

    def count(frame: FrameType, what: str, _: Any) -> Any:
        lines[frame.f_code.co_qualname] += what == "line"
        return count

    before = sys.gettrace()
    with without_collections():
        sys.settrace(count)
        try:
            work()
        finally:
            sys.settrace(before)
    return lines
