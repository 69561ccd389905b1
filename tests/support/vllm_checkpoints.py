"""Checkpoints with quantized weights, and an adapter, as other tools write them: random, for real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.vllm_engine import CONFIG, write_model

ADAPTED = ("q_proj", "v_proj")
RANK = 8


def write_awq(directory: Path, config: Mapping[str, Any] = CONFIG, group: int = 32, **changed: Any) -> Path:
    """Write a model whose linear layers have four bits a weight, as AutoAWQ stores them."""

    def packed(name: str, rows: int, columns: int) -> dict[str, Any]:
        return {
            name.replace("weight", "qweight"): _any_bits(columns, rows // 8),
            name.replace("weight", "qzeros"): _any_bits(columns // group, rows // 8),
        } | _scales(name, rows, columns // group)

    about = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return _write(directory, {**config, **changed}, packed, about)


def write_gptq(directory: Path, config: Mapping[str, Any] = CONFIG, group: int = 32, **changed: Any) -> Path:
    """Write a model whose linear layers have four bits a weight, symmetric, as AutoGPTQ stores them."""
    import torch

    def packed(name: str, rows: int, columns: int) -> dict[str, Any]:
        return {
            name.replace("weight", "qweight"): _any_bits(columns // 8, rows),
            name.replace("weight", "qzeros"): torch.full((columns // group, rows // 8), 0x77777777, dtype=torch.int32),
            name.replace("weight", "g_idx"): torch.arange(columns, dtype=torch.int32) // group,
        } | _scales(name, rows, columns // group)

    about = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    return _write(directory, {**config, **changed}, packed, about)


def write_fp8(directory: Path, config: Mapping[str, Any] = CONFIG, **changed: Any) -> Path:
    """Write a model whose linear layers have FP8 weights with one scale each."""
    import torch

    def packed(name: str, rows: int, columns: int) -> dict[str, Any]:
        weight = torch.randn(rows, columns) * config["initializer_range"]
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        return {name: (weight / scale).to(torch.float8_e4m3fn), name.replace("weight", "weight_scale"): scale}

    return _write(directory, {**config, **changed}, packed, {"quant_method": "fp8", "activation_scheme": "dynamic"})


def write_adapter(directory: Path, config: Mapping[str, Any] = CONFIG, size: float = 1.0) -> Path:
    """Write a LoRA for the attention of a model. `size` is that of its numbers: large enough to change its answers."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    torch.manual_seed(5)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in zip(ADAPTED, ("num_attention_heads", "num_key_value_heads"), strict=True):
            before = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{before}.lora_A.weight"] = torch.randn(RANK, config["hidden_size"]) * size
            tensors[f"{before}.lora_B.weight"] = torch.randn(config[heads] * config["head_dim"], RANK) * size
    save_file(tensors, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*ADAPTED], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": ""}))
    return directory


def _any_bits(*shape: int) -> Any:
    import torch

    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32)


def _scales(name: str, rows: int, groups: int) -> dict[str, Any]:
    import torch

    return {name.replace("weight", "scales"): torch.rand(groups, rows).to(torch.bfloat16) / 40}


def _write(
    directory: Path,
    config: Mapping[str, Any],
    packed: Callable[[str, int, int], Mapping[str, Any]],
    quantization: Mapping[str, Any],
) -> Path:
    from safetensors.torch import load_file, save_file

    write_model(directory, config)
    path, about = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= packed(name, *tensors.pop(name).shape)
    save_file(tensors, path, {"format": "pt"})
    about.write_text(json.dumps({**json.loads(about.read_text()), "quantization_config": dict(quantization)}))
    return directory
