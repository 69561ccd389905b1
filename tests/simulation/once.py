"""What the referees look up again and again while they judge one step: the books do not change meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def once_a_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a referee's method returns until the step is judged. Outside of a step nothing is kept."""
    name = method.__qualname__

    @functools.wraps(method)
    def known(self: Any, *args: Any) -> Any:
        found: dict[Any, Any] | None = self._referee.known
        if found is None:
            return method(self, *args)
        key = (name, *args)
        value = found.get(key, found)
        if value is found:
            found[key] = value = method(self, *args)
        return value

    return known
