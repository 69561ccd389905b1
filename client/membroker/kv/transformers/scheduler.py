"""A scheduler of transformers that lets its cache take a turn at each step, and waits for memory that is on its way.

Owns the decision what to do when requests find no block: wait, or let transformers preempt. transformers by itself
preempts at once, and ends with an error if there is no request to preempt.
"""

from __future__ import annotations

from typing import Any, Final

from ..cache import ElasticCache
from ..sleeper import Sleeper
from .requests import Requests

WAIT_SECONDS: Final = 0.02
"""How long a step waits for memory if it has nothing else to do. Then new requests and a stop are looked at."""


class Elastic:
    """A mixin for the schedulers of transformers: see `elastic`."""

    cache_of_blocks: ElasticCache
    requests: Requests
    sleeper: Sleeper | None
    """While it wakes no block is free, so nothing is scheduled."""
    starved_requests: list[Any]
    wake_up: Any
    """The event for which transformers waits if it has scheduled nothing."""
    _refusals: int | None = None
    """While requests find no block: how often the broker had refused when that began."""

    def schedule_batch(self: Any, token_budget: int, cache_budget: int) -> Any:
        """Schedule a step, with the blocks that have memory now."""
        self.cache_of_blocks.turn()
        if self.sleeper is not None:
            self.sleeper.wake()
        if not self.cache_of_blocks.is_growing:
            self.requests.make_room()
        found = super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
        is_stuck = found[0] is None
        if not is_stuck and not self.starved_requests:
            self._refusals = None
            return found
        if self._is_memory_coming():
            self.starved_requests = []  # no request is preempted
        elif not is_stuck or self.requests.can_make_room():
            return found
        if not is_stuck:
            return found
        self.cache_of_blocks.wait(WAIT_SECONDS)
        self.wake_up.set()
        return [], *found[1:]

    def _is_memory_coming(self) -> bool:
        refusals = self.cache_of_blocks.stats().refusals
        if self._refusals is None:
            self._refusals = refusals
        return refusals == self._refusals and self.cache_of_blocks.is_growing


def elastic(plain: Any, wake_up: Any) -> Any:
    """Return a scheduler like `plain`, with the mixin. Its cache and its requests are set later.

    It keeps no safety margin, because that would be a part of all blocks, those without memory included.
    """
    kind = type(f"Elastic{type(plain).__name__}", (Elastic, type(plain)), {})
    made = kind(plain.cache, 0.0, plain.max_requests_per_batch)
    made.wake_up = wake_up
    return made
