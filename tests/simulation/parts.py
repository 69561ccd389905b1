"""What all referees have: a report, and a memory of what they look up again and again while they judge one step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any


class Counting:
    """Counts what happened. `COUNTED` are the names of its numbers and counters."""

    COUNTED: tuple[str, ...]

    def report(self) -> str:
        """Return what was counted, in a line."""
        told = []
        for name in self.COUNTED:
            found = getattr(self, name)
            each = {f" {how}": count for how, count in found.items()} if isinstance(found, Counter) else {"": found}
            told += [f"{name}{how} {count:,}" for how, count in sorted(each.items())]
        return f"{type(self).__name__}: {', '.join(told) or 'nothing'}"


def once_a_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a referee's method returns until the step is judged. Outside of a step nothing is kept.

    The books do not change meanwhile.
    """
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
