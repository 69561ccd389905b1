"""The memory of one vLLM engine's KV cache: its pool, its `ElasticCache`, and the fences of its steps.

Owns what vLLM's worker and scheduler share. Both run in one thread of one process as long as an engine has one GPU, so
a variable of this module connects them. Only the worker's side, at the start of the engine, waits for the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...adapters.torch import device_of
from ...adapters.torch.package import torch
from ...arguments import bytes_of
from ...client import Client, connect
from ...errors import InvalidRequest, MembrokerError
from ...model import Model
from ...pool.pool import VirtualMemoryPool
from ...vmm.sizes import round_up
from ..cache import ElasticCache
from ..capture import Capture, strided
from ..layout import Layout, Strided
from .blocks import Blocks
from .settings import BLOCK_MAJOR, LAYER_MAJOR, PAGES, Settings

logger = logging.getLogger("vllm.membroker")  # vLLM shows only loggers below its own

START_SECONDS = 300.0
"""How long the start of an engine waits for the memory that its warm-up needs."""

_current: Memory | None = None


class Memory:
    """The KV cache of a `VllmConfig` and a `KVCacheConfig`. It borrows nothing before `open`."""

    def __init__(self, settings: Settings, config: Any, cache_config: Any) -> None:
        self.settings = settings
        self._config, self._cache_config = config, cache_config
        self._name = str(settings.model or config.model_config.served_model_name)
        self._tensors: list[Strided] = []
        self._is_uniform = False
        self._client: Client | None = None
        self._model: Model | None = None
        self._pool: VirtualMemoryPool | None = None
        self._cache: ElasticCache | None = None
        self._steps = _Steps()

    # The worker's side

    def capture(self, device: Any, *, block_major: bool) -> Capture:
        """Connect to the broker, reserve addresses, and return the mode that makes the KV tensors of them.

        `block_major` says which layout vLLM will choose, for the size of the pages. Any layout is served with any.
        """
        self._client = connect()
        self._model = self._client.register_model(self._name, limit=self.settings.limit)
        lent = device_of(self._model.driver.device)
        if lent.type != device.type or device.index not in (None, lent.index):
            raise InvalidRequest(f"this engine computes on {device}, and the broker lends memory of {lent}")
        layout = BLOCK_MAJOR if block_major else LAYER_MAJOR
        page = bytes_of("page_size", self.settings.page_size or PAGES[layout])
        sizes = [tensor.size for tensor in self._cache_config.kv_cache_tensors]
        wanted = {*sizes, sum(sizes)}
        self._pool = VirtualMemoryPool(self._model, sum(round_up(size, page) for size in sizes), page)
        steps, is_cuda = self._steps, device.type == "cuda"
        steps.record = _recorded if is_cuda else _Over
        return Capture(
            self._pool, wanted=lambda shape, dtype: dtype is torch.int8 and len(shape) == 1 and shape[0] in wanted
        )

    def register(self, tensor: Any, dimension: int, *, uniform: bool) -> None:
        """Note a KV tensor, with its blocks along `dimension`. `uniform`: it has all layers."""
        blocks, rows = self._cache_config.num_blocks, tensor.shape[dimension]
        if rows % blocks:
            raise InvalidRequest(f"{blocks} blocks cannot lie in {rows} rows of a tensor of {tuple(tensor.shape)}")
        pieces = rows // blocks  # attention kernels with smaller blocks have several for one block of the scheduler
        for one in strided(tensor, dimension):
            self._tensors.append(Strided(one.address, one.stride * pieces, one.stride * (pieces - 1) + one.size))
        self._is_uniform = uniform

    def open(self, warm_up_blocks: int) -> None:
        """Map the null block and the blocks that the warm-up writes. Waits for the broker."""
        pool, model, settings = self._pool, self._model, self.settings
        if pool is None or model is None or not self._tensors:
            raise InvalidRequest("the connector was not told of any KV tensor: this runner of vLLM is not supported")
        if not all(
            pool.base_address <= one.address
            and one.end(self._cache_config.num_blocks) <= pool.base_address + pool.capacity
            for one in self._tensors
        ):
            raise InvalidRequest(
                f"a KV tensor is not in the pool: give --kv-cache-memory-bytes at least a page of {pool.page_size} "
                "bytes for each tensor"
            )
        tokens = self._config.cache_config.block_size
        layout = Layout(pool.base_address, pool.page_size, self._cache_config.num_blocks, self._tensors, tokens)
        self._check_fits(layout, model)
        self._cache = ElasticCache(
            pool,
            layout,
            floor=settings.floor,
            ahead=layout.bytes_of(0) if settings.ahead is None else settings.ahead,
            keep=settings.keep,
            ceiling=settings.ceiling,
        )
        if not self._cache.prepare(min(layout.blocks, 1 + warm_up_blocks), START_SECONDS):
            raise InvalidRequest(
                f"the broker did not lend the {warm_up_blocks * layout.block_bytes} bytes that vLLM's warm-up needs "
                f"within {START_SECONDS:.0f} seconds: free some, or lower --max-num-batched-tokens and --max-num-seqs"
            )
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
        with self._opened.capturing(), self._client.defer_recalls():
            yield

    def end_step(self, number: int) -> None:
        """Note that the worker has launched all work of a step."""
        self._steps.end(number)

    # The scheduler's side

    def attach(self, pool: Any) -> tuple[ElasticCache, Blocks]:
        """Hold the blocks of vLLM's pool that have no memory; return the cache, and the pool as its engine."""
        if self._cache is None:
            raise InvalidRequest("the KV cache is vLLM's own: give vLLM --worker-cls membroker.kv.vllm.Worker")
        blocks = Blocks(
            pool,
            block_tokens=self._config.cache_config.block_size,
            most_tokens=self._config.model_config.max_model_len,
            most_requests=self._config.scheduler_config.max_num_seqs,
            new_fence=self._steps.fence,
        )
        if pool.num_gpu_blocks != self._cache_config.num_blocks:
            raise InvalidRequest(
                f"vLLM's scheduler has {pool.num_gpu_blocks} blocks, and its worker {self._cache_config.num_blocks}"
            )
        self._cache.attach(blocks)
        return self._cache, blocks

    def begin_step(self) -> int:
        """Return the number of the step that is being scheduled."""
        return self._steps.begin()

    # The end

    def close(self) -> None:
        """Release all memory. Idempotent. The engine computes no more."""
        global _current
        if _current is self:
            _current = None
        with suppress(MembrokerError):  # the memory goes with this process
            if self._cache is not None:
                self._cache.close()
            if self._client is not None:
                self._client.close()

    @property
    def _opened(self) -> ElasticCache:
        assert self._cache is not None
        return self._cache

    def _check_fits(self, layout: Layout, model: Model) -> None:
        """Raise `InvalidRequest` if the longest request can never have its blocks: vLLM would let it wait forever."""
        longest = self._config.model_config.max_model_len
        blocks = min(layout.blocks - 1, -(-longest // layout.block_tokens))
        size = sum(layout.bytes_of(group) for group in range(max(layout.touched(blocks)) + 1))
        available = model.available()
        ceiling = None if self.settings.ceiling is None else bytes_of("ceiling", self.settings.ceiling)
        assert self._client is not None
        limits = (self._client.capacities.get("device"), available.limit_bytes, ceiling)
        limit = min((one for one in limits if one is not None), default=size)
        if size > limit:
            raise InvalidRequest(
                f"a request of {longest} tokens needs {size} bytes of KV cache, and {self._name!r} may borrow "
                f"{limit}: lower --max-model-len, or raise the limit"
            )
        if size > available.guarantee_bytes:
            logger.warning(
                "membroker: a request of %d tokens needs %d MiB, and model %r is guaranteed %d MiB: while others "
                "need the memory, long requests wait",
                longest,
                size >> 20,
                self._name,
                available.guarantee_bytes >> 20,
            )


def begin(settings: Settings, config: Any, cache_config: Any) -> Memory:
    """Return the memory of the engine that starts in this process."""
    global _current
    _current = Memory(settings, config, cache_config)
    return _current


def current() -> Memory:
    """Return the memory of the engine that starts in this process, for its other side."""
    if _current is None:
        raise InvalidRequest(
            "vLLM's worker and its connector do not meet in this process: give both --worker-cls "
            'membroker.kv.vllm.Worker and --kv-transfer-config with "kv_connector": "Membroker", and one GPU per engine'
        )
    return _current


class _Steps:
    """Counts steps where they are scheduled and where they are launched, and settles fences between the two."""

    def __init__(self) -> None:
        self.record: Any = _Over
        """Returns an event behind all work that was launched."""
        self._begun = self._ended = 0
        self._open: list[_Fence] = []

    def begin(self) -> int:
        self._begun += 1
        return self._begun

    def fence(self) -> _Fence:
        fence = _Fence(self._begun)
        if self._ended >= fence.number:
            fence.event = self.record()
        else:
            self._open.append(fence)
        return fence

    def end(self, number: int) -> None:
        self._ended = number
        if self._open and self._open[0].number <= number:
            event = self.record()
            for fence in self._open:
                if fence.number <= number:
                    fence.event = event
            self._open = [fence for fence in self._open if fence.number > number]


class _Fence:
    """The end of a step's work on the device, which may not have been launched yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.event: Any = None

    def query(self) -> bool:
        event = self.event
        return event is not None and bool(event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class _Over:
    """The event of work that is over when it is launched, as on a CPU."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _recorded() -> Any:
    event = torch.cuda.Event()
    event.record()
    return event
