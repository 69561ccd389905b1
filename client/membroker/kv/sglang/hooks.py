"""The hooks in SGLang, by SGLang's own `HookRegistry`: where its cache is made, where it schedules, where it counts.

A turn of the cache is before a batch is composed: all earlier ones are launched then, so events on the model's stream
and on the scheduler's are the fence. For a recall, SGLang is made to believe once that it has no room for the next
token, until its own steps have retracted the requests that use unwanted pages. At another point of its loop a retracted
request could be admitted again before its last step's result has come, and would have that token twice.

Owns the table of them. They are registered in each process of SGLang and used in its scheduler's, which has one engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ...errors import InvalidRequest
from ...ext import arguments
from . import seams
from .memory import SglangMemory
from .settings import VARIABLE, check_supported, settings_of

_MEM_CACHE: Final = "sglang.srt.mem_cache"
_CONFIGURATOR: Final = f"{_MEM_CACHE}.kv_cache_configurator.KVCacheConfigurator"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_COMPONENTS: Final = "sglang.srt.managers.scheduler_components"

_current: SglangMemory | None = None


def register() -> None:
    """Register the hooks. What is wrong in the settings is raised when an engine makes its cache."""
    envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.set("python")  # the other one does not say which pages are cached
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(target, hook, kind)


def current() -> SglangMemory:
    """Return the memory of this process's engine."""
    if _current is None:
        raise InvalidRequest("SGLang's scheduler runs without the KV cache that membroker made for it")
    return _current


# Where the cache is made


def _load_model(runner: Any) -> None:
    """Before `ModelRunner.load_model`: the place of all refusals."""
    settings_of(os.environ[VARIABLE])
    seams.check()
    if missing := [target for target in HOOKS if target not in HookRegistry._patched]:
        raise InvalidRequest(f"SGLang did not apply membroker's hook on {missing[0]}: its log has the reason")
    model = runner.model_config
    check_supported(
        resolved_view(runner.server_args),
        is_recurrent=mambaish_config(model) is not None,
        is_window=bool(model.is_hybrid_swa),
        is_sparse=is_deepseek_dsa(model.hf_config),
        sizes_late=envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
    )


def _configure(config: Any, **options: Any) -> None:
    """Before `KVCacheConfigurator.configure`: what makes the cache."""
    global _current
    _current = SglangMemory(settings_of(os.environ[VARIABLE]), config)


def _available_bytes(original: Callable[..., int], config: Any, pre_model_load_memory: Any) -> int:
    """Around `_profile_available_bytes`: the cache is as large as `capacity`, whatever the GPU has free."""
    if (capacity := current().settings.capacity) is None:
        return original(config, pre_model_load_memory)
    return arguments.bytes_of("capacity", capacity)


def _create_buffers(original: Callable[[Any], None], kvcache: Any) -> None:
    """Around `_create_buffers` of the pools: the KV tensors are addresses."""
    if type(kvcache).__name__ not in ("MHATokenToKVPool", "MLATokenToKVPool"):
        raise InvalidRequest(f"membroker.kv.sglang does not serve a KV cache of class {type(kvcache).__name__}")
    current().create_buffers(kvcache, original)


def _allocator(plain: Any, config: Any, **options: Any) -> Any:
    """After `_build_token_to_kv_pool_allocator`: another one takes the place of SGLang's own."""
    return current().allocator(plain)


def _capture_graphs(original: Callable[[Any], None], scheduler: Any) -> None:
    """Around `Scheduler.init_all_cuda_graphs`."""
    with current().capturing():
        original(scheduler)


# Where the scheduler works


def _run(scheduler: Any) -> None:
    """Before `Scheduler.run_event_loop`: everything is there, and no request is."""
    current().attach(scheduler)


def _turn(scheduler: Any, running_batch: Any, last_batch: Any) -> None:
    """Before `Scheduler.get_next_batch_to_run`: all that was scheduled before is launched."""
    current().turn(running_batch, last_batch)


def _has_memory(original: Callable[..., bool], batch: Any, selected_indices: Any = None) -> bool:
    """Around `ScheduleBatch.check_decode_mem`: without memory SGLang retracts, and so it does for a recall."""
    return not current().blocks.must_retract(batch.reqs, selected_indices) and original(batch, selected_indices)


def _order(order: list[int], reqs: Any) -> list[int]:
    """After `ScheduleBatch._get_decode_retraction_order`: those that a recall wants retracted go first."""
    return current().blocks.order(order)


def _retracted(result: Any, batch: Any) -> Any:
    """After `ScheduleBatch.retract_decode`: the last request waits for memory, and is not aborted."""
    return current().blocks.retracted(*result)


# Where SGLang counts


def _check_pool(checker: Any, ps: Any, uncached: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before `SchedulerInvariantChecker._check_full_pool`: tokens without memory are neither free nor lost."""
    return (checker, ps, uncached + current().held_tokens), {}


def _token_info(stats: Any, observer: Any) -> None:
    """After `SchedulerPoolStatsObserver._get_token_info`: the usage is that of what has memory."""
    held = current().held_tokens
    stats.full_num_used -= held
    stats.full_token_usage = stats.full_num_used / max(1, observer.max_total_num_tokens - held)


HOOKS: Final = {
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (HookType.BEFORE, _load_model),
    f"{_CONFIGURATOR}.configure": (HookType.BEFORE, _configure),
    f"{_CONFIGURATOR}._profile_available_bytes": (HookType.AROUND, _available_bytes),
    f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (HookType.AFTER, _allocator),
    f"{_MEM_CACHE}.memory_pool.MHATokenToKVPool._create_buffers": (HookType.AROUND, _create_buffers),
    f"{_MEM_CACHE}.memory_pool.MLATokenToKVPool._create_buffers": (HookType.AROUND, _create_buffers),
    f"{_SCHEDULER}.init_all_cuda_graphs": (HookType.AROUND, _capture_graphs),
    f"{_SCHEDULER}.run_event_loop": (HookType.BEFORE, _run),
    f"{_SCHEDULER}.get_next_batch_to_run": (HookType.BEFORE, _turn),
    f"{_BATCH}.check_decode_mem": (HookType.AROUND, _has_memory),
    f"{_BATCH}._get_decode_retraction_order": (HookType.AFTER, _order),
    f"{_BATCH}.retract_decode": (HookType.AFTER, _retracted),
    f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker._check_full_pool": (HookType.BEFORE, _check_pool),
    f"{_COMPONENTS}.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info": (HookType.AFTER, _token_info),
}
"""What each target is given: the registry's table, and the list that `_load_model` looks through."""
