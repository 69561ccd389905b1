"""The classes, methods and functions of vLLM that this package relies on, with the parameters that it gives them.

Owns the tables; `kv/seams.py` compares them with the vLLM that is installed. A version that has all of them may still
behave otherwise than those in `TESTED`.
"""

from __future__ import annotations

from typing import Final

from .. import seams
from . import logger

TESTED: Final = "0.31.", "0.32.", "0.33."
"""How the versions begin that this package was written for."""
_WRITTEN_FOR: Final = f"{TESTED[0][:-1]} to {TESTED[-1][:-1]}"
MEMBERS: Final = seams.members(
    "vllm",
    {
        "distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
            "__init__(vllm_config, role, kv_cache_config) get_mem_pool_context() "
            "get_required_kvcache_layout(vllm_config) requires_piecewise_for_cudagraph(extra_config) "
            "bind_kv_cache_manager(kv_cache_manager) on_new_request(request) "
            "get_num_new_matched_tokens(request, num_computed_tokens) "
            "update_state_after_alloc(request, blocks, num_external_tokens) build_connector_meta(scheduler_output) "
            "update_connector_output(connector_output) has_pending_push_work() register_kv_caches(kv_caches) "
            "handle_preemptions(kv_connector_metadata) bind_connector_metadata(connector_metadata) "
            "start_load_kv(forward_context) wait_for_layer_load(layer_name) "
            "save_kv_layer(layer_name, kv_layer, attn_metadata) wait_for_save() get_handshake_metadata() "
            "set_xfer_handshake_metadata(metadata) reset_cache() shutdown() @requires_kv_delivery"
        ),
        "distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": "request_finished_all_groups(request, block_ids)",
        "distributed.kv_transfer.kv_connector.utils": "get_current_attn_backends(vllm_config)",
        "v1.attention.backends.utils": "get_supported_kv_cache_layouts(backends)",
        "v1.core.kv_cache_manager:KVCacheManager": "get_block_ids(request_id) watermark_blocks",
        "v1.core.kv_cache_manager:KVCacheBlocks": "get_block_ids()",
        "v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "get_num_skipped_tokens(num_computed_tokens)",
        "v1.kv_cache_interface:KVCacheSpec": (
            "max_memory_usage_bytes(vllm_config) @page_size_bytes @has_layer_views block_size"
        ),
        "_custom_ops": "swap_blocks_batch(src_ptrs, dst_ptrs, sizes)",
        "v1.core.block_pool:BlockPool": (
            "touch(blocks) free_blocks(ordered_blocks) evict_blocks(block_ids) get_num_free_blocks() num_gpu_blocks "
            "blocks null_block free_block_queue"
        ),
        "v1.core.kv_cache_utils:FreeKVCacheBlockQueue": "get_all_free_blocks() num_free_blocks",
        "v1.worker.gpu_worker:Worker": "load_model(load_dummy_weights) get_model() apply_model(fn) shutdown()",
        "model_executor.model_loader:BaseModelLoader": (
            "load_model(vllm_config, model_config, prefix) load_weights(model, model_config) "
            "download_model(model_config)"
        ),
        "model_executor.model_loader": "register_model_loader(load_format) get_model_loader(load_config)",
        "model_executor.model_loader.utils": (
            "initialize_model(vllm_config, prefix, model_class, model_config) "
            "process_weights_after_loading(model, model_config, target_device)"
        ),
        "model_executor.model_loader.weight_cache.protocol": "check_ipc_quant_support(model)",
        "model_executor.utils": "weights_already_processed()",
        "config:CompilationConfig": "mode",
        "config:CompilationMode": "NONE",
        "envs": "compile_factors()",
        "v1.kv_cache_layout:KVCacheLayout": "@is_block_outermost",
        "config:VllmConfig": (
            "@num_lookahead_tokens @num_speculative_tokens offload_config lora_config weight_transfer_config "
            "compilation_config kernel_config ec_transfer_config speculative_config attention_config"
        ),
        "config:ModelConfig": (
            "@is_hybrid @is_attention_free is_encoder_decoder enable_sleep_mode enable_cumem_allocator "
            "served_model_name max_model_len"
        ),
        "config:ParallelConfig": (
            "rank world_size tensor_parallel_size data_parallel_size decode_context_parallel_size nnodes "
            "distributed_executor_backend"
        ),
        "config:AttentionConfig": "hisparse_config",
        "config:SchedulerConfig": "max_num_seqs max_num_batched_tokens watermark policy",
        "config:KVTransferConfig": "@is_kv_producer @is_kv_consumer kv_connector kv_connector_extra_config",
        "v1.core.kv_cache_utils:KVCacheBlock": "block_id ref_cnt block_hash is_null",
        "v1.request:Request": (
            "request_id status num_tokens num_computed_tokens num_prompt_tokens skip_reading_prefix_cache priority "
            "arrival_time"
        ),
        "v1.core.sched.output:SchedulerOutput": (
            "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs preempted_req_ids"
        ),
        "v1.core.sched.output:NewRequestData": "req_id block_ids",
        "v1.core.sched.output:CachedRequestData": "req_ids resumed_req_ids new_block_ids",
        "v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_tensors kv_cache_groups kv_cache_layout",
        "v1.kv_cache_interface:KVCacheTensor": "size layers layer_stride block_stride offset",
        "v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec",
        "v1.kv_cache_interface:MambaSpec": "num_speculative_blocks",
        "config:CacheConfig": "cache_dtype kv_cache_dtype_skip_layers",
        "model_executor.layers.quantization.base_config:QuantizeMethodBase": (
            "supports_pre_processed_weights uses_meta_device process_weights_after_loading"
        ),
        "config.load:LoadConfig": "load_format model_loader_extra_config device",
    },
)


def check() -> None:
    """Raise `InvalidRequest` if the installed vLLM differs from the ones that this package was written for."""
    import vllm

    seams.check("membroker.kv.vllm", f"vLLM {_WRITTEN_FOR}", f"vLLM {vllm.__version__}", MEMBERS)


def warn() -> None:
    """Say it if the installed vLLM is another release than those."""
    import vllm

    if not vllm.__version__.startswith(TESTED):
        logger.warning("membroker.kv.vllm was tested with vLLM %s, but not with %s", _WRITTEN_FOR, vllm.__version__)
