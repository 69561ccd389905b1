"""The worker class for `--worker-cls`: vLLM's own, for weights that are borrowed. The KV cache alone needs none.

Owns the moments at which weights are loaded and used: they are used only while the engine is awake. A step needs no
guard: vLLM schedules none for a sleeping engine, because that has no free block. It serves vLLM's builds for NVIDIA
GPUs and for CPUs. An engine that membroker does not serve is refused here before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from . import memory, seams
from .settings import check_supported
from .sleep import borrow, wants_borrowed

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Base
else:
    from vllm.v1.worker.gpu_worker import Worker as _Base

USE_WEIGHTS = (
    *("execute_dummy_batch", "apply_model", "add_lora", "reload_weights"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
    *("compute_weight_checksums", "reset_weights"),
    *("save_sharded_state", "save_tensorized_model"),
)
"""What vLLM calls by name, besides steps, and reads or writes weights."""


class Worker(_Base):  # type: ignore[misc]
    """vLLM's worker of one device."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        seams.check()
        check_supported(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **options: Any) -> None:
        """Load, and move the weights to borrowed memory if the user asked for that."""
        is_borrowed = wants_borrowed(self.vllm_config)
        super().load_model(**options)
        memory.borrowed = borrow(self.vllm_config, self.get_model()) if is_borrowed else None


def _awake(name: str) -> Callable[..., Any]:
    """Return a method that calls vLLM's own of that name with the engine awake."""

    def call(self: Worker, *args: Any, **kwargs: Any) -> Any:
        with memory.awake():
            return getattr(super(Worker, self), name)(*args, **kwargs)

    return call


for _name in USE_WEIGHTS:
    setattr(Worker, _name, _awake(_name))
