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
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

from vllm.v1.request import RequestStatus

from ...errors import InvalidRequest
from ..engine import Fence

_NEVER = 1e-9
"""The warmth of cached contents whose last use is not known: colder than all others, and not 0."""


class VllmBlocks:
    """The free list, reference counts and requests of one vLLM engine.

    `pool` is vLLM's `BlockPool`. A block has `block_tokens` tokens, and a request at most `most_tokens`; at most
    `most_requests` run at a time. vLLM admits a request beside others only if `watermark` blocks stay free. It preempts
    the youngest request first, or with `by_priority` the youngest of those that matter least. `new_fence` returns a
    fence behind all steps before the one that is being scheduled: no block of this one is unused. `save` is told of a
    request that was preempted, and of the blocks that it had.
    """

    def __init__(
        self,
        pool: Any,
        *,
        block_tokens: int,
        most_tokens: int,
        most_requests: int,
        watermark: int,
        by_priority: bool = False,
        new_fence: Callable[[], Fence],
        save: Callable[[Any, Sequence[int]], None],
    ) -> None:
        if pool.null_block.block_id != 0:
            raise InvalidRequest(f"vLLM's null block is number {pool.null_block.block_id}, and membroker expects 0")
        self._pool = pool
        self._block_tokens, self._most_tokens, self._most_requests = block_tokens, most_tokens, most_requests
        self._watermark, self._by_priority = watermark, by_priority
        self.fence = new_fence
        self._save = save
        self._requests: dict[str, Any] = {}
        self._squeezed: list[Any] = []
        """Blocks of which one more reference is held for one step, so that vLLM preempts."""
        self._squeezed_used = 0
        """How many of them requests had at that time."""
        self._more = 0
        """What requests need beyond the blocks that they have."""
        self._last_used = [0.0] * pool.num_gpu_blocks
        self._running: dict[str, list[int]] = {}
        """The blocks of each request that has any, the oldest request first: in the order of their admission."""
        self._users: dict[int, tuple[int, str]] | None = None
        """Of the requests that use a block the last to be preempted, and its place; None: to be found again."""

    # What the connector tells

    def add(self, request: Any) -> None:
        """Note a new request."""
        self._requests[request.request_id] = request
        if len(self._requests) <= self._most_requests:
            self._more += self._blocks_of(request.num_tokens + 1)

    def finish(self, request: Any, blocks: Sequence[int]) -> None:
        """Note that a request has ended. Its blocks are still referenced."""
        self._requests.pop(request.request_id, None)
        self._running.pop(request.request_id, None)
        self._users = None
        now = time.monotonic()
        for block in blocks:
            self._last_used[block] = now

    def note(self, step: Any) -> None:
        """Note which requests a step has admitted, the blocks that it has given to them and to others, and the need."""
        if step.preempted_req_ids:
            for name in [
                request for request, _ in self._in_order() if request in step.preempted_req_ids
            ]:  # resumed so, too
                self._save(self._requests[name], self._running.pop(name))
        admitted = {new.req_id: new.block_ids[0] for new in step.scheduled_new_reqs}
        others = step.scheduled_cached_reqs
        for name, blocks in zip(others.req_ids, others.new_block_ids, strict=True):
            if name in others.resumed_req_ids:
                admitted[name] = blocks[0]
            elif blocks is not None and name in self._running:
                self._running[name] += blocks[0]
        order = {name: place for place, name in enumerate(step.num_scheduled_tokens)} if admitted else {}
        for name in sorted(admitted, key=order.__getitem__):
            self._running.pop(name, None)  # a session that goes on is now the youngest
            self._running[name] = list(admitted[name])
        self._users = None
        self._count(step.num_scheduled_tokens)

    def _count(self, scheduled: Mapping[str, int]) -> None:
        """Count what requests need beyond their blocks. Written for speed, as each step runs it: 128 take 30 us."""
        more, size, most, left = 0, self._block_tokens, self._most_tokens, self._most_requests
        for name, request in self._requests.items():
            if not left:
                break  # the others cannot run yet
            left -= 1
            tokens, done = request.num_tokens, 0
            if name in self._running:
                done = request.num_computed_tokens + scheduled.get(name, 0)
                tokens = max(tokens, done) + size
            else:
                tokens += 1
            # Rounded up to blocks, both, without a call for each request.
            more += (min(tokens, most) + size - 1) // size - (min(done, most) + size - 1) // size
        self._more = more

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
    def has_requests(self) -> bool:
        """Return whether there is a request, running or waiting."""
        return bool(self._requests)

    @property
    def is_starved(self) -> bool:
        """Return whether requests wait, and none runs."""
        return bool(self._requests) and not self._running

    @property
    def is_empty(self) -> bool:
        """Return whether there is no request, and no step that may still give blocks back."""
        return not self._requests and self._used() == 1

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
        is_waiting = len(self._running) < len(self._requests)
        return self._used() + self._more + self._watermark * is_waiting

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
            for place, (name, used) in reversed(list(enumerate(self._in_order()))):
                self._users.update(dict.fromkeys(used, (place, name)))
        users = {self._users[block] for block in blocks if block in self._users}
        if not all(self._can_preempt(name) for _, name in users):
            return math.inf
        return len(self._running) - min(users)[0] if users else 0

    def _in_order(self) -> list[tuple[str, list[int]]]:
        """Return the requests with blocks, and these. vLLM preempts the last one first."""
        found, requests = list(self._running.items()), self._requests
        if self._by_priority:
            found.sort(key=lambda entry: (requests[entry[0]].priority, requests[entry[0]].arrival_time))
        return found

    def _can_preempt(self, name: str) -> bool:
        """Return whether vLLM can preempt a request with blocks. A session keeps them between its parts, and waits."""
        return bool(self._requests[name].status == RequestStatus.RUNNING)

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
        lists = [used for name, used in self._in_order() if self._can_preempt(name)]
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
        return -(-min(tokens, self._most_tokens) // self._block_tokens)
