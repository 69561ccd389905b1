"""The memory of one rank's KV cache: its pool, the events of its steps, and its `ElasticCache` for the start.

Owns what vLLM's worker class and the worker's side of the connector share, by a variable of this module. With the
executor "uni" the scheduler is in the same process and takes over the cache. Otherwise the scheduler has a cache over
the pools of all ranks, and the one that was used for the start ends. All of this happens at the start of the engine,
and may wait for the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from ... import Client, Model, VirtualMemoryPool, connect
from ...adapters.torch import device_of
from ...errors import InvalidRequest, MembrokerError
from ...ext import arguments
from ...vmm.sizes import format_size, round_up
from ..bounds import START_SECONDS, bytes_of_first, say_wait
from ..cache import ElasticCache
from ..capture import Capture, strided
from ..engine import Over
from ..layout import Layout, Strided
from ..rank import Rank
from ..sleeper import Sleeper
from .seams import has_layouts
from .settings import AUTO, BLOCK_MAJOR, LAYER_MAJOR, PAGES, VllmSettings, endpoint_of
from .sleep import VllmWeights
from .steps import Launched, recorded
from .swap import SwapSpace

logger = logging.getLogger("vllm.membroker")  # vLLM shows only loggers below its own

CONTEXT_BYTES = 600 << 20
"""What a CUDA context and the kernels take, which PyTorch does not count: 518 MiB on an H200."""
_NO_WORKER = "the KV cache is vLLM's own: give vLLM --worker-cls membroker.kv.vllm.Worker"

_current: VllmMemory | None = None


class VllmMemory:
    """The KV cache of a `VllmConfig` and a `KVCacheConfig`. It borrows nothing before `open`."""

    def __init__(self, settings: VllmSettings, config: Any, cache_config: Any) -> None:
        self.settings = settings
        self._config, self._cache_config = config, cache_config
        self._name = settings.name(config.model_config.served_model_name, logger)
        self._tensors: list[Strided] = []
        self._is_uniform = False
        self._client: Client | None = None
        self._model: Model | None = None
        self._pool: VirtualMemoryPool | None = None
        self._cache: ElasticCache | None = None
        self.sleeper: Sleeper | None = None
        """The engine's, if its scheduler is in this process."""
        self.rank: Rank | None = None
        """This one, if its scheduler is in another process."""
        self.weights: VllmWeights | None = None
        self.launched = Launched()
        self.swap_space: SwapSpace | None = None

    def capture(self, device: Any, *, block_major: bool) -> Capture:
        """Connect to the broker, reserve addresses, and return the mode that makes the KV tensors of them.

        `block_major` says which layout vLLM will choose, for the size of the pages. Any layout is served with any.
        """
        self._client = connect(endpoint_of(self.settings.endpoint, self._config.parallel_config))
        self._model = self._client.register_model(self._name, limit=self.settings.limit)
        lent = self._tensor_device = device_of(self._model.driver.device)
        if lent.type != device.type or device.index not in (None, lent.index):
            raise InvalidRequest(f"this engine computes on {device}, and the broker lends memory of {lent}")
        layout = BLOCK_MAJOR if block_major else LAYER_MAJOR
        page = arguments.bytes_of("page_size", self.settings.page_size or PAGES[layout])
        sizes = [tensor.size for tensor in self._cache_config.kv_cache_tensors]
        if has_layouts():
            sizes = sizes[:1]  # of the one buffer
        wanted = {*sizes, sum(sizes)}
        self._pool = VirtualMemoryPool(self._model, sum(round_up(size, page) for size in sizes), page)
        self.launched.record = recorded if device.type == "cuda" else Over
        return Capture(
            self._pool, wanted=lambda shape, dtype: dtype is torch.int8 and len(shape) == 1 and shape[0] in wanted
        )

    def register(self, tensor: Any, dimension: int, *, uniform: bool) -> None:
        """Note a KV tensor, with its blocks along `dimension`. `uniform`: it has all layers."""
        blocks, rows = self._cache_config.num_blocks, tensor.shape[dimension]
        if rows % blocks:
            raise InvalidRequest(f"{blocks} blocks cannot lie in {rows} rows of a tensor of {tuple(tensor.shape)}")
        pieces = rows // blocks  # attention kernels with smaller blocks have several for one block of the scheduler
        for part in strided(tensor, dimension):
            self._tensors.append(Strided(part.address, part.stride * pieces, part.stride * (pieces - 1) + part.size))
        self._is_uniform = uniform

    def open(self, warm_up_blocks: int) -> None:
        """Map the null block and the blocks that the warm-up writes. Waits for the broker."""
        pool, model, settings = self._pool, self._model, self.settings
        if pool is None or model is None or not self._tensors:
            raise InvalidRequest("the connector was not told of any KV tensor: this runner of vLLM is not supported")
        if not all(
            pool.base_address <= part.address
            and part.end(self._cache_config.num_blocks) <= pool.base_address + pool.capacity
            for part in self._tensors
        ):
            raise InvalidRequest(
                f"a KV tensor is not in the pool: give --kv-cache-memory-bytes at least a page of {pool.page_size} "
                "bytes for each tensor"
            )
        tokens = self._config.cache_config.block_size
        layout = Layout(pool.base_address, pool.page_size, self._cache_config.num_blocks, self._tensors, tokens)
        assert self._client is not None
        longest = self._config.model_config.max_model_len
        size = bytes_of_first(layout, 1 + min(layout.blocks - 1, -(-longest // tokens)))
        settings.check_fits(
            size, longest, self._client, model, "--max-model-len", logger, besides=self._charged_besides
        )
        first = min(layout.blocks, 1 + warm_up_blocks)
        needed = bytes_of_first(layout, first)
        say_wait(needed, model, logger)
        self._cache = settings.elastic(pool, layout)
        if not self._cache.prepare(first, START_SECONDS):
            raise InvalidRequest(
                f"the broker did not lend the {format_size(needed)} that vLLM's warm-up needs within "
                f"{START_SECONDS:.0f} seconds: free some, or lower --max-num-batched-tokens and --max-num-seqs"
            )
        if settings.swap_space is not None:
            size = arguments.bytes_of("swap_space", settings.swap_space)
            self.swap_space = SwapSpace(model.source, layout, size, on_gpu=self._tensor_device.type == "cuda")
            logger.info("membroker: pinned %s of host memory for the KV cache of preempted requests", format_size(size))
        logger.info(
            "membroker: the KV cache of model %r is %s, in %d groups of %d MiB: %d blocks of %d tokens, %.1f GiB of "
            "addresses (vLLM's %s runner)",
            self._name,
            BLOCK_MAJOR if self._is_uniform else LAYER_MAJOR,
            layout.groups,
            layout.bytes_of(0) >> 20,
            layout.blocks,
            tokens,
            pool.capacity / (1 << 30),
            "V2" if self._config.use_v2_model_runner else "V1",
        )

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keep the library's threads away from the device while vLLM warms up and captures its graphs."""
        assert self._client is not None
        assert self._cache is not None
        with self._cache.capturing(), self._client.defer_recalls():
            yield

    def declare(self) -> None:
        """Let the broker charge the model for what vLLM has allocated without it, if the user asked for that.

        Raises `OutOfMemory` if the books have no room for it.
        """
        size = self.settings.declare
        if size is None:
            return
        if size == AUTO:
            device = self._tensor_device
            size = torch.cuda.memory_reserved(device) + CONTEXT_BYTES if device.type == "cuda" else 0
        assert self._model is not None
        self._model.declare(size)
        logger.info(
            "membroker: declared %s of memory that vLLM allocates itself",
            format_size(arguments.bytes_of("declare", size)),
        )

    # The scheduler takes over

    def take_cache(self) -> ElasticCache:
        """Return the cache, for the scheduler in this process."""
        if self._cache is None:
            raise InvalidRequest(_NO_WORKER)
        self.launched.begin(0, 0)
        return self._cache

    def serve(self) -> tuple[str, tuple[Any, ...]]:
        """Let the scheduler in another process decide what has memory. What the warm-up needed is released.

        Returns the address for its `Ranks`, and the arguments of its `Layout`, in which the pool begins at 0.
        """
        if self._cache is None or self._pool is None:
            raise InvalidRequest(_NO_WORKER)
        self._cache.close()
        self.launched.begin(0, 0)
        pool, tokens = self._pool, self._config.cache_config.block_size
        tensors = tuple(replace(tensor, address=tensor.address - pool.base_address) for tensor in self._tensors)
        arguments = (0, pool.page_size, self._cache_config.num_blocks, tensors, tokens)
        assert self.weights is not None
        self.rank = Rank(pool, self.launched.passed, weights=self.weights.pool, also=self.empty_torch)
        return self.rank.address, arguments

    def empty_torch(self) -> None:
        """Release what PyTorch keeps for its next use."""
        if self._tensor_device.type == "cuda":
            with torch.cuda.device(self._tensor_device):
                torch.cuda.empty_cache()

    # The end

    def close(self) -> None:
        """Release all memory. Idempotent. The engine computes no more."""
        global _current
        if _current is self:
            _current = None
        for owned in (self.swap_space, self.sleeper, self._cache, self._client, self.weights):
            with suppress(MembrokerError):  # the memory goes with this process
                if owned is not None:
                    owned.close()

    @property
    def _charged_besides(self) -> int:
        """The bytes of borrowed weights and of what is declared. What is declared as "auto" is not known yet."""
        size, weights = self.settings.declare, self.weights
        declared = 0 if size is None or size == AUTO else arguments.bytes_of("declare", size)
        return declared + (0 if weights is None or weights.pool is None else weights.pool.physical_usage_bytes)


def begin(settings: VllmSettings, config: Any, cache_config: Any) -> VllmMemory:
    """Return the memory of the engine that starts in this process."""
    global _current
    _current = VllmMemory(settings, config, cache_config)
    return _current


def awake() -> AbstractContextManager[None]:
    """Wait until this process's engine is awake, and keep it so during a block. At its start it does nothing."""
    keeper = None if _current is None else _current.sleeper or _current.rank
    return nullcontext() if keeper is None else keeper.awake()


def current() -> VllmMemory:
    """Return the memory of the engine that starts in this process, for another part of it."""
    if _current is None:
        raise InvalidRequest(
            "vLLM's worker and its connector do not meet in this process: give both --worker-cls "
            'membroker.kv.vllm.Worker and --kv-transfer-config with "kv_connector": "Membroker"'
        )
    return _current
