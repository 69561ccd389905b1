"""The requests of one manager as a `membroker.kv.Engine`: what they need, and how they are preempted.

Owns the estimate of what requests need. Which blocks are free is the business of a `Store`, because transformers keeps
its cache in another way in each version. All of this runs in the thread that generates, or in the cache's while that
thread rests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus

from ..engine import Fence
from ..layout import Strided


class Store(ABC):
    """The blocks of a cache by number, and its lists of free ones, as one version of transformers has them.

    `count` is how many blocks the tensors have, those of `always` included, which are for padding. `look` notes which
    blocks no request uses; `used`, `unused` and `warmth` answer from that.
    """

    def __init__(self, count: int, always: Collection[int], block_tokens: int) -> None:
        self.count, self.always, self.block_tokens = count, always, block_tokens
        self._held = 0
        self._free: set[int] = set()
        self._cached: dict[int, float] = {}
        """The unused blocks with cached contents, and when each was first seen so."""

    @abstractmethod
    def parts(self) -> list[Strided]:
        """Return where the blocks are in memory."""

    @abstractmethod
    def look(self) -> None:
        """Note which blocks no request uses now."""

    @abstractmethod
    def lacking(self, wanted: Iterable[tuple[str, int]]) -> int:
        """Return how many blocks requests lack in all. Each is an id and the tokens for which it wants room."""

    @abstractmethod
    def users(self, blocks: Collection[int]) -> list[str]:
        """Return the ids of the requests that use any of these blocks."""

    @abstractmethod
    def make_room(self, wanted: int) -> None:
        """Evict cached contents until so many blocks are free."""

    @abstractmethod
    def can_evict(self) -> bool:
        """Return whether transformers finds more room when it evicts cached contents."""

    def used(self) -> int:
        """Return how many blocks are in use, those for padding included."""
        return self.count - self._held - len(self._free) - len(self._cached)

    def unused(self, blocks: Sequence[int]) -> list[int]:
        """Return those without a request."""
        return [block for block in blocks if block in self._free or block in self._cached]

    def warmth(self, blocks: Sequence[int]) -> float:
        """Return when a request with one of these cached blocks ended last, or 0."""
        return max((self._cached[block] for block in blocks if block in self._cached), default=0.0)

    def hold(self, blocks: Sequence[int]) -> None:
        """Take unused blocks out of the lists, with what is cached in them."""
        self._free.difference_update(blocks)
        self._held += len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Put blocks into the free list."""
        self._free.update(blocks)
        self._held -= len(blocks)


class Requests:
    """The requests of `scheduler`, which use the blocks of `store`.

    `record` returns a fence behind all work that was launched.
    """

    def __init__(self, store: Store, scheduler: Any, record: Callable[[], Fence]) -> None:
        self._store = store
        self._scheduler = scheduler
        self.fence = record  # steps are launched before the next ones are scheduled
        self.unused, self.warmth, self.hold, self.release = store.unused, store.warmth, store.hold, store.release

    def need(self) -> int:
        """Return the blocks in use, and those that requests lack for their next steps."""
        self._store.look()
        return self._store.used() + self._store.lacking(self._wanted())

    def cost(self, blocks: Sequence[int]) -> float:
        """Return how many of these blocks are used: to count their requests takes longer."""
        return len(blocks) - len(self.unused(blocks))

    def preempt(self, blocks: Sequence[int]) -> bool:
        """Let the requests that use these blocks begin again, as transformers does when it finds no room.

        What they have generated becomes a part of their prompt.
        """
        scheduler = self._scheduler
        for request_id in self._store.users(blocks):
            state = scheduler.active_requests.get(request_id)
            if state is None or any(one is state for one in scheduler._requests_to_fork):
                continue
            again = state.create_equivalent_initial_request()
            state._status = RequestStatus.FINISHED  # not by `status`, which would end its lifespan
            scheduler.finish_request(request_id)
            scheduler.add_waiting_request(again)
        if not scheduler.active_requests:
            scheduler.block_new_requests = False  # else they would wait for a request to end
        self._store.look()
        return True

    def make_room(self) -> None:
        """Evict cached contents for what requests lack. No memory is on its way for them, because it is there."""
        self._store.make_room(self._store.lacking(self._wanted()))

    def can_make_room(self) -> bool:
        """Return whether transformers can schedule something after it has preempted or evicted."""
        scheduler = self._scheduler
        return self._store.can_evict() or bool(scheduler.starved_requests and len(scheduler.active_requests) > 1)

    def _wanted(self) -> Iterator[tuple[str, int]]:
        scheduler = self._scheduler  # copies of its lists: while it rests, another thread may add a request
        for state in list(scheduler.active_requests.values()):
            tokens = state.position_offset + max(1, len(state.remaining_prefill_tokens)) + self._store.block_tokens
            if state.max_new_tokens is not None:
                tokens = min(tokens, len(state.initial_tokens) + state.max_new_tokens)
            yield state.request_id, tokens
        if scheduler.block_new_requests:
            return
        most = max(0, scheduler.max_requests_per_batch - len(scheduler.active_requests))
        for state in list(scheduler.waiting_requests.values())[:most]:
            yield state.request_id, state.position_offset + len(state.remaining_prefill_tokens)
