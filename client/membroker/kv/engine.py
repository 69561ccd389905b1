"""The contract between an engine and its elastic cache: the verbs that an engine implements, and the fence it records.

Owns the protocols and the simplest fence, and holds no state. docs/kv.md explains them for authors of engines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Fence(Protocol):
    """A mark in the device's work, which passes when all work before it is over: a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the work is over, without waiting."""
        ...


class Over:
    """The fence of work that is already over, as on a CPU. A pool waits for nothing with it."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


class Engine(Protocol):
    """What an engine does with the blocks of its cache, by number.

    The engine has a free list of blocks, and counts the requests that use each block. The cache calls these verbs in
    the engine's scheduler thread, inside `ElasticCache.attach`, `grow` and `turn`. Between `ElasticCache.rest` and
    `wake` it calls them in a thread of its own. It never calls two at a time. The verbs work on lists and return at
    once. A verb may not wait, call the cache or a broker, or take a lock that the engine holds while it calls the
    cache. An exception propagates to the caller of `grow` or `turn`.
    """

    def need(self) -> int:
        """Return how many blocks the engine would use now if it had them.

        These are the blocks that requests use, the ones that running requests will take in their next steps, and those
        that the waiting requests need.
        """
        ...

    def unused(self, blocks: Sequence[int]) -> Collection[int]:
        """Return those of `blocks` that no request uses. A block whose contents are only cached is unused."""
        ...

    def warmth(self, blocks: Sequence[int]) -> float:
        """Return when cached contents of these unused blocks were last used: larger is later; 0 without any."""
        ...

    def cost(self, blocks: Sequence[int]) -> float:
        """Return how many requests would have to be preempted until no request uses any of these blocks.

        Some of the blocks are in use. A recall takes the pages with the lowest cost first. An engine that preempts its
        youngest requests first counts all requests that it would preempt on the way. An estimate is enough, such as the
        number of used blocks.
        """
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """Take these unused blocks out of the free list, and drop what is cached in them."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Put these blocks into the free list, at its end if it has an order. They have memory now."""
        ...

    def fence(self) -> Fence:
        """Return a fence that passes when every step scheduled so far is over, including steps that have not begun.

        The cache calls it only in the scheduler thread.
        """
        ...

    def preempt(self, blocks: Sequence[int]) -> bool:
        """Preempt the requests that use any of these blocks, now or in the next steps; return False if it cannot.

        The requests wait until there is room, and are computed again. The cache calls this only for a recall. At
        the next turn it calls this again with the blocks that are still in use.
        """
        ...
