"""SGLang's allocator, prefix cache and requests as a `membroker.kv.Engine`.

Owns an estimate of what the requests need, and which requests are to be retracted. A block is a page of SGLang. All of
this runs in the scheduler's thread, and waits for the GPU only to learn which pages a part of the prefix cache has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy
import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from ..engine import Fence
from .allocator import Allocator


class SglangBlocks:
    """The pages and requests of one SGLang scheduler. `new_fence` returns a fence behind all work that was launched.

    The scheduler launches what it has scheduled at once.
    """

    fence: Callable[[], Fence]

    def __init__(self, scheduler: Any, allocator: Allocator, new_fence: Callable[[], Fence]) -> None:
        self._scheduler, self._allocator, self.fence = scheduler, allocator, new_fence
        self._tree = scheduler.tree_cache
        self._page = int(allocator.page_size)
        self._owners: list[Any] = []
        self._pages: dict[Any, tuple[Any, Any]] = {}
        """For each node of the prefix cache its value, and the pages in it: a node that was split has another value."""
        self.has_grown: bool = False
        """Whether pages were released since this was last set to False."""
        self.begin(scheduler.running_batch, None)

    def begin(self, running: Any, last: Any) -> None:
        """Begin a turn of the scheduler, with its running batch and the batch that it launched last."""
        self._running, self._last = running, last
        self._owner_of: Any = None
        """For each page the number of the node in `_owners` that has it, or -1. None before a look."""
        self._unwanted: frozenset[int] = frozenset()
        """Pages whose users are to be retracted."""
        self._users: frozenset[int] = frozenset()
        """The places in the running batch of the requests that use them, once SGLang has asked."""

    @property
    def runs_nothing(self) -> bool:
        """Whether no request runs."""
        return not self._scheduler.chunked_req and next(self._under_way(), None) is None

    # The verbs of `membroker.kv.Engine`

    def need(self) -> int:
        """Return the pages in use, and those that requests need besides.

        Before SGLang admits a request it wants room for the whole answer, up to 4,096 tokens, and for a part of what
        the running ones may still generate. So this counts the same while requests wait.
        """
        scheduler, page = self._scheduler, self._page
        waiting = scheduler.waiting_queue[: max(0, scheduler.max_running_requests - len(self._running.reqs))]
        ratio = scheduler.new_token_ratio_tracker.current if waiting else 0.0
        tokens = 0.0
        for req in self._under_way():
            left = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
            share = 1.0 if req.sampling_params.ignore_eos else ratio
            tokens += min(left, max(page, min(left, CLIP_MAX_NEW_TOKENS) * share if waiting else 0.0))
        chunked = scheduler.chunked_req
        if chunked is not None:
            tokens += self._rest_of(chunked) + min(chunked.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        for req in waiting:
            if tokens > self._allocator.size:
                break  # it is the whole cache, and thousands can wait
            done = len(req.output_ids)
            left = max(0, req.sampling_params.max_new_tokens - done)
            tokens += len(req.origin_input_ids) + done + min(left, CLIP_MAX_NEW_TOKENS) + 2 * page
        return self._used() + -(-int(tokens) // page)

    def unused(self, blocks: Sequence[int]) -> Collection[int]:
        """Return the pages that are free or cached, but for those that a prompt needs which is computed in parts.

        SGLang ends with an error if the next part of such a prompt has no room.
        """
        asked = numpy.asarray(blocks, int)
        reserve = self._reserve()
        is_unused = self._allocator.is_free(asked) & ~numpy.isin(asked, self._allocator.lowest_free(reserve))
        if reserve <= self._allocator.free_count:
            is_unused |= self._owners_of(asked) >= 0
        found: list[int] = asked[is_unused].tolist()
        return found

    def warmth(self, blocks: Sequence[int]) -> float:
        """Return when one of these cached pages was last matched by a request."""
        numbers = self._owners_of(numpy.asarray(blocks, int))
        return max((self._owners[at].last_access_time for at in numpy.unique(numbers[numbers >= 0])), default=0.0)

    def cost(self, blocks: Sequence[int]) -> float:
        """Return how many of these pages are used: which requests that are is only in the GPU's memory."""
        return len(blocks) - len(self.unused(blocks))

    def hold(self, blocks: Sequence[int]) -> None:
        """Evict what is cached there, with what continues it, and take the pages out of the free list."""
        numbers = self._owners_of(numpy.asarray(blocks, int))
        for at in numpy.unique(numbers[numbers >= 0]):
            self._evict(self._owners[at])
        self._allocator.hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Put pages into the free list."""
        self._allocator.release(blocks)
        self.has_grown = True

    def preempt(self, blocks: Sequence[int]) -> bool:
        """Let the scheduler retract the requests that use these pages, when it next decodes."""
        if not blocks or self._running.is_empty():
            return False
        self._unwanted = frozenset(blocks)
        self._running.batch_is_full = True  # so that it decodes, and admits nothing before
        return True

    # What the hooks ask

    @property
    def is_preempting(self) -> bool:
        """Whether requests are to be retracted."""
        return bool(self._unwanted)

    def has_memory(
        self, original: Callable[..., bool], batch: Any, selected_indices: Collection[int] | None = None
    ) -> bool:
        """Around `ScheduleBatch.check_decode_mem`: without memory SGLang retracts, and so it does for a recall.

        `selected_indices` are those that it has not retracted yet; None: it has retracted none.
        """
        if selected_indices is None:
            self._users = self._users_in(batch.reqs)
        is_asked_back = bool(self._users) if selected_indices is None else not self._users.isdisjoint(selected_indices)
        return not is_asked_back and original(batch, selected_indices)

    def order(self, order: list[int], reqs: Any) -> list[int]:
        """After `ScheduleBatch._get_decode_retraction_order`: users of unwanted pages come last, and go first."""
        return sorted(order, key=self._users.__contains__)

    def retracted(self, result: tuple[list[Any], float, list[Any]], batch: Any) -> tuple[list[Any], float, list[Any]]:
        """After `ScheduleBatch.retract_decode`, which ends a retraction: the last request waits, too.

        SGLang aborts it if it has no room, and keeps it otherwise. Here the memory will come. It cannot retract a beam
        search.
        """
        retracted, ratio, aborted = result
        self._unwanted = self._users = frozenset()
        waits = [req for req in aborted if req.beam_group is None]
        for req in waits:
            req.to_finish = None
        return retracted + waits, ratio, [req for req in aborted if req.beam_group is not None]

    def _users_in(self, reqs: Sequence[Any]) -> frozenset[int]:
        """Return the places of the requests that use unwanted pages."""
        if not self._unwanted or not reqs:
            return frozenset()
        table = self._scheduler.req_to_token_pool.req_to_token
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs], device=table.device)
        longest = max(req.kv.kv_allocated_len for req in reqs)
        pages = (table[rows, : longest : self._page] // self._page).cpu().numpy()
        is_unwanted = numpy.zeros(self._allocator.pages, bool)
        is_unwanted[list(self._unwanted)] = True
        return frozenset(
            at
            for at, req in enumerate(reqs)
            if is_unwanted[pages[at, : -(-req.kv.kv_allocated_len // self._page)]].any()
        )

    def _under_way(self) -> Iterator[Any]:
        """Yield the requests that generate."""
        last, chunked = self._last, self._scheduler.chunked_req
        yield from (req for req in self._running.reqs if not req.finished())
        if last is not None and last is not self._running and last.forward_mode.is_extend():
            yield from (req for req in last.reqs if req is not chunked and not req.finished())

    def _used(self) -> int:
        """Return how many pages requests use, page 0 included."""
        pages, cached = self._allocator, int(self._tree.evictable_size()) // self._page
        return pages.pages - pages.held_count - pages.free_count - cached

    def _rest_of(self, req: Any) -> int:
        """Return how many tokens of its prompt have no page yet."""
        has: int = req.kv.kv_allocated_len
        return max(0, len(req.origin_input_ids) + len(req.output_ids) - has)

    def _reserve(self) -> int:
        """Return the pages that the prompt needs which is computed in parts."""
        chunked = self._scheduler.chunked_req
        return 0 if chunked is None else self._rest_of(chunked) // self._page + 2

    # The prefix cache

    def _owners_of(self, pages: Any) -> Any:
        """Return for each page the number of the unlocked node that has it, or -1."""
        if self._owner_of is None:
            self._look()
        return self._owner_of[pages]

    def _look(self) -> None:
        """Note which pages are cached and not in use."""
        core = getattr(self._tree, "tree_core", None)  # 0.5.21 has none without a prefix cache
        nodes = [] if core is None else list(_below(core.root_node))
        known = {node: self._pages[node] for node in nodes if node in self._pages}
        self._pages = {node: pages for node, pages in known.items() if pages[0] is _value(node)}
        unknown = [node for node in nodes if node not in self._pages]
        if unknown:
            firsts = torch.cat([_value(node)[:: self._page] for node in unknown])
            numbers = (firsts // self._page).cpu().numpy()
            ends = numpy.cumsum([-(-len(_value(node)) // self._page) for node in unknown])[:-1]
            for node, pages in zip(unknown, numpy.split(numbers, ends), strict=True):
                self._pages[node] = _value(node), pages
        self._owners = [node for node in nodes if not node.component(ComponentType.FULL).lock_ref]
        self._owner_of = numpy.full(self._allocator.pages, -1)
        for at, node in enumerate(self._owners):
            self._owner_of[self._pages[node][1]] = at

    def _evict(self, node: Any) -> None:
        """Free the pages of an unlocked node, and of all nodes that continue it. They are unlocked too."""
        if node not in self._pages:
            return  # with a node above it
        gone = [node, *_below(node)]
        for node in reversed(gone):
            self._owner_of[self._pages.pop(node)[1]] = -1
            self._tree._evict_device_leaf(node.id, defaultdict(int))


def _value(node: Any) -> Any:
    """Return the tokens of a node of the prefix cache: where they are in the KV cache."""
    return node.component(ComponentType.FULL).value


def _below(root: Any) -> Iterator[Any]:
    """Yield the nodes below one, each before those below it."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
