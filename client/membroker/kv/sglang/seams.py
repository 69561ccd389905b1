"""The classes, methods and attributes of SGLang that this package relies on, with the parameters that it gives them.

Owns the tables; `kv/seams.py` compares them with the SGLang that is installed. A version that has all of them may still
behave otherwise: only the last of `TESTED` was run whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from .. import seams

logger = logging.getLogger("membroker")

TESTED: Final = ("0.5.21", "0.5.22", "0.5.23")
_SRT: Final = "sglang.srt"
_REGISTRY: Final = f"{_SRT}.plugins.hook_registry:HookRegistry"
_CONFIGURATOR: Final = f"{_SRT}.mem_cache.kv_cache_configurator:KVCacheConfigurator"
_POOL: Final = f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool"
_MLA: Final = f"{_SRT}.mem_cache.memory_pool:MLATokenToKVPool"
_ALLOCATOR: Final = f"{_SRT}.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator"
_TREE: Final = f"{_SRT}.mem_cache.unified_radix_cache:UnifiedRadixCache"
_CORE: Final = f"{_SRT}.mem_cache.unified_cache.unified_tree_core"
_RUNNER: Final = f"{_SRT}.model_executor.model_runner:ModelRunner"
_SCHEDULER: Final = f"{_SRT}.managers.scheduler:Scheduler"
_BATCH: Final = f"{_SRT}.managers.schedule_batch:ScheduleBatch"
_COMPONENTS: Final = f"{_SRT}.managers.scheduler_components"
_CHECKER: Final = f"{_COMPONENTS}.invariant_checker:SchedulerInvariantChecker"
_OBSERVER: Final = f"{_COMPONENTS}.pool_stats_observer:SchedulerPoolStatsObserver"

# A method with a hook has the hook's wrapper: `inspect.signature` follows it to SGLang's own.
METHODS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (_REGISTRY, "register", ("target", "hook", "hook_type")),
    (_CONFIGURATOR, "configure", ("pre_model_load_memory",)),
    (_CONFIGURATOR, "_profile_available_bytes", ("pre_model_load_memory",)),
    (
        _CONFIGURATOR,
        "_build_token_to_kv_pool_allocator",
        ("sizes", "token_to_kv_pool", "is_dsv4_model", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    (_RUNNER, "load_model", ()),
    (f"{_SRT}.arg_groups.model_override_base", "resolved_view", ("server_args",)),
    (f"{_SRT}.configs.hybrid_arch", "mambaish_config", ("model_config",)),
    (f"{_SRT}.configs.model_config", "is_deepseek_dsa", ("config",)),
    (_POOL, "_create_buffers", ()),
    (_MLA, "_create_buffers", ()),
    (_ALLOCATOR, "__init__", ("size", "page_size", "dtype", "device", "kvcache", "need_sort")),
    (_ALLOCATOR, "available_size", ()),
    (_ALLOCATOR, "alloc", ("need_size",)),
    (
        _ALLOCATOR,
        "alloc_extend",
        (
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
            "extend_num_tokens",
            "num_new_pages",
        ),
    ),
    (_ALLOCATOR, "alloc_decode", ("seq_lens", "seq_lens_cpu", "last_loc")),
    (_ALLOCATOR, "get_all_free_pages", ()),
    (_ALLOCATOR, "_release_page_ids", ("page_ids",)),
    (_ALLOCATOR, "clear", ()),
    (f"{_SRT}.utils", "get_num_new_pages", ("seq_lens", "page_size", "prefix_lens", "decode")),
    (_TREE, "evictable_size", ()),
    (_TREE, "_evict_device_leaf", ("node_id", "tracker")),
    (f"{_CORE}:UnifiedTreeNode", "component", ("component_type",)),
    (_SCHEDULER, "init_all_cuda_graphs", ()),
    (_SCHEDULER, "run_event_loop", ()),
    (_SCHEDULER, "get_next_batch_to_run", ("running_batch", "last_batch")),
    (_BATCH, "check_decode_mem", ("selected_indices",)),
    (_BATCH, "retract_decode", ()),
    (_BATCH, "_get_decode_retraction_order", ("reqs",)),
    (_CHECKER, "_check_full_pool", ("ps", "uncached")),
    (_OBSERVER, "_get_token_info", ()),
)
ATTRIBUTES: Final = (
    (_REGISTRY, ("_patched",)),
    (
        _CONFIGURATOR,
        (
            "server_args",
            "model_config",
            "device",
            "gpu_id",
        ),
    ),
    (_RUNNER, ("server_args", "model_config")),
    (f"{_SRT}.configs.model_config:ModelConfig", ("context_len", "hf_config", "is_hybrid_swa")),
    (
        f"{_SRT}.environ:Envs",
        ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ),
    (
        f"{_SRT}.server_args:ServerArgs",
        (
            "page_size",
            "served_model_name",
            "tp_size",
            "pp_size",
            "dp_size",
            "dcp_size",
            "attn_cp_size",
            "ep_size",
            "speculative_algorithm",
            "enable_hierarchical_cache",
            "enable_hisparse",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
            "disaggregation_mode",
            "radix_cache_backend",
            "enable_streaming_session",
            "enable_session_radix_cache",
            "enable_memory_saver",
            "kv_cache_dtype",
            "dllm_algorithm",
            "enable_pdmux",
            "enable_unified_memory",
            "kv_canary",
        ),
    ),
    (
        _POOL,
        ("size", "page_size", "layer_num", "store_dtype", "head_num", "head_dim", "v_head_dim", "k_buffer", "v_buffer"),
    ),
    (_MLA, ("size", "page_size", "layer_num", "store_dtype", "kv_cache_dim", "kv_buffer")),
    (_ALLOCATOR, ("free_pages",)),
    (_TREE, ("tree_core",)),
    (f"{_CORE}:UnifiedTreeCore", ("root_node",)),
    (f"{_CORE}:UnifiedTreeNode", ("id", "children", "last_access_time")),
    (f"{_SRT}.mem_cache.unified_cache.components:ComponentData", ("value", "lock_ref")),
    (
        _SCHEDULER,
        (
            "tree_cache",
            "token_to_kv_pool_allocator",
            "req_to_token_pool",
            "waiting_queue",
            "chunked_req",
            "running_batch",
            "max_running_requests",
            "new_token_ratio_tracker",
        ),
    ),
    (_BATCH, ("reqs", "batch_is_full", "forward_mode")),
    (
        f"{_SRT}.managers.schedule_batch:Req",
        ("origin_input_ids", "output_ids", "sampling_params", "kv", "to_finish", "beam_group"),
    ),
    (f"{_SRT}.managers.schedule_batch:ReqKvInfo", ("req_pool_idx", "kv_allocated_len")),
    (f"{_COMPONENTS}.pool_stats_observer:PoolStats", ("full_num_used", "full_token_usage")),
    (_OBSERVER, ("max_total_num_tokens",)),
)


def differences() -> Iterator[str]:
    """Yield what the installed SGLang lacks, one by one."""
    return seams.differences(METHODS, ATTRIBUTES)


def check() -> None:
    """Raise `InvalidRequest` if the installed SGLang differs from the one that this package was written for."""
    import sglang

    written_for = f"SGLang {TESTED[0]} to {TESTED[-1]}"
    seams.check("membroker.kv.sglang", written_for, f"SGLang {sglang.__version__}", differences())
    if sglang.__version__ not in TESTED:
        logger.warning("membroker.kv.sglang was tested with %s, but not with %s", written_for, sglang.__version__)
