"""The worker class for `--worker-cls`: vLLM's own, whose KV tensors are addresses of a pool.

Owns the moments of the start (the weights are loaded, the tensors are made, the warm-up begins and ends), and the rule
that weights are used only while the engine is awake. A step needs no guard: vLLM schedules none for a sleeping engine,
because that has no free block. It serves vLLM's builds for NVIDIA GPUs and for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from . import memory, seams
from .settings import check_supported, is_block_major
from .sleep import VllmWeights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Base
else:
    from vllm.v1.worker.gpu_worker import Worker as _Base

_SLACK_BLOCKS = 8
"""The warm-up of the V2 runner writes up to 3 blocks more than its tokens fill."""
USE_WEIGHTS = (
    *("execute_dummy_batch", "apply_model", "add_lora", "reload_weights"),
    *("start_weight_update", "update_weights", "finish_weight_update"),
    *("save_sharded_state", "save_tensorized_model"),
)
"""What vLLM calls by name, besides steps, and reads or writes weights."""


class Worker(_Base):  # type: ignore[misc]
    """vLLM's worker of one device."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        seams.check()
        check_supported(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Called by vLLM around the allocation of weights, and of the KV tensors."""
        if tag != "kv_cache":
            found: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
            return found
        return memory.current().capture(self.device, block_major=self._will_be_block_major())

    def load_model(self, **options: Any) -> None:
        """Load, and move the weights to borrowed memory if the user asked for that."""
        self._weights = VllmWeights(self.vllm_config)
        super().load_model(**options)
        self._weights.move(self.get_model())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV tensors, and map what the warm-up writes."""
        super().initialize_from_config(kv_cache_config)
        memory.current().weights = self._weights
        memory.current().open(self._warm_up_blocks())

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture graphs, undisturbed by the library's threads."""
        with memory.current().capturing():
            done = super().compile_or_warm_up_model()
        memory.current().declare()
        return done

    def _will_be_block_major(self) -> bool:
        """Return whether the tensors will be block-major: by the layout, or as the V1 runner will say."""
        if seams.has_layouts():
            return is_block_major(self.cache_config)
        if self.vllm_config.use_v2_model_runner or not has_kv_transfer_group():
            return False
        connector = get_kv_transfer_group()
        specs = self.model_runner.get_kv_cache_spec().values()
        return bool(connector.prefer_cross_layer_blocks and all(spec.indexes_kv_by_block_stride for spec in specs))

    def _warm_up_blocks(self) -> int:
        """Return how many blocks behind the null block the warm-up may write."""
        if current_platform.is_cpu():
            return 0  # it warms up before it has a cache
        scheduler, block_tokens = self.vllm_config.scheduler_config, self.cache_config.block_size
        by_tokens = -(-scheduler.max_num_batched_tokens // block_tokens) + _SLACK_BLOCKS
        if self.vllm_config.use_v2_model_runner:
            return int(max(by_tokens, scheduler.max_num_seqs))  # it also gives a block to each request
        return int(by_tokens)


def _awake(name: str) -> Callable[..., Any]:
    """Return a method that calls vLLM's own of that name with the engine awake."""

    def call(self: Worker, *args: Any, **kwargs: Any) -> Any:
        with memory.awake():
            return getattr(super(Worker, self), name)(*args, **kwargs)

    return call


for _name in USE_WEIGHTS:
    setattr(Worker, _name, _awake(_name))
