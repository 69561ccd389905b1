"""Ctrl-C at a chosen point of a call: wherever Python looks for signals, in the library and in what it calls."""

from __future__ import annotations

import inspect
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.garbage import without_collections


def interrupted_at(point: int | None, call: Callable[[], object]) -> tuple[int, bool]:
    """Run the call with Ctrl-C at its `point`, counted from 1; return how many it passed, and whether it was struck.

    Python looks for signals when a function of its own begins, and when one of C has returned.
    """
    passed = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal passed
        # At the end of a generator that is garbage, Python loses an interrupt, and that end looks like a call.
        resumed = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        own = frame.f_globals.get("__name__") == __name__
        if event in ("call", "c_return") and not own and not resumed:
            passed += 1
            if passed == point:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    with without_collections():  # a finalizer would be a point, and loses an interrupt
        sys.setprofile(count)
        try:
            result = call()
        except KeyboardInterrupt:
            return passed, True
        finally:
            sys.setprofile(None)
    del result  # not before: what a finalizer raises is lost
    return passed, False


def sampled(seed: int, points: int, count: int) -> list[int]:
    """Return `count` of the points, the first and the last ones among them."""
    ends = {1, 2, points - 1, points}
    drawn = random.Random(seed).sample(range(1, points + 1), min(count, points))
    return sorted(point for point in ends.union(drawn) if 1 <= point <= points)
