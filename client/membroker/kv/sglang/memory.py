"""The memory of one SGLang engine's KV cache: its pool, its `ElasticCache`, and the fences of its work.

Owns what most hooks do, in the process of SGLang's scheduler. Only the start of an engine waits for the broker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view

from ... import Client, Model, VirtualMemoryPool, connect
from ...errors import InvalidRequest
from ...ext import arguments
from ...vmm.sizes import round_up
from ..bounds import bytes_of_first, say_cache, say_wait
from ..cache import ElasticCache
from ..capture import Capture, device_lent, strided
from ..engine import Over
from ..layout import Layout
from ..sleeper import Sleeper
from .allocator import Allocator
from .blocks import SglangBlocks
from .settings import PAGE, SglangSettings

logger: logging.Logger = logging.getLogger("membroker")

IDLE_SECONDS = 0.001
"""How long a turn of an idle scheduler lets the thread that unmaps have the interpreter."""


class SglangMemory:
    """The KV cache of a `KVCacheConfigurator`. It connects to the broker, and borrows nothing before `open`."""

    def __init__(self, settings: SglangSettings, config: Any) -> None:
        self.settings = settings
        self._config = config
        name = settings.name(resolved_view(config.server_args).served_model_name, logger)
        self._client: Client = connect()
        self._model: Model = self._client.model(name, limit=settings.limit)
        kind = torch.device(config.device).type
        device_lent(self._model.driver, torch.device(kind, config.gpu_id if kind == "cuda" else None))
        self._cache: ElasticCache
        self._allocator: Allocator
        self.blocks: SglangBlocks
        """The scheduler's pages and requests, once it is attached."""
        self._sleeper: Sleeper

    # At the start

    def available_bytes(self, original: Callable[..., int], config: Any, pre_model_load_memory: Any) -> int:
        """Around `_profile_available_bytes`: the cache is as large as `capacity`, whatever the GPU has free."""
        if (capacity := self.settings.capacity) is None:
            return original(config, pre_model_load_memory)
        return arguments.bytes_of("capacity", capacity)

    def create_buffers(self, original: Callable[[Any], None], kvcache: Any) -> None:
        """Around `_create_buffers` of the pools: the KV tensors are addresses of a pool, and page 0 is mapped."""
        if type(kvcache).__name__ not in ("MHATokenToKVPool", "MLATokenToKVPool"):
            raise InvalidRequest(f"membroker.kv.sglang does not serve a KV cache of class {type(kvcache).__name__}")
        page = arguments.bytes_of("page_size", self.settings.page_size or PAGE)
        rows = kvcache.size + kvcache.page_size
        is_mla = hasattr(kvcache, "kv_cache_dim")
        names = ["kv_buffer"] if is_mla else ["k_buffer", "v_buffer"]
        row = kvcache.kv_cache_dim if is_mla else kvcache.head_num * (kvcache.head_dim + kvcache.v_head_dim)
        layer = rows * row * kvcache.store_dtype.itemsize + len(names) * page  # each tensor begins with a page
        pool = VirtualMemoryPool(self._model, round_up(kvcache.layer_num * layer, page), page)
        with Capture(pool):
            original(kvcache)
        blocks = kvcache.size // kvcache.page_size + 1
        buffers = [buffer for name in names for buffer in getattr(kvcache, name)]
        # A buffer has a row for each token, or for each page.
        parts = [part for buffer in buffers for part in strided(buffer.unflatten(0, (blocks, -1)), 0)]
        if not all(pool.base_address <= part.address < pool.base_address + pool.capacity for part in parts):
            raise InvalidRequest(
                f"a KV tensor is smaller than a page of {page} bytes: give a larger capacity, or a smaller page_size"
            )
        self._open(pool, Layout(pool.base_address, page, blocks, parts), kvcache.page_size)

    def _open(self, pool: VirtualMemoryPool, layout: Layout, tokens: int) -> None:
        longest = self._config.model_config.context_len
        size = bytes_of_first(layout, 1 + -(-longest // tokens) + 2)
        self.settings.check_fits(size, longest, self._client, self._model, "--context-length", logger)
        say_wait(layout.bytes_of(0), self._model, logger)
        self._cache = self.settings.elastic(pool, layout)
        say_cache(pool, layout, self._model, "layer-major", f"pages of {tokens} tokens", logger)

    def allocator(self, plain: Any, config: Any, **options: Any) -> Allocator:
        """After `_build_token_to_kv_pool_allocator`: another one takes the place of SGLang's own."""
        if not hasattr(self, "_cache"):
            raise InvalidRequest("SGLang has made a KV cache that membroker.kv.sglang does not serve")
        self._allocator = Allocator(plain)
        assert self._allocator.pages == self._cache.layout.blocks
        return self._allocator

    def capture_graphs(self, original: Callable[[Any], None], scheduler: Any) -> None:
        """Around `Scheduler.init_all_cuda_graphs`: the library's threads keep away from the device."""
        with self._cache.capturing(), self._client.defer_recalls():
            original(scheduler)

    def attach(self, scheduler: Any) -> None:
        """Before `Scheduler.run_event_loop`: everything is there, and no request is."""
        tree, allocator = scheduler.tree_cache, getattr(self, "_allocator", None)
        if allocator is None or scheduler.token_to_kv_pool_allocator is not allocator:
            raise InvalidRequest("SGLang has an allocator that membroker.kv.sglang does not serve")
        kinds = type(tree).__name__, type(getattr(tree, "tree_core", None)).__name__
        if kinds not in (("UnifiedRadixCache", "UnifiedTreeCore"), ("ChunkCache", "NoneType")):
            raise InvalidRequest(f"membroker.kv.sglang does not support the prefix cache {kinds[0]} with {kinds[1]}")
        is_cuda = torch.device(scheduler.device).type == "cuda"
        self.blocks = SglangBlocks(
            scheduler, allocator, (lambda: _Fence(scheduler.forward_stream)) if is_cuda else Over
        )
        self._cache.attach(self.blocks)
        also = torch.cuda.empty_cache if is_cuda else None
        self._sleeper = Sleeper(self._cache, kept="they are SGLang's own memory", also=also)

    # In the scheduler's loop

    def turn(self, scheduler: Any, running_batch: Any, last_batch: Any) -> None:
        """Before `Scheduler.get_next_batch_to_run`: all that was scheduled before is launched."""
        blocks = self.blocks
        was_preempting = blocks.is_preempting
        blocks.begin(running_batch, last_batch)
        has_waiting, runs_nothing = bool(scheduler.waiting_queue), blocks.runs_nothing
        is_idle = runs_nothing and not has_waiting
        self._cache.turn(is_idle=is_idle)
        if not is_idle:
            self._sleeper.wake()
        if blocks.has_grown or was_preempting:
            blocks.has_grown = False
            running_batch.batch_is_full = blocks.is_preempting  # if not, SGLang looks at waiting requests again
        if runs_nothing and has_waiting:
            self._cache.wait(0.0)  # raises if no memory can come any more: else the scheduler would spin forever
        if is_idle and self._cache.stats().going_bytes:
            # An idle scheduler spins. Each page that the other thread unmaps would then wait 5 ms for the interpreter.
            time.sleep(IDLE_SECONDS)

    # Where SGLang counts

    def check_pool(self, checker: Any, ps: Any, uncached: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before `SchedulerInvariantChecker._check_full_pool`: tokens without memory are neither free nor lost."""
        return (checker, ps, uncached + self._held_tokens()), {}

    def token_info(self, stats: Any, observer: Any) -> None:
        """After `SchedulerPoolStatsObserver._get_token_info`: the usage is that of what has memory."""
        held = self._held_tokens()
        stats.full_num_used -= held
        stats.full_token_usage = stats.full_num_used / max(1, observer.max_total_num_tokens - held)

    def _held_tokens(self) -> int:
        return self._allocator.held_count * int(self._allocator.page_size)


class _Fence:
    """The end of what was launched on the stream of the model, and on the current one."""

    def __init__(self, forward_stream: Any) -> None:
        self._events = [stream.record_event() for stream in (forward_stream, torch.cuda.current_stream())]

    def query(self) -> bool:
        return all(event.query() for event in self._events)
