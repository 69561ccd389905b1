"""The KV connector `Membroker`: vLLM's scheduler tells it of requests and steps, and its worker of tensors.

Owns the calls of vLLM, and decides when the cache takes its turn. It transfers nothing. No hook waits for the broker
or for the device; they run in the scheduler's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from ..cache import ElasticCache
from . import memory, seams
from .blocks import Blocks
from .settings import BLOCK_MAJOR, check_cache, check_supported, settings_of


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The number of a step, which tells the worker's side which fences are settled when the step is launched."""

    number: int


class Membroker(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of the connector: vLLM makes one for its worker first, and later one for its scheduler."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        seams.check()
        check_supported(vllm_config)
        check_cache(kv_cache_config)
        settings = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        is_worker = role is KVConnectorRole.WORKER
        self._memory = memory.begin(settings, vllm_config, kv_cache_config) if is_worker else memory.current()
        self._cache: ElasticCache | None = None
        self._blocks: Blocks | None = None
        self._rests = False

    # The worker's side

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Ask for block-major. The V1 runner listens where the attention backend allows it, and V2 does not."""
        return self._memory.settings.layout == BLOCK_MAJOR

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Note the tensors of a cache that is layer-major."""
        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, list(kv_caches))
        for name, tensor in kv_caches.items():
            self._memory.register(tensor, self._block_dimension(layers[name].get_attn_backend()), uniform=False)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """Note the tensor of a cache that is block-major."""
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        self._memory.register(kv_cache, order.index(1 + self._block_dimension(attn_backend)), uniform=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing: all contents are in the engine's own blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Settle the fences of the step, which is launched now. No request waits for a transfer."""
        if self.has_connector_metadata():
            self._memory.end_step(self._get_connector_metadata().number)
        return None, None

    # The scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the blocks without memory out of the engine's free list, before its first request."""
        self._cache, self._blocks = self._memory.attach(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Note a request, and ask for its memory before it is scheduled."""
        cache, blocks = self._sides()
        blocks.add(request)
        self._rests = False
        cache.grow()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Publish the blocks that have got memory. Nothing is held here: a prefix that was found is not referenced yet.

        The answer is always that nothing is stored elsewhere. If free blocks are missing, vLLM keeps the request first
        in line.
        """
        cache, blocks = self._sides()
        if ready := cache.take():
            blocks.release(ready)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing was loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """End the scheduling of a step: the cache takes its turn, or rests if there is no request."""
        cache, blocks = self._sides()
        number = self._memory.begin_step()
        if self._rests:
            cache.wake()
        blocks.relax()
        blocks.count(scheduler_output.num_scheduled_tokens)
        self._rests = blocks.is_empty
        if self._rests:
            cache.rest()
        else:
            cache.turn()
        return StepMetadata(number)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. vLLM frees its blocks."""
        self._sides()[1].finish(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep vLLM stepping after its last request until the cache rests, and shrinks and answers recalls by itself.

        With requests this says nothing: vLLM steps for them, unless it is paused, and then it waits to be idle.
        """
        return self._blocks is not None and not self._rests and not self._blocks.has_requests

    def shutdown(self) -> None:
        """Release all memory."""
        self._memory.close()

    def _sides(self) -> tuple[ElasticCache, Blocks]:
        assert self._cache is not None
        assert self._blocks is not None
        return self._cache, self._blocks

    def _block_dimension(self, backend: Any) -> int:
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        return int(
            backend.get_kv_cache_block_dim(
                spec.block_size,
                spec.num_kv_heads,
                spec.head_size,
                cache_dtype_str=self._vllm_config.cache_config.cache_dtype,
            )
        )
