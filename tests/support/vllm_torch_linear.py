"""A plugin of vLLM for tests: its CPU build computes with the weights in place, as builds for GPUs do.

By itself it packs them for oneDNN, into memory of its own.
"""

from __future__ import annotations


def register() -> None:
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False
