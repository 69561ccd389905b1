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
from operator import attrgetter
from typing import Any, Final

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ...errors import InvalidRequest
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


def _with(name: str) -> Callable[..., Any]:
    """Return the hook that is a method of this process's engine, or of its blocks."""
    found = attrgetter(name)
    return lambda *args, **options: found(current())(*args, **options)


HOOKS: Final = {
    # Where the cache is made
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": (HookType.BEFORE, _load_model),
    f"{_CONFIGURATOR}.configure": (HookType.BEFORE, _configure),
    f"{_CONFIGURATOR}._profile_available_bytes": (HookType.AROUND, _with("available_bytes")),
    f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (HookType.AFTER, _with("allocator")),
    f"{_MEM_CACHE}.memory_pool.MHATokenToKVPool._create_buffers": (HookType.AROUND, _with("create_buffers")),
    f"{_MEM_CACHE}.memory_pool.MLATokenToKVPool._create_buffers": (HookType.AROUND, _with("create_buffers")),
    f"{_SCHEDULER}.init_all_cuda_graphs": (HookType.AROUND, _with("capture_graphs")),
    # Where the scheduler works
    f"{_SCHEDULER}.run_event_loop": (HookType.BEFORE, _with("attach")),
    f"{_SCHEDULER}.get_next_batch_to_run": (HookType.BEFORE, _with("turn")),
    f"{_BATCH}.check_decode_mem": (HookType.AROUND, _with("blocks.has_memory")),
    f"{_BATCH}._get_decode_retraction_order": (HookType.AFTER, _with("blocks.order")),
    f"{_BATCH}.retract_decode": (HookType.AFTER, _with("blocks.retracted")),
    # Where it counts
    f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker._check_full_pool": (
        HookType.BEFORE,
        _with("check_pool"),
    ),
    f"{_COMPONENTS}.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info": (
        HookType.AFTER,
        _with("token_info"),
    ),
}
"""What each target is given: the registry's table, and the list that `_load_model` looks through."""
