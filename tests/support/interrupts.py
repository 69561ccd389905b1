"""Ctrl-C at a chosen point of a call: wherever Python looks for signals, one point after the other."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def interrupted_everywhere(prepare: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """Run what `prepare` returns with Ctrl-C at its first point, then anew at its second, until it has no more.

    Yields the number of the point after each run, which has raised KeyboardInterrupt. Python looks for signals when a
    function of its own begins, and when one of C has returned.
    """
    point, struck = 0, True
    while struck:
        point, call = point + 1, prepare()
        struck, raised = _interrupted_at(point, call)
        assert raised == struck, f"an interrupt at point {point} was lost"
        if struck:
            yield point


def _interrupted_at(point: int, call: Callable[[], object]) -> tuple[bool, bool]:
    """Return whether the call has so many points, and whether it raised KeyboardInterrupt."""
    left = point

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_globals.get("__name__") not in (__name__, "threading"):
            left -= 1
            if not left:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        result = call()
    except KeyboardInterrupt:
        return True, True
    finally:
        sys.setprofile(None)
    del result  # not before: what a finalizer raises is nobody's
    return left <= 0, False
