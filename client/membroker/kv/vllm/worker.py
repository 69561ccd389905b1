"""The worker class for `--worker-cls`: vLLM's own, for weights that are borrowed. The KV cache alone needs none.

Borrowed weights are in the books, and can be released while the engine sleeps. Owns their pool and its session, and the
moments at which they are loaded and used: only while the engine is awake. A step needs no guard: vLLM schedules none
for a sleeping engine, because that has no free block. It serves vLLM's builds for NVIDIA GPUs and for CPUs. An engine
that membroker does not serve is refused here before its weights are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from vllm.platforms import current_platform

from ... import Client, VirtualMemoryPool, connect
from ...adapters.torch import device_of, move_to_pool
from ...errors import InvalidRequest
from ..bounds import START_SECONDS, say_wait
from . import logger, memory, seams
from .settings import BORROWED, check_supported, endpoint_of, settings_in

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
        super().load_model(**options)
        if settings_in(self.vllm_config.kv_transfer_config).weights == BORROWED:
            memory.borrowed = _borrow(self.vllm_config, self.get_model())


def _borrow(config: Any, module: Any) -> tuple[Client, VirtualMemoryPool]:
    """Move a module's parameters to a pool, and return its client and it. It waits for the broker.

    The session answers no recalls: weights cannot be recalled, so the broker must not lend this engine what others are
    guaranteed for them.
    """
    begun, settings = time.monotonic(), settings_in(config.kv_transfer_config)
    name = settings.name(config.model_config.served_model_name)
    with ExitStack() as undo:
        client = undo.enter_context(connect(endpoint_of(settings.endpoint, config.parallel_config)))
        model = client.model(name, limit=settings.limit)
        device = device_of(model.driver.device)
        wanted = [parameter for parameter in module.parameters() if parameter.device == device]
        if not wanted:
            raise InvalidRequest(f"this engine has no weights on {device}, whose memory the broker lends")
        say_wait(sum(parameter.nbytes for parameter in wanted), model, logger)
        pool = move_to_pool(wanted, model, timeout=START_SECONDS)
        undo.pop_all()
    logger.info(
        "membroker: moved %d bytes of weights of model %r into borrowed memory in %.2f s",
        pool.physical_usage_bytes,
        name,
        time.monotonic() - begun,
    )
    return client, pool


def _awake(name: str) -> Callable[..., Any]:
    """Return a method that calls vLLM's own of that name with the engine awake."""

    def call(self: Worker, *args: Any, **kwargs: Any) -> Any:
        with memory.awake():
            return getattr(super(Worker, self), name)(*args, **kwargs)

    return call


for _name in USE_WEIGHTS:
    setattr(Worker, _name, _awake(_name))
