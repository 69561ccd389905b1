"""The contract between an engine and its elastic cache: the verbs that an engine implements, and the fence it records.

Owns the protocols and the simplest fence, and holds no state. docs/kv.md explains them for authors of engines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Fence(Protocol):
    """The end of work on the device. A `torch.cuda.Event` that was recorded is one."""

    def query(self) -> bool:
        """Return whether the work is over, without waiting."""
        ...

    def synchronize(self) -> object:
        """Return when the work is over. It is called only after `query` has returned True."""
        ...


class Over:
    """The fence of work that is over when a call returns, as on a CPU."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


class Engine(Protocol):
    """What an engine does with the blocks of its cache, by number.

    The engine has a free list of blocks, and counts the requests that use each block. The cache calls these verbs in
    the engine's scheduler thread, inside `ElasticCache.grow` and `turn`, and in a thread of its own between
    `ElasticCache.rest` and `wake`: never two at a time. They work on lists and return at once. A verb may not wait,
    call the cache or a broker, or take a lock that the engine holds while it calls the cache. An exception ends the
    call that it came from.
    """

    def need(self) -> int:
        """Return how many blocks the engine would use now if it had them.

        These are the blocks that requests use, the ones that running requests will take in their next steps, and those
        that the waiting requests need.
        """
        ...

    def unused(self, blocks: Sequence[int]) -> Collection[int]:
        """Return those of `blocks` that no request uses. Cached contents, such as a prefix, are no use."""
        ...

    def warmth(self, blocks: Sequence[int]) -> float:
        """Return when cached contents of these unused blocks were last of use: larger is later. 0 without any."""
        ...

    def cost(self, blocks: Sequence[int]) -> float:
        """Return how many requests end up preempted if these blocks, some of which are used, are to become unused.

        A recall takes the pages with the least cost first. An engine that preempts its youngest requests until the
        blocks are unused counts all of these. An estimate will do, such as the number of blocks that are used.
        """
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """Take these unused blocks out of the free list, and forget what is cached in them."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Put these blocks into the free list, at its end if it has an order. They have memory now.

        If it raises, it must have put none there: the next `ElasticCache.grow` calls it again with all of them.
        """
        ...

    def fence(self) -> Fence:
        """Return a fence behind every step that was scheduled so far, those included that have not begun.

        It is called in the scheduler thread only.
        """
        ...

    def preempt(self, blocks: Sequence[int]) -> bool:
        """Preempt the requests that use any of these blocks, now or in the next steps; return False if that cannot be.

        The requests wait until there is room, and are computed again. Only a recall or `ElasticCache.shrink` leads to
        this. It is called again with blocks that are still in use at the next turn.
        """
        ...
