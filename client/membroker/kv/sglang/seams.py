"""The classes, methods and attributes of SGLang that this package relies on, with the parameters that it gives them.

Owns the tables; `kv/seams.py` compares them with the SGLang that is installed. A version that has all of them may still
behave otherwise: only the last two of `TESTED` were run whole.
"""

from __future__ import annotations

import logging
from typing import Final

from .. import seams
from .settings import USUAL

logger: logging.Logger = logging.getLogger("membroker")

TESTED: Final = ("0.5.21", "0.5.22", "0.5.23")
# A method with a hook has the hook's wrapper: `inspect.signature` follows it to SGLang's own.
MEMBERS: Final = seams.members(
    "sglang.srt",
    {
        "plugins.hook_registry:HookRegistry": "register(target, hook, hook_type) _patched",
        "mem_cache.kv_cache_configurator:KVCacheConfigurator": (
            "configure(pre_model_load_memory) _profile_available_bytes(pre_model_load_memory) "
            "_build_token_to_kv_pool_allocator(sizes, token_to_kv_pool, is_dsv4_model, req_to_token_pool, "
            "token_to_kv_pool_allocator) server_args model_config device gpu_id"
        ),
        "model_executor.model_runner:ModelRunner": "load_model() server_args model_config",
        "arg_groups.model_override_base": "resolved_view(server_args)",
        "configs.hybrid_arch": "mambaish_config(model_config)",
        "configs.model_config": "is_deepseek_dsa(config)",
        "mem_cache.memory_pool:MHATokenToKVPool": (
            "_create_buffers() size page_size layer_num store_dtype head_num head_dim v_head_dim k_buffer v_buffer"
        ),
        "mem_cache.memory_pool:MLATokenToKVPool": (
            "_create_buffers() size page_size layer_num store_dtype kv_cache_dim kv_buffer"
        ),
        "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator": (
            "__init__(size, page_size, dtype, device, kvcache, need_sort) available_size() alloc(need_size) "
            "alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, "
            "num_new_pages) alloc_decode(seq_lens, seq_lens_cpu, last_loc) get_all_free_pages() "
            "_release_page_ids(page_ids) clear() free_pages"
        ),
        "utils": "get_num_new_pages(seq_lens, page_size, prefix_lens, decode)",
        "mem_cache.unified_radix_cache:UnifiedRadixCache": (
            "evictable_size() _evict_device_leaf(node_id, tracker) tree_core"
        ),
        "mem_cache.unified_cache.unified_tree_core:UnifiedTreeNode": (
            "component(component_type) id children last_access_time"
        ),
        "managers.scheduler:Scheduler": (
            "init_all_cuda_graphs() run_event_loop() get_next_batch_to_run(running_batch, last_batch) tree_cache "
            "token_to_kv_pool_allocator req_to_token_pool waiting_queue chunked_req running_batch "
            "max_running_requests new_token_ratio_tracker"
        ),
        "managers.schedule_batch:ScheduleBatch": (
            "check_decode_mem(selected_indices) retract_decode() _get_decode_retraction_order(reqs) reqs "
            "batch_is_full forward_mode"
        ),
        "managers.scheduler_components.invariant_checker:SchedulerInvariantChecker": "_check_full_pool(ps, uncached)",
        "managers.scheduler_components.pool_stats_observer:SchedulerPoolStatsObserver": (
            "_get_token_info() max_total_num_tokens"
        ),
        "configs.model_config:ModelConfig": "context_len hf_config is_hybrid_swa",
        "environ:Envs": "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "server_args:ServerArgs": " ".join(("page_size", "served_model_name", "kv_cache_dtype", *USUAL)),
        "mem_cache.unified_cache.unified_tree_core:UnifiedTreeCore": "root_node",
        "mem_cache.unified_cache.components:ComponentData": "value lock_ref",
        "managers.schedule_batch:Req": "origin_input_ids output_ids sampling_params kv to_finish beam_group",
        "managers.schedule_batch:ReqKvInfo": "req_pool_idx kv_allocated_len",
        "managers.scheduler_components.pool_stats_observer:PoolStats": "full_num_used full_token_usage",
    },
)


def check() -> None:
    """Raise `InvalidRequest` if the installed SGLang differs from the one that this package was written for."""
    import sglang

    written_for = f"SGLang {TESTED[0]} to {TESTED[-1]}"
    seams.check("membroker.kv.sglang", written_for, f"SGLang {sglang.__version__}", MEMBERS)
    if sglang.__version__ not in TESTED:
        logger.warning("membroker.kv.sglang was tested with %s, but not with %s", written_for, sglang.__version__)
