"""The memory of one rank's KV cache: its pool, the events of its steps, and its `ElasticCache` for the start.

Owns what vLLM's worker, the worker's side of the connector and the scheduler's share, by variables of this module. With
the executor "uni" the scheduler is in the same process and takes over the cache. Otherwise the scheduler has a cache
over the pools of all ranks, and the one that was used for the start ends. All of this happens at the start of the
engine, and may wait for the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from ... import Client, Model, VirtualMemoryPool, connect
from ...errors import InvalidRequest, MembrokerError
from ...ext import arguments
from ...vmm.sizes import format_size, round_up
from ..bounds import START_SECONDS, bytes_of_first, say_cache, say_wait
from ..cache import ElasticCache
from ..capture import Capture, device_lent
from ..layout import Layout, Strided
from ..rank import Rank
from ..sleeper import Sleeper
from . import logger
from .blocks import GroupNeed, needs_of
from .settings import AUTO, BORROWED, VllmSettings, endpoint_of
from .steps import Launched
from .swap import SwapSpace

CONTEXT_BYTES = 600 << 20
"""What a CUDA context and the kernels take, which PyTorch does not count: 518 MiB on an H200."""
_LEAST_PAGE, _USUAL_PAGE, _MOST_PAGE = 2 << 20, 16 << 20, 64 << 20
_WARM_UP_TOKENS = 8
"""The warm-up of vLLM's kernels gives each request so many tokens, and so many for each token that it drafts."""

borrowed: tuple[Client, VirtualMemoryPool] | None = None
"""The weights of this process's worker, if they are borrowed, and the client of their pool."""
_current: VllmMemory | None = None


class VllmMemory:
    """The KV cache of a `VllmConfig` and a `KVCacheConfig`. It borrows nothing before `open`."""

    def __init__(self, settings: VllmSettings, config: Any, cache_config: Any) -> None:
        self.settings = settings
        self._config, self._cache_config = config, cache_config
        self._name = settings.name(config.model_config.served_model_name, logger)
        self._ending = ExitStack()
        self.weights: VirtualMemoryPool | None = None
        """The pool of borrowed weights, or None for weights that are vLLM's own."""
        if settings.weights == BORROWED:
            if borrowed is None:
                raise InvalidRequest('"weights": "borrowed" needs --worker-cls membroker.kv.vllm.Worker')
            client, self.weights = borrowed
            self._ending.enter_context(client)
        self._capture: Capture | None = None
        self._client: Client
        self._model: Model
        self._pool: VirtualMemoryPool
        self._cache: ElasticCache
        self.keeper: Sleeper | Rank | None = None
        """What keeps the engine awake: its `Sleeper`, or this `Rank` if its scheduler is in another process."""
        self._warm_up = ExitStack()
        """Keeps the library's threads away from the device while vLLM warms up and captures its graphs."""
        self.launched: Launched = Launched()
        self.passed: Callable[[], int] = self.launched.passed
        """Returns the last step whose fence has passed, as `Ranks.passed` does."""
        self.swap_space: SwapSpace | None = None

    def capture(self, device: Any) -> Capture:
        """Connect to the broker, reserve addresses, and return the mode that makes vLLM's one KV buffer of them."""
        endpoint = endpoint_of(self.settings.endpoint, self._config.parallel_config)
        self._client = self._ending.enter_context(connect(endpoint))
        self._model = self._client.model(self._name, limit=self.settings.limit)
        self._tensor_device = device_lent(self._model.driver, device)
        size = self._cache_config.kv_cache_tensors[0].size
        given, found = self.settings.page_size, self.parts(0)
        page = page_size_of(found) if given is None else arguments.bytes_of("page_size", given)
        self._pool = VirtualMemoryPool(self._model, round_up(size, page), page)
        if device.type == "cuda":
            self.launched.record = lambda: torch.cuda.current_stream().record_event()
        self._capture = Capture(self._pool, wanted=lambda shape, dtype: dtype is torch.int8 and shape == (size,))
        return self._capture

    def parts(self, base: int) -> list[Strided]:
        """Return where the blocks are in a buffer at `base`.

        If a block has the bytes of all layers side by side, it is one range, whatever the kinds of layers are: the
        layers of one group lie where those of another group do, and a block belongs to one group at a time. Otherwise
        each layer has a region of its own.
        """
        tensors, blocks = self._cache_config.kv_cache_tensors, self._cache_config.num_blocks
        if all(tensor.block_stride * blocks == tensor.size for tensor in tensors):
            return [Strided(base, tensors[0].block_stride, tensors[0].block_stride)]
        return [
            Strided(base + tensor.offset + number * tensor.layer_stride, tensor.block_stride, tensor.block_stride)
            for tensor in tensors
            for number in range(len(tensor.layers))
        ]

    def open(self) -> None:
        """Map the null block and the blocks that the warm-up writes. Waits for the broker.

        The warm-up begins after that, and ends when the scheduler takes over.
        """
        if self._capture is None or not self._capture.ranges:
            raise InvalidRequest(
                "vLLM has allocated its KV cache elsewhere: this worker of vLLM is not supported, or "
                "--kv-cache-memory-bytes is less than a page"
            )
        pool, model, settings = self._pool, self._model, self.settings
        parts = self.parts(pool.base_address)
        layout = Layout(pool.base_address, pool.page_size, self._cache_config.num_blocks, parts)
        needs = needs_of(self._config, self._cache_config.kv_cache_groups)
        longest = self._config.model_config.max_model_len
        size = bytes_of_first(layout, 1 + sum(need.most for need in needs))
        besides = 0 if self.weights is None else self.weights.physical_usage_bytes
        if settings.declare not in (None, AUTO):  # "auto" is not known yet
            besides += arguments.bytes_of("declare", settings.declare)
        settings.check_fits(size, longest, self._client, model, "--max-model-len", logger, besides=besides)
        first = min(layout.blocks, 1 + self._warm_up_blocks(needs))
        needed = bytes_of_first(layout, first)
        say_wait(needed, model, logger)
        self._cache = self._ending.enter_context(settings.elastic(pool, layout))
        if not self._cache.prepare(first, START_SECONDS):
            raise InvalidRequest(
                f"the broker did not lend the {format_size(needed)} that vLLM's warm-up needs within "
                f"{START_SECONDS:.0f} seconds: free some, or lower --max-num-batched-tokens and --max-num-seqs"
            )
        if settings.swap_space is not None:
            size = arguments.bytes_of("swap_space", settings.swap_space)
            space = SwapSpace(model.source, layout, size, on_gpu=self._tensor_device.type == "cuda")
            self.swap_space = self._ending.enter_context(closing(space))
            logger.info("membroker: pinned %s of host memory for the KV cache of preempted requests", format_size(size))
        of = f"blocks for {len(needs)} groups of layers"
        say_cache(pool, layout, model, self._cache_config.kv_cache_layout, of, logger)
        self._warm_up.enter_context(self._cache.capturing())
        self._warm_up.enter_context(self._client.defer_recalls())

    def _warm_up_blocks(self, needs: Sequence[GroupNeed]) -> int:
        """Return how many blocks behind the null block the warm-up may write: of one long step, or of many requests."""
        if self._tensor_device.type == "cpu":
            return 0  # it warms up before it has a cache
        scheduler, ahead = self._config.scheduler_config, self._config.num_lookahead_tokens
        each = _WARM_UP_TOKENS * (1 + self._config.num_speculative_tokens) + ahead

        def blocks(tokens: int) -> int:
            return sum(-(-tokens // need.block_tokens) + need.besides for need in needs)

        one_step = blocks(scheduler.max_num_batched_tokens + ahead) + blocks(each)
        requests: int = scheduler.max_num_seqs
        return max(one_step, requests * blocks(each))

    def _end_warm_up(self) -> None:
        """Let the library's threads go on, and charge the model for vLLM's own memory, if the user asked for that.

        Raises `OutOfMemory` if the books have no room for it.
        """
        self._warm_up.close()
        self.launched.begin(0, 0)
        size = self.settings.declare
        if size is None:
            return
        if size == AUTO:
            device = self._tensor_device
            size = torch.cuda.memory_reserved(device) + CONTEXT_BYTES if device.type == "cuda" else 0
        self._model.declare(size)
        logger.info(
            "membroker: declared %s of memory that vLLM allocates itself",
            format_size(arguments.bytes_of("declare", size)),
        )

    # The scheduler takes over

    def take_cache(self) -> ElasticCache:
        """Return the cache, for the scheduler in this process."""
        self._end_warm_up()
        return self._cache

    def serve(self) -> tuple[str, tuple[Any, ...]]:
        """Let the scheduler in another process decide what has memory. What the warm-up needed is released.

        Returns the address for its `Ranks`, and the arguments of its `Layout`, in which the pool begins at 0.
        """
        self._end_warm_up()
        self._cache.close()
        layout = self._cache.layout
        tensors = tuple(replace(tensor, address=tensor.address - layout.base) for tensor in layout.tensors)
        rank = self.keeper = Rank(self._pool, self.passed, weights=self.weights, also=self.also)
        return rank.address, (0, layout.page_size, layout.blocks, tensors)

    def also(self) -> None:
        """Release what PyTorch keeps for its next use. `Sleeper` calls it when the cache is empty."""
        if self._tensor_device.type == "cuda":
            with torch.cuda.device(self._tensor_device):
                torch.cuda.empty_cache()

    # The end

    def close(self) -> None:
        """Release all memory. Idempotent. The engine computes no more."""
        global _current
        if _current is self:
            _current = None
        if isinstance(self.keeper, Sleeper):
            self.keeper.close()
        with suppress(MembrokerError):  # the memory goes with this process
            self._ending.close()


def page_size_of(parts: Sequence[Strided]) -> int:
    """Return the size of a page: larger where one has all layers, so that growth needs few of them.

    A page stays as long as any block in it is used. So it has 8 to 256 blocks, and few of them if it gets large: it is
    then rarely used by more than one request.
    """
    if len(parts) > 1:
        return _LEAST_PAGE
    few, many = (1 << (blocks * parts[0].stride - 1).bit_length() for blocks in (8, 256))
    return min(_MOST_PAGE, max(few, min(_USUAL_PAGE, many), _LEAST_PAGE))


def begin(settings: VllmSettings, config: Any, cache_config: Any) -> VllmMemory:
    """Return the memory of the engine that starts in this process."""
    global _current
    _current = VllmMemory(settings, config, cache_config)
    return _current


def awake() -> AbstractContextManager[None]:
    """Wait until this process's engine is awake, and keep it so during a block. At its start it does nothing."""
    keeper = None if _current is None else _current.keeper
    return nullcontext() if keeper is None else keeper.awake()


def current() -> VllmMemory:
    """Return the memory of the engine that starts in this process, for another part of it."""
    if _current is None:
        raise InvalidRequest("vLLM's worker is not in its scheduler's process: give --distributed-executor-backend mp")
    return _current
