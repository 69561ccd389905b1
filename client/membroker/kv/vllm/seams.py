"""The classes, methods and functions of vLLM that this package relies on, with the parameters that it gives them.

Owns the tables; `kv/seams.py` compares them with the vLLM that is installed. A version that has all of them may still
behave otherwise than those in `TESTED`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from .. import seams

logger = logging.getLogger("vllm.membroker")  # vLLM shows only loggers below its own

TESTED: Final = "0.31.", "0.32.", "0.33."
"""How the versions begin that this package was written for."""
_WRITTEN_FOR: Final = f"{TESTED[0][:-1]} to {TESTED[-1][:-1]}"
_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTOR: Final = f"{_BASE}:KVConnectorBase_V1"
_POOL: Final = "vllm.v1.core.block_pool:BlockPool"
_MANAGER: Final = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
_OUTPUT: Final = "vllm.v1.core.sched.output"
_LOADING: Final = "vllm.model_executor.model_loader"
_LOADER: Final = f"{_LOADING}:BaseModelLoader"
_METHOD: Final = "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase"
METHODS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (_CONNECTOR, "__init__", ("vllm_config", "role", "kv_cache_config")),
    (_CONNECTOR, "get_mem_pool_context", ()),
    (_CONNECTOR, "get_required_kvcache_layout", ("vllm_config",)),
    (_CONNECTOR, "bind_kv_cache_manager", ("kv_cache_manager",)),
    (_CONNECTOR, "on_new_request", ("request",)),
    (_CONNECTOR, "get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    (_CONNECTOR, "update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    (_CONNECTOR, "build_connector_meta", ("scheduler_output",)),
    (_CONNECTOR, "update_connector_output", ("connector_output",)),
    (f"{_BASE}:SupportsHMA", "request_finished_all_groups", ("request", "block_ids")),
    (_CONNECTOR, "has_pending_push_work", ()),
    (_CONNECTOR, "register_kv_caches", ("kv_caches",)),
    (_CONNECTOR, "handle_preemptions", ("kv_connector_metadata",)),
    (_CONNECTOR, "bind_connector_metadata", ("connector_metadata",)),
    (_CONNECTOR, "start_load_kv", ("forward_context",)),
    (_CONNECTOR, "wait_for_layer_load", ("layer_name",)),
    (_CONNECTOR, "save_kv_layer", ("layer_name", "kv_layer", "attn_metadata")),
    (_CONNECTOR, "wait_for_save", ()),
    (_CONNECTOR, "get_handshake_metadata", ()),
    (_CONNECTOR, "set_xfer_handshake_metadata", ("metadata",)),
    (_CONNECTOR, "reset_cache", ()),
    (_CONNECTOR, "shutdown", ()),
    ("vllm.distributed.kv_transfer.kv_connector.utils", "get_current_attn_backends", ("vllm_config",)),
    ("vllm.v1.attention.backends.utils", "get_supported_kv_cache_layouts", ("backends",)),
    ("vllm.v1.core.kv_cache_manager:KVCacheManager", "get_block_ids", ("request_id",)),
    ("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids", ()),
    (
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
        "get_num_skipped_tokens",
        ("num_computed_tokens",),
    ),
    ("vllm.v1.kv_cache_interface:KVCacheSpec", "max_memory_usage_bytes", ("vllm_config",)),
    ("vllm._custom_ops", "swap_blocks_batch", ("src_ptrs", "dst_ptrs", "sizes")),
    (_POOL, "touch", ("blocks",)),
    (_POOL, "free_blocks", ("ordered_blocks",)),
    (_POOL, "evict_blocks", ("block_ids",)),
    (_POOL, "get_num_free_blocks", ()),
    ("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", "get_all_free_blocks", ()),
    (_WORKER, "load_model", ("load_dummy_weights",)),
    (_WORKER, "get_model", ()),
    (_WORKER, "apply_model", ("fn",)),
    (_WORKER, "shutdown", ()),
    (_LOADER, "load_model", ("vllm_config", "model_config", "prefix")),
    (_LOADER, "load_weights", ("model", "model_config")),
    (_LOADER, "download_model", ("model_config",)),
    (_LOADING, "register_model_loader", ("load_format",)),
    (_LOADING, "get_model_loader", ("load_config",)),
    (f"{_LOADING}.utils", "initialize_model", ("vllm_config", "prefix", "model_class", "model_config")),
    (f"{_LOADING}.utils", "process_weights_after_loading", ("model", "model_config", "target_device")),
    (f"{_LOADING}.weight_cache.protocol", "check_ipc_quant_support", ("model",)),
    ("vllm.model_executor.utils", "weights_already_processed", ()),
    ("vllm.envs", "compile_factors", ()),
)
PROPERTIES: Final[tuple[tuple[str, str], ...]] = (
    (_CONNECTOR, "requires_kv_delivery"),
    ("vllm.v1.kv_cache_layout:KVCacheLayout", "is_block_outermost"),
    ("vllm.config:VllmConfig", "num_lookahead_tokens"),
    ("vllm.v1.kv_cache_interface:KVCacheSpec", "page_size_bytes"),
    ("vllm.v1.kv_cache_interface:KVCacheSpec", "has_layer_views"),
)
ATTRIBUTES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("vllm.v1.core.block_pool:BlockPool", ("num_gpu_blocks", "blocks", "null_block", "free_block_queue")),
    ("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", ("num_free_blocks",)),
    ("vllm.v1.core.kv_cache_utils:KVCacheBlock", ("block_id", "ref_cnt", "block_hash", "is_null")),
    ("vllm.v1.request:Request", ("request_id", "status", "num_tokens", "num_computed_tokens", "num_prompt_tokens")),
    ("vllm.v1.request:Request", ("skip_reading_prefix_cache", "priority", "arrival_time")),
    (f"{_OUTPUT}:SchedulerOutput", ("num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs")),
    (f"{_OUTPUT}:SchedulerOutput", ("preempted_req_ids",)),
    (f"{_OUTPUT}:NewRequestData", ("req_id", "block_ids")),
    (f"{_OUTPUT}:CachedRequestData", ("req_ids", "resumed_req_ids", "new_block_ids")),
    ("vllm.v1.kv_cache_interface:KVCacheConfig", ("num_blocks", "kv_cache_tensors", "kv_cache_groups")),
    ("vllm.v1.kv_cache_interface:KVCacheConfig", ("kv_cache_layout",)),
    ("vllm.v1.kv_cache_interface:KVCacheTensor", ("size", "layers", "layer_stride", "block_stride", "offset")),
    ("vllm.v1.kv_cache_interface:KVCacheGroupSpec", ("kv_cache_spec", "host_resident")),
    ("vllm.v1.kv_cache_interface:KVCacheSpec", ("block_size",)),
    ("vllm.v1.kv_cache_interface:MambaSpec", ("num_speculative_blocks",)),
    ("vllm.config:VllmConfig", ("offload_config", "lora_config", "weight_transfer_config")),
    ("vllm.config:VllmConfig", ("compilation_config", "kernel_config")),
    ("vllm.config:CacheConfig", ("cache_dtype", "kv_cache_dtype_skip_layers")),
    (_METHOD, ("supports_pre_processed_weights", "uses_meta_device", "process_weights_after_loading")),
    ("vllm.config:VllmConfig", ("ec_transfer_config",)),
    ("vllm.config.load:LoadConfig", ("load_format", "model_loader_extra_config", "device")),
)


def differences() -> Iterator[str]:
    """Yield what the installed vLLM lacks, one by one."""
    return seams.differences(METHODS, ATTRIBUTES, PROPERTIES)


def check() -> None:
    """Raise `InvalidRequest` if the installed vLLM differs from the ones that this package was written for."""
    import vllm

    seams.check("membroker.kv.vllm", f"vLLM {_WRITTEN_FOR}", f"vLLM {vllm.__version__}", differences())


def warn() -> None:
    """Say it if the installed vLLM is another release than those."""
    import vllm

    if not vllm.__version__.startswith(TESTED):
        logger.warning("membroker.kv.vllm was tested with vLLM %s, but not with %s", _WRITTEN_FOR, vllm.__version__)
