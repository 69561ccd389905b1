"""What makes two engines' weights the same: the name of their segment.

Owns the list of what goes into the name. Two engines that may differ in one byte of their weights must differ in it. It
imports no vLLM.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from contextlib import suppress
from typing import Any

from ..model_names import files_of
from .settings import WeightSettings


def pinned(model_config: Any) -> Any:
    """Return a copy whose revision is a commit, for a model of Hugging Face: the one of its configuration.

    A branch such as "main" is other files tomorrow. vLLM has just read the configuration, so the cache has its commit.
    What is not in the cache, such as a directory or a model of ModelScope, keeps its revision.
    """
    from huggingface_hub import snapshot_download

    found = copy.copy(model_config)
    with suppress(OSError, ValueError):
        if not os.path.exists(found.model):
            folder = snapshot_download(str(found.model), revision=found.revision, local_files_only=True)
            found.revision = os.path.basename(folder)
    return found


def digest_of(vllm_config: Any, model_config: Any, settings: WeightSettings, prefix: str) -> str:
    """Return a digest of what decides the bytes of one rank's weights, for the name of their segment.

    `model_config` is `pinned`.
    """
    import vllm

    parallel, cache, kernel = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.kernel_config
    facts = {
        "vllm": vllm.__version__,
        "device": str(vllm_config.device_config.device_type),
        "files": _files(str(model_config.model)),
        "hub": [model_config.revision, *map(os.environ.get, _HUBS)],
        "config": model_config.hf_config.to_dict(),
        "dtype": str(model_config.dtype),
        "quantization": [model_config.quantization, repr(model_config.quantization_config)],
        "kind": [str(model_config.runner_type), str(model_config.convert_type), str(model_config.model_impl), prefix],
        "loader": [settings.load_format, dict(settings.extra_config)],
        "ranks": [
            parallel.rank,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.enable_expert_parallel,
            parallel.expert_placement_strategy,
            parallel.all2all_backend,  # with some, vLLM ignores the strategy
        ],
        "modalities": _modalities(model_config.multimodal_config),
        # What decides how vLLM lays processed weights out, and which scales the cache has.
        "kernels": {name: str(value) for name, value in vars(kernel).items() if "backend" in name},
        "environment": [vllm.envs.compile_factors(), *map(os.environ.get, _PREPACKING)],
        "lora": vllm_config.lora_config is not None and model_config.is_moe,
        "cache": [cache.cache_dtype, sorted(cache.kv_cache_dtype_skip_layers)],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _modalities(config: Any) -> Any:
    """Return which parts a multimodal model is built of, and how they are split. Other limits change no weight."""
    if config is None:
        return None
    without = sorted(name for name in config.limit_per_prompt if not config.get_limit_per_prompt(name))
    return [config.language_model_only, config.mm_encoder_only, config.mm_encoder_tp_mode, without]


def _files(model: str) -> Any:
    """Return the path, size, time and a sample of each file of a model, or its name on Hugging Face.

    A checkpoint that is written to the same path again is another one. Where all files have one time, as in an image
    that can be built again, only the sample tells one fine-tuned model from another.
    """
    if not os.path.exists(model):
        return model
    root = os.path.realpath(model)
    return [root, [(path, stat.st_size, stat.st_mtime_ns, sample) for path, stat, sample in files_of(root)]]


_HUBS = ("HF_ENDPOINT", "VLLM_USE_MODELSCOPE")
_PREPACKING = ("VLLM_CPU_MOE_PREPACK", "VLLM_ZENTORCH_WEIGHT_PREPACK")
"""What vLLM leaves out of its own factors, because compiled code does not depend on it."""
