"""A plugin of vLLM for tests: its CPU build computes with the weights in place, as builds for GPUs do.

By itself it packs them for oneDNN or its own kernels, into memory of its own.
"""

from __future__ import annotations


def register() -> None:
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
