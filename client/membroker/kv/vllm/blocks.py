"""vLLM's block pool as a `membroker.kv.Engine`.

Owns the blocks that are held out of vLLM's free list, and an estimate of what its requests need. It only works on
lists: it must never wait, or call a broker, a driver or the cache. vLLM's pool has no lock, so all of this runs in the
scheduler's thread, or in the cache's while the engine rests.

vLLM subtracts its free blocks from the pool's `num_gpu_blocks`, takes the rest for used, and resets its prefix cache
only if all blocks are free. So `num_gpu_blocks` leaves out the blocks that are held, and those of a squeeze.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from ...errors import InvalidRequest
from ..engine import Fence

_NEVER = 1e-9
"""The warmth of cached contents whose last use is not known: colder than all others, and not 0."""

STEPS_COUNTED = 4
"""For how many steps a count of the need is good, if all requests run and each one computes its next token."""

STEPS_AHEAD = 2
"""For how many steps memory is asked: what waits behind them would lie idle, while others may need it."""

GROWTH = 2
"""How many blocks a running request of an engine that is short of memory can take before others are admitted."""


class GroupNeed(NamedTuple):
    """What a request takes of a group of layers: a block for each `block_tokens`, and `besides`, but at most `most`."""

    block_tokens: int
    besides: int
    most: int


def needs_of(config: Any, groups: Iterable[Any]) -> list[GroupNeed]:
    """Return what a request takes of each of a model's groups, by vLLM's own specs of their layers.

    A sliding window or a recurrent state takes a bounded number of blocks, whatever the request's length.
    """
    specs = [group.kv_cache_spec for group in groups]
    return [
        GroupNeed(
            spec.block_size,
            getattr(spec, "num_speculative_blocks", 0),
            -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes),
        )
        for spec in specs
    ]


class VllmBlocks:
    """The free list, reference counts and requests of one vLLM engine.

    `pool` is vLLM's `BlockPool`, and `config` its `VllmConfig`. Of each group of layers a request takes what `needs`
    say, tokens for drafts included, and `tables` returns the numbers of its blocks in each group now: all groups have
    blocks of one pool, and 0 stands where a request needs none any more. vLLM admits a request beside others only if
    the blocks of its watermark stay free. It preempts the youngest request first, or by priority the youngest of those
    that matter least. `new_fence` returns a fence behind all steps before the one that is being scheduled: no block of
    this one is unused.
    """

    def __init__(
        self,
        pool: Any,
        config: Any,
        needs: Sequence[GroupNeed],
        tables: Callable[[str], Iterable[Iterable[int]]],
        new_fence: Callable[[], Fence],
    ) -> None:
        if pool.null_block.block_id != 0:
            raise InvalidRequest(f"vLLM's null block is number {pool.null_block.block_id}, and membroker expects 0")
        self._pool = pool
        self._needs, self._tables, self._lookahead = needs, tables, config.num_lookahead_tokens
        scheduler = config.scheduler_config
        self._most_requests, self._by_priority = scheduler.max_num_seqs, scheduler.policy == "priority"
        self._soon = self._most_soon = STEPS_AHEAD * scheduler.max_num_batched_tokens
        """How many tokens of requests that wait can still be computed in the next steps."""
        self._watermark = self._least_watermark = int(scheduler.watermark * pool.num_gpu_blocks)
        self.fence = new_fence
        self.requests: dict[str, Any] = {}
        """Those that have not ended."""
        self._squeezed: list[Any] = []
        """Blocks of which one more reference is held for one step, so that vLLM preempts."""
        self._squeezed_used = 0
        """How many of them requests had at that time."""
        self._more = 0
        """What requests need beyond the blocks that they have."""
        self._steps_counted = 0
        """For how many steps more the last count is good."""
        self._short = 0
        """How many blocks more than that vLLM seems to want before it admits a request."""
        self._last_used = [0.0] * pool.num_gpu_blocks
        self._running: dict[str, None] = {}
        """The requests that have blocks, the oldest first: in the order of their admission."""
        self._users: dict[int, tuple[int, str]] | None = None
        """Of the requests that use a block the last to be preempted, and its place; None: to be found again."""

    # What the connector tells

    def add(self, request: Any) -> None:
        """Note a new request."""
        self.requests[request.request_id] = request
        if len(self.requests) <= self._most_requests and self._soon > 0:
            self._soon -= request.num_tokens
            self._more += self._blocks_of(request.num_tokens + 1)

    def finish(self, request: Any, tables: Iterable[Iterable[int]]) -> None:
        """Note that a request has ended. Its blocks are still referenced."""
        self.requests.pop(request.request_id, None)
        self._running.pop(request.request_id, None)
        self._users = None
        self._steps_counted = 0
        now = time.monotonic()
        for block in chain.from_iterable(tables):
            self._last_used[block] = now

    def note(self, step: Any) -> None:
        """Note which requests a step has preempted and admitted, and the need."""
        for name in step.preempted_req_ids or ():
            self._running.pop(name, None)
        others = step.scheduled_cached_reqs
        admitted = {new.req_id for new in step.scheduled_new_reqs}.union(others.resumed_req_ids)
        for name in step.num_scheduled_tokens if admitted else ():  # in vLLM's order
            if name in admitted:
                self._running.pop(name, None)  # a session that goes on is now the youngest
                self._running[name] = None
        self._users = None
        goes_on = len(self._running) == len(self.requests) and not (admitted or step.preempted_req_ids)
        if step.total_num_scheduled_tokens > len(self._running) * (1 + self._lookahead):
            goes_on = False  # some compute a part of their prompt
        self._steps_counted = self._steps_counted - 1 if goes_on else 0
        if self._steps_counted <= 0:
            self._count(step.num_scheduled_tokens)
            self._steps_counted = STEPS_COUNTED

    def _count(self, scheduled: Mapping[str, int]) -> None:
        """Count what requests need beyond their blocks. Written for speed: 128 take 40 us, a hundredth of a step."""
        more, left, soon = 0, self._most_requests, self._most_soon
        for name, request in self.requests.items():
            if not left:
                break  # the others cannot run yet
            left -= 1
            tokens, done, ahead = request.num_tokens, 0, 0
            if name in self._running:
                done = request.num_computed_tokens + scheduled.get(name, 0)
                tokens, ahead = max(tokens, done) + self._lookahead, 1
            elif soon > 0:
                soon -= tokens
                tokens += 1
            else:
                continue
            # Rounded up to blocks, both, without a call for each request.
            for size, besides, most in self._needs:
                more += min((tokens + size - 1) // size + ahead + besides, most)
                if ahead:
                    more -= min((done + size - 1) // size + besides, most)
        # By this estimate the first request has room. If vLLM wants more, it would wait forever.
        is_short = self.is_starved and self._pool.get_num_free_blocks() >= more + self._watermark
        self._short = min(self._short + 1, self._blocks_of(1 << 40)) if is_short else 0
        self._more, self._soon = more, soon

    def were_reset(self, request: Any) -> bool:
        """Return whether vLLM has preempted all requests at once to compute them again, as for new weights.

        It is asked of a preempted request that may be resumed. This one had blocks, and no step has preempted it.
        """
        if request.request_id not in self._running:
            return False
        self._running.clear()
        self._users = None
        return True

    @property
    def is_starved(self) -> bool:
        """Return whether requests wait, and none runs."""
        return bool(self.requests) and not self._running

    @property
    def is_empty(self) -> bool:
        """Return whether there is no request, and no step that may still give blocks back."""
        return not self.requests and self._used() == 1

    def keep_free(self, *, is_short: bool) -> int:
        """Return how many blocks vLLM is to keep free when it admits a request beside others.

        An engine that is short of memory would preempt the request again when those that run grow.
        """
        self._watermark = max(self._least_watermark, GROWTH * len(self._needs) * len(self._running) * is_short)
        return self._watermark

    def relax(self) -> None:
        """End a squeeze: give vLLM back the blocks that were kept from it."""
        if self._squeezed:
            self._pool.free_block_queue.num_free_blocks += 1
            self._pool.num_gpu_blocks += len(self._squeezed) + 1
            self._pool.free_blocks(self._squeezed)
            self._squeezed, self._squeezed_used = [], 0

    # The verbs of `membroker.kv.Engine`

    def need(self) -> int:
        """Return the blocks in use, those that requests need besides, and those that are to stay free."""
        is_waiting = len(self._running) < len(self.requests)
        return self._used() + self._more + self._short + self._watermark * is_waiting

    def unused(self, blocks: Sequence[int]) -> Collection[int]:
        """Return the blocks without a reference. A step in flight may still use them: the fence is behind it."""
        table = self._pool.blocks
        return [block for block in blocks if table[block].ref_cnt == 0 and not table[block].is_null]

    def warmth(self, blocks: Sequence[int]) -> float:
        """Return when a request with one of these cached blocks ended last."""
        table = self._pool.blocks
        times = (self._last_used[block] or _NEVER for block in blocks if table[block].block_hash is not None)
        return max(times, default=0.0)

    def cost(self, blocks: Sequence[int]) -> float:
        """Return how many requests vLLM preempts until no request uses these blocks, in its own order.

        What a request has that vLLM cannot preempt goes last.
        """
        if self._users is None:
            self._users = {}
            for place, name in reversed(list(enumerate(self._in_order()))):
                self._users.update(dict.fromkeys(self._table(name), (place, name)))
        users = {self._users[block] for block in blocks if block in self._users}
        if not all(self._can_preempt(name) for _, name in users):
            return math.inf
        return len(self._running) - min(users)[0] if users else 0

    def _in_order(self) -> list[str]:
        """Return the requests with blocks. vLLM preempts the last one first."""
        found, requests = list(self._running), self.requests
        if self._by_priority:
            found.sort(key=lambda name: (requests[name].priority, requests[name].arrival_time))
        return found

    def _table(self, name: str) -> list[int]:
        """Return the blocks that a request uses."""
        return [block for block in chain.from_iterable(self._tables(name)) if block]

    def _can_preempt(self, name: str) -> bool:
        """Return whether vLLM can preempt a request with blocks. A session keeps them between its parts, and waits."""
        return bool(self.requests[name].status == RequestStatus.RUNNING)

    def hold(self, blocks: Sequence[int]) -> None:
        """Forget what is cached there, and take a reference, which takes a block out of the free list."""
        table = self._pool.blocks
        self._pool.evict_blocks(set(blocks))
        self._pool.touch([table[block] for block in blocks])
        self._pool.num_gpu_blocks -= len(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Put blocks into the free list. vLLM puts those without cached contents in front of cached ones."""
        table = self._pool.blocks
        self._pool.free_blocks([table[block] for block in blocks])
        self._pool.num_gpu_blocks += len(blocks)

    def preempt(self, blocks: Sequence[int]) -> bool:
        """Let vLLM preempt: it does so when a running request needs more blocks than are free.

        So all free blocks are held until the end of the next step, and one more counts as missing: then the first
        request of that step lacks room, whether or not it fills a block. vLLM preempts its youngest requests until
        there is room, and cannot admit them again. What the users of `blocks` have, and what younger requests have, is
        held as well: it does not become free when they lose it. So one step preempts all of them; one in each step
        would take seconds. The oldest of them makes the room, with its other blocks.

        Nothing is held if `blocks` have no user that vLLM can preempt: it would preempt others for nothing.
        """
        going, table = set(blocks), self._pool.blocks
        lists = [self._table(name) for name in self._in_order() if self._can_preempt(name)]
        while lists and going.isdisjoint(lists[0]):
            del lists[0]
        if not lists:
            return False
        if not self._squeezed:
            oldest, *younger = lists
            lists = [*reversed(younger), [block for block in oldest if block in going]]
            # In the order in which vLLM frees: `relax` keeps it, and the end of a cached prompt is evicted first.
            used = dict.fromkeys(chain.from_iterable(map(reversed, lists)))
            self._squeezed = self._pool.free_block_queue.get_all_free_blocks() + [table[block] for block in used]
            self._squeezed_used = len(used)
            self._pool.touch(self._squeezed)
            self._pool.num_gpu_blocks -= len(self._squeezed) + 1
            self._pool.free_block_queue.num_free_blocks -= 1
        return True

    def _used(self) -> int:
        """Return how many blocks are referenced by requests, the null block included."""
        return int(self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() + self._squeezed_used)

    def _blocks_of(self, tokens: int) -> int:
        return sum(min(-(-tokens // size) + besides, most) for size, besides, most in self._needs)
