"""Tests that are stories in a world: what plays one gives it its first argument, and fixtures give it the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def played_by(play: Callable[..., Any], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function, mostly a coroutine, a test: `play` is called with it and these options, and gives it a world."""

    def decorate(story: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(story)
        _, *fixtures = signature.parameters.values()

        @functools.wraps(story)
        def test(**given: Any) -> None:
            play(functools.partial(story, **given), **options)

        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate
