"""Plain torch in place of the kernels that SGLang compiles at their first use: a plugin for a GPU without nvcc."""

from __future__ import annotations

from typing import Any

LAYERS = (
    "sglang.srt.layers.activation.SiluAndMul",
    "sglang.srt.layers.layernorm.RMSNorm",
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding",
)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for layer in LAYERS:
        HookRegistry.register(f"{layer}.forward_cuda", _forward, HookType.REPLACE)
    HookRegistry.register("sglang.srt.model_executor.forward_batch_info.clamp_position", _clamp, HookType.REPLACE)


def _forward(layer: Any, *args: Any, **options: Any) -> Any:
    return layer.forward_native(*args, **options)


def _clamp(lengths: Any) -> Any:
    return (lengths - 1).clamp(min=0).long()
